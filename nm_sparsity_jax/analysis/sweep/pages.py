"""One page of a sweep: its tables, then the sections of `nm-sparsity report` for each pattern.

    finished runs -> by recipe and pattern, the mean over seeds -> sections.sections -> report.html

A line is a recipe, at each step the mean over the seeds that are done.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import report
from nm_sparsity_jax.analysis.report import charts, reading, sections
from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.parts import Section, Table, key_of, some
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.sweep import results
from nm_sparsity_jax.analysis.sweep.checks import Checked
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.core.patterns import NM


def page(sweep: Sweep, checked: Checked, found: Mapping[str, Any]) -> pathlib.Path | None:
  """Writes out/report.html and returns its path; writes nothing where no run is done.

  Args:
    sweep: what `read` returns.
    checked: what `check` returns.
    found: what `table` returns.
  """
  runs_of = {
    cell.name: reading.read([cell.folder])[0]
    for cell in sweep.runs()
    if checked.runs[cell.name].is_done()
  }
  done: dict[tuple[str, str | None], list[Run]] = {}
  for cell in sweep.cells:
    if cell.name in runs_of:
      done.setdefault((cell.recipe, cell.pattern), []).append(runs_of[cell.name])
  if not done:
    return None
  recipes = sweep.recipes[: charts.MAX_RUNS]  # more have no colours
  parts = [
    Section("results", "Results", list(_results(found, recipes))),
    Section("curves", "Loss of all runs", list(_all_runs(sweep, runs_of, recipes))),
  ]
  seeds = max(map(len, done.values()))
  shown: list[Run] = []
  for number, pattern in enumerate(sweep.patterns or [None]):
    runs = [
      _mean(recipe, done.get((recipe, None if recipe == "dense" else pattern), []))
      for recipe in recipes
    ]
    shown = [a if a.gin else b for a, b in zip(shown or runs, runs, strict=True)]
    for section in sections.sections(runs, "last", seeds):
      if section.key != "scores":  # of single runs; the tables above are in its place
        parts.append(_renamed(section, number, pattern))
  return report.write(report.Report(shown, parts), sweep.out / "report.html")


def _results(found: Mapping[str, Any], recipes: Sequence[str]):
  """Yields the tables, the notes, and the charts over the patterns."""
  yield results.heading(found)
  for title, (head, *rows) in results.tables(found):
    yield f"{title[:1].upper()}{title[1:]}."
    yield Table(head, rows)
  yield from results.notes(found)
  yield from _by_pattern(found, recipes)
  yield "Below, a line is a recipe, the mean over its seeds at each step; settings are of one seed."
  if left_out := [r for r in dict.fromkeys(x["recipe"] for x in found["rows"]) if r not in recipes]:
    yield f"Not drawn, for there are {charts.MAX_RUNS} colours: {', '.join(left_out)}."


def _by_pattern(found: Mapping[str, Any], recipes: Sequence[str]):
  """Yields the means over the seeds that are done, a line for a recipe (figure 4a of the paper)."""
  patterns = {row["pattern"] for row in found["rows"]} - {None}
  labels = sorted(patterns, key=lambda p: (-NM.parse(p).density, NM.parse(p).m))
  if len(labels) < 2:
    return
  titles = {"score": "Score", "loss": "Loss on validation data"}
  for measure in found["measures"]:
    lines = [
      Line(i, points)
      for i, recipe in enumerate(recipes)
      for points in _pieces(
        [row for row in found["rows"] if row["recipe"] == recipe], measure, labels
      )
    ]
    if lines:
      yield Chart(
        key_of(f"{measure}_by_pattern"),
        f"{titles.get(measure, measure)}, against pattern",
        "pattern, from dense to sparse",
        lines,
        labels=labels,
        note="Means over the seeds that are done."
        + (" dense has no pattern." if "dense" in recipes else ""),
      )


def _all_runs(
  sweep: Sweep, runs_of: Mapping[str, Run], recipes: Sequence[str]
) -> Iterator[Chart | str]:
  """Yields the loss curves of every run, and of the runs that they start from, in one place."""
  runs = [
    (cell, runs_of[cell.name])
    for cell in sweep.runs()
    if cell.name in runs_of and (sweep.is_start(cell) or cell.recipe in recipes)
  ]
  since = min((run.offset for _, run in runs), default=0)  # those that are done may have no colour

  def chart(key: str, title: str, of: Callable[[Run], Mapping[int, float]]) -> Chart | None:
    lines = [
      Line(
        None if sweep.is_start(cell) else recipes.index(cell.recipe),
        sorted(points.items()),
        "thin",
        name=cell.name,
      )
      for cell, run in runs
      if (points := of(run))
    ]
    return Chart(key_of(key), title, "step", lines, since=since) if lines else None

  drawn = [chart("all_train_loss", "Training loss", lambda run: run.loss)]
  for task in sorted({task for _, run in runs for task in run.evals}):
    of = lambda run, task=task: run.loss_of(task)
    drawn.append(chart(f"all_eval_loss_{task}", f"Validation loss, {task}", of))
  yield from some(drawn, "No run has curves of its loss.")
  if any(drawn):
    yield "A line is a run, in the colour of its recipe; those that the others start from are grey."


def _pieces(
  rows: Sequence[Mapping[str, Any]], measure: str, labels: Sequence[str]
) -> Iterator[list[tuple[float, float]]]:
  """Yields the lines of a recipe: one, and more where a pattern is missing, which none bridges."""
  means = {row["pattern"]: row[measure]["mean"] for row in rows}
  means = dict.fromkeys(labels, means[None]) if None in means else means
  there = [(float(x), means.get(label)) for x, label in enumerate(labels)]
  for missing, points in itertools.groupby(there, key=lambda point: point[1] is None):
    if not missing:
      yield [(x, y) for x, y in points if y is not None]


def _renamed(section: Section, number: int, pattern: str | None) -> Section:
  """Returns a section with the pattern in its title, and keys that no other on the page has."""
  parts = [
    dataclasses.replace(p, key=f"{p.key}-{number}") if isinstance(p, Chart) else p
    for p in section.parts
  ]
  title = section.title if pattern is None else f"{section.title}, {pattern}"
  return Section(f"{section.key}-{number}", title, parts, section.folded)


def _mean(recipe: str, runs: Sequence[Run]) -> Run:
  """Returns the mean of the runs of some seeds, as a run; without runs, one without numbers."""
  first = runs[0] if runs else None
  return Run(
    first.path if first else pathlib.Path(recipe),
    recipe,
    _by_key([run.train for run in runs]),
    {
      task: _by_key([run.evals[task] for run in runs])
      for task in (first.evals if first else ())
      if all(task in run.evals for run in runs)
    },
    {
      task: _by_key([run.tasks[task] for run in runs])
      for task in (first.tasks if first else ())
      if all(task in run.tasks for run in runs)
    },
    first.gin if first else "",
  )


def _by_key(many: Sequence[Mapping[Any, Mapping[Any, float]]]) -> dict[Any, dict[Any, float]]:
  """Averages nested dicts over the keys that all of them have, in the first one's order."""
  if not many:
    return {}
  return {
    key: {
      at: statistics.fmean(each[key][at] for each in many)
      for at in inner
      if all(at in each[key] for each in many)
    }
    for key, inner in many[0].items()
    if all(key in each for each in many)
  }
