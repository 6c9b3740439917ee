"""What needs no memory: dense training, and SR-STE's hard masks."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases, Segment, as_step
from nm_sparsity_jax.recipes.base import NAN, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Recipe):
  """Nothing: W~ = W. The baseline, and the explicit way to leave a place alone.

  `pattern` and `phases` are accepted, so that recipes can be swapped by name; only the
  length of the timeline depends on them.
  """

  name: ClassVar[str] = "dense"
  pattern: NM | None = None  # type: ignore[assignment]
  phases: Phases | None = None  # type: ignore[assignment]

  def __post_init__(self):
    if self.pattern is not None:
      object.__setattr__(self, "pattern", NM.parse(self.pattern))

  def levels(self, axis_size=None):
    return ()

  def decay(self, step):
    return jnp.where(as_step(step) < 0, NAN, jnp.float32(1))

  def mask(self, w, step, axis=0, mask=None):
    return jnp.ones_like(w, bool)

  def effective(self, w, step, axis=0, mask=None):
    return w

  def final(self, w, groups, state=None):
    return w

  def timeline(self, axis_size=None):
    return (Segment(0, self.phases.total, None, 1.0, 1.0),) if self.phases else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SrSte(Recipe):
  """Sparse-refined straight-through estimator: a hard mask, taken anew every step.

      W~ = W * Phi(W),   dL/dW = g + lam * (1 - Phi) * W.

  The gradient is straight-through; the second term is added once per optimizer step, to the
  gradient of the mean loss per target token. It acts from the end of the dense phase to the end of
  the run.

  Adam divides that term by the root of v, as any gradient, so lam means something else for every
  weight. A decoupled term acts beside the update u of the optimizer, as AdamW decays weights:

      dL/dW = g,   W = W + u(g) - eta(t) * lam * (1 - Phi) * W.

      recipe = nms.recipe("sr_ste", pattern="1:8", phases=phases, decoupled=True)
      tx = nms.sparse(optax.adam(rate), nms.Rules({"ff": recipe}), learning_rate=rate)

  `eta` is the `learning_rate` of `nms.sparse`: that of the optimizer, or a schedule of its own.
  The trainer of T5X and the local runner give theirs. So a pruned weight that has no gradient
  becomes (1 - lam * eta) * W at each step, whatever its v. It changes its sign where lam * eta is
  above 1, and grows above 2.

  Tune lam together with the rate. A rule: masks should flip no faster than those of dense weights,
  but not much slower (Hu et al., "Accelerating transformer pre-training with 2:4 sparsity", ICML
  2024, arXiv:2404.01847, who keep the term in the gradient). It gave the default of 0.2 at a rate
  of 2e-3 (docs/core.md).

  References: Zhou et al., "Learning N:M fine-grained structured sparse neural networks from
  scratch", ICLR 2021, arXiv:2102.04010; Loshchilov and Hutter, "Decoupled weight decay
  regularization", ICLR 2019, arXiv:1711.05101.

  Attributes:
    pattern: what to keep.
    phases: hard masks from step `phases.dense` on. `phases.finetune` changes nothing.
    lam: the weight lambda of the term that decays pruned weights; None = 2e-4, or 0.2 where it is
      decoupled. `dataclasses.replace` of `decoupled` alone keeps it.
    decoupled: whether the term acts beside the update, not in the gradient.
  """

  name: ClassVar[str] = "sr_ste"
  default_gradient: ClassVar[str] = "straight_through"
  lam: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  decoupled: bool = False

  def __post_init__(self):
    if self.lam is None:
      object.__setattr__(self, "lam", 0.2 if self.decoupled else 2e-4)
    super().__post_init__()
