"""What the sections of a report share: a chart with a line for each run, sentences on runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Cell
from nm_sparsity_jax.analysis.report.reading import Run


def by_step(runs: Sequence[Run], key: str, title: str, lines: Sequence[Line], **more) -> Chart:
  """Returns a chart of lines over the steps of all runs; its key names a file too."""
  since, until = min(run.offset for run in runs), max(run.last_step or 0 for run in runs)
  key = re.sub(r"[^\w.-]", "_", key)
  return Chart(key, title, "step", lines, since=since, until=until, **more)


def curve(
  runs: Sequence[Run],
  key: str,
  title: str,
  points: Iterable[Mapping[int, float]],
  style: str = "line",
  **more,
) -> list[Chart]:
  """Returns a chart with a line for each run that has points, in a list; [] if no run has any.

  Args:
    runs: all runs of the page.
    key: names the chart and its file.
    title: what y is.
    points: of each run, by step.
    style: of the lines.
    **more: other fields of `Chart`.
  """
  lines = [Line(i, sorted(found.items()), style) for i, found in enumerate(points) if found]
  return [by_step(runs, key, title, lines, **more)] if lines else []


def grouped(remarks: Iterable[tuple[str, str]]) -> Iterator[str]:
  """Yields a sentence for each remark, once, with all runs that it is of.

  Args:
    remarks: name of a run, what is to say of it.
  """
  names: dict[str, list[str]] = {}
  for name, text in remarks:
    names.setdefault(text, []).append(name)
  yield from (f"{', '.join(of)}: {text}." for text, of in names.items())


def heads(runs: Sequence[Run]) -> list[Cell]:
  """Returns the names of runs, in their colours, to head the columns of a table."""
  return [Cell(run.name, run=i) for i, run in enumerate(runs)]
