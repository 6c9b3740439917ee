"""Evaluations: sums over a workload's splits, predictions, and which checkpoint is best.

Splits or Evaluation -> evaluator -> Found -> curves, lines -> [entry] -> evaluations.json
                                                                       -> the best step
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.trainer.workloads.base import Batch, Workload, less_by_name

# What identifies an example, and what is predicted of it: values that JSON has.
Row = tuple[Mapping[str, Any], Any]


class Found(NamedTuple):
  """What an evaluation finds.

  Attributes:
    scalars: split -> what `Workload.scalars` makes of its sums.
    metrics: split -> name -> value; `Workload.less_is_better` says which way is better.
  """

  scalars: dict[str, dict[str, float]]
  metrics: dict[str, dict[str, float]]


class Evaluator:
  """Evaluates one model again and again, by sums over each split.

  Args:
    model: the runner's, see `nm_sparsity_jax.trainer.step.Model`.
    splits: name -> what returns its batches.
  """

  def __init__(self, model: Any, splits: Mapping[str, Callable[[], Iterable[Batch]]]):
    self.model, self.splits = model, splits

  def evaluate(self, variables: Mapping[str, Any], step: int) -> Found:
    """Returns what is found at a step; of a workload's own splits, all scalars but the loss."""
    del step
    scalars = self.scalars(variables)
    # The loss has a key of its own in evaluations.json.
    metrics = {split: {k: x for k, x in v.items() if k != "loss"} for split, v in scalars.items()}
    return Found(scalars, {split: values for split, values in metrics.items() if values})

  def scalars(self, variables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns split -> scalars over its examples, from effective 'params' and the state."""
    found = {}
    for split, batches in self.splits.items():
      total: dict[str, float] = {}
      for batch in batches():
        # Added up in Python's float64, where float32 sums of a large split would lose digits.
        sums = jax.device_get(self.model.eval_step(variables, self.model.put(batch)))
        total = {name: total.get(name, 0.0) + float(x) for name, x in sums.items()}
      found[split] = self.model.workload.scalars(total)
    return found

  def predictions(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yields each split and what `Workload.predict` says of its examples, in their order."""
    state = {name: x for name, x in variables.items() if name != "params"}

    def predict(params, state, batch):
      found = self.model.workload.predict(params, state, batch)
      # numpy knows bfloat16 by another package, and cannot make Python's numbers of it.
      is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
      return {name: x.astype(jnp.float32) if is_float(x) else x for name, x in found.items()}

    step = self.model.jit(predict)
    for split in self.splits:
      yield split, self._rows(split, functools.partial(step, variables["params"], state))

  def _rows(self, split: str, predict: Callable) -> Iterator[Row]:
    real, count = self.model.workload.real, itertools.count()
    for batch in self.splits[split]():
      found = jax.device_get(predict(self.model.put(batch)))
      rows = len(next(iter(batch.values())))
      # Strict: a prediction that has no entry for each row would be another example's.
      is_real = [True] * rows if real is None else batch[real]
      for keep, *values in zip(is_real, *found.values(), strict=True):
        if keep:
          named = zip(found, values, strict=True)
          yield {"idx": next(count)}, {name: x.tolist() for name, x in named}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
  """Says that the workload's own splits are evaluated.

  Attributes:
    batches: how many of each split; None = all [EVAL_STEPS].
    split: the only one that is looked at; None = each [EVAL_SPLIT].
  """

  batches: int | None = None
  split: str | None = None

  def check(self, model: Any, predicts: bool = False) -> None:
    """Refuses a split or predictions that the workload lacks, before a checkpoint is read."""
    workload, names = model.workload, list(model.workload.splits())
    if self.split is not None and self.split not in names:
      raise ValueError(f"EVAL_SPLIT={self.split!r}: choose one of {', '.join(names)}, or None.")
    if predicts and type(workload).predict is Workload.predict:
      raise ValueError(
        f"{type(workload).__name__} lacks predict: define predict(params, state, batch), which "
        "returns name -> an array with an entry a row."
      )

  def evaluator(self, model: Any, folder: str | None) -> Evaluator:
    """Returns what evaluates the splits of a model's workload; it writes nothing by itself."""
    del folder
    batches = lambda name: itertools.islice(model.workload.splits()[name], self.batches)
    names = model.workload.splits() if self.split is None else [self.split]
    return Evaluator(model, {name: functools.partial(batches, name) for name in names})


# --- the best -------------------------------------------------------------------------------------


def entry(step: int, found: Found, at_target: bool, workload: Workload) -> dict[str, Any]:
  """Returns what evaluations.json says of an evaluation.

  Args:
    step: the global one.
    found: at that step.
    at_target: whether the weights have the target pattern.
    workload: says which way its metrics get better.
  """
  names = sorted({name for metrics in found.metrics.values() for name in metrics})
  return {
    "step": step,
    "at_target": at_target,
    "loss": {split: scalars["loss"] for split, scalars in found.scalars.items()},
    "metrics": found.metrics,
    "less_is_better": [name for name in names if workload.less_is_better(name)],
  }


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
    # A dense checkpoint is nearly always better, and never what a sparse run is for.
    if values and e["at_target"] and np.isfinite(mean := float(np.mean(values))):
      less = metric is None or less_is_better(e, metric)
      scores[e["step"]] = -mean if less else mean
  return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def less_is_better(entry: Mapping[str, Any], metric: str) -> bool:
  """Returns whether less of a metric is better, as an entry of evaluations.json notes it.

  Args:
    entry: where it notes nothing, as of a run of T5X, the name says it.
    metric: its name.
  """
  less = entry.get("less_is_better")
  return less_by_name(metric) if less is None else metric in less
