"""The section of scores, and which measures a run is judged by.

GLUE's columns stand beside the published row; metrics of other tasks stand in a table of their own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.report import images, parts
from nm_sparsity_jax.analysis.report.parts import Cell, Table
from nm_sparsity_jax.analysis.report.reading import Run, dense_beside
from nm_sparsity_jax.runs import glue, results


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

  def step(self, run: Run, checkpoint: str | int) -> int | None:
    """Returns the step that counts, as `scores.choose` does; None if there is none.

    The best step is never one whose weights are denser than the pattern.

    Args:
      run: the run.
      checkpoint: 'best', 'last' or a step.
    """
    series, first = run.tasks.get(self.task, {}), run.settings.target_from() or 0
    if not series:
      return None
    return scores.choose(series, self.metrics, checkpoint, first, self.less)[0]


def measures(run: Run) -> dict[str, Measure]:
  """Returns what a run is judged by, by name.

  These are the columns of GLUE if it has any. Else they are all its tasks, each with the metrics of
  every step of which more is better, and each metric by itself of which less is better. A metric
  such as accuracy_top5 does not count beside accuracy.
  """
  if columns := columns_of(run):
    return {name: Measure(*column) for name, column in columns.items()}
  found = {}
  for task, series in run.tasks.items():
    names = sorted(set.intersection(*map(set, series.values()))) if series else []
    names = [n for n in names if _strict(n) == n or _strict(n) not in names]
    if more := [name for name in names if not run.less_is_better(name)]:
      found[task] = Measure(task, tuple(more))
    for name in names:
      if run.less_is_better(name):
        found[f"{task} {name}"] = Measure(task, (name,), less=True)
  return found


def _strict(metric: str) -> str:
  """Returns the metric that one such as accuracy_top5 is a laxer form of; else itself."""
  return re.sub(r"_top\d+$", "", metric)


def common(judged: Sequence[Run]) -> dict[str, Measure]:
  """Returns the measures that all runs have: those of which more is better, else one of the rest.

  The rest are errors in units of their own, which have no mean.

  Args:
    judged: runs that have measures.
  """
  first = measures(judged[0]) if judged else {}
  found = {n: m for n, m in first.items() if all(n in measures(run) for run in judged)}
  more = {name: measure for name, measure in found.items() if not measure.less}
  return more or dict(list(found.items())[:1])


def means(run: Run, common: Mapping[str, Measure]) -> list[tuple[int, float]]:
  """Returns (step, mean of the measures) for each step where all of them have a finite value."""
  found = []
  for step in sorted(set.intersection(*(set(run.tasks[m.task]) for m in common.values()))):
    values = [measure.at(run, step) for measure in common.values()]
    if all(map(math.isfinite, values)):
      found.append((step, math.fsum(values) / len(values)))
  return found


def mean_score(run: Run, common: Mapping[str, Measure], checkpoint: str | int) -> float:
  """Returns the mean of the measures, each at the step that counts; NaN if one has no such step."""
  values = []
  for measure in common.values():
    step = measure.step(run, checkpoint)
    values.append(math.nan if step is None else measure.at(run, step))
  return math.fsum(values) / len(values)


def columns_of(run: Run) -> dict[str, tuple[str, tuple[str, ...]]]:
  """Returns column of GLUE -> (task, metrics); mini-GLUE's columns have names of their own."""
  found = {glue.config_of(name): name for name in run.tasks}
  return {
    f"{'mini ' if mini else ''}{c.title}": (found[c.task, mini], c.metrics)
    for c in glue.COLUMNS
    for mini in (False, True)
    if (c.task, mini) in found
  }


def table(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Table | str]:
  """Yields the rows of GLUE beside the published ones, and a table of other tasks' metrics.

  Args:
    runs: all runs of the page.
    checkpoint: 'best', 'last' or a step.
  """
  if any(columns_of(run) for run in runs):
    scored = [run for run in runs if columns_of(run)]
    report, why = parts.tried(_score_of, scored, checkpoint)
    yield from _glue_table(runs, scored, report) if report else [f"No table of GLUE: {why}."]
    yield from parts.lacking(runs, columns_of, "no metrics of GLUE")
  yield from _others(runs, checkpoint)
  yield from images.table(runs, checkpoint)
  if not any(run.tasks for run in runs):
    yield "No run has metrics of decoded predictions (inference_eval/)."
  yield from parts.told(
    (
      run.name,
      f"no dense run from step {run.span[0]:,} to {run.span[1]:,} is beside it, so this "
      "page does not say what sparsity costs",
    )
    for run in runs
    if not run.is_dense
    and parts.tried(getattr, run, "rules")[0] is not None
    and dense_beside(runs, run) is None
  )


