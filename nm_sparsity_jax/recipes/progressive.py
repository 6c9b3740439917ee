"""Progressive gradient flow: pruned weights fade (MDGF), or the pattern tightens (SDGF).

In the formulas j = step - dense, and Phi_i is the mask of level i.

Reference: Bambhaniya et al., "Progressive Gradient Flow for Robust N:M Sparsity Training in
Transformers", CPAL 2025, arXiv:2402.04744.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.recipes.base import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fading(Recipe):
  """A recipe in which D follows `decay_kind`, at the rate `beta`; None is hard masks, D = 0.

  Subclasses set `decay_kind`, as a constant or a field.
  """

  decay_kind: ClassVar[str | None]
  beta: float | None = None
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    # What does not fit raises here, not at the first step.
    _ = self.levels(), self.curve

  @property
  def curve(self):
    return schedules.decay(self.decay_kind, self.beta, self.phases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MdgfLinear(Fading):
  """Mask decay gradient flow, linear: the target mask, pruned weights fade out.

      D(j) = max(1 - beta * j, 0).

  Attributes:
    pattern: the target.
    phases: D falls from step `dense` on and is 0 in the fine-tune phase in any case.
    beta: None = 1 / j*, j* = min(0.7 * total, total - finetune) - dense.
    gradient: None = masked, the paper's equation.
  """

  name: ClassVar[str] = "mdgf_linear"
  decay_kind: ClassVar[str] = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MdgfExponential(Fading):
  """Mask decay gradient flow, exponential: the target mask, pruned weights fade out.

      D(j) = exp(-beta * j), and 0 from the fine-tune phase on.

  Attributes:
    pattern: the target.
    phases: as in `MdgfLinear`; without a fine-tune phase D stays above 0 to the end.
    beta: None = ln(1000) / j*, j* = min(0.7 * total, total - finetune) - dense.
    gradient: None = masked, the paper's equation.
  """

  name: ClassVar[str] = "mdgf_exponential"
  decay_kind: ClassVar[str] = "exponential"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SdgfStepwise(Fading):
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
  decay_kind: str | None = None

  def levels(self, axis_size=None):
    return schedules.share_phase(schedules.stepwise_levels(self.pattern), self.phases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SdgfGeometric(Fading):
  """Structure decay gradient flow, geometric: k*n/2^d : k*m/2^d down to n:m, equal density.

      W~ = W * (Phi_i + D(j) * (1 - Phi_i)),   D = 0 unless `decay_kind` is given.

  A level whose group does not divide the axis, such as 512 of 768, is left out: a group never
  reaches beyond the axis. The others share the phase.

  Attributes:
    pattern: the target.
    phases: the levels share the sparsify phase equally.
    k: the first group is k times as long, a power of two (16 in the paper, 8 in its code).
    decay_kind: as in `SdgfStepwise`.
    beta: as in `SdgfStepwise`.
    gradient: None = masked.
  """

  name: ClassVar[str] = "sdgf_geometric"
  decay_kind: str | None = None
  k: int = 16

  def levels(self, axis_size=None):
    levels = schedules.geometric_levels(self.pattern, self.k, axis_size)
    return schedules.share_phase(levels, self.phases)
