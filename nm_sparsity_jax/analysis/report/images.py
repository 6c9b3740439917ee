"""Top-1 of runs on images beside the paper's Tables 2, 3 and 6."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.report import parts
from nm_sparsity_jax.analysis.report.parts import Cell, Table
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.scores import published

_METRIC = "accuracy"  # a share, of `workloads.vision`
_SPLITS = ("validation", "test")  # ImageNet's, CIFAR-10's


def table(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Table | str]:
  """Yields the runs whose network the paper has, each with its published row and the difference.

  Args:
    runs: all runs of the page.
    checkpoint: 'best', 'last' or a step.
  """
  rows, said = [], []
  for number, run in enumerate(runs):
    row, remark = published.match_images(run.settings)
    at = _top1(run, checkpoint) if row or remark else None
    if at is None:
      continue
    step, top1 = at
    rows.append([Cell(run.name, run=number), f"{top1:.3f} @ {step:,}"])
    first = run.settings.target_from()
    if row and step < (first or 0):
      row, remark = None, f"no published row: step {step:,} is before the target pattern"
    if row:
      rows.append([f"published, Table {row['table']}, {row['row']}", f"{row['top1']:.3f}"])
      rows.append(["delta", f"{top1 - row['top1'] + 0.0:+.3f}"])
    said.append((run.name, remark))
  if rows:
    yield Table(["", "top-1"], rows)
    yield from parts.told((name, remark) for name, remark in said if remark)


def _top1(run: Run, checkpoint: str | int) -> tuple[int, float] | None:
  """Returns (step, top-1 in percent) of the step that counts; None where there is none."""
  found = [task for task, series in run.tasks.items() if any(_METRIC in s for s in series.values())]
  ordered = sorted(found, key=lambda task: (task not in _SPLITS, task != _SPLITS[0], task))
  for task in ordered[:1]:
    first = run.settings.target_from() or 0
    step, _ = scores.choose(run.tasks[task], [_METRIC], checkpoint, first)
    if step is not None and math.isfinite(value := run.tasks[task][step][_METRIC]):
      return step, 100 * value
  return None
