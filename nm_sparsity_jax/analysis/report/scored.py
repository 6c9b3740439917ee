"""What a run is judged by, and the sections that judge: summary, scores, accuracy against cost."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Cell, Part, Table
from nm_sparsity_jax.analysis.report.parts import grouped, heads
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.core.text import Strong, listed, score_digits
from nm_sparsity_jax.runs import glue

Checkpoint = str | int  # 'best', 'last' or a step


@dataclasses.dataclass(frozen=True)
class Measure:
  """What a run is judged by.

  Attributes:
    task: of which task.
    metrics: those whose mean counts.
    less: whether less is better.
  """

  task: str
  metrics: tuple[str, ...]
  less: bool = False

  def at(self, run: Run, step: int) -> float:
    """Returns the value at a step that was evaluated; NaN where it lacks a metric."""
    values = run.tasks[self.task][step]
    return math.fsum(values.get(m, math.nan) for m in self.metrics) / len(self.metrics)

  def step(self, run: Run, checkpoint: Checkpoint) -> int | None:
    """Returns the step that counts, as `scores.choose` does; None if there is none."""
    series, first = run.tasks.get(self.task, {}), run.settings.target_from() or 0
    if not series:
      return None
    return scores.choose(series, self.metrics, checkpoint, first, self.less)[0]


def measures(run: Run) -> dict[str, Measure]:
  """Returns what a run is judged by, by name.

  These are the columns of GLUE if it has any. Else they are all its tasks, each with the metrics of
  every step of which more is better, and each metric by itself of which less is better.
  """
  of_glue = {glue.config_of(task): task for task in run.tasks}
  if columns := {
    f"{'mini ' * mini}{column.title}": Measure(of_glue[column.name, mini], column.metrics)
    for column in glue.COLUMNS
    for mini in (False, True)
    if (column.name, mini) in of_glue
  }:
    return columns
  found = {}
  for task, series in run.tasks.items():
    names = sorted(set.intersection(*map(set, series.values()))) if series else []
    # accuracy_top5 is a laxer accuracy, so their mean is no score.
    strict = lambda name: re.sub(r"_top\d+$", "", name)
    names = [name for name in names if strict(name) == name or strict(name) not in names]
    if more := [name for name in names if not run.less_is_better(name)]:
      found[task] = Measure(task, tuple(more))
    for name in names:
      if run.less_is_better(name):
        found[f"{task} {name}"] = Measure(task, (name,), less=True)
  return found


def common(runs: Sequence[Run]) -> dict[str, Measure]:
  """Returns the measures of which more is better that all runs have, of those that have any.

  Errors are in units of their own, so they have no mean, and no share of one is kept.
  """
  judged = [found for run in runs if (found := measures(run))]
  shared = set.intersection(*(set(found) for found in judged)) if judged else set()
  return {n: m for n, m in (judged[0] if judged else {}).items() if n in shared and not m.less}


def means(run: Run, common: Mapping[str, Measure]) -> list[tuple[int, float]]:
  """Returns (step, mean of the measures) for each step where all of them have a finite value."""
  steps = set.intersection(*(set(run.tasks[m.task]) for m in common.values()))
  found = [(step, statistics.fmean(m.at(run, step) for m in common.values())) for step in steps]
  return sorted((step, mean) for step, mean in found if math.isfinite(mean))


def mean_score(run: Run, common: Mapping[str, Measure], checkpoint: Checkpoint) -> float:
  """Returns the mean of the measures, each at the step that counts; NaN if one has no such step."""
  steps = [(measure, measure.step(run, checkpoint)) for measure in common.values()]
  return statistics.fmean(math.nan if s is None else measure.at(run, s) for measure, s in steps)


def _of_checkpoint(checkpoint: Checkpoint) -> str:
  return "the best one at the target pattern" if checkpoint == "best" else str(checkpoint)


# --- the summary ----------------------------------------------------------------------------------


class _Row(NamedTuple):
  """A run of the summary.

  Attributes:
    cell: its name, in its colour.
    score: the mean of the common tasks at the step that counts.
    weights: the share of the weights that the patterns leave, such as '12.5 %'; '' if dense.
    updates: how many the weights have had, those before the sparse run too.
  """

  cell: Cell
  score: float
  weights: str
  updates: int


def summary(runs: Sequence[Run], checkpoint: Checkpoint) -> Iterator[Part]:
  """Yields a table with a bar for each run's score, and what to know of it."""
  shared = common(runs)
  rows = []
  for i, run in enumerate(runs if shared else ()):
    if run.sparse is None or not shared.keys() <= measures(run).keys():
      continue
    score = mean_score(run, shared, checkpoint)
    left = sorted({recipe.pattern.density for recipe in run.sparse.values()})
    ends = [f"{100 * share:.4g}" for share in (left if len(left) < 2 else (left[0], left[-1]))]
    weights = f"{' to '.join(ends)} %" if ends else ""
    if math.isfinite(score):
      rows.append(_Row(Cell(run.name, run=i), score, weights, run.last_step or 0))
  if not rows:
    yield "No metric of which more is better is common to runs whose rules are known."
    return
  digits, top = score_digits([row.score for row in rows]), max(row.score for row in rows)
  dense, cells, unfair = [row for row in rows if not row.weights], [], []
  for row in rows:
    bar = row.score / top if top > 0 else 0.0  # bars begin at 0
    score = Cell(f"{row.score:.{digits}f}", bar=bar, run=row.cell.run)
    # The dense run that is nearest in length, for training on makes a dense network better too.
    distance = lambda other, row=row: abs(other.updates - row.updates)
    near = min(dense, key=distance, default=None) if row.weights else None
    kept = (
      f"{100 * row.score / near.score:.1f} % of {near.cell.text}" if near and near.score else ""
    )
    cells.append([row.cell, score, kept, row.weights or "all", f"{row.updates:,}"])
    if near and near.updates != row.updates:
      unfair.append(
        f"{row.cell.text} has had {row.updates:,} updates, {near.cell.text} {near.updates:,}: "
        "compare it with a dense run of its own length."
      )
  yield Table(["run", " and ".join(shared), "kept", "weights", "updates"], cells, words=True)
  # A column of GLUE has a name of its own; a task has metrics.
  names = [f"{listed(m.metrics)} of {n}" if n == m.task else n for n, m in shared.items()]
  yield (
    f"Score: {'the mean of ' * (len(shared) > 1)}{listed(names)}, checkpoint: "
    f"{_of_checkpoint(checkpoint)}. Weights: what the patterns leave of the sparse kernels."
  )
  if not dense:
    yield "No run here is dense, so nothing tells what the sparse ones lost."
  yield from unfair
  yield "One seed shows that a recipe works, not which is best: that takes a sweep over several."


