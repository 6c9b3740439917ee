"""One run of a sweep as its folder shows it: open, begun, failed or done.

MODEL_DIR/checkpoint_N, evaluations.json    of the run itself
MODEL_DIR/failed.txt                        why it failed, until it is tried again
MODEL_DIR/evaluation.txt                    how it is evaluated
"""

from __future__ import annotations

import dataclasses
import pathlib

from nm_sparsity_jax.analysis.sweep.grid import Cell
from nm_sparsity_jax.runs import folders


@dataclasses.dataclass(frozen=True)
class Run:
  """A cell, and what is known of it from its configuration.

  Attributes:
    cell: which one.
    first: the global step before its first one.
    steps: how many it has.
    evaluation: the settings of its evaluations, as text.
  """

  cell: Cell
  first: int
  steps: int
  evaluation: str

  @property
  def last(self) -> int:
    """Returns the global step at which it ends."""
    return self.first + self.steps

  @property
  def failure(self) -> pathlib.Path:
    """Returns the file that says why it failed."""
    return self.cell.folder / "failed.txt"

  @property
  def evaluated_with(self) -> pathlib.Path:
    """Returns the file that says how it is evaluated."""
    return self.cell.folder / "evaluation.txt"

  @property
  def log(self) -> pathlib.Path:
    """Returns the file that gets what it prints."""
    return self.cell.folder / "log.txt"

  def steps_done(self) -> int:
    """Returns how many steps it would not do again."""
    found = folders.steps(self.cell.folder)
    return found[-1] - self.first if found else 0

  def is_done(self) -> bool:
    """Returns whether it has its last evaluation and checkpoint."""
    return folders.is_done(self.cell.folder, self.last)

  def state(self) -> str:
    """Returns 'done', 'failed', 'begun' or 'open'."""
    if self.is_done():
      return "done"
    return "failed" if self.failure.is_file() else "begun" if self.steps_done() else "open"
