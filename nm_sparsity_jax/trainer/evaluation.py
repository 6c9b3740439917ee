"""Evaluations of a run: what is evaluated, what was found, which checkpoint is best.

Splits or Evaluation -> evaluator -> Found -> curves, lines -> [History] -> evaluations.json
                                                                         -> the best step
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.trainer import directions, workloads
from nm_sparsity_jax.trainer.workloads.base import Devices, Evaluator, Found, Stopped, take
from nm_sparsity_jax.trainer.workloads.text_evaluation import (
  Evaluation,  # T5's, a name for gin files
)

__all__ = [
  "Evaluation", "Evaluator", "Found", "History", "Splits", "Stopped", "best_step", "check_metric",
  "loss_line", "metrics_line",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
  """Says that the workload's own splits are evaluated.

  Attributes:
    batches: how many of each split; None = all.
    split: the only one that is looked at; None = each.
  """

  batches: int | None = None
  split: str | None = None

  def __post_init__(self):
    if self.batches is not None and (not isinstance(self.batches, int) or self.batches < 1):
      raise ValueError(f"EVAL_STEPS={self.batches!r}: batches of each split, 1 or more, or None.")

  @property
  def has_metrics(self) -> bool:
    """Returns True: all scalars of a workload but its loss are metrics."""
    return True

  def evaluator(
    self, devices: Devices, folder: str | None, stop: Callable[[], bool] = lambda: False
  ) -> Evaluator:
    """Returns what evaluates the splits of a model's workload; it writes nothing by itself."""
    del folder
    batches = lambda name: take(devices.workload.splits()[name], self.batches)
    names = self._names(devices)
    return Evaluator(devices, {name: functools.partial(batches, name) for name in names}, stop)

  def check(self, devices: Devices) -> None:
    """Refuses a split that the workload of a model lacks, before a checkpoint is read."""
    self._names(devices)

  def _names(self, devices: Devices) -> list[str]:
    """Returns the splits that are looked at."""
    names = list(devices.workload.splits())
    if self.split is None:
      return names
    if self.split not in names:
      raise ValueError(
        f"EVAL_SPLIT={self.split!r} is not a split of {type(devices.workload).__name__}: "
        f"choose one of {', '.join(names)}, or None for all."
      )
    return [self.split]

  def for_predictions(self, workload: workloads.Workload) -> Splits:
    """Returns itself; refuses a workload that lacks `predict`."""
    workloads.refuse_without_predict(workload)
    return self


class History:
  """What a run's evaluations found, as evaluations.json says it.

  Args:
    folder: of the run.
    metric: by which an evaluation is best; see `best_step`.
    less_is_better: what the workload says of the name of a metric.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    metric: str | None,
    less_is_better: Callable[[str], bool] = directions.by_name,
  ):
    self._folder, self._metric, self._less_is_better = folder, metric, less_is_better
    self.entries: dict[int, dict[str, Any]] = {}  # by global step

  def read(self, until: int) -> None:
    """Reads what was found up to a step; what is later is of a checkpoint never completed."""
    kept = folders.evaluations(self._folder)
    self.entries = {at: entry for at, entry in kept.items() if at <= until}
    if len(self.entries) < len(kept):
      self._write()

  def note(self, step: int, found: Found, at_target: bool) -> None:
    """Adds what was found at a step."""
    self.entries[step] = {
      "step": step,
      "at_target": at_target,
      "loss": {split: scalars["loss"] for split, scalars in found.scalars.items()},
      "metrics": found.metrics,
      **directions.noted(itertools.chain(*found.metrics.values()), self._less_is_better),
    }
    self._write()

  def _write(self) -> None:
    text = json.dumps(list(self.entries.values()), indent=1)
    files.write_atomically(self._folder / "evaluations.json", text + "\n")

  @property
  def best(self) -> int | None:
    """Returns the step of the best evaluation, None where there is none."""
    return best_step(self.entries.values(), self._metric)


def best_step(evaluations: Iterable[Mapping[str, Any]], metric: str | None) -> int | None:
  """Returns the step of the best evaluation at the target pattern, the earliest of equals.

  An evaluation that is not a number is never the best; a correlation of equal predictions is one.

  Args:
    evaluations: entries of evaluations.json.
    metric: its mean over tasks, better in the direction that the entries note or its name tells;
      None = the mean loss, smaller is better.
  """
  scores: dict[int, float] = {}
  for e in evaluations:
    if metric is None:
      values = [-loss for loss in e["loss"].values()]
    else:
      values = [found[metric] for found in e["metrics"].values() if metric in found]
      if not values:
        check_metric(metric, {name for found in e["metrics"].values() for name in found})
    if metric is not None and directions.less_is_better(e, metric):
      values = [-x for x in values]
    if values and e["at_target"] and np.isfinite(mean := float(np.mean(values))):
      scores[e["step"]] = mean
  return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def check_metric(metric: str, names: Collection[str] | None) -> None:
  """Refuses a BEST_METRIC that no task has.

  Args:
    metric: its name.
    names: of all metrics; None where they are not known yet.
  """
  if names is not None and metric not in names:
    have = ", ".join(sorted(names)) or "they have none"
    raise ValueError(f"BEST_METRIC={metric!r} is not a metric of the tasks: {have}.")


def loss_line(task: str, scalars: Mapping[str, float], headline: Sequence[str]) -> str:
  """Returns the printed line of a task's scalars: those of the headline."""
  return f"  {task}: " + ", ".join(f"{name} {scalars[name]:.4f}" for name in headline)


def metrics_line(task: str, values: Mapping[str, float]) -> str:
  """Returns the printed line of a task's metrics."""
  return f"  {task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
