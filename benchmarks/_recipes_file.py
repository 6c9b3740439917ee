"""What the benchmark of recipes runs, and the file of results: a line of JSON a run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
from typing import Any, NamedTuple

RESULTS = pathlib.Path(__file__).with_name("results")


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
    decoupled: whether its term acts beside the optimizer.
    rate: the largest learning rate, None for the task's.
    constant: whether the rate stays there after the warm-up, instead of a cosine to 0.
  """

  recipe: str
  gradient: str | None = None
  dense: int = 10
  finetune: int = 20
  ff: bool = True
  lam: float | None = None
  decoupled: bool = False
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


def read(path: pathlib.Path) -> dict[Run, dict[str, Any]]:
  """Returns the records of a results file by run."""
  found: dict[Run, dict[str, Any]] = {}
  for line in path.read_text("utf8").splitlines() if path.exists() else ():
    try:
      record = json.loads(line)
    except json.JSONDecodeError:  # torn by a kill: the run is done again
      continue
    run = Run(*(record[name] for name in Run._fields))
    if run in found:
      raise ValueError(f"{path} has two results of {run}: delete one of these lines.")
    found[run] = record
  return found


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Adds a line by one write; after a torn line it begins a new one."""
  line = json.dumps(record, allow_nan=False) + "\n"
  with open(path, "ab+", buffering=0) as f:
    fcntl.flock(f, fcntl.LOCK_EX)  # nobody writes between the look at the end and the write
    size = f.seek(0, os.SEEK_END)
    if size:
      f.seek(size - 1)
      line = line if f.read(1) == b"\n" else "\n" + line
    f.write(line.encode())
    os.fsync(f.fileno())