def _others(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Table | str]:
  """Yields a table of the metrics of tasks that are not GLUE's, if there are any."""
  others = sorted({t for run in runs for t in run.tasks if not glue.config_of(t)})
  rows = [
    _row(runs, task, metric, checkpoint)
    for task in others
    for metric in sorted({m for r in runs for s in r.tasks.get(task, {}).values() for m in s})
  ]
  if rows:
    yield Table(["metric", *parts.heads(runs)], rows)
    yield f"Behind a value stands its step. Checkpoint: {of_target(checkpoint)}."
    yield from unknown_targets(runs, checkpoint)


def _row(runs: Sequence[Run], task: str, metric: str, checkpoint: str | int) -> list[str | Cell]:
  """Returns the row of a metric; of several runs the best stands out."""
  less = any(run.less_is_better(metric) for run in runs if task in run.tasks)
  measure = Measure(task, (metric,), less)
  steps = [measure.step(run, checkpoint) for run in runs]
  values = [
    None if step is None else measure.at(run, step) for run, step in zip(runs, steps, strict=True)
  ]
  there = [value for value in values if value is not None]
  best = (min if less else max)(there) if len(set(there)) > 1 else None
  cells: list[str | Cell] = [f"{task} {metric}{', less is better' if less else ''}"]
  for step, value in zip(steps, values, strict=True):
    text = "–" if value is None else f"{value:.4g} @ {step:,}"
    cells.append(Cell(text, strong=True) if best is not None and value == best else text)
  return cells


def _score_of(runs: Sequence[Run], checkpoint: str | int) -> dict[str, Any]:
  return scores.score([results.read(str(run.path)) for run in runs], checkpoint)


def of_target(checkpoint: str | int) -> str:
  """Returns, for people, which checkpoint the scores are of."""
  return "the best one at the target pattern" if checkpoint == "best" else str(checkpoint)


def unknown_targets(runs: Sequence[Run], checkpoint: str | int) -> Iterator[str]:
  """Names the runs whose best step may have denser weights than the target pattern."""
  remarks = ((run.name, run.settings.target_remark()) for run in runs if checkpoint == "best")
  yield from parts.told(
    (name, f"{remark}, so the best step may be one before it") for name, remark in remarks if remark
  )


def _glue_table(
  runs: Sequence[Run], scored: Sequence[Run], report: Mapping[str, Any]
) -> Iterator[Table | str]:
  """Yields the table of a report of `scores.score`, and what a reader must know."""
  titles = ["overall", *report["columns"]]
  rows = []

  def cells(source, best=()):
    means = {t: c["mean"] for t, c in source["columns"].items()} | {"overall": source["overall"]}
    for title in titles:
      mean = means.get(title)
      yield Cell("–" if mean is None else f"{mean:.1f}", strong=title in best)

  for run, row in zip(scored, report["runs"], strict=True):
    best = [title for title, names in report["best"].items() if row["run"] in names]
    rows.append([Cell(run.name, run=runs.index(run)), *cells(row, best)])
    steps = {t: f"{c['step']:,}" for t, c in row["columns"].items()}
    rows.append(["at step", *(steps.get(t, "") for t in titles)])
    if published := row["published"]:
      rows.append([f"published, Table {published['table']}", *cells(published)])
      delta = {t: f"{round(d, 1) + 0.0:+.1f}" for t, d in row["delta"].items()}
      rows.append(["delta", *(delta.get(t, "–") for t in titles)])
  yield Table(["", *titles], rows)
  meaning = {
    "best": "the best step of each task, on the set that it is reported on, which is optimistic",
    "last": "the last one of each task",
  }
  yield f"Checkpoint: {meaning.get(report['checkpoint'], report['checkpoint'])}."
  yield from parts.told(
    (row["run"], said)
    for row in report["runs"]
    for said in (*_missing(row["missing"]), *row["remarks"])
  )


def _missing(missing: Mapping[str, str]) -> Iterator[str]:
  """Says why a row has no overall, columns of one reason together."""
  reasons = [
    f"{', '.join(title for title, why in missing.items() if why == reason)} ({reason})"
    for reason in dict.fromkeys(missing.values())
  ]
  if reasons:
    yield f"no overall, missing {'; '.join(reasons)}"
