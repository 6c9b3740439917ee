"""The section of scores, and which measures a run is judged by.

GLUE's columns stand beside the published row; metrics of other tasks stand in a table of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import glue, scores
from nm_sparsity_jax.report import parts
from nm_sparsity_jax.report.parts import Cell, Table
from nm_sparsity_jax.report.reading import Run
from nm_sparsity_jax.runs import results


def measures(run: Run) -> dict[str, tuple[str, tuple[str, ...]]]:
  """Returns what a run is judged by: name -> (task, metrics).

  These are the columns of GLUE if it has any, else all its tasks, with the metrics of every step.
  """
  if columns := columns_of(run):
    return columns
  found = {}
  for task, series in run.tasks.items():
    if metrics := sorted(set.intersection(*map(set, series.values()))) if series else []:
      found[task] = task, tuple(metrics)
  return found


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
  if not any(run.tasks for run in runs):
    yield "No run has metrics of decoded predictions (inference_eval/)."


def _others(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Table | str]:
  """Yields a table of the metrics of tasks that are not GLUE's, if there are any."""
  others = sorted({t for run in runs for t in run.tasks if not glue.config_of(t)})
  rows = [
    [f"{task} {metric}", *(_chosen(run, task, metric, checkpoint) for run in runs)]
    for task in others
    for metric in sorted({m for r in runs for s in r.tasks.get(task, {}).values() for m in s})
  ]
  if rows:
    yield Table(["metric", *parts.heads(runs)], rows)
    yield f"Behind a value stands its step. Checkpoint: {of_target(checkpoint)}."
    yield from unknown_targets(runs, checkpoint)


def _score_of(runs: Sequence[Run], checkpoint: str | int) -> dict[str, Any]:
  return scores.score([results.read(str(run.path)) for run in runs], checkpoint)


def _chosen(run: Run, task: str, metric: str, checkpoint: str | int) -> str:
  series = run.tasks.get(task, {})
  step = step_of(run, series, [metric], checkpoint) if series else None
  return "–" if step is None else f"{series[step][metric]:.4g} @ {step - run.offset:,}"


def of_target(checkpoint: str | int) -> str:
  """Returns, for people, which checkpoint the scores are of."""
  return "the best one at the target pattern" if checkpoint == "best" else str(checkpoint)


def unknown_targets(runs: Sequence[Run], checkpoint: str | int) -> Iterator[str]:
  """Names the runs whose best step may have denser weights than the target pattern."""
  for run in runs if checkpoint == "best" else ():
    if remark := run.settings.target_remark():
      yield f"{run.name}: {remark}, so its best step may be one before it."


def step_of(
  run: Run, series: results.Series, metrics: Sequence[str], checkpoint: str | int
) -> int | None:
  """Returns the step that counts, as `scores.choose` does; None if there is none.

  The best step is never one whose weights are denser than the pattern.

  Args:
    run: the run.
    series: step -> metric -> value, of one of its tasks.
    metrics: the metrics whose mean counts.
    checkpoint: 'best', 'last' or a step.
  """
  return scores.choose(series, metrics, checkpoint, run.settings.target_from() or 0)[0]


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
    steps = {t: f"{c['step'] - run.offset:,}" for t, c in row["columns"].items()}
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
  for row in report["runs"]:
    if said := [*_missing(row["missing"]), *row["remarks"]]:
      yield f"{row['run']}: {'; '.join(said)}."


def _missing(missing: Mapping[str, str]) -> Iterator[str]:
  """Says why a row has no overall, columns of one reason together."""
  reasons = [
    f"{', '.join(title for title, why in missing.items() if why == reason)} ({reason})"
    for reason in dict.fromkeys(missing.values())
  ]
  if reasons:
    yield f"no overall, missing {'; '.join(reasons)}"
