"""Charts: plain values in, SVG for a page or PNG files out.

    Chart (lines of points, by run) -> [svg] -> text that scales, coloured by the page's CSS
                                    -> [png] -> a file, by matplotlib

Both draw the points as they are; nothing is smoothed or thinned out. What cannot be drawn (no
finite number; on a logarithmic axis 0) is left out and counted below.
"""

from __future__ import annotations

import dataclasses
import html
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

MAX_RUNS = 9
# Okabe and Ito's colours, which most colour-blind people tell apart: on a light and a dark ground.
LIGHT = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56a0d3", "#7a4fb5", "#6b6b6b", "#111111",
)  # fmt: skip
DARK = (
  "#4ea8de", "#ff8c42", "#2fcf9f", "#e79bc6", "#e6c229", "#9ad1f5", "#b79aec", "#b5b5b5", "#ffffff",
)  # fmt: skip

_WIDTH, _HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 8, 34
_DOTTED = 80  # a line of more points has no dots on it


@dataclasses.dataclass(frozen=True)
class Line:
  """Points of one run.

  Attributes:
    run: its number, which is its colour; None: that of none.
    points: (x, y), in the order of x.
    style: 'line', 'steps' (a value holds until the next one), 'dots', 'dashed' or 'thin'. The first
      two have dots where there is room, the last two have none.
    names: what each point is called, where x does not tell.
    name: what the line is called; the run's name if it is "".
  """

  run: int | None
  points: Sequence[tuple[float, float]]
  style: str = "line"
  names: Sequence[str] = ()
  name: str = ""


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
    """Returns the points of a line that can be drawn."""
    return [p for p in line.points if math.isfinite(p[1]) and (p[1] > 0 or not self.log)]

  @property
  def left_out(self) -> str:
    """Says what is not drawn, in a sentence; '' where everything is."""
    values = [y for line in self.lines for _, y in line.points]
    odd = sum(not math.isfinite(y) for y in values)
    zero = sum(math.isfinite(y) and y <= 0 for y in values) if self.log else 0
    parts = [f"{odd} not finite"] * bool(odd)
    parts += [f"{zero} that are 0, which a logarithmic axis lacks"] * bool(zero)
    return f"Points not drawn: {' and '.join(parts)}." if parts else ""


def number(value: float, digits: int = 4) -> str:
  """Returns a number in short form, for an axis.

  >>> number(0), number(0.25), number(12500), number(3e15), number(2e-7)
  ('0', '0.25', '12.5k', '3P', '2e-07')
  """
  for size, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= size:
      return f"{value / size:.{digits}g}{name}"
  return f"{value:.{digits}g}"


def numbers(values: Sequence[float]) -> list[str]:
  """Returns numbers short and exact: the marks of an axis far from 0 differ in late digits alone.

  >>> numbers([1_000_000, 1_000_250, 1_000_500])
  ['1M', '1.00025M', '1.0005M']
  """
  digits = next(d for d in range(4, 18) if all(float(f"{v:.{d}g}") == v for v in values) or d == 17)
  return [number(value, digits) for value in values]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
  """Returns round numbers from low to high, both ends within.

  >>> ticks(0, 400), ticks(0.07, 0.31)
  ([0.0, 100.0, 200.0, 300.0, 400.0], [0.1, 0.15, 0.2, 0.25, 0.3])
  """
  raw = (high - low) / most
  power = 10.0 ** math.floor(math.log10(raw))
  step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= raw * (1 - 1e-9))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
  """Returns powers of ten between two numbers; where they are too few, also 2 and 5 times these.

  >>> log_ticks(3e-7, 2e-3), log_ticks(1.5, 40)
  ([1e-06, 1e-05, 0.0001, 0.001], [2.0, 5.0, 10.0, 20.0])
  """
  first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
  powers = [10.0**e for e in range(first, last + 1) if low <= 10.0**e <= high]
  if len(powers) > 2:
    return powers[:: math.ceil(len(powers) / most)]
  fine = [float(f"{k}e{e}") for e in range(first, last + 1) for k in (1, 2, 5)]
  return [t for t in fine if low <= t <= high]


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
  low, high = min(values), max(values)
  if log:
    low, high = math.log10(low), math.log10(high)
  if low == high:  # one value alone lies in the middle
    margin = abs(low) / 10 or 0.5
  else:
    margin = 0.05 * (high - low)
  bottom, top = low - margin, high + margin
  if log:
    return 10**bottom, 10**top
  # 0 is shown where it is not far: a share of 0.1 is to look like one.
  return (0.0 if 0 <= low <= high / 2 else bottom), top


@dataclasses.dataclass(frozen=True)
class Axes:
  """The pixels of a chart's values."""

  x: tuple[float, float]
  y: tuple[float, float]
  log: bool

  def at(self, x: float, y: float) -> tuple[float, float]:
    """Returns where (x, y) lies, in pixels."""
    place = lambda v, low, high: (v - low) / (high - low)
    if self.log:
      up = place(math.log10(y), math.log10(self.y[0]), math.log10(self.y[1]))
    else:
      up = place(y, *self.y)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return _LEFT + width * place(x, *self.x), _TOP + height * (1 - up)


