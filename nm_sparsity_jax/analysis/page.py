"""One self-contained HTML page of sections: no script, no font, nothing fetched.

page.html.jinja is the page. It escapes every value, and its policy forbids a browser to fetch.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.analysis.charts import Chart
from nm_sparsity_jax.core import installed
from nm_sparsity_jax.runs import files


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells below a head."""

  head: Sequence[str]
  rows: Sequence[Sequence[str]]


Part = Chart | Table | str


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and what is below it.

  Attributes:
    key: the section's name in links; no other section of a page has it.
    title: the heading.
    parts: charts, tables and sentences, in order.
  """

  key: str
  title: str
  parts: Sequence[Part]


def write(
  path: str | os.PathLike,
  title: str,
  names: Sequence[str],
  sections: Sequence[Section],
  configs: Mapping[str, str],
) -> pathlib.Path:
  """Writes a page whole or not at all, and returns its path. The same input makes the same bytes.

  Args:
    path: the file; its folder is made where it is missing.
    title: of the page.
    names: of what is compared, in the order of their colours.
    sections: what is shown.
    configs: name of a run -> the text of its config.gin.
  """
  import jinja2

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True,
    trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
  )  # fmt: skip
  text = environment.get_template("page.html.jinja").render(
    title=title,
    legend=list(zip(names, charts.COLOURS, strict=False)),
    sections=sections,
    configs=configs,
    versions=installed.versions(installed.NAME, "Python", "jax", "flax", "optax"),
    svg_of=lambda chart: base64.b64encode(charts.svg(chart)).decode(),
    numbers_of=lambda chart: numbers(chart, names),
  )
  path = pathlib.Path(path)
  files.write_atomically(path, text)
  return path


def numbers(chart: Chart, names: Sequence[str]) -> Table:
  """Returns the points: a row for each x, a column for each line that holds measurements."""
  lines = [line for line in chart.lines if line.style != "dashed"]  # those are computed
  ys = [dict(line.points) for line in lines]
  rows = []
  for x in sorted({x for points in ys for x in points}):
    name = chart.labels[int(x)] if chart.labels else f"{x:,.10g}"
    rows.append([name, *(f"{points[x]:.6g}" if x in points else "" for points in ys)])
  return Table([chart.x, *(names[line.run] for line in lines)], rows)
