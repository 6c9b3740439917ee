"""What all recipes share: the effective weight, by levels, a curve and a gradient mode.

w, step -> [levels: pattern now -> mask] x [curve: D now] x [gradient mode] -> W~
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax.core import gradients, masks, schedules
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Curve, Phases, Segment, as_step
from nm_sparsity_jax.recipes.levels import leveled_mask, when

NAN = np.float32(np.nan)  # numpy's: JAX_DEBUG_NANS looks at what jax makes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What a rule applies to a weight.

  A recipe is a frozen, keyword-only dataclass. To vary one, write your own, and `register` it. A
  name makes one that works:

      @dataclasses.dataclass(frozen=True, kw_only=True)
      class Mine(nms.Recipe):
        name = "mine"

  Then override what differs:

      levels             which pattern holds when; the target from the dense phase on
      curve              D(j) of the sparsify phase; hard, D = 0, by default
      sparse_from        the first step of the schedule proper; the end of the dense phase
      chosen             the mask of the level that holds; by magnitude
      final              what is deployed; the weight where the mask keeps it, else 0
      stateful, renewals_due, first_state, next_state   a mask that is kept, as `OneShot` does
      problem, remarks   why a kept mask may not act, and what to log of it, as `Hold` does
      effective, pull_back, was_kept   together: W~, the gradient at W, and the mask seen in W~
      __post_init__      checks of your own; call that of `Recipe` first

  Attributes:
    name: the name that `recipe` knows it by.
    stateful: whether it keeps a mask or a scale; see `stored.init_state`.
    keeps: the name of the array in its state that `effective` needs: 'mask', bool, shape of `w`; or
      'scale', a float32 scalar.
    needs_gradients: whether `next_state` must be given the gradient of each update.
    default_gradient: the gradient mode where `gradient` is None.
    pattern: the target pattern, None for dense.
    phases: the steps of the sparse run, None for dense.
    gradient: 'masked', 'straight_through', or None for `default_gradient`; a field of some recipes.
    lam: weight of the SR-STE term, 0 where there is none; a field of some recipes.
    decoupled: whether that term acts beside the optimizer's update; a field of `SrSte`.
  """

  name: ClassVar[str]
  stateful: ClassVar[bool] = False
  keeps: ClassVar[str] = "mask"
  needs_gradients: ClassVar[bool] = False
  default_gradient: ClassVar[str] = "masked"
  pattern: NM
  phases: Phases
  gradient: ClassVar[str | None] = None
  lam: ClassVar[float] = 0.0
  decoupled: ClassVar[bool] = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      # Python's numbers, and floats where the type is one: equal recipes have one text.
      value = value.item() if isinstance(value, np.generic) else value
      is_float = "float" in str(field.type) and isinstance(value, int)
      object.__setattr__(self, field.name, float(value) if is_float else value)
    object.__setattr__(self, "pattern", NM.parse(self.pattern))
    if not isinstance(self.phases, Phases):
      raise ValueError(
        f"{type(self).__name__}(phases={self.phases!r}): give the steps of the sparse run, for "
        "example Phases(total=100_000, dense=10_000, finetune=20_000)."
      )
    if not (0 <= self.lam < math.inf and isinstance(self.decoupled, bool)):
      raise ValueError(
        f"{self.name}(lam={self.lam!r}, decoupled={self.decoupled!r}): give a finite lam >= 0, or "
        "pruned weights grow, and True or False."
      )
    if self.gradient not in (None, "masked", "straight_through"):
      raise ValueError(
        f"gradient={self.gradient!r}: choose 'masked' (autodiff: a pruned weight gets D times the "
        "gradient), 'straight_through' (every weight gets the whole gradient), or None for the "
        "recipe's own."
      )

  @property
  def gradient_mode(self) -> str:
    """Returns 'masked' or 'straight_through'."""
    return self.gradient or self.default_gradient

  @property
  def sparse_from(self) -> int:
    """Returns the first step of the schedule proper; before it D = 1."""
    return self.phases.dense

  def levels(self, axis_size: int | None = None) -> tuple[tuple[int, NM], ...]:
    """Returns ((first step, pattern), ...): which pattern holds from which step on.

    By default the target pattern holds from `sparse_from` on.

    Args:
      axis_size: length of the grouped axis, None where it is not known.
    """
    return ((self.sparse_from, self.pattern),)

  @property
  def curve(self) -> Curve:
    """Returns D(j) of the sparsify phase, for j = step - dense."""
    return schedules.HARD

  def decay(self, step: jax.Array | int) -> jax.Array:
    """Returns D at `step`, a float32 scalar in [0, 1].

    At `schedules.NO_STEP` it is NaN.
    """
    step = as_step(step)
    # The phases stand above every curve: each recipe equals dense first, and is n:m at the end.
    d = self.curve.value(step - self.phases.dense, jnp)
    d = jnp.where(step >= self.phases.finetune_start, jnp.float32(0), d)
    d = jnp.where(step < self.sparse_from, jnp.float32(1), d)
    return jnp.where(step < 0, NAN, d)

  def chosen(
    self, w: jax.Array, step: jax.Array, axis: masks.Axis, stored: jax.Array | None
  ) -> jax.Array:
    """Returns the mask of the level that holds at `step`; the first level counts before it, too."""
    del stored  # kept by stateful recipes alone
    length = math.prod(w.shape[a] for a in masks.check_axis(w.shape, axis))
    return leveled_mask(self.levels(length), w, step, axis)

  def mask(
    self,
    w: jax.Array,
    step: jax.Array | int,
    axis: masks.Axis = 0,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the mask that holds at `step`, bool, shape of `w`; all True in the dense phase."""
    if self.stateful and mask is None:
      raise ValueError(
        f"{self.name} keeps its {self.keeps} as state, but no {self.keeps} was given: carry "
        "state = nms.init_state(params, rules), refresh it by nms.update_state after each "
        "optimizer update, and pass it (state=..., or mask=... for one weight)."
      )
    return _jit_if_traced(_mask, self, axis, step, w, mask)

  def effective(
    self,
    w: jax.Array,
    step: jax.Array | int,
    axis: masks.Axis = 0,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """Returns the effective weight W~.

    Args:
      w: the stored parameter, float array [..., K, ...], in its stored dtype.
      step: updates applied so far, int32 scalar, usually traced.
      axis: the contraction axis (length K), or adjacent axes that count as one.
      mask: what a stateful recipe acts by, its `keeps`.

    Returns:
      Shape and dtype of `w`; differentiable with respect to it.
    """
    return _jit_if_traced(_effective, self, axis, step, w, mask)

  def pull_back(
    self,
    grad: jax.Array,
    w: jax.Array,
    seen: jax.Array,
    step: jax.Array | int,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """Returns dL/dW of dL/dW~, in the recipe's gradient mode, with SR-STE's term.

        masked            g * (mask + D * (1 - mask))
        straight_through  g
        both              + lam * (1 - mask) * W, unless it is decoupled

    Which weights the mask kept can be read off `seen`, so no mask is made a second time: a pruned
    one is D * W there, and a kept one is W, up to rounding. Override it beside `effective`.

    Args:
      grad: dL/dW~, shape of `w`.
      w: the dense weight W.
      seen: the weight that the forward pass computed with, W~ of `w` at `step`.
      step: the step of that pass.
      mask: the stored mask of a stateful recipe at that step.
    """
    # Nothing to change, so nothing is compiled and read either.
    if self.gradient_mode == "straight_through" and not self.lam:
      return grad
    return _jit_if_traced(_pull_back, self, 0, step, grad, w, seen, mask)

  def pruned_term(
    self, w: jax.Array, seen: jax.Array, step: jax.Array | int, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns SR-STE's term alone, lam * (1 - mask) * W, float32 or wider.

    Args:
      w: the dense weight W.
      seen: as in `pull_back`.
      step: the step of that pass.
      mask: the stored mask of a stateful recipe at that step.
    """
    return _jit_if_traced(_pruned_term, self, 0, step, w, seen, mask)

  def was_kept(
    self, w: jax.Array, seen: jax.Array, decay: jax.Array, mask: jax.Array | None
  ) -> jax.Array:
    """Returns the mask that a forward pass had, bool: is W~ nearer to W than to D * W?

    Where W~ is W, since W is 0 or D is 1, a weight counts as kept. (Parameters may be an ulp away
    from W, so they are not asked there.)
    """
    return (decay == 1) | (jnp.abs(seen) >= (1 + decay) / 2 * jnp.abs(w))

  def final(
    self, w: jax.Array, groups: Groups, state: Mapping[str, jax.Array] | None = None
  ) -> jax.Array:
    """Returns what is deployed: the target pattern with D = 0; survivors keep their bits.

    Override it where deployed values are not the stored ones, for example scaled. What it returns
    must be n:m: `nms.verify` looks at the pattern alone. Give such weights to the dense model: the
    sparse model would apply the recipe to them once more.

    Args:
      w: the trained parameter.
      groups: where its groups lie; it makes masks of the weight.
      state: what `next_state` returned last, of a stateful recipe.
    """
    keep = groups.magnitude_mask(w, self.pattern, parent=(state or {}).get("mask"))
    return jnp.where(keep, w, jnp.zeros_like(w))

  def timeline(self, axis_size: int | None = None) -> tuple[Segment, ...]:
    """Returns what happens when, as segments that cover [0, total)."""
    p, curve = self.phases, self.curve
    decay = lambda step: float(curve.value(np.int32(step - p.dense), np))
    levels = self.levels(axis_size)
    cuts = {0, self.sparse_from, p.finetune_start, p.total, *(start for start, _ in levels)}
    cuts |= {p.dense + j for j in curve.knots}
    cuts = sorted(c for c in cuts if 0 <= c <= p.total)
    segments: list[Segment] = []
    for start, stop in itertools.pairwise(cuts):
      if start < self.sparse_from:
        new = Segment(start, stop, None, 1.0, 1.0)
      else:
        pattern = next(q for first, q in reversed(levels) if first <= start)
        ends = (0.0, 0.0) if start >= p.finetune_start else (decay(start), decay(stop))
        new = Segment(start, stop, pattern, *ends)
      before = segments[-1] if segments else new
      decays = {before.decay_start, before.decay_stop, new.decay_start, new.decay_stop}
      if segments and before.pattern == new.pattern and len(decays) == 1:  # nothing changes here
        new = dataclasses.replace(segments.pop(), stop=stop)
      segments.append(new)
    return tuple(segments)

  def target_from(self, axis_size: int | None = None) -> int:
    """Returns the first step from which D = 0 and the target pattern holds until the end.

    It is `phases.total` where the run never reaches that.
    """
    found = self.phases.total
    for segment in reversed(self.timeline(axis_size)):
      if segment.pattern != self.pattern or segment.decay_start:
        break
      found = segment.start
    return found

  def renewals_due(self, step: jax.Array | int) -> jax.Array | int:
    """Returns how many renewals of the stored mask are due by `step`; 0 where none is kept."""
    return 0

  def renewals_done(self, state: dict[str, jax.Array], last: jax.Array | int) -> jax.Array | int:
    """Returns how many times the mask in `state` was renewed, after `next_state` at step `last`."""
    return self.renewals_due(last)

  def first_state(self, groups: Groups, w: jax.Array) -> dict[str, jax.Array]:
    """Returns what `init_state` stores for one weight: `keeps` at least."""
    return {"mask": jnp.ones_like(w, bool)}

  def next_state(
    self,
    groups: Groups,
    state: dict[str, jax.Array],
    w: jax.Array,
    step: jax.Array,
    last: jax.Array,
    grad: jax.Array | None,
    grad_at: jax.Array,
  ) -> dict[str, jax.Array]:
    """Returns what `update_state` stores for one weight: `state` at `last` brought to `step`.

    By default the magnitude mask of `w` where a renewal is due.

    Args:
      groups: where the groups of this weight lie; it makes masks of the weight.
      state: what `first_state` or the last call returned.
      w: the weight after `step` updates.
      step: updates applied so far.
      last: the step of the call before.
      grad: gradient of the update just applied, None where the caller gave none and the recipe
        needs none.
      grad_at: the weight that `grad` was taken at.
    """
    return self._renewed(state, step, last, lambda: groups.magnitude_mask(w, self.pattern))

  def _renewed(self, state, step, last, take):
    """Returns what is kept: `take()` where a renewal came due since `last`, else the old one."""
    due = self.renewals_due(step) > self.renewals_due(last)
    return {self.keeps: when(due, take, lambda: state[self.keeps])}

  def problem(self, state: Mapping[str, jax.Array]) -> str:
    """Returns why the stored mask may not act, where that is known; '' otherwise."""
    return ""

  def remarks(self, groups: Groups, state: Mapping[str, jax.Array]) -> list[str]:
    """Returns what to log of the state that `first_state` made."""
    return []


def _jit_if_traced(function: Callable, recipe: Recipe, axis: Any, step: Any, *arrays: Any) -> Any:
  # A network has dozens of kernels of one shape: under jit they share one trace. A step that is
  # known runs without jit, so that Python takes the branch and nothing else is compiled.
  step = as_step(step)
  axis = axis if isinstance(axis, int) else tuple(axis)
  if isinstance(step, jax.core.Tracer):
    function = jax.jit(function, static_argnums=(0, 1))
  return function(recipe, axis, step, *arrays)


def _mask(recipe, axis, step, w, stored):
  dense = (step >= 0) & (step < recipe.sparse_from)
  keep = recipe.chosen(lax.stop_gradient(w), step, axis, stored) | dense
  # Forward pass, backward pass and optimizer read one mask, not three copies of how it is made.
  return masks.computed_once(keep.astype(jnp.uint8)) > 0


def _effective(recipe, axis, step, w, stored):
  keep = recipe.mask(w, step, axis, stored)
  return gradients.blend(w, keep, recipe.decay(step), recipe.gradient_mode)


def _pull_back(recipe, axis, step, grad, w, seen, stored):
  # In float32, since lambda * W and D * g may be subnormals of a shorter dtype.
  out = grad.astype(gradients.wider(w.dtype))
  if recipe.gradient_mode == "masked":
    _, d, kept = _seen(recipe, step, w, seen, stored)
    out = jnp.where(kept, out, d * out)
  if recipe.lam and not recipe.decoupled:
    out = out + _pruned_term(recipe, axis, step, w, seen, stored)
  return out.astype(grad.dtype)


def _pruned_term(recipe, axis, step, w, seen, stored):
  wide, _, kept = _seen(recipe, step, w, seen, stored)
  return wide.dtype.type(recipe.lam) * jnp.where(kept, jnp.zeros_like(wide), wide)


def _seen(recipe, step, w, seen, stored):
  """Returns W, D and the mask of the forward pass that computed with `seen`."""
  dtype = gradients.wider(w.dtype)
  wide, d = w.astype(dtype), gradients.computed_once(recipe.decay(step)).astype(dtype)
  return wide, d, recipe.was_kept(wide, seen.astype(dtype), d, stored)
