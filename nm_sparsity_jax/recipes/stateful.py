"""Recipes that keep their mask as state: one-shot, SNIP, inherited dynamic pruning, and hold."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.core
import jax.numpy as jnp

from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.schedules import Phases, as_step
from nm_sparsity_jax.recipes.base import Recipe
from nm_sparsity_jax.recipes.levels import leveled_mask, value_at, when


class TakenOnce(Recipe):
  """A recipe that takes once, at `sparse_from`, what it keeps."""

  stateful: ClassVar[bool] = True

  def chosen(self, w, step, axis, stored):
    assert stored is not None  # `Recipe.mask` has looked
    return stored & (step >= 0)  # else D = NaN would meet no pruned weight

  def was_kept(self, w, seen, decay, mask):
    return mask

  def renewals_due(self, step):
    return (as_step(step) >= self.sparse_from).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneShot(TakenOnce):
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
    if self.phases.dense == 0:  # no later step would make it due
      return {"mask": groups.magnitude_mask(w, self.pattern)}
    return super().first_state(groups, w)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snip(TakenOnce):
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
    if not isinstance(self.batches, int) or not 1 <= self.batches <= self.phases.sparsify:
      raise ValueError(
        f"snip(batches={self.batches!r}): sums that many gradients in the sparsify phase of "
        f"{self.phases}, so give a whole number from 1 to {self.phases.sparsify}."
      )

  @property
  def sparse_from(self):
    # The gradients that are summed are those of dense training, so D = 1 until the last of them.
    return self.phases.dense + self.batches

  def renewals_done(self, state, last):
    return (state["seen"] >= self.batches).astype(jnp.int32)

  def first_state(self, groups, w):
    # float32: sums of products of bfloat16 would stop growing after a few batches.
    score = jnp.zeros_like(w, jnp.float32)
    return super().first_state(groups, w) | {"score": score, "seen": jnp.int32(0)}

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    assert grad is not None  # it says `needs_gradients`
    # Each step of the window once. Whoever misses one never has a mask, and is told so.
    next_one = self.phases.dense + state["seen"] + 1
    add = (step > last) & (step == next_one) & (state["seen"] < self.batches)
    sensitivity = jnp.abs(grad.astype(jnp.float32) * grad_at.astype(jnp.float32))
    score = jnp.where(add, state["score"] + sensitivity, state["score"])
    seen = state["seen"] + add.astype(jnp.int32)
    due = add & (seen == self.batches)
    # No score is below 0, so it is its own magnitude.
    mask = when(due, lambda: groups.magnitude_mask(score, self.pattern), lambda: state["mask"])
    return {"mask": mask, "score": score, "seen": seen}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idp(Recipe):
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
  stateful: ClassVar[bool] = True
  default_gradient: ClassVar[str] = "straight_through"
  lam: float = 2e-4

  def __post_init__(self):
    super().__post_init__()
    self.levels()

  def levels(self, axis_size=None):
    return schedules.share_phase(schedules.stepwise_levels(self.pattern), self.phases)

  def chosen(self, w, step, axis, stored):
    # Anew at each step, but among the survivors of the level before alone.
    return leveled_mask(self.levels(), w, step, axis, parent=stored)

  def renewals_due(self, step):
    levels = self.levels()
    return value_at(levels, as_step(step), range(len(levels)))

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    levels = self.levels()
    kept = [p.n for _, p in levels]
    # One choice replays all levels crossed: the best of the best is the best.
    n = value_at(levels, step, [kept[0], *kept[:-1]])
    take = lambda: groups.magnitude_mask(w, self.pattern, n, state["mask"])
    return self._renewed(state, step, last, take)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold(TakenOnce):
  """Trains on from weights that were pruned elsewhere, and keeps their zeros.

      W~ = W * (W_start != 0)

      nms.recipe("hold", pattern="2:4")   # of SparseGPT, Wanda, or magnitudes

  A group with fewer than n weights keeps those. A group with more is refused at the first update,
  which takes the mask, so weights may be loaded before it: by an error, and by NaN where weights
  are traced. Where they are known, the log says how many non-zeros are missing or too many.

  Attributes:
    pattern: what the weights are already.
    phases: the steps of the run; it has no dense phase. By default any step may be deployed.
    gradient: None = masked.
  """

  name: ClassVar[str] = "hold"
  phases: Phases = None  # type: ignore[assignment]
  gradient: str | None = None

  def __post_init__(self):
    if self.phases is None:
      object.__setattr__(self, "phases", Phases(total=1, finetune=1))
    super().__post_init__()
    if self.phases.dense:
      raise ValueError(
        f"hold(phases={self.phases}): keeps the mask of the first weights, so leave dense out."
      )

  def renewals_done(self, state, last):
    return (state["over"] == 0).astype(jnp.int32)  # else no step has a mask

  def first_state(self, groups, w):
    given = w != 0
    full = groups.magnitude_mask(given.astype(jnp.float32), self.pattern)
    # No error, since other weights may come after an `init`.
    return {"mask": given & full, "over": jnp.sum(given & ~full).astype(jnp.int32)}

  def problem(self, state):
    over = state["over"]
    if isinstance(over, jax.core.Tracer) or not over:
      return ""
    return (
      f"groups of the first weights have {over} non-zeros too many, so start from weights that are "
      "pruned, or take one_shot"
    )

  def remarks(self, groups, state):
    if isinstance(state["mask"], jax.core.Tracer):
      return []
    full = groups.magnitude_mask(jnp.ones(groups.shape, jnp.float32), self.pattern)
    missing = int(jnp.sum(full) - jnp.sum(state["mask"]))
    few = f"groups have {missing} non-zeros less than they may, and keep what they have"
    return [*filter(None, [self.problem(state), few if missing else ""])]

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    return dict(state)

  def final(self, w, groups, state=None):
    assert state is not None  # `finalize` has looked
    return jnp.where(state["mask"], w, jnp.zeros_like(w))
