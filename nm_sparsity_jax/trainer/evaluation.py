"""Evaluations: sums over a workload's splits, predictions, and which checkpoint is best.

Splits -> Found -> curves, lines -> [entry] -> evaluations.json -> the best step
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.trainer.workloads.base import Batch, Workload

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


@dataclasses.dataclass(eq=False)
class Splits:
  """Evaluates a model on splits of its workload, again and again.

  A gin file binds the class, and a run makes it for its model: `evaluation = @evaluation.Splits`.

  Attributes:
    model: the runner's, see `nm_sparsity_jax.trainer.step.Model`.
    folder: of the run, for what an evaluation writes by itself; None = nothing is written.
    batches: how many of each split; None = all [EVAL_STEPS].
    split: the only one that is looked at; None = each [EVAL_SPLIT].
  """

  model: Any
  folder: str | None = None
  _: dataclasses.KW_ONLY
  batches: int | None = None
  split: str | None = None

  def __post_init__(self):
    self.splits()  # a wrong name is refused before a checkpoint is read

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns name -> the batches of what is evaluated."""
    found = self.model.workload.splits()
    if self.split is None:
      return found
    return {self.split: choose(found, "EVAL_SPLIT", self.split)}

  def rows(self) -> Callable[[str], int]:
    """Returns path -> rows that the kernel sees at once, which decide if it stays packed."""
    workload = self.model.workload
    return inference_tree.rows_of(workload.network_config, workload.batch_size)

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
    for split, batches in self.splits().items():
      total: dict[str, float] = {}
      for batch in itertools.islice(batches, self.batches):
        # Added up in Python's float64, where float32 sums of a large split would lose digits.
        sums = jax.device_get(self.model.eval_step(variables, self.model.put(batch)))
        total = {name: total.get(name, 0.0) + float(x) for name, x in sums.items()}
      found[split] = self.model.workload.scalars(total)
    return found

  def predictions(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[Row]]]:
    """Yields each split and what `Workload.predict` says of its examples, in their order."""

    def predict(variables, batch):
      state = dict(variables)
      params = state.pop("params")
      return self.model.workload.predict(params, state, batch)

    step = self.model.jit(predict)

    def rows(batches: Iterable[Batch]) -> Iterator[Row]:
      count = itertools.count()
      for batch in itertools.islice(batches, self.batches):
        found = jax.device_get(step(variables, self.model.put(batch)))
        is_real = batch.get("real", np.ones(len(next(iter(batch.values())))))
        for name, x in found.items():
          if x.shape[:1] != (len(is_real),):
            raise ValueError(
              f"`predict` returns {name!r} of shape {x.shape} for a batch of {len(is_real)} rows: "
              "its first axis must count the rows."
            )
        for i in np.flatnonzero(is_real):
          yield {"idx": next(count)}, {name: x[i].tolist() for name, x in found.items()}

    for split, batches in self.splits().items():
      yield split, rows(batches)


# --- the best -------------------------------------------------------------------------------------


def entry(step: int, found: Found, at_target: bool, workload: Workload) -> dict[str, Any]:
  """Returns what evaluations.json says of an evaluation.

  Args:
    step: the global one.
    found: at that step.
    at_target: whether the weights have the target pattern, from then on.
    workload: says which way its metrics get better.
  """
  names = {name for metrics in found.metrics.values() for name in metrics}
  return {
    "step": step,
    "at_target": at_target,
    "loss": {split: scalars["loss"] for split, scalars in found.scalars.items()},
    "metrics": found.metrics,
    "less_is_better": sorted(filter(workload.less_is_better, names)),
  }


def best_step(evaluations: Iterable[Mapping[str, Any]], metric: str | None) -> int | None:
  """Returns the step of the best evaluation at the target pattern, the first of equals.

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
      of_tasks: dict[str, list[float]] = {}
      for found in e["metrics"].values():
        for name, value in found.items():
          of_tasks.setdefault(name, []).append(value)
      values = choose(of_tasks, "BEST_METRIC", metric)
    # A dense checkpoint is nearly always better, and never what a sparse run is for.
    if values and e["at_target"] and np.isfinite(mean := float(np.mean(values))):
      less = metric is None or metric in e["less_is_better"]
      scores[e["step"]] = -mean if less else mean
  return max(scores, key=lambda step: scores[step], default=None)
