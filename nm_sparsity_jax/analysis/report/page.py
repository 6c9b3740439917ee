"""One self-contained HTML page: sections in, text out. No script, no font, nothing fetched.

    Section(Chart | Table | Strip | sentence) -> plain values -> page.html.jinja, page.css -> HTML

The template escapes every value. The policy in the page's head forbids a browser to fetch anything.
The same input makes the same bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report import charts, plain
from nm_sparsity_jax.analysis.report.charts import Chart
from nm_sparsity_jax.analysis.report.parts import Cell, Section, Strip, Table
from nm_sparsity_jax.analysis.report.reading import Run

_FOLDER = pathlib.Path(__file__).parent


def render(runs: Sequence[Run], sections: Sequence[Section], versions: Mapping[str, str]) -> str:
  """Returns the page.

  Args:
    runs: for their names and gin configurations.
    sections: what is shown.
    versions: name -> version of what made the report.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
  """
  names = [run.name for run in runs]
  return page_of(f"N:M sparsity: {', '.join(names)}", names, sections, versions, runs)


def page_of(
  title: str,
  names: Sequence[str],
  sections: Sequence[Section],
  versions: Mapping[str, str],
  runs: Sequence[Run] = (),
) -> str:
  """Returns a page of what is no run's too.

  Args:
    title: of the page.
    names: of what is compared, in the order of their colours.
    sections: what is shown.
    versions: name -> version of what made the page.
    runs: for their gin configurations.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
  """
  template = _template()
  import markupsafe  # it comes with jinja2

  return template.render(
    title=title,
    names=names,
    light=charts.LIGHT,
    dark=charts.DARK,
    style=markupsafe.Markup((_FOLDER / "page.css").read_text("utf-8")),
    runs=runs,
    sections=[
      {"key": s.key, "title": s.title, "folded": s.folded, "blocks": list(_blocks(s, names))}
      for s in sections
    ],
    made_by=", ".join(f"{name} {version}" for name, version in versions.items()),
  )


@functools.cache
def _template() -> Any:
  try:
    import jinja2
  except ImportError as e:
    raise ModuleNotFoundError("the page needs jinja2: pip install jinja2") from e
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters["percent"] = _percent
  return environment.get_template("page.html.jinja")


def _percent(share: float) -> str:
  """Returns the width of a bar for a share from 0 to 1."""
  width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
  return f"{width:.4g}%"


def _blocks(section: Section, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
  """Yields (kind, value) for each part; charts that follow one another are one block.

  What is said instead of a chart stands behind the charts around it.
  """
  for are_charts, group in itertools.groupby(section.parts, lambda part: isinstance(part, Chart)):
    parts = [plain.plain(part, names) if isinstance(part, Chart) else part for part in group]
    if are_charts and (
      drawn := [_figure(part, names) for part in parts if isinstance(part, Chart)]
    ):
      yield "charts", drawn
    for part in parts:
      if isinstance(part, Table):
        yield "table", part
      elif isinstance(part, Strip):
        yield "strip", _strip(part, names)
      elif isinstance(part, str):
        yield "sentence", part


def _figure(chart: Chart, names: Sequence[str]) -> dict[str, Any]:
  """Returns what the template says of a chart."""
  import markupsafe

  drawn = charts.axes_of(chart) is not None
  return {
    "key": chart.key,
    "title": f"{chart.title}{' (log)' if chart.log else ''}",
    "svg": markupsafe.Markup(charts.svg(chart, names)) if drawn else "",
    "note": " ".join(filter(None, [chart.note, chart.left_out])),
    "numbers": _numbers(chart, names),
  }


def _numbers(chart: Chart, names: Sequence[str]) -> Table:
  """Returns the points: a row for each x, a column for each line that holds measurements."""
  named = lambda line: line.run is not None or line.name
  lines = [line for line in chart.lines if named(line) and line.style != "dashed"]
  rows: dict[float, list[str]] = {}
  for i, line in enumerate(lines):
    for x, y in line.points:
      rows.setdefault(x, [""] * len(lines))[i] = f"{y:.6g}" if math.isfinite(y) else str(y)
  heads = [Cell(charts.called(line, names), run=line.run) for line in lines]

  def name(x: float) -> str:
    return chart.labels[int(x)] if chart.labels else f"{x:,.10g}"

  return Table([chart.x, *heads], [[name(x), *rows[x]] for x in sorted(rows)])


def _strip(strip: Strip, names: Sequence[str]) -> dict[str, Any]:
  """Returns what the template says of a strip."""
  since, until = strip.segments[0][0], strip.segments[-1][1]
  segments, rows = [], []
  for start, stop, label, density, first, last in strip.segments:
    decay = f"D {first:.3g}" if first == last else f"D {first:.3g} to {last:.3g}"
    # Sparser is darker; even 1:128 is told from dense, and no text loses its contrast.
    shade = 8 + 37 * min(1.0, -math.log2(density) / 7)
    segments.append(
      {
        "steps": stop - start,
        "shade": f"{shade:.0f}",
        "label": label,
        "small": f"{start:,}" if label == "dense" else f"{start:,} · {decay}",
        "said": f"steps {start:,} to {stop - 1:,}: {label}, {decay}",
      }
    )
    rows.append([f"{start:,} .. {stop - 1:,}", label, decay.removeprefix("D ")])
  return {
    "run": strip.run,
    "name": names[strip.run],
    "title": f"{strip.title}, {until - since:,} steps" + (f" from {since:,} on" if since else ""),
    "segments": segments,
    "numbers": Table(["steps", "pattern", "D"], rows),
  }