# --- scores ---------------------------------------------------------------------------------------


Match = tuple[Mapping[str, Any] | None, str]  # the paper's row, a remark


def table(runs: Sequence[Run], checkpoint: Checkpoint) -> Iterator[Part]:
  """Yields a table of all measures, with the paper's scores where it has the run's row."""
  names = dict.fromkeys(name for run in runs for name in measures(run))
  if not names:
    yield "No run has metrics of decoded predictions (inference_eval/)."
    return
  matches = []
  for run in runs:
    is_of_paper = run.settings.network or measures(run).keys() & {*scores.table.TITLES}
    matches.append(published.match(run.settings) if is_of_paper else (None, ""))
  rows = [_measured(name, runs, matches, checkpoint) for name in names]
  yield Table(["", *heads(runs)], rows)
  yield f"Behind a value stands its step. Checkpoint: {_of_checkpoint(checkpoint)}."
  remarks = []
  for run, (row, remark) in zip(runs, matches, strict=True):
    remarks.append((run.name, row and f"published: Table {row['table']}, {row['row']}"))
    remarks.append((run.name, remark))
    if checkpoint == "best" and (unknown := run.settings.target_remark()):
      remarks.append((run.name, f"{unknown}, so the best step may be one before it"))
  yield from grouped((name, remark) for name, remark in remarks if remark)


def _measured(
  name: str, runs: Sequence[Run], matches: Sequence[Match], checkpoint: Checkpoint
) -> list[str]:
  """Returns the row of a measure; of several runs the best stands out."""
  texts, values, less = [], [], False
  for run, (row, _) in zip(runs, matches, strict=True):
    measure = measures(run).get(name)
    step = measure.step(run, checkpoint) if measure else None
    if measure is None or step is None:
      texts.append("–")
      values.append(math.nan)
      continue
    value, less = measure.at(run, step), measure.less
    # The paper's scores are of the target pattern.
    is_at_target = step >= (run.settings.target_from() or 0)
    paper = _published(row, name, value) if row and is_at_target else ""
    texts.append(f"{value:.4g} @ {step:,}{paper}")
    values.append(value)
  known = {value for value in values if math.isfinite(value)}
  best = (min if less else max)(known) if len(known) > 1 else math.nan  # NaN equals nothing
  marked = [Strong(t) if v == best else t for t, v in zip(texts, values, strict=True)]
  return [f"{name}{', less is better' if less else ''}", *marked]


def _published(row: Mapping[str, Any], measure: str, value: float) -> str:
  """Returns the paper's score and the difference; '' where the row has none for the measure."""
  if "top1" in row and measure in ("validation", "test"):  # ImageNet's set, CIFAR-10's
    published = row["top1"] / 100
  elif measure in row.get("columns", {}):
    published = row["columns"][measure][-1]  # of a pair of metrics the mean stands last
  else:
    return ""
  return f", published {published:.5g} ({value - published:+.3g})"


# --- accuracy against cost -----------------------------------------------------------------------


def cost(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields the mean score of the runs' common tasks by training FLOPs (Figure 4b)."""
  judged = {i: run for i, run in enumerate(runs) if measures(run)}
  shared = common(runs)
  if not shared:
    yield "No metric of which more is better is common to the runs."
    return
  quality = f"{'Mean of ' * (len(shared) > 1)}{', '.join(shared)}"
  lines, missing = [], []
  for i, run in judged.items():
    try:
      points = [(run.flops(step - run.offset)[0], mean) for step, mean in means(run, shared)]
    except (ValueError, TypeError) as e:  # TypeError: a config.gin with fields of another T5
      missing.append((run.name, f"no FLOPs, {e}"))
    else:
      lines += [Line(i, points)] if points else []
  if lines:
    note = (
      "FLOPs of the run's own steps up to an evaluation: of matrix products alone, on a machine "
      "that skips all pruned weights (Figure 4b)."
    )
    title = f"{quality}, against training FLOPs"
    yield Chart("score_by_flops", title, "training FLOPs", lines, note=note)
  yield from grouped(missing)
