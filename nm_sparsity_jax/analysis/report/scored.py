"""The section of scores, and which measures a run is judged by.

GLUE's columns stand beside the published row; metrics of other tasks stand in a table of their own.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.page import Cell, Part, Table
from nm_sparsity_jax.analysis.report.parts import grouped, heads, lacking
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.core.text import Strong
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


def table(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Part]:
  """Yields the rows of GLUE beside the published ones, and a table of other tasks' metrics.

  Args:
    runs: all runs of the page.
    checkpoint: 'best', 'last' or a step.
  """
  if in_glue := [run for run in runs if columns_of(run)]:
    yield from _glue_table(runs, in_glue, checkpoint)
    yield from lacking(runs, columns_of, "no metrics of GLUE")
  yield from _others(runs, checkpoint)
  yield from _images(runs, checkpoint)
  if not any(run.tasks for run in runs):
    yield "No run has metrics of decoded predictions (inference_eval/)."
  dense = {run.span for run in runs if run.sparse == {}}
  yield from grouped(
    (
      run.name,
      f"no dense run from step {run.span[0]:,} to {run.span[1]:,} is beside it, so this page does "
      "not say what sparsity costs",
    )
    for run in runs
    if run.sparse and run.span not in dense
  )


def _glue_table(runs: Sequence[Run], in_glue: Sequence[Run], checkpoint: str | int):
  """Yields the table of `scores.score`, and what a reader must know."""
  try:
    report = scores.score([results.read(str(run.path)) for run in in_glue], checkpoint)
  except ValueError as e:
    yield f"No table of GLUE: {e}."
    return
  numbers = {run.name: i for i, run in enumerate(runs)}
  head, *rows = scores.table.table_rows(report)
  yield Table(head, [[Cell(name, run=numbers.get(name)), *cells] for name, *cells in rows])
  yield from grouped(scores.table.notes(report))


def _others(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Part]:
  """Yields a table of the metrics of tasks that are not GLUE's, if there are any."""
  others = sorted({t for run in runs for t in run.tasks if not glue.config_of(t)})
  rows = [
    _row(runs, task, metric, checkpoint)
    for task in others
    for metric in sorted({m for r in runs for s in r.tasks.get(task, {}).values() for m in s})
  ]
  if rows:
    yield Table(["metric", *heads(runs)], rows)
    yield f"Behind a value stands its step. Checkpoint: {of_target(checkpoint)}."
    yield from unknown_targets(runs, checkpoint)


def _row(runs: Sequence[Run], task: str, metric: str, checkpoint: str | int) -> list[str | Cell]:
  """Returns the row of a metric; of several runs the best stands out."""
  less = any(run.less_is_better(metric) for run in runs if task in run.tasks)
  measure = Measure(task, (metric,), less)
  found = [(step, run) for run in runs for step in [measure.step(run, checkpoint)]]
  values = [None if step is None else measure.at(run, step) for step, run in found]
  known = [value for value in values if value is not None]
  best = (min if less else max)(known) if len(set(known)) > 1 else None
  cells: list[str | Cell] = [f"{task} {metric}{', less is better' if less else ''}"]
  for (step, _), value in zip(found, values, strict=True):
    text = "–" if value is None else f"{value:.4g} @ {step:,}"
    cells.append(Strong(text) if value is not None and value == best else text)
  return cells


def of_target(checkpoint: str | int) -> str:
  """Returns, for people, which checkpoint the scores are of."""
  return "the best one at the target pattern" if checkpoint == "best" else str(checkpoint)


def unknown_targets(runs: Sequence[Run], checkpoint: str | int) -> Iterator[str]:
  """Names the runs whose best step may have denser weights than the target pattern."""
  remarks = ((run.name, run.settings.target_remark()) for run in runs if checkpoint == "best")
  yield from grouped(
    (name, f"{remark}, so the best step may be one before it") for name, remark in remarks if remark
  )


# --- images ---------------------------------------------------------------------------------------


def _images(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Part]:
  """Yields top-1 beside the paper's Tables 2, 3 and 6, of runs whose network the paper has."""
  rows, said = [], []
  for number, run in enumerate(runs):
    row, remark = published.match_images(run.settings)
    at = _top1(run, checkpoint) if row or remark else None
    if at is None:
      continue
    step, top1 = at
    rows.append([Cell(run.name, run=number), f"{top1:.3f} @ {step:,}"])
    if row and step < (run.settings.target_from() or 0):
      row, remark = None, f"no published row: step {step:,} is before the target pattern"
    if row:
      rows.append([f"published, Table {row['table']}, {row['row']}", f"{row['top1']:.3f}"])
      rows.append(["delta", f"{top1 - row['top1'] + 0.0:+.3f}"])
    said += [(run.name, remark)] if remark else []
  if rows:
    yield Table(["", "top-1"], rows)
    yield from grouped(said)


def _top1(run: Run, checkpoint: str | int) -> tuple[int, float] | None:
  """Returns (step, top-1 in percent) of the step that counts; None where there is none."""
  judged = [t for t, series in run.tasks.items() if any("accuracy" in s for s in series.values())]
  preferred = [task for task in ("validation", "test") if task in judged]  # ImageNet's, CIFAR-10's
  for task in (preferred or judged)[:1]:
    measure = Measure(task, ("accuracy",))
    if (step := measure.step(run, checkpoint)) is not None:
      return step, 100 * measure.at(run, step)
  return None
