"""Evaluations: sums over a workload's splits, predictions, and which checkpoint is best.

Splits or Evaluation -> evaluator -> Found -> curves, lines -> [History] -> evaluations.json
                                                                         -> the best step
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.trainer.workloads.base import Batch, Workload, less_by_name

KEPT = 1 << 28  # bytes of a split that an evaluator keeps

# What identifies an example, and what is predicted of it: values that JSON has.
Row = tuple[Mapping[str, Any], Any]


class Stopped(Exception):
  """The process was asked to end during an evaluation."""


class Found(NamedTuple):
  """What an evaluation finds.

  Attributes:
    scalars: split -> what `Workload.scalars` makes of its sums.
    metrics: split -> name -> value; `Workload.less_is_better` tells which way is better.
  """

  scalars: dict[str, dict[str, float]]
  metrics: dict[str, dict[str, float]]


class Evaluator:
  """Evaluates one model again and again: sums over each split; data that are few are read once.

  Args:
    model: the runner's, see `nm_sparsity_jax.trainer.step.Model`.
    splits: name -> its batches, called for when they are needed.
    stop: asked between batches; where it is true, `Stopped` is raised.
  """

  def __init__(
    self,
    model: Any,
    splits: Mapping[str, Callable[[], Iterable[Batch]]],
    stop: Callable[[], bool] = lambda: False,
  ):
    self.model, self.stop, self.splits = model, stop, splits
    self._step = model.eval_step()
    self._kept: dict[str, list[Batch]] = {}

  def evaluate(self, variables: Mapping[str, Any], step: int) -> Found:
    """Returns what is found at a step; of a workload's own splits, all scalars but the loss."""
    del step
    scalars = self.scalars(variables)
    metrics = {
      split: {name: x for name, x in values.items() if name != "loss"}
      for split, values in scalars.items()
    }
    return Found(scalars, {split: values for split, values in metrics.items() if values})

  def scalars(self, variables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns split -> scalars over its examples.

    Args:
      variables: effective 'params', and the state.
    """
    found = {}
    for split in self.splits:
      total: dict[str, float] = {}
      for batch in self._batches(split):
        self.check()
        sums = jax.device_get(self._step(variables, self.model.put(batch)))
        total = {name: total.get(name, 0.0) + float(x) for name, x in sums.items()}
      if not total:
        raise ValueError(f"the split {split!r} has no batches: there is nothing to evaluate.")
      found[split] = self.model.workload.scalars(total)
    return found

  def predictions(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yields each split and what `Workload.predict` says of its examples, in their order.

    Args:
      variables: effective 'params', and the state.
    """
    workload = self.model.workload
    state = {name: x for name, x in variables.items() if name != "params"}
    step = self.model.jit(functools.partial(_predict, workload))
    for split in self.splits:
      run = functools.partial(step, variables["params"], state)
      yield split, self._rows(split, run)

  def _rows(self, split: str, predict: Callable) -> Iterator[Row]:
    real, count = self.model.workload.real, 0
    for batch in self.splits[split]():
      self.check()
      arrays = {k: np.asarray(x) for k, x in predict(self.model.put(batch)).items()}
      rows = len(next(iter(batch.values())))
      for row in range(rows) if real is None else np.flatnonzero(batch[real]):
        for name, x in arrays.items():
          if not np.all(np.isfinite(x[row])):
            raise ValueError(
              f"predict returned a {name!r} that is not finite for example {count} of {split!r}: "
              "JSON has no such number. Look at the checkpoint, or return finite numbers."
            )
        yield {"idx": count}, {name: x[row].tolist() for name, x in arrays.items()}
        count += 1

  def _batches(self, split: str) -> Iterator[Batch]:
    """Yields the batches of a split, and keeps them if they are few."""
    if split in self._kept:
      yield from self._kept[split]
      return
    kept, size = [], 0
    for batch in self.splits[split]():
      size += sum(np.asarray(x).nbytes for x in batch.values())
      if size <= KEPT:
        kept.append(batch)
      else:
        kept.clear()
      yield batch
    if size <= KEPT:
      self._kept[split] = kept

  def check(self) -> None:
    """Raises `Stopped` where the process is asked to end."""
    if self.stop():
      raise Stopped


def _predict(workload: Workload, params: Any, state: Any, batch: Batch) -> dict[str, jax.Array]:
  """Returns what `Workload.predict` says of a batch, in dtypes that Python's numbers have."""
  rows, found = len(next(iter(batch.values()))), {}
  for name, x in workload.predict(params, state, batch).items():
    if x.shape[:1] != (rows,):
      raise ValueError(
        f"{type(workload).__name__}.predict returned {name!r} of shape {x.shape} for a batch of "
        f"{rows} rows: its first axis must count them."
      )
    # numpy knows bfloat16 by another package, and cannot make Python's numbers of it.
    found[name] = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
  return found


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
    if self.batches is not None and self.batches < 1:
      raise ValueError(f"EVAL_STEPS={self.batches!r}: batches of each split, 1 or more, or None.")

  def evaluator(
    self, model: Any, folder: str | None, stop: Callable[[], bool] = lambda: False
  ) -> Evaluator:
    """Returns what evaluates the splits of a model's workload; it writes nothing by itself."""
    del folder
    batches = lambda name: itertools.islice(model.workload.splits()[name], self.batches)
    names = self._names(model.workload)
    return Evaluator(model, {name: functools.partial(batches, name) for name in names}, stop)

  def check(self, model: Any) -> None:
    """Refuses a split that the workload of a model lacks, before a checkpoint is read."""
    self._names(model.workload)

  def _names(self, workload: Workload) -> list[str]:
    names = list(workload.splits())
    if self.split is None:
      return names
    if self.split not in names:
      raise ValueError(
        f"EVAL_SPLIT={self.split!r} is not a split of {type(workload).__name__}: choose one of "
        f"{', '.join(names)}, or None for all."
      )
    return [self.split]

  def for_predictions(self, workload: Workload) -> Splits:
    """Returns itself; refuses a workload that lacks `predict`."""
    if type(workload).predict is Workload.predict:
      raise ValueError(
        f"{type(workload).__name__} lacks predict: define predict(params, state, batch), which "
        "returns name -> an array with an entry a row."
      )
    return self


# --- the best -------------------------------------------------------------------------------------


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
    less_is_better: Callable[[str], bool] = less_by_name,
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
    names = sorted({name for metrics in found.metrics.values() for name in metrics})
    self.entries[step] = {
      "step": step,
      "at_target": at_target,
      "loss": {split: scalars["loss"] for split, scalars in found.scalars.items()},
      "metrics": found.metrics,
      "less_is_better": [name for name in names if self._less_is_better(name)],
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
    metric: its mean over tasks, better in the direction that the entries note; None = the mean
      loss, smaller is better.
  """
  scores: dict[int, float] = {}
  for e in evaluations:
    if metric is None:
      values = list(e["loss"].values())
    else:
      values = [found[metric] for found in e["metrics"].values() if metric in found]
      if not values:
        names = sorted({name for found in e["metrics"].values() for name in found})
        raise ValueError(
          f"BEST_METRIC={metric!r} is not a metric of the tasks: {', '.join(names)}."
        )
    if values and e["at_target"] and np.isfinite(mean := float(np.mean(values))):
      less = metric is None or less_is_better(e, metric)
      scores[e["step"]] = -mean if less else mean
  return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def less_is_better(entry: Mapping[str, Any], metric: str) -> bool:
  """Returns whether less of a metric is better, as an entry of evaluations.json notes it.

  Args:
    entry: where it notes nothing, the name tells.
    metric: its name.
  """
  less = entry.get("less_is_better")
  return less_by_name(metric) if less is None else metric in less