def axes_of(chart: Chart) -> Axes | None:
  """Returns the axes of a chart, None where nothing can be drawn."""
  points = [p for line in chart.lines for p in chart.drawn(line)]
  if not points:
    return None
  if chart.labels:
    x = -0.5, len(chart.labels) - 0.5
  else:
    first = min(chart.since, *(x for x, _ in points))
    x = first, max(first + 1.0, chart.until, *(x for x, _ in points))
  return Axes(x, _range([y for _, y in points], chart.log), chart.log)


def svg(chart: Chart, names: Sequence[str]) -> str:
  """Returns an <svg> without a title; colours are the CSS variables --run-0, --run-1, ...

  Args:
    chart: what can be drawn: `axes_of` is not None.
    names: of the runs.
  """
  axes = axes_of(chart)
  if axes is None:
    raise ValueError(f"{chart.key}: nothing can be drawn")
  return "\n".join(
    [
      f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">',
      *_grid(chart, axes),
      *(part for line in chart.lines for part in _line(chart, axes, line, names)),
      "</svg>",
    ]
  )


def _grid(chart: Chart, axes: Axes) -> Iterator[str]:
  right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
  for y in (log_ticks if axes.log else ticks)(*axes.y):
    at = axes.at(axes.x[0], y)[1]
    yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
    yield f'<text x="{_LEFT - 5}" y="{at + 3.5:.1f}" text-anchor="end">{number(y)}</text>'
  if chart.labels:
    marks = list(enumerate(chart.labels))
  else:
    at = ticks(*axes.x)
    marks = list(zip(at, numbers(at), strict=True))
  for x, label in marks:
    at = axes.at(x, axes.y[0])[0]
    yield f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
    for i, part in enumerate(label.split(", ")):
      middle = min(at, _WIDTH - 3.2 * len(part))  # at the end of the axis it stays inside
      down = bottom + 15 + 11 * i
      yield f'<text x="{middle:.1f}" y="{down}" text-anchor="middle">{html.escape(part)}</text>'
  yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
  if not chart.labels:  # they tell what x is
    middle, down = (_LEFT + right) / 2, _HEIGHT - 4
    yield f'<text x="{middle}" y="{down}" text-anchor="middle">{html.escape(chart.x)}</text>'


def _line(chart: Chart, axes: Axes, line: Line, names: Sequence[str]) -> Iterator[str]:
  points = chart.drawn(line)
  if not points:
    return
  places = [axes.at(*p) for p in points]
  name = called(line, names)
  colour = "c-none" if line.run is None else f"c{line.run}"
  yield f'<g class="{colour}">'
  if line.style != "dots" and len(points) > 1:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _corners(line, places))
    title = f"<title>{html.escape(name)}</title>" if name else ""
    yield f'<polyline class="{line.style}" points="{path}">{title}</polyline>'
  if _has_dots(line, points):
    own = dict(zip(line.points, line.names, strict=False))
    for p, (x, y) in zip(points, places, strict=True):
      what = own.get(p) or f"{name}, {chart.labels[int(p[0])] if chart.labels else f'{p[0]:,g}'}"
      radius = 2.2 if len(points) > 25 else 3
      yield (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{html.escape(what)}: {p[1]:.6g}'
        "</title></circle>"
      )
  yield "</g>"


def called(line: Line, names: Sequence[str]) -> str:
  """Returns what a line is called.

  Args:
    line: the line.
    names: of the runs.
  """
  return line.name or ("" if line.run is None else names[line.run])


def _corners(line: Line, places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
  """Yields the places that a line goes through; one of steps turns twice between two points."""
  for before, (x, y) in zip([None, *places], places, strict=False):
    if before is not None and line.style == "steps":
      yield x, before[1]
    yield x, y


def _has_dots(line: Line, points: Sequence[Any]) -> bool:
  """Returns whether each point of a line is a dot."""
  return line.style == "dots" or line.style in ("line", "steps") and len(points) <= _DOTTED


def png(chart: Chart, names: Sequence[str], path: pathlib.Path) -> None:
  """Writes a chart as a file, with its title and a legend."""
  try:
    import matplotlib
  except ImportError as e:
    raise ModuleNotFoundError("a picture needs matplotlib: pip install matplotlib") from e
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
  named = set()
  for line in chart.lines:
    points = chart.drawn(line)
    if not points:
      continue
    label = names[line.run] if line.run is not None and line.run not in named else None
    named.add(line.run)
    axes.plot(
      *zip(*points, strict=True),
      color="#999999" if line.run is None else LIGHT[line.run],
      label=label,
      linestyle={"dots": "", "dashed": (0, (4, 3))}.get(line.style, "-"),
      drawstyle="steps-post" if line.style == "steps" else "default",
      linewidth=0.8 if line.style == "thin" else 1.6,
      marker="o" if _has_dots(line, points) else "",
      markersize=3,
    )
  if chart.log:
    axes.set_yscale("log")
  if chart.labels:
    axes.set_xticks(range(len(chart.labels)), [s.replace(", ", "\n") for s in chart.labels])
  else:
    axes.xaxis.set_major_formatter(lambda x, _: number(x))
  axes.set_title(chart.title, fontsize=10)
  axes.set_xlabel(chart.x)
  axes.grid(axis="y", alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(fontsize=8, frameon=False)
  figure.savefig(path, dpi=150, metadata={"Software": None})
  plt.close(figure)
