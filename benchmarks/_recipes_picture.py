"""The picture of the README: accuracy of the finalized network over the pattern, by recipe.

records of benchmarks/recipes.py -> tables -> [picture] -> one SVG of two panels
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import _recipes_report as report

PANELS = (("bigram", "400"), ("bigram80", "1600"))
PATTERNS = ("1:4", "1:8", "1:16", "1:32")
# Row -> the name that a reader knows, and a colour that most colour-blind people tell apart.
LINES = {
  "mdgf_exponential, masked": ("mdgf_exponential", "#0072b2"),
  "mdgf_linear, masked": ("mdgf_linear", "#009e73"),
  "sdgf_stepwise, masked": ("sdgf_stepwise", "#b8860b"),
  "sr_ste, 10 % dense": ("sr_ste", "#d55e00"),
  "one_shot": ("one_shot", "#7a4fb5"),
}
BOUNDS = {"dense": "dense", "no_ff": "without feed-forward layers"}

WIDTH, HEIGHT, TOP, BOTTOM, LEFT, PANEL = 880, 330, 44, 44, 52, 280


class Panel(NamedTuple):
  """What one panel shows.

  Attributes:
    title: the task and the steps.
    lines: row -> its accuracy in percent at each of PATTERNS.
    bounds: row without a pattern -> its accuracy in percent.
  """

  title: str
  lines: dict[str, list[float]]
  bounds: dict[str, float]


def panels(tables: Sequence[report.Table]) -> list[Panel]:
  """Returns the mean accuracy over seeds for each panel; refuses a missing row by name."""
  at = {(t.task, t.budget, t.pattern): t for t in tables}
  found = []
  for task, budget in PANELS:
    mine = [at[task, budget, pattern] for pattern in PATTERNS]
    mean = lambda table, row: _mean(table.rows[row], row, table.title)
    title = "Table of " + mine[0].title.replace(f", {PATTERNS[0]},", ",")
    lines = {row: [mean(table, row) for table in mine] for row in LINES}
    found.append(Panel(title, lines, {row: mean(mine[-1], row) for row in BOUNDS}))
  return found


def _mean(records: Mapping[int, Any], row: str, title: str) -> float:
  if not records:
    raise ValueError(f"no results of {row!r} in {title!r}: run benchmarks/recipes.py first.")
  return report.mean_accuracy(records.values())


def svg(drawn: Sequence[Panel]) -> str:
  """Returns the picture as SVG text: the same panels give the same bytes."""
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
    'font-family="sans-serif" font-size="12">',
    "<title>Accuracy of the finalized network by pattern and recipe, mean over seeds</title>",
    f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
  ]
  for i, panel in enumerate(drawn):
    parts += _panel(panel, LEFT + i * (PANEL + 60))
  parts += _legend(LEFT + 2 * (PANEL + 60) - 24)
  return "\n".join([*parts, "</svg>", ""])


def _y(accuracy: float) -> float:
  return TOP + (HEIGHT - TOP - BOTTOM) * (1 - accuracy / 100)


def _panel(panel: Panel, left: float) -> Iterator[str]:
  right = left + PANEL
  yield _text(left, 22, panel.title, weight="bold")
  for accuracy in range(0, 101, 25):
    y = _y(accuracy)
    yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
    yield _text(left - 8, y + 4, f"{accuracy} %", anchor="end")
  x = lambda i: left + 30 + i * (PANEL - 60) / (len(PATTERNS) - 1)
  for i, pattern in enumerate(PATTERNS):
    yield _text(x(i), HEIGHT - BOTTOM + 20, pattern, anchor="middle")
  for row, accuracy in panel.bounds.items():
    y = _y(accuracy)
    x_said, anchor = (right - 4, "end") if row == "dense" else (left + 4, "start")
    yield _text(x_said, y + 14, BOUNDS[row], anchor, colour="#6b6b6b")
    yield (
      f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#6b6b6b" '
      'stroke-dasharray="5 4"/>'
    )
  for row, values in panel.lines.items():
    name, colour = LINES[row]
    places = [(x(i), _y(value)) for i, value in enumerate(values)]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (px, py), value, pattern in zip(places, values, PATTERNS, strict=True):
      said = f"<title>{html.escape(f'{name}, {pattern}: {value:.1f} %')}</title>"
      yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}">{said}</circle>'


def _legend(left: float) -> Iterator[str]:
  for i, (name, colour) in enumerate(LINES.values()):
    y = TOP + 10 + 22 * i
    yield (
      f'<line x1="{left}" x2="{left + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
    )
    yield f'<circle cx="{left + 11}" cy="{y}" r="3.5" fill="{colour}"/>'
    yield _text(left + 30, y + 4, name)


def _text(
  x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", colour="#222222"
) -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
    f'fill="{colour}">{html.escape(text)}</text>'
  )
