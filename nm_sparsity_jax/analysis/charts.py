"""Charts: points in, an SVG for a page out. All points are drawn, none smoothed."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

# Okabe and Ito's colours, which most colour-blind people tell apart.
COLOURS = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a0d3", "#7a4fb5", "#6b6b6b", "#111111",
)  # fmt: skip
MAX_RUNS = len(COLOURS)
_STYLE: Any = {
  "axes.grid": True, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dfe2e6",
  "axes.formatter.useoffset": False, "svg.fonttype": "none",
}  # fmt: skip
_LINES: dict[str, Any] = {
  "line": {"marker": "."},
  "steps": {"drawstyle": "steps-post"},
  "dots": {"marker": "o", "linestyle": ""},
  "dashed": {"linestyle": "--", "linewidth": 1.2},
}


@dataclasses.dataclass(frozen=True)
class Line:
  """Points of one run.

  Attributes:
    run: its number, which is its colour.
    points: (x, y), in the order of x. What no axis can show, such as NaN, is a gap.
    style: 'line', 'steps' (a value holds until the next one), 'dots' or 'dashed'.
  """

  run: int
  points: Sequence[tuple[float, float]]
  style: str = "line"


@dataclasses.dataclass(frozen=True)
class Chart:
  """One pair of axes.

  Attributes:
    key: its name; no other chart of a page has it.
    title: what y is.
    x: what x is.
    lines: what is drawn.
    log: whether y is logarithmic.
    labels: of x = 0, 1, ..., where x is not a number.
    note: what a reader must know.
  """

  key: str
  title: str
  x: str
  lines: Sequence[Line]
  log: bool = False
  labels: Sequence[str] = ()
  note: str = ""


def svg(chart: Chart) -> bytes:
  """Returns a chart as SVG, without its title. The same chart makes the same bytes."""
  import matplotlib
  from matplotlib.figure import Figure
  from matplotlib.ticker import EngFormatter

  out = io.BytesIO()
  # By default ids have a random salt, and the date stands in the file.
  with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.key}):
    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for line in chart.lines:
      xs, ys = zip(*line.points, strict=True)
      axes.plot(xs, ys, color=COLOURS[line.run], **_LINES[line.style])
    if chart.log:
      axes.set_yscale("log", nonpositive="mask")
    axes.set_xlabel(chart.x)
    if chart.labels:
      axes.set_xticks(range(len(chart.labels)), chart.labels)
    else:
      axes.locator_params(axis="x", nbins=5)
      axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.2M: steps have many digits
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
  return out.getvalue()
