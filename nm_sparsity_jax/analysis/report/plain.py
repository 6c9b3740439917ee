"""What is said instead of drawn: a chart of one value is a sentence, one of single points has bars.

Chart -> [plain] -> Chart | Table | a sentence
"""

from __future__ import annotations

from collections.abc import Sequence

from nm_sparsity_jax.analysis.report import charts
from nm_sparsity_jax.analysis.report.charts import Chart
from nm_sparsity_jax.analysis.report.parts import Cell, Table


def plain(chart: Chart, names: Sequence[str]) -> Chart | Table | str:
  """Returns a chart as it is, or what says the same where a chart would show nothing.

  Args:
    chart: what a section yielded.
    names: of the runs.
  """
  points = [point for line in chart.lines for point in line.points]
  if chart.left_out or not points:
    return chart
  values = {y for _, y in points}
  if len(values) == 1 and len(points) > len(chart.lines):
    return f"{chart.title}: {values.pop():.6g} throughout."
  runs = [line.run for line in chart.lines]
  if chart.x.startswith("step") and None not in runs and len(points) == len(set(runs)) == len(runs):
    return _bars(chart, names)
  return chart


def _bars(chart: Chart, names: Sequence[str]) -> Table:
  """Returns a row for each run; bars begin at 0, and the longest is the largest value's."""
  values = [y for line in chart.lines for _, y in line.points]
  drawn = min(values) >= 0 < max(values) and not chart.log
  rows = [
    [
      Cell(names[line.run or 0], run=line.run),
      Cell(charts.number(y), bar=y / max(values) if drawn else None, run=line.run),
      f"{x:,g}",
    ]
    for line in chart.lines
    for x, y in line.points
  ]
  return Table(["", chart.title, "at step"], rows, words=True)
