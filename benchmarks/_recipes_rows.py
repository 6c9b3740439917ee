"""What the benchmark of recipes runs: a row is a way to train; a run has a task and a seed too."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Row:
  """One way to train.

  Attributes:
    recipe: name of the recipe; "dense" where there is none.
    gradient: the gradient mode, None where the recipe has but one.
    dense: steps before the sparse ones, in percent of all.
    finetune: steps at the end, with the target pattern and nothing else, in percent of all.
    ff: whether the network has feed-forward layers at all.
    lam: SR-STE's lambda, None for the library's.
    rate: the largest learning rate, None for the task's.
    constant: whether the rate stays there after the warm-up, instead of a cosine to 0.
  """

  recipe: str
  gradient: str | None = None
  dense: int = 10
  finetune: int = 20
  ff: bool = True
  lam: float | None = None
  rate: float | None = None
  constant: bool = False

  @property
  def sparse(self) -> bool:
    return self.recipe != "dense"


class Run(NamedTuple):
  """One line of the results. Rows without sparsity have the pattern "-"."""

  task: str
  pattern: str
  budget: str
  row: str
  seed: int
