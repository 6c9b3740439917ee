"""One page of a sweep: its tables, the means against the pattern, and the loss of every run."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.analysis import page as pages
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part, Section, Table
from nm_sparsity_jax.analysis.report import parts, reading
from nm_sparsity_jax.analysis.sweep import results
from nm_sparsity_jax.analysis.sweep.grid import START, Sweep
from nm_sparsity_jax.analysis.sweep.training import Run
from nm_sparsity_jax.core.patterns import NM


def page(sweep: Sweep, runs: Mapping[str, Run], found: Mapping[str, Any]) -> pathlib.Path | None:
  """Writes out/report.html and returns its path; writes nothing where no run is done.

  Args:
    sweep: what `read` returns.
    runs: what `check` returns.
    found: what `table` returns.
  """
  recipes = sweep.recipes[: charts.MAX_RUNS]  # more have no colours
  drawn = [run for run in runs.values() if run.is_done() and run.cell.recipe in (*recipes, START)]
  if not drawn:
    return None
  sections = [
    Section("results", "Results", list(_results(found, recipes))),
    Section("curves", "Loss of all runs", _curves(drawn, recipes)),
  ]
  title = f"N:M sparsity: {', '.join(recipes)}"
  return pages.write(sweep.out / "report.html", title, recipes, sections)


def _results(found: Mapping[str, Any], recipes: Sequence[str]) -> Iterator[Part]:
  """Yields the tables, the notes, and the charts over the patterns."""
  yield results.heading(found)
  for title, (head, *rows) in results.tables(found):
    yield f"{title}."
    yield Table(head, rows)
  yield from results.notes(found)
  yield from _by_pattern(found, recipes)
  if left_out := {row["recipe"] for row in found["rows"]} - set(recipes):
    yield f"Not drawn, for there are {charts.MAX_RUNS} colours: {', '.join(sorted(left_out))}."


def _by_pattern(found: Mapping[str, Any], recipes: Sequence[str]) -> Iterator[Chart]:
  """Yields the means over the seeds that are done, a line for a recipe (figure 4a of the paper)."""
  patterns = {row["pattern"] for row in found["rows"]} - {None}
  labels = sorted(patterns, key=lambda p: (-NM.parse(p).density, NM.parse(p).m))
  for measure in found["measures"] if len(labels) > 1 else ():
    mean = {(row["recipe"], row["pattern"]): row[measure]["mean"] for row in found["rows"]}
    lines = []
    for i, recipe in enumerate(recipes):
      ys = [mean[recipe, label] for label in labels]
      # A pattern that is missing is NaN: the line stops there.
      points = [(float(x), math.nan if y is None else y) for x, y in enumerate(ys)]
      lines.append(Line(i, points))
    yield Chart(
      f"{measure}_by_pattern".replace(" ", "_"),
      f"{measure}, against pattern",
      "pattern, from dense to sparse",
      lines,
      labels=labels,
      note="Means over the seeds that are done.",
    )


def _curves(drawn: Sequence[Run], recipes: Sequence[str]) -> Sequence[Part]:
  """Returns the loss curves of every run, and of the runs that they start from, in one place."""
  read = [(run.cell, reading.read([run.cell.folder])[0]) for run in drawn]
  losses = {"train_loss": ("Training loss", lambda run: run.train.get("loss", {}))}
  for task in sorted({task for _, run in read for task in run.evals}):
    of = lambda run, task=task: run.evals.get(task, {}).get("loss", {})
    losses[f"eval_loss_{task}"] = f"Validation loss, {task}", of
  found: list[Part] = []
  for key, (title, points_of) in losses.items():
    lines = [
      Line(
        recipes.index(cell.recipe) if cell.recipe in recipes else None,
        sorted(points.items()),
        "thin",
        cell.name,
      )
      for cell, run in read
      if (points := points_of(run))
    ]
    if lines:
      found.append(parts.by_step([run for _, run in read], f"all_{key}", title, lines))
  note = "A line is a run, in the colour of its recipe; those that the others start from are grey."
  return [*found, note] if found else ["No run has curves of its loss."]
