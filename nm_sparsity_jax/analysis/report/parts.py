"""What a report is made of, as plain values: sections of charts, tables, strips and sentences.

    Section(key, title, parts)    parts: Chart | Table | Strip | a sentence

Below these are the small makers that all sections share.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.reading import Run


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell of a table that is more than a text.

  Attributes:
    text: what stands in it.
    bar: a share from 0 to 1 to show beside it.
    run: the number of the run whose colour it has.
    strong: whether it stands out.
  """

  text: str
  bar: float | None = None
  run: int | None = None
  strong: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells; the first column is text, the others are numbers unless `words` says so."""

  head: Sequence[str | Cell]
  rows: Sequence[Sequence[str | Cell]]
  words: bool = False


@dataclasses.dataclass(frozen=True)
class Strip:
  """A bar of segments along the steps of a run.

  Attributes:
    run: its number.
    title: what it shows.
    segments: (start, stop, label, density, D at start, D at stop), one after the other.
  """

  run: int
  title: str
  segments: Sequence[tuple[int, int, str, float, float, float]]


Part = Chart | Table | Strip | str


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and what is below it.

  Attributes:
    key: the section's name in links; no other section of a page has it.
    title: the heading.
    parts: charts, tables, strips and sentences, in order.
    folded: whether the page shows the parts only when a reader asks for them.
  """

  key: str
  title: str
  parts: Sequence[Part]
  folded: bool = False


# --- charts -------------------------------------------------------------------------------------


def chart(
  runs: Sequence[Run],
  key: str,
  title: str,
  of: Callable[[Run], Mapping[int, float]],
  style: str = "line",
  **more,
) -> Chart | None:
  """Returns a chart with a line for each run that has points, or None if no run has.

  Args:
    runs: all runs of the page.
    key: names the chart and its file.
    title: what y is.
    of: the points of a run, by step.
    style: of the lines.
    **more: other fields of `Chart`.
  """
  found = [of(run) for run in runs]
  lines = [Line(i, sorted(points.items()), style) for i, points in enumerate(found) if points]
  return by_step(runs, key, title, lines, **more) if lines else None


def key_of(name: str) -> str:
  """Returns a key of a chart, which names a file too, for any name."""
  return re.sub(r"[^\w.-]", "_", name)


def by_step(runs: Sequence[Run], key: str, title: str, lines: Sequence[Line], **more) -> Chart:
  """Returns a chart of lines over steps, those of all runs; see `chart`."""
  since, until = min(run.offset for run in runs), max(run.last_step or 0 for run in runs)
  return Chart(key_of(key), title, "step", lines, since=since, until=until, **more)


def tagged(runs: Sequence[Run], key: str, title: str, tag: str, **more) -> Chart | None:
  """Returns a chart of one tag of train/, or None if no run has it; see `chart`."""
  return chart(runs, key, title, lambda run: run.train.get(tag, {}), **more)


# --- sentences and cells ------------------------------------------------------------------------


def some(charts: Iterable[Chart | None], otherwise: str) -> Iterator[Chart | str]:
  """Yields the charts that are there, or one sentence if there are none."""
  found = [chart for chart in charts if chart is not None]
  yield from found or [otherwise]


def told(said: Iterable[tuple[str, str]]) -> Iterator[str]:
  """Yields a sentence for each thing that is said, once, with all runs that it is said of.

  Args:
    said: name of a run, what is said of it.
  """
  names: dict[str, list[str]] = {}
  for name, text in said:
    names.setdefault(text, []).append(name)
  yield from (f"{', '.join(of)}: {text}." for text, of in names.items())


def lacking(runs: Sequence[Run], has: Callable[[Run], Any], what: str) -> Iterator[str]:
  """Names the runs that lack what others have."""
  names = [run.name for run in runs if not has(run)]
  if names and len(names) < len(runs):
    yield f"{', '.join(names)}: {what}."


def heads(runs: Sequence[Run]) -> list[Cell]:
  """Returns the names of runs, in their colours, to head the columns of a table."""
  return [Cell(run.name, run=i) for i, run in enumerate(runs)]


def tried(function: Callable[..., Any], *args) -> tuple[Any, str]:
  """Calls a function; returns (its value, ''), or (None, why not) if it raises ValueError."""
  try:
    return function(*args), ""
  except ValueError as e:
    return None, str(e)
