"""Charts: points in, an SVG for a page out. All points are drawn, none smoothed."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Sequence
from typing import Any

MAX_RUNS = 9
# Okabe and Ito's colours, which most colour-blind people tell apart: on a light and a dark ground.
LIGHT = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a0d3", "#7a4fb5", "#6b6b6b", "#111111",
)  # fmt: skip
DARK = (
  "#4ea8de", "#ff8c42", "#2fcf9f", "#e79bc6", "#e6c229", "#9ad1f5", "#b79aec", "#b5b5b5", "#ffffff",
)  # fmt: skip
_TEXT, _GRID = "#5b6470", "#dfe2e6"
_STYLE: Any = {
  "text.color": _TEXT, "axes.labelcolor": _TEXT, "axes.edgecolor": _TEXT, "xtick.color": _TEXT,
  "ytick.color": _TEXT, "grid.color": _GRID, "axes.grid": True, "axes.grid.axis": "y",
  "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
  "axes.formatter.useoffset": False, "svg.fonttype": "none",
}  # fmt: skip
_DOTTED = 80  # a line of more points has no dots on it


@dataclasses.dataclass(frozen=True)
class Line:
  """Points of one run.

  Attributes:
    run: its number, which is its colour; None: grey.
    points: (x, y), in the order of x.
    style: 'line', 'steps' (a value holds until the next one), 'dots' or 'dashed'.
    name: what the line is called; "": the run's name.
  """

  run: int | None
  points: Sequence[tuple[float, float]]
  style: str = "line"
  name: str = ""

  def called(self, names: Sequence[str]) -> str:
    """Returns what the line is called, where the runs have these names."""
    return self.name or ("" if self.run is None else names[self.run])


@dataclasses.dataclass(frozen=True)
class Chart:
  """One pair of axes.

  Attributes:
    key: a file's name for it.
    title: what y is.
    x: what x is.
    lines: what is drawn.
    log: whether y is logarithmic.
    labels: of x = 0, 1, ..., where x is not a number.
    since: the axis of x begins here at the latest, so that charts of one page lie over one another.
    until: it reaches at least here.
    note: what a reader must know.
  """

  key: str
  title: str
  x: str
  lines: Sequence[Line]
  log: bool = False
  labels: Sequence[str] = ()
  since: float = 0
  until: float = 0
  note: str = ""

  def drawn(self, line: Line) -> list[tuple[float, float]]:
    """Returns the points of a line with NaN, a gap in the line, for what no axis can show."""
    has_place = lambda y: math.isfinite(y) and (y > 0 or not self.log)
    return [(x, y if has_place(y) else math.nan) for x, y in line.points]

  @property
  def left_out(self) -> int:
    """Returns how many points are not drawn: they are not finite, or 0 on a logarithmic axis."""
    return sum(math.isnan(y) for line in self.lines for _, y in self.drawn(line))

  @property
  def is_empty(self) -> bool:
    """Returns whether nothing can be drawn."""
    return self.left_out == sum(len(line.points) for line in self.lines)


def svg(chart: Chart, names: Sequence[str]) -> str:
  """Returns an <svg> without a title; colours are the CSS variables --run-0, --soft and --line.

  Args:
    chart: what is drawn.
    names: of the runs, which a browser shows at their lines.
  """
  import matplotlib

  out = io.StringIO()
  # Ids are hashes: the same chart makes the same bytes, and two charts of a page share none.
  with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.key}):
    _figure(chart, names).savefig(out, format="svg", transparent=True)
  text = out.getvalue()
  text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
  text = re.sub(r'<g id="line:([^"]*)">', r"<g><title>\1</title>", text)
  text = re.sub(r'<g id="[^"]*">', "<g>", text)
  # Variables follow the reader's light or dark theme; matplotlib knows fixed colours alone.
  for i, colour in enumerate(LIGHT):
    text = text.replace(colour, f"var(--run-{i})")
  text = text.replace(_TEXT, "var(--soft)").replace(_GRID, "var(--line)")
  return text.replace("<svg ", '<svg role="img" ', 1)


def _figure(chart: Chart, names: Sequence[str]) -> Any:
  from matplotlib.figure import Figure
  from matplotlib.ticker import EngFormatter

  figure = Figure(figsize=(4.4, 2.6), layout="constrained")
  axes = figure.add_subplot()
  for line in chart.lines:
    points = chart.drawn(line)
    has_dots = line.style == "dots" or line.style in ("line", "steps") and len(points) <= _DOTTED
    axes.plot(
      [x for x, _ in points],
      [y for _, y in points],
      color=_TEXT if line.run is None else LIGHT[line.run],
      linestyle={"dots": "", "dashed": (0, (4, 3))}.get(line.style, "-"),
      drawstyle="steps-post" if line.style == "steps" else "default",
      linewidth=1.2 if line.style == "dashed" else 1.6,
      marker="o" if has_dots else "",
      markersize=4,
      clip_on=False,
      gid=f"line:{line.called(names)}",  # `svg` makes a <title> of it
    )
  shown = [(x, y) for line in chart.lines for x, y in chart.drawn(line) if not math.isnan(y)]
  xs, ys = zip(*shown, strict=True)
  if chart.log:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
  elif 0 <= min(ys) <= max(ys) / 2:  # 0 is shown where it is not far
    axes.set_ylim(bottom=0)
  if chart.labels:
    labels = [label.replace(", ", "\n") for label in chart.labels]
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)
  else:
    axes.set_xlabel(chart.x)
    first = min(chart.since, *xs)
    axes.set_xlim(first, max(first + 1, chart.until, *xs))
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.2M: steps have many digits
  return figure
