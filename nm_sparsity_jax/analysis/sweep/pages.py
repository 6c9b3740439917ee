"""One page of a sweep: its tables, and the means against the pattern."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.analysis import page as pages
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part, Section, Table
from nm_sparsity_jax.analysis.sweep import results
from nm_sparsity_jax.core.patterns import NM


def page(found: Mapping[str, Any]) -> pathlib.Path | None:
  """Writes out/report.html and returns its path; writes nothing where no run is done.

  Args:
    found: what `table` returns.
  """
  if not found["done"]:
    return None
  recipes = list(dict.fromkeys(row["recipe"] for row in found["rows"]))
  recipes = recipes[: charts.MAX_RUNS]  # more have no colours; the tables have all
  section = Section("results", "Results", list(_parts(found, recipes)))
  path = pathlib.Path(found["out"], "report.html")
  return pages.write(path, f"N:M sparsity: {', '.join(recipes)}", recipes, [section])


def _parts(found: Mapping[str, Any], drawn: Sequence[str]) -> Iterator[Part]:
  """Yields the tables, the notes, and the means over the patterns (figure 4a of the paper)."""
  yield results.heading(found)
  for title, (head, *rows) in results.tables(found):
    yield f"{title}."
    yield Table(head, rows)
  yield from results.notes(found)
  patterns = {row["pattern"] for row in found["rows"]} - {None}
  labels = sorted(patterns, key=lambda p: (-NM.parse(p).density, NM.parse(p).m))
  for measure in found["measures"] if len(labels) > 1 else ():
    mean = {(row["recipe"], row["pattern"]): row[measure]["mean"] for row in found["rows"]}
    lines = []
    for i, recipe in enumerate(drawn):
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
