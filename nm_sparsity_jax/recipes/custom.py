"""Any path through patterns and D, entry by entry."""

from __future__ import annotations

import dataclasses
from operator import index
from typing import ClassVar

from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.recipes.base import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Custom(Recipe):
  """Any path: a list of (step, pattern, D). The pattern holds, D runs linearly to the next entry.

  After the last entry D runs to 0 at the fine-tune phase, where the target pattern takes over.
  Before the first entry the weight is dense.

  >>> p = nms.Phases(total=100, finetune=20)
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
    # A step of numpy becomes Python's, and one that is no whole number raises a TypeError.
    path = tuple((index(step), NM.parse(pattern), float(d)) for step, pattern, d in self.path)
    steps = [step for step, _, _ in path]
    low, high = self.phases.dense, self.phases.finetune_start
    is_rising = steps == sorted(set(steps)) and steps and low <= steps[0] and steps[-1] < high
    if not is_rising or not all(0 <= d <= 1 for _, _, d in path):
      raise ValueError(
        f"custom(path={path}): give rising steps in the sparsify phase [{low}, {high}) of "
        f"{self.phases}, and D in [0, 1], where 1 keeps pruned weights and 0 makes them 0."
      )
    object.__setattr__(self, "path", path)

  @property
  def sparse_from(self):
    return self.path[0][0]

  def levels(self, axis_size=None):
    levels = [(step, pattern) for step, pattern, _ in self.path]
    if levels[-1][1] != self.pattern:  # a path may end at another pattern than the target
      levels.append((self.phases.finetune_start, self.pattern))
    return tuple(levels)

  @property
  def curve(self):
    dense = self.phases.dense
    knots = [(step - dense, d) for step, _, d in self.path]
    return schedules.piecewise(*knots, (self.phases.finetune_start - dense, 0.0))
