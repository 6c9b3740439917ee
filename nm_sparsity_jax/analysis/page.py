"""One self-contained HTML page of sections: no script, no font, nothing fetched.

The template escapes every value. The policy in the page's head forbids a browser to fetch anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
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


def write(
  path: str | os.PathLike,
  title: str,
  names: Sequence[str],
  sections: Sequence[Section],
  configs: Sequence[str] = (),
  made_by: Mapping[str, str] | None = None,
) -> pathlib.Path:
  """Writes a page whole or not at all, and returns its path. The same input makes the same bytes.

  Args:
    path: the file; its folder is made where it is missing.
    title: of the page.
    names: of what is compared, in the order of their colours.
    sections: what is shown.
    configs: the text of each one's config.gin, '' for none; () where they are no runs.
    made_by: name -> version of what made the page; None: of this package and of JAX.
  """
  import jinja2
  import markupsafe

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
  )  # fmt: skip
  made_by = made_by or installed.versions(installed.NAME, "Python", "jax", "flax", "optax")
  text = environment.get_template("page.html.jinja").render(
    title=title,
    names=names,
    light=charts.LIGHT,
    dark=charts.DARK,
    style=markupsafe.Markup((_FOLDER / "page.css").read_text("utf-8")),
    configs=list(zip(names, configs, strict=True)) if configs else [],
    sections=[(section, list(_blocks(section, names))) for section in sections],
    made_by=", ".join(f"{name} {version}" for name, version in made_by.items()),
    cell_of=lambda x: x if isinstance(x, Cell) else Cell(x),
    is_strong=lambda x: isinstance(x, Strong),
    svg_of=lambda chart: markupsafe.Markup(charts.svg(chart, names)),  # the only text not escaped
    numbers_of=lambda chart: numbers(chart, names),
  )
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, text)
  return path


def _blocks(section: Section, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
  """Yields (kind, value) for each part; charts that follow one another are one block."""
  for kind, group in itertools.groupby(section.parts, type):
    if kind is Chart:
      yield "charts", list(group)
    elif kind is Table:
      yield from (("table", part) for part in group)
    elif kind is Strip:
      yield from (("strip", _strip(part, names)) for part in group if isinstance(part, Strip))
    else:
      yield from (("sentence", part) for part in group)


def numbers(chart: Chart, names: Sequence[str]) -> Table:
  """Returns the points: a row for each x, a column for each line that holds measurements."""
  # Dashed lines are computed, at a hundred steps, or join points of other lines.
  lines = [line for line in chart.lines if line.style != "dashed"]
  rows: dict[float, list[str]] = {}
  for i, line in enumerate(lines):
    for x, y in line.points:
      rows.setdefault(x, [""] * len(lines))[i] = f"{y:.6g}"
  heads = [Cell(line.called(names), run=line.run) for line in lines]
  name = lambda x: chart.labels[int(x)] if chart.labels else f"{x:,.10g}"
  return Table([chart.x, *heads], [[name(x), *rows[x]] for x in sorted(rows)])


def _strip(strip: Strip, names: Sequence[str]) -> dict[str, Any]:
  since, until = strip.segments[0][0], strip.segments[-1][1]
  segments, rows = [], []
  for start, stop, label, density, first, last in strip.segments:
    decay = f"{first:.3g}" if first == last else f"{first:.3g} to {last:.3g}"
    # Sparser is darker; even 1:128 is told from dense, and no text loses its contrast.
    shade = round(8 + 37 * min(1.0, -math.log2(density) / 7))
    segments.append((stop - start, shade, label, f"{start:,} · D {decay}"))
    rows.append([f"{start:,} .. {stop - 1:,}", label, decay])
  return {
    "run": strip.run,
    "name": names[strip.run],
    "title": f"{strip.title}, {until - since:,} steps" + (f" from {since:,} on" if since else ""),
    "segments": segments,
    "numbers": Table(["steps", "pattern", "D"], rows),
  }
