"""One self-contained HTML page: sections in, text out. No script, no font, nothing fetched.

    Section(Chart | Table | Strip | sentence) -> page.html.jinja, page.css -> HTML

The template escapes every value. The policy in the page's head forbids a browser to fetch anything.
The same input makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.analysis.charts import Chart
from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.text import Strong
from nm_sparsity_jax.runs import files

_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell of a table that is more than a text.

  Attributes:
    text: what stands in it; a `Strong` stands out.
    bar: a share from 0 to 1 to show beside it.
    run: the number of the run whose colour it has.
  """

  text: str
  bar: float | None = None
  run: int | None = None


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


def render(
  title: str,
  names: Sequence[str],
  sections: Sequence[Section],
  configs: Sequence[str] = (),
  made_by: Mapping[str, str] | None = None,
) -> str:
  """Returns a page.

  Args:
    title: of the page.
    names: of what is compared, in the order of their colours.
    sections: what is shown.
    configs: the text of each one's config.gin, '' for none; () where they are no runs.
    made_by: name -> version of what made the page; None: of this package and of JAX.

  Raises:
    ModuleNotFoundError: jinja2 or matplotlib is not installed.
  """
  try:
    import jinja2
    import markupsafe
    import matplotlib  # noqa: F401
  except ImportError as e:
    raise ModuleNotFoundError(f"the page needs {e.name}: pip install {e.name}") from e
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
  )  # fmt: skip
  made_by = made_by or installed.versions(installed.NAME, "Python", "jax", "flax", "optax")
  return environment.get_template("page.html.jinja").render(
    title=title,
    names=names,
    light=charts.LIGHT,
    dark=charts.DARK,
    style=markupsafe.Markup((_FOLDER / "page.css").read_text("utf-8")),
    configs=list(zip(names, configs, strict=True)) if configs else [],
    sections=[(section, list(_blocks(section, names, markupsafe.Markup))) for section in sections],
    made_by=", ".join(f"{name} {version}" for name, version in made_by.items()),
    cell_of=lambda x: x if isinstance(x, Cell) else Cell(x),
    is_strong=lambda x: isinstance(x, Strong),
    numbers_of=numbers,
    called=lambda line: line.called(names),
  )


def write(text: str, path: pathlib.Path) -> pathlib.Path:
  """Writes a page whole or not at all, into a folder that is made where it is missing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, text)
  return path


def _blocks(section: Section, names: Sequence[str], markup: Any) -> Iterator[tuple[str, Any]]:
  """Yields (kind, value) for each part; charts that follow one another are one block.

  What is said instead of a chart stands behind the charts around it.
  """
  is_chart = lambda part: isinstance(part, Chart)
  for are_charts, group in itertools.groupby(section.parts, is_chart):
    parts = [plain(part, names) if isinstance(part, Chart) else part for part in group]
    if are_charts and (drawn := [part for part in parts if isinstance(part, Chart)]):
      draw = lambda chart: "" if chart.is_empty else markup(charts.svg(chart, names))
      yield "charts", [(chart, draw(chart)) for chart in drawn]
    for part in parts:
      if isinstance(part, Table):
        yield "table", part
      elif isinstance(part, Strip):
        yield "strip", _strip(part, names)
      elif isinstance(part, str):
        yield "sentence", part


def plain(chart: Chart, names: Sequence[str]) -> Chart | Table | str:
  """Returns a chart, or what says the same where a chart would show nothing.

  A chart of one value is a sentence. Where each run has one step, bars stand in its place.

  Args:
    chart: what a section has.
    names: of the runs.
  """
  points = [point for line in chart.lines for point in line.points]
  if chart.left_out or not points:
    return chart
  values = {y for _, y in points}
  if len(values) == 1 and len(points) > len(chart.lines):
    return f"{chart.title}: {values.pop():.6g} throughout."
  runs = {line.run for line in chart.lines}
  if chart.x != "step" or None in runs or not len(points) == len(runs) == len(chart.lines):
    return chart
  top = max(values) if min(values) >= 0 < max(values) and not chart.log else 0
  rows = [
    [
      Cell(line.called(names), run=line.run),
      Cell(f"{y:.4g}", bar=y / top if top else None, run=line.run),
      f"{x:,g}",
    ]
    for line in chart.lines
    for x, y in line.points
  ]
  return Table(["", chart.title, "at step"], rows, words=True)


def numbers(chart: Chart, names: Sequence[str]) -> Table:
  """Returns the points: a row for each x, a column for each line that holds measurements.

  Args:
    chart: whose points.
    names: of the runs.
  """
  lines = [line for line in chart.lines if line.called(names) and line.style != "dashed"]
  rows: dict[float, list[str]] = {}
  for i, line in enumerate(lines):
    for x, y in line.points:
      rows.setdefault(x, [""] * len(lines))[i] = f"{y:.6g}"
  heads = [Cell(line.called(names), run=line.run) for line in lines]
  name = lambda x: chart.labels[int(x)] if chart.labels else f"{x:,.10g}"
  return Table([chart.x, *heads], [[name(x), *rows[x]] for x in sorted(rows)])


def _strip(strip: Strip, names: Sequence[str]) -> dict[str, Any]:
  since, until = strip.segments[0][0], strip.segments[-1][1]
  segments = []
  for start, stop, label, density, first, last in strip.segments:
    decay = f"{first:.3g}" if first == last else f"{first:.3g} to {last:.3g}"
    # Sparser is darker; even 1:128 is told from dense, and no text loses its contrast.
    shade = round(8 + 37 * min(1.0, -math.log2(density) / 7))
    steps = f"{start:,} .. {stop - 1:,}"
    segments.append((stop - start, shade, label, f"{start:,} · D {decay}", steps, decay))
  return {
    "run": strip.run,
    "name": names[strip.run],
    "title": f"{strip.title}, {until - since:,} steps" + (f" from {since:,} on" if since else ""),
    "segments": segments,
    "numbers": Table(["steps", "pattern", "D"], [[s[4], s[2], s[5]] for s in segments]),
  }
