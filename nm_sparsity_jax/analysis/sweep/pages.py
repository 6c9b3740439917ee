"""One page of a sweep: its tables, then the sections of `nm-sparsity report` for each pattern.

    finished runs -> by recipe and pattern, the mean over seeds -> sections.sections -> report.html

A line is a recipe, at each step the mean over the seeds that are done.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts, report
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part, Section, Table
from nm_sparsity_jax.analysis.report import parts, reading, sections
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.sweep import results
from nm_sparsity_jax.analysis.sweep.checks import Checked
from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep
from nm_sparsity_jax.core.patterns import NM


def page(sweep: Sweep, checked: Checked, found: Mapping[str, Any]) -> pathlib.Path | None:
  """Writes out/report.html and returns its path; writes nothing where no run is done.

  Args:
    sweep: what `read` returns.
    checked: what `check` returns.
    found: what `table` returns.
  """
  cells = [cell for cell in sweep.runs() if checked.runs[cell.name].is_done()]
  runs = [(cell, reading.read([cell.folder])[0]) for cell in cells]
  if all(map(sweep.is_start, cells)):
    return None
  recipes = sweep.recipes[: charts.MAX_RUNS]  # more have no colours
  shown = [
    Section("results", "Results", list(_results(found, recipes))),
    Section("curves", "Loss of all runs", _all_runs(sweep, runs, recipes)),
  ]
  means: list[Run] = []
  for number, pattern in enumerate(sweep.patterns or [None]):
    of = lambda recipe, at=pattern: [
      run
      for cell, run in runs
      if not sweep.is_start(cell)
      and (cell.recipe, cell.pattern) == (recipe, None if recipe == "dense" else at)
    ]
    means = [_mean(recipe, of(recipe)) for recipe in recipes]
    for section in sections.sections(means, "last"):
      if section.key != "scores":  # of single runs; the tables above are in its place
        shown.append(_renamed(section, number, pattern))
  return report.write(report.Report(means, shown), sweep.out / "report.html")


def _results(found: Mapping[str, Any], recipes: Sequence[str]) -> Iterator[Part]:
  """Yields the tables, the notes, and the charts over the patterns."""
  yield results.heading(found)
  for title, (head, *rows) in results.tables(found):
    yield f"{title}."
    yield Table(head, rows)
  yield from results.notes(found)
  yield from _by_pattern(found, recipes)
  yield "Below, a line is a recipe, the mean over its seeds at each step; settings are of one seed."
  if left_out := {row["recipe"] for row in found["rows"]} - set(recipes):
    yield f"Not drawn, for there are {charts.MAX_RUNS} colours: {', '.join(sorted(left_out))}."


def _by_pattern(found: Mapping[str, Any], recipes: Sequence[str]) -> Iterator[Chart]:
  """Yields the means over the seeds that are done, a line for a recipe (figure 4a of the paper)."""
  patterns = {row["pattern"] for row in found["rows"]} - {None}
  labels = sorted(patterns, key=lambda p: (-NM.parse(p).density, NM.parse(p).m))
  if len(labels) < 2:
    return
  titles = {"score": "Score", "loss": "Loss on validation data"}
  for measure in found["measures"]:
    lines = []
    for i, recipe in enumerate(recipes):
      rows = [row for row in found["rows"] if row["recipe"] == recipe]
      means = {row["pattern"]: row[measure]["mean"] for row in rows}
      ys = [means.get(label, means.get(None)) for label in labels]  # dense has no pattern
      # A pattern that is missing is NaN: the line stops there.
      points = [(float(x), math.nan if y is None else y) for x, y in enumerate(ys)]
      lines.append(Line(i, points))
    chart = Chart(
      f"{measure}_by_pattern".replace(" ", "_"),
      f"{titles.get(measure, measure)}, against pattern",
      "pattern, from dense to sparse",
      lines,
      labels=labels,
      note="Means over the seeds that are done.",
    )
    if not chart.is_empty:
      yield chart


def _all_runs(
  sweep: Sweep, runs: Sequence[tuple[Cell, Run]], recipes: Sequence[str]
) -> Sequence[Part]:
  """Returns the loss curves of every run, and of the runs that they start from, in one place."""
  runs = [(cell, run) for cell, run in runs if sweep.is_start(cell) or cell.recipe in recipes]
  losses = {"train_loss": ("Training loss", lambda run: run.train.get("loss", {}))}
  for task in sorted({task for _, run in runs for task in run.evals}):
    of = lambda run, task=task: run.evals.get(task, {}).get("loss", {})
    losses[f"eval_loss_{task}"] = f"Validation loss, {task}", of
  drawn = []
  for key, (title, points_of) in losses.items():
    lines = [
      Line(
        None if sweep.is_start(cell) else recipes.index(cell.recipe),
        sorted(points_of(run).items()),
        "thin",
        cell.name,
      )
      for cell, run in runs
      if points_of(run)
    ]
    drawn += [parts.by_step([r for _, r in runs], f"all_{key}", title, lines)] if lines else []
  note = "A line is a run, in the colour of its recipe; those that the others start from are grey."
  return [*drawn, note] if drawn else ["No run has curves of its loss."]


def _renamed(section: Section, number: int, pattern: str | None) -> Section:
  """Returns a section with the pattern in its title, and keys that no other on the page has."""
  shown = [
    dataclasses.replace(part, key=f"{part.key}-{number}") if isinstance(part, Chart) else part
    for part in section.parts
  ]
  title = section.title if pattern is None else f"{section.title}, {pattern}"
  return Section(f"{section.key}-{number}", title, shown, section.folded)


def _mean(recipe: str, runs: Sequence[Run]) -> Run:
  """Returns the mean of the runs of some seeds, as a run; without runs, one without numbers."""
  if not runs:
    return Run(pathlib.Path(recipe), recipe, {}, {}, {}, "")
  train, evals, tasks = (
    _average([getattr(run, field) for run in runs]) for field in ("train", "evals", "tasks")
  )
  return Run(runs[0].path, recipe, train, evals, tasks, runs[0].gin)


def _average(values: Sequence[Any]) -> Any:
  """Averages nested dicts of numbers over the keys that all of them have."""
  first, *rest = values
  if not isinstance(first, dict):
    return statistics.fmean(values)
  keys = [key for key in first if all(key in other for other in rest)]
  return {key: _average([value[key] for value in values]) for key in keys}
