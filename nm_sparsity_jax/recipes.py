"""The recipes: (weight, step) -> effective weight. Pure, traced step, one compilation.

    params, step -> rules -> [recipe: pattern and D now -> mask -> W~] -> layer -> loss

Each recipe is a frozen dataclass that can be hashed. What all share is written once here:
D = 1 before `dense` steps, so every recipe equals dense there; D = 0 from the fine-tune phase
on, so every one (`Dense` apart) is binary n:m there.

With Phi the magnitude mask of the pattern that holds at step t and j = t - dense,

    W~ = W * (Phi + D(j) * (1 - Phi)).

Reference of all but the baselines: Bambhaniya et al., "Progressive Gradient Flow for Robust
N:M Sparsity Training in Transformers", CPAL 2025, arXiv:2402.04744.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax import gradients, masks, schedules
from nm_sparsity_jax.groups import Groups
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.schedules import Phases, Segment, as_step

_NAN = np.float32(np.nan)  # numpy's: JAX_DEBUG_NANS looks at what jax makes


class Recipe(abc.ABC):
  """What a rule applies to a weight. Subclasses here are final; to vary one, write your own.

  A stateful one also writes `renewals`, `first_state` and `next_state`, as `OneShot` does.

  Attributes:
    name: the name that `recipe` knows it by.
    pattern: the target pattern, None for dense.
    phases: the steps of the sparse run, None for dense.
    gradient_mode: 'masked' or 'straight_through'.
    lam: weight of the SR-STE term, 0 where there is none.
    stateful: whether it keeps a mask; see `stored.init_state`.
    needs_gradients: whether `next_state` must be given the gradient of each update.
  """

  name: ClassVar[str]
  stateful: ClassVar[bool] = False
  needs_gradients: ClassVar[bool] = False
  default_gradient: ClassVar[str] = "masked"
  pattern: NM | None
  phases: Phases | None
  lam: float = 0.0

  @property
  def gradient_mode(self) -> str:
    return getattr(self, "gradient", None) or self.default_gradient

  @property
  def sparse_from(self) -> int:
    """The first step of the schedule proper; before it D = 1."""
    return self.phases.dense if self.phases else 0

  @abc.abstractmethod
  def levels(self, axis_size: int | None = None) -> tuple[tuple[int, NM], ...]:
    """((first step, pattern), ...): which pattern holds from which step on."""

  @abc.abstractmethod
  def decay(self, step: jax.Array | int) -> jax.Array:
    """D at `step`, a float32 scalar in [0, 1]. NaN for a negative step: nothing was given."""

  @abc.abstractmethod
  def mask(
    self,
    w: jax.Array,
    step: jax.Array | int,
    axis: masks.Axis = 0,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """The mask that holds at `step`, bool, shape of `w`; all True in the dense phase."""

  @abc.abstractmethod
  def effective(
    self,
    w: jax.Array,
    step: jax.Array | int,
    axis: masks.Axis = 0,
    mask: jax.Array | None = None,
  ) -> jax.Array:
    """The effective weight W~.

    Args:
      w: the stored parameter, float array [..., K, ...], in its stored dtype.
      step: updates applied so far, int32 scalar, usually traced.
      axis: the contraction axis (length K), or adjacent axes that count as one.
      mask: the stored mask of a stateful recipe, bool, shape of `w`.

    Returns:
      Shape and dtype of `w`; differentiable with respect to it.
    """

  @abc.abstractmethod
  def timeline(self, axis_size: int | None = None) -> tuple[Segment, ...]:
    """What happens when, as segments that cover [0, total)."""

  def renewals(self, step: jax.Array | int) -> jax.Array | int:
    """How many times the stored mask was to be renewed by `step`; 0 where there is none."""
    del step
    return 0

  def renewed(self, state: dict[str, jax.Array], last: jax.Array | int) -> jax.Array | int:
    """How many times the mask in `state` was renewed, after `next_state` at step `last`."""
    del state
    return self.renewals(last)

  @property
  def renewed_by(self) -> str:
    """What `update_state` must have been given, for error messages."""
    return (
      "Call nms.update_state(state, params, rules, step) after each optimizer update, from the "
      "first one on, and carry its result."
    )

  def first_state(self, groups: Groups, w: jax.Array) -> dict[str, jax.Array]:
    """What `init_state` stores for one weight: at least "mask", bool, shape of `w`."""
    raise NotImplementedError(f"{self.name} is stateful, so it must define first_state.")

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
    """What `update_state` stores for one weight: `state` at `last` brought to `step`.

    Args:
      groups: where the groups of this weight lie; it makes masks of it.
      state: what `first_state` or the last call returned.
      w: the weight after `step` updates.
      step: updates applied so far.
      last: the step of the call before.
      grad: gradient of the update just applied, None where the caller gave none and the recipe
        needs none.
      grad_at: the weight that `grad` was taken at.
    """
    raise NotImplementedError(f"{self.name} is stateful, so it must define next_state.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Recipe):
  """Nothing: W~ = W. The baseline, and the explicit way to leave a place alone.

  `pattern` and `phases` are accepted, so that recipes can be swapped by name; only the
  length of the timeline depends on them.
  """

  name: ClassVar[str] = "dense"
  pattern: NM | None = None
  phases: Phases | None = None

  def __post_init__(self):
    if self.pattern is not None:
      object.__setattr__(self, "pattern", NM.parse(self.pattern))

  def levels(self, axis_size=None):
    del axis_size
    return ()

  def decay(self, step):
    return jnp.where(as_step(step) < 0, _NAN, jnp.float32(1))

  def mask(self, w, step, axis=0, mask=None):
    del step, axis, mask
    return jnp.ones_like(w, bool)

  def effective(self, w, step, axis=0, mask=None):
    del step, axis, mask
    return w

  def timeline(self, axis_size=None):
    del axis_size
    return (Segment(0, self.phases.total, None, 1.0, 1.0),) if self.phases else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sparse(Recipe):
  """What all sparse recipes share; subclasses say `levels` and `_decay`."""

  pattern: NM
  phases: Phases

  def __post_init__(self):
    object.__setattr__(self, "pattern", NM.parse(self.pattern))
    if not isinstance(self.phases, Phases):
      raise ValueError(
        f"{type(self).__name__}(phases={self.phases!r}): give the steps of the sparse run, for "
        "example Phases(total=100_000, dense=10_000, finetune=20_000)."
      )
    gradients.check_mode(getattr(self, "gradient", None))

  def levels(self, axis_size=None):
    del axis_size
    return ((self.sparse_from, self.pattern),)

  def _decay(self, j, xp=jnp) -> Any:
    """D(j) of the sparsify phase, for j = step - dense (an array of `xp`)."""
    return xp.zeros(xp.shape(j), xp.float32)

  def _decay_ends(self) -> int:
    """The first j from which on D(j) is 0, if only the fine-tune phase did not come before."""
    return 0

  def decay(self, step):
    step = as_step(step)
    d = self._decay(step - self.phases.dense)
    d = jnp.where(step >= self.phases.finetune_start, jnp.float32(0), d)
    d = jnp.where(step < self.sparse_from, jnp.float32(1), d)
    return jnp.where(step < 0, _NAN, d)

  def _mask(self, w, step, axis, stored):
    """The mask of the level that holds at `step` (of the first one before)."""
    if stored is not None:
      raise ValueError(
        f"{self.name} derives its mask from the weight and keeps none, but mask= was given."
      )
    return _leveled_mask(self.levels(_length(w, axis)), w, step, axis)

  def mask(self, w, step, axis=0, mask=None):
    step = as_step(step)
    dense = (step >= 0) & (step < self.sparse_from)
    keep = self._mask(w, step, axis, mask) | dense
    # Forward pass, backward pass and optimizer read one mask, not three copies of how it is made.
    return masks.pinned(keep.astype(jnp.uint8)) > 0

  def effective(self, w, step, axis=0, mask=None):
    keep = self.mask(w, step, axis, mask)
    return gradients.blend(w, keep, self.decay(step), self.gradient_mode)

  def timeline(self, axis_size=None):
    p = self.phases
    levels = self.levels(axis_size)
    cuts = {0, self.sparse_from, p.finetune_start, p.total, *(start for start, _ in levels)}
    cuts |= {p.dense + k for k in self._decay_knots()}
    cuts.add(p.dense + self._decay_ends())
    cuts = sorted(c for c in cuts if 0 <= c <= p.total)
    segments: list[Segment] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
      if start < self.sparse_from:
        new = Segment(start, stop, None, 1.0, 1.0)
      else:
        pattern = next(q for first, q in reversed(levels) if first <= start)
        new = Segment(start, stop, pattern, *self._decay_between(start, stop))
      if segments and _same_state(segments[-1], new):
        new = dataclasses.replace(segments.pop(), stop=stop)
      segments.append(new)
    return tuple(segments)

  def _decay_between(self, start: int, stop: int) -> tuple[float, float]:
    """D at `start`, and the D it runs to by `stop`, where both lie in one phase."""
    if start >= self.phases.finetune_start:
      return 0.0, 0.0
    ends = self._decay_ends()
    j = start - self.phases.dense, stop - self.phases.dense
    first, last = (0.0 if x >= ends else float(self._decay(np.int32(x), np)) for x in j)
    return first, last

  def _decay_knots(self) -> Sequence[int]:
    """The j at which D(j) has a corner, for the timeline."""
    return ()


def _same_state(a: Segment, b: Segment) -> bool:
  """Whether nothing changes from one segment to the next."""
  return a.pattern == b.pattern and a.decay_start == a.decay_stop == b.decay_start == b.decay_stop


def _length(w: jax.Array, axis: masks.Axis) -> int:
  return math.prod(w.shape[a] for a in masks.check_axis(w.shape, axis))


def _when(condition, yes, no):
  """lax.cond without operands; outside jit a Python branch, which compiles nothing anew."""
  if isinstance(condition, jax.core.Tracer):
    return lax.cond(condition, yes, no)
  return yes() if condition else no()


def _current(levels, step, values):
  """The value of the level that holds at `step`, by comparisons: nothing to gather."""
  now = jnp.int32(values[0])
  for (start, _), value in zip(levels[1:], values[1:], strict=True):
    now = jnp.where(step >= start, jnp.int32(value), now)
  return now


def _leveled_mask(levels, w, step, axis, parent=None):
  """The magnitude mask of the pattern that holds at `step`; one compilation for all levels."""
  *earlier, last = [p for _, p in levels]
  w = lax.stop_gradient(w)
  final = lambda: masks.magnitude_mask(w, last, axis, parent=parent)
  if not earlier:
    return final()
  climb = lambda: _ladder_mask(levels[:-1], w, step, axis, parent)
  # The last level holds longest and is often far cheaper than the ladder: 1:m is one maximum.
  return _when(step >= levels[-1][0], final, climb)


def _ladder_mask(levels, w, step, axis, parent):
  """The mask of one of several levels: one program with a traced n, or d, or one for each."""
  patterns = [p for _, p in levels]
  base = patterns[-1]
  if len({p.m for p in patterns}) == 1:
    n = _current(levels, step, [p.n for p in patterns])
    return masks.magnitude_mask(w, base, axis, n=n, parent=parent)
  most = len(patterns) - 1
  doubling = [NM(base.n << d, base.m << d) for d in range(most, -1, -1)]
  if patterns == doubling and parent is None:
    d = _current(levels, step, range(most, -1, -1))
    return masks.ladder_mask(w, base, axis, doublings=d, most=most)
  branches = [lambda w, p=p: masks.magnitude_mask(w, p, axis, parent=parent) for p in patterns]
  now = _current(levels, step, range(len(levels)))
  if isinstance(now, jax.core.Tracer):
    return lax.switch(now, branches, w)
  return branches[int(now)](w)


# --- baselines --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stateful(_Sparse):
  """A recipe that keeps a mask. It keeps everything at first and is renewed now and then."""

  stateful: ClassVar[bool] = True

  def first_state(self, groups, w):
    del groups
    return {"mask": jnp.ones_like(w, bool)}

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    del grad, grad_at
    due = self.renewals(step) > self.renewals(last)
    mask = state["mask"]
    return {"mask": _when(due, lambda: self._take(groups, mask, w, step), lambda: mask)}

  def _take(self, groups: Groups, mask, w, step) -> jax.Array:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frozen(_Stateful):
  """A recipe whose mask is taken once: it acts on what `update_state` stored."""

  def _mask(self, w, step, axis, stored):
    del axis
    return _require(self, w, stored) & (step >= 0)  # else D = NaN would meet no pruned weight

  def renewals(self, step):
    return (as_step(step) >= self.sparse_from).astype(jnp.int32)


def _require(recipe: Recipe, w: jax.Array, stored: jax.Array | None) -> jax.Array:
  if stored is None:
    raise ValueError(
      f"{recipe.name} keeps its mask as state, and none was given: carry state = "
      "nms.init_state(params, rules), refresh it by nms.update_state after each optimizer "
      "update, and pass it (state=..., or mask=... for one weight)."
    )
  if stored.shape != w.shape or stored.dtype != jnp.bool_:
    raise ValueError(
      f"{recipe.name}: the stored mask has shape {stored.shape} and dtype {stored.dtype}, the "
      f"weight needs {w.shape} bool. Was the state made for other parameters?"
    )
  return stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneShot(_Frozen):
  """Magnitude pruning once, then fine-tuning: Phi is taken at the end of the dense phase.

      W~ = W for t < dense, then W * Phi(W_dense).

  Reference: the one-shot category of arXiv:2402.04744, section 2; NVIDIA apex ASP.

  Attributes:
    pattern: what to keep.
    phases: the mask is taken at step `phases.dense` (from the initial weights when 0).
    gradient: None = masked.
  """

  name: ClassVar[str] = "one_shot"
  gradient: str | None = None

  def first_state(self, groups, w):
    if self.phases.dense == 0:
      return {"mask": groups.magnitude_mask(w, self.pattern)}
    return super().first_state(groups, w)

  def _take(self, groups, mask, w, step):
    del mask, step
    return groups.magnitude_mask(w, self.pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SrSte(_Sparse):
  """Sparse-refined straight-through estimator: a hard mask, taken anew every step.

      W~ = W * Phi(W),   dL/dW = g + lam * (1 - Phi) * W.

  The gradient is straight-through; the second term is added once per optimizer step by
  `optim.sr_ste`, to the gradient of the mean loss per target token. It acts from the end of
  the dense phase to the end of the run.

  Reference: Zhou et al., "Learning N:M fine-grained structured sparse neural networks from
  scratch", ICLR 2021, arXiv:2102.04010.

  Attributes:
    pattern: what to keep.
    phases: hard masks from step `phases.dense` on.
    lam: the weight lambda of the term that decays pruned weights.
  """

  name: ClassVar[str] = "sr_ste"
  default_gradient: ClassVar[str] = "straight_through"
  lam: float = 2e-4

  def __post_init__(self):
    super().__post_init__()
    _check_lam(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snip(_Frozen):
  """Connection sensitivity, once: dense for `batches` steps, then a frozen mask.

      c = sum over the first batches of |g * W|,   W~ = W * top-n-of-m(c).

  Reference: Lee et al., "SNIP: single-shot network pruning based on connection sensitivity",
  ICLR 2019, arXiv:1810.02340; the top n of each group instead of a global top k is ours.

  Attributes:
    pattern: what to keep.
    phases: scores are summed over the gradients of steps dense, ..., dense + batches - 1.
    batches: how many gradients to sum.
    gradient: None = masked.
  """

  name: ClassVar[str] = "snip"
  needs_gradients: ClassVar[bool] = True
  batches: int = 1
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    if isinstance(self.batches, bool) or not isinstance(self.batches, int) or self.batches < 1:
      raise ValueError(f"snip(batches={self.batches!r}): give a whole number of at least 1.")
    if self.batches > self.phases.sparsify:
      raise ValueError(
        f"snip(batches={self.batches}) sums that many gradients in the sparsify phase, which has "
        f"{self.phases.sparsify} steps in {self.phases}. Raise total or lower batches."
      )

  @property
  def sparse_from(self):
    return self.phases.dense + self.batches

  def first_state(self, groups, w):
    more = {"score": jnp.zeros_like(w, jnp.float32), "seen": jnp.int32(0)}
    return super().first_state(groups, w) | more

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    # Each step of the window once. Whoever misses one never has a mask, and is told so.
    next_one = self.phases.dense + state["seen"] + 1
    add = (step > last) & (step == next_one) & (state["seen"] < self.batches)
    sensitivity = jnp.abs(grad.astype(jnp.float32) * grad_at.astype(jnp.float32))
    score = jnp.where(add, state["score"] + sensitivity, state["score"])
    seen = state["seen"] + add.astype(jnp.int32)
    due = add & (seen == self.batches)
    mask = _when(due, lambda: groups.score_mask(score, self.pattern), lambda: state["mask"])
    return {"mask": mask, "score": score, "seen": seen}

  @property
  def renewed_by(self):
    first, last = self.phases.dense, self.sparse_from - 1
    return (
      f"snip sums the gradients of steps {first} to {last}, each once: call nms.update_state("
      "state, params, rules, step, grads=grads) after each of these updates. Once one is missed "
      f"there is no mask: go back to a checkpoint of step {first} or before."
    )

  def renewed(self, state, last):
    del last
    return (state["seen"] >= self.batches).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idp(_Stateful):
  """Inherited dynamic pruning: stepwise levels, each choosing among the survivors of the last.

      Phi_i = top-n_i-of-m of |W| among Phi_{i-1} as it was when level i began,
      W~ = W * Phi_i(W),   dL/dW = g + lam * (1 - Phi_i) * W.

  Our reading of an abstract: Fang, Zhou and Wang, "An algorithm-hardware co-optimized framework
  for accelerating N:M sparse transformers", 2022, arXiv:2208.06118, names "inherited dynamic
  pruning" and a series of models from dense to sparse; stage lengths and update rule are ours.

  Attributes:
    pattern: the target.
    phases: the levels of `sdgf_stepwise` share the sparsify phase.
    lam: as in SR-STE.
  """

  name: ClassVar[str] = "idp"
  default_gradient: ClassVar[str] = "straight_through"
  lam: float = 2e-4

  def __post_init__(self):
    super().__post_init__()
    _check_lam(self)
    self.levels()

  def levels(self, axis_size=None):
    del axis_size
    return schedules.share_phase(schedules.stepwise_levels(self.pattern), self.phases)

  def renewals(self, step):
    levels = self.levels()
    return _current(levels, as_step(step), range(len(levels)))

  def _take(self, groups, mask, w, step):
    # One choice replays all levels crossed: the best of the best is the best.
    levels = self.levels()
    kept = [p.n for _, p in levels]
    n = _current(levels, step, [kept[0], *kept[:-1]])
    return groups.magnitude_mask(w, self.pattern, n, mask)

  def _mask(self, w, step, axis, stored):
    return _leveled_mask(self.levels(), w, step, axis, parent=_require(self, w, stored))


def _is_number(x: Any) -> bool:
  """A plain one: a recipe is hashed, so an array will not do."""
  return isinstance(x, (int, float)) and not isinstance(x, bool)


def _check_lam(recipe):
  if not _is_number(recipe.lam) or not 0 <= recipe.lam < math.inf:
    raise ValueError(
      f"{recipe.name}(lam={recipe.lam!r}): lambda must be a number >= 0, such as 2e-4."
    )


# --- decay recipes ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decaying(_Sparse):
  """What recipes with a linear or exponential D(j) share."""

  beta: float | None = None
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.kind is None and self.beta is not None:
      raise ValueError(
        f"{self.name}(beta={self.beta!r}) needs decay_kind='linear' or 'exponential'."
      )
    if self.beta is not None and not (_is_number(self.beta) and 0 < self.beta < math.inf):
      raise ValueError(
        f"{self.name}(beta={self.beta!r}): beta must be positive, a plain number, or D would not "
        "fall. None chooses it from the phases."
      )
    if self.kind is not None and self.beta is None:
      schedules.default_horizon(self.phases)

  @property
  def kind(self) -> str | None:
    """'linear', 'exponential' or None."""
    raise NotImplementedError

  @property
  def rate(self) -> float:
    """beta, or what None stands for: linear 1 / j*, exponential ln(1000) / j*."""
    if self.beta is not None:
      return self.beta
    top = 1 if self.kind == "linear" else math.log(1000)
    return top / schedules.default_horizon(self.phases)

  def _decay(self, j, xp=jnp):
    if self.kind == "linear":
      return schedules.linear_decay(j, self._horizon(), xp)
    if self.kind == "exponential":
      return schedules.exponential_decay(j, self.rate, xp)
    return super()._decay(j, xp)

  def _horizon(self):
    return schedules.default_horizon(self.phases) if self.beta is None else 1 / self.beta

  def _decay_ends(self):
    if self.kind == "linear":
      return schedules.linear_end(self._horizon())
    return schedules.exponential_end(self.rate) if self.kind else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MdgfLinear(_Decaying):
  """Mask decay gradient flow, linear: the target mask, pruned weights fade out.

      D(j) = max(1 - beta * j, 0).

  Attributes:
    pattern: the target.
    phases: D falls from step `dense` on and is 0 in the fine-tune phase in any case.
    beta: None = 1 / j*, j* = min(0.7 * total, total - finetune) - dense.
    gradient: None = masked, the paper's equation.
  """

  name: ClassVar[str] = "mdgf_linear"
  kind: ClassVar[str] = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MdgfExponential(_Decaying):
  """Mask decay gradient flow, exponential: the target mask, pruned weights fade out.

      D(j) = exp(-beta * j), and 0 from the fine-tune phase on.

  Attributes:
    pattern: the target.
    phases: as in `MdgfLinear`; without a fine-tune phase D stays above 0 to the end.
    beta: None = ln(1000) / j*, j* = min(0.7 * total, total - finetune) - dense.
    gradient: None = masked, the paper's equation.
  """

  name: ClassVar[str] = "mdgf_exponential"
  kind: ClassVar[str] = "exponential"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Structured(_Decaying):
  """What the recipes that walk through levels share."""

  decay_kind: str | None = None

  def __post_init__(self):
    if self.decay_kind not in (None, "linear", "exponential"):
      raise ValueError(
        f"{self.name}(decay_kind={self.decay_kind!r}): choose 'linear', 'exponential' or None."
      )
    super().__post_init__()
    self.levels()

  @property
  def kind(self):
    return self.decay_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class SdgfStepwise(_Structured):
  """Structure decay gradient flow, stepwise: m-1, m/2, m/4, ..., n of m at equal intervals.

      W~ = W * (Phi_i + D(j) * (1 - Phi_i)),   D = 0 unless `decay_kind` is given.

  Attributes:
    pattern: the target.
    phases: the levels share the sparsify phase equally.
    decay_kind: also let pruned weights fade, 'linear' or 'exponential' (the paper's future work).
    beta: the rate of that decay, as in the MDGF recipes.
    gradient: None = masked.
  """

  name: ClassVar[str] = "sdgf_stepwise"

  def levels(self, axis_size=None):
    del axis_size
    return schedules.share_phase(schedules.stepwise_levels(self.pattern), self.phases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SdgfGeometric(_Structured):
  """Structure decay gradient flow, geometric: k*n/2^d : k*m/2^d down to n:m, equal density.

      W~ = W * (Phi_i + D(j) * (1 - Phi_i)),   D = 0 unless `decay_kind` is given.

  Levels whose group does not divide the axis are dropped from the top (768 % 512), never
  straddled; the remaining ones share the phase.

  Attributes:
    pattern: the target.
    phases: the levels share the sparsify phase equally.
    k: the first group is k times as long, a power of two (16 in the paper, 8 in its code).
    decay_kind: as in `SdgfStepwise`.
    beta: as in `SdgfStepwise`.
    gradient: None = masked.
  """

  name: ClassVar[str] = "sdgf_geometric"
  k: int = 16

  def levels(self, axis_size=None):
    return schedules.share_phase(
      schedules.geometric_levels(self.pattern, self.k, axis_size), self.phases
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(_Sparse):
  """Any path: a list of (step, pattern, D). The pattern holds, D runs linearly to the next entry.

  After the last entry D runs to 0 at the fine-tune phase, where the target pattern takes over.
  Before the first entry the weight is dense.

  >>> p = Phases(total=100, finetune=20)
  >>> r = Custom(pattern="1:8", phases=p, path=((0, "4:8", 1.0), (40, "1:8", 0.5)))
  >>> [(s.start, str(s.pattern), s.decay_start, s.decay_stop) for s in r.timeline(64)]
  [(0, '4:8', 1.0, 0.5), (40, '1:8', 0.5, 0.0), (80, '1:8', 0.0, 0.0)]

  Attributes:
    pattern: the target, which holds in the fine-tune phase.
    phases: every entry lies in the sparsify phase.
    path: entries (step of the sparse run, pattern, D in [0, 1]), steps rising.
    gradient: None = masked.
  """

  name: ClassVar[str] = "custom"
  path: tuple[tuple[int, NM, float], ...] = ()
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    try:
      path = tuple((step, NM.parse(pattern), float(d)) for step, pattern, d in self.path)
    except (TypeError, ValueError) as e:
      raise ValueError(f"custom(path={self.path!r}): entries are (step, pattern, D). {e}") from e
    if not path:
      raise ValueError(
        "custom needs a path, entries (step, pattern, D): for example "
        "path=((0, '4:8', 1.0), (5000, '1:8', 0.5))."
      )
    low, high = self.phases.dense, self.phases.finetune_start
    for i, (step, _, d) in enumerate(path):
      if isinstance(step, bool) or not isinstance(step, int) or not low <= step < high:
        raise ValueError(
          f"custom: entry {i} starts at step {step!r}; give a whole number in the sparsify phase "
          f"[{low}, {high}) of {self.phases}."
        )
      if not 0 <= d <= 1:
        raise ValueError(
          f"custom: entry {i} has D = {d}; choose D in [0, 1]: 1 keeps pruned weights, 0 makes "
          "them 0."
        )
      if i and step <= path[i - 1][0]:
        raise ValueError(
          f"custom: entry {i} at step {step} does not come after {path[i - 1][0]}: sort the path "
          "by step, one entry a step."
        )
    object.__setattr__(self, "path", path)

  @property
  def sparse_from(self):
    return self.path[0][0]

  def levels(self, axis_size=None):
    del axis_size
    levels = [(step, pattern) for step, pattern, _ in self.path]
    if levels[-1][1] != self.pattern:
      levels.append((self.phases.finetune_start, self.pattern))
    return tuple(levels)

  def _knots(self):
    return (*((step, d) for step, _, d in self.path), (self.phases.finetune_start, 0.0))

  def _decay(self, j, xp=jnp):
    return schedules.piecewise_linear(j + xp.int32(self.phases.dense), self._knots(), xp)

  def _decay_ends(self):
    zero_from = self.phases.finetune_start
    for step, d in reversed(self._knots()):
      if d:
        break
      zero_from = step
    return zero_from - self.phases.dense

  def _decay_knots(self):
    # Where D rises from 0, it is 0 for one step: a segment of its own.
    knots = self._knots()
    rises = [a + 1 for (a, d), (_, e) in zip(knots, knots[1:], strict=False) if not d and e]
    return [step - self.phases.dense for step in (*(step for step, _ in knots), *rises)]


RECIPES: dict[str, type[Recipe]] = {
  cls.name: cls
  for cls in (
    Dense,
    OneShot,
    SrSte,
    MdgfLinear,
    MdgfExponential,
    SdgfStepwise,
    SdgfGeometric,
    Custom,
    Snip,
    Idp,
  )
}


def recipe(
  name: str,
  *,
  pattern: NM | str | None = None,
  phases: Phases | None = None,
  **fields: Any,
) -> Recipe:
  """Makes a recipe by name. Fields that are None take the recipe's own default.

  A field that the recipe lacks and that is not None is an error, so that one set of settings
  (`beta=None, gradient=None`) fits every recipe and a wrong one never passes silently.

  >>> recipe("mdgf_linear", pattern="1:8", phases=Phases(total=100), beta=None).pattern
  NM(n=1, m=8)
  """
  if name not in RECIPES:
    close = difflib.get_close_matches(str(name), RECIPES, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"there is no recipe {name!r}. Choose one of: {', '.join(RECIPES)}.{hint}")
  cls = RECIPES[name]
  known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
  given = {k: v for k, v in fields.items() if v is not None}
  if unknown := sorted(set(given) - known):
    raise ValueError(
      f"{name} has no field {', '.join(f'{k}={given[k]!r}' for k in unknown)}. Its fields: "
      f"{', '.join(sorted(known))}. Leave the others None."
    )
  if cls is not Dense and (pattern is None or phases is None):
    missing = "pattern" if pattern is None else "phases"
    example = "pattern='1:8'" if pattern is None else "phases=nms.Phases(total=100_000)"
    raise ValueError(f"{name} needs {missing}, for example {example}.")
  return cls(pattern=pattern, phases=phases, **given)  # type: ignore[call-arg]
