"""The five pictures of the study: what is told, losses over time, price, gain and noise.

records, verdicts -> lines of points, or a grid of cells -> SVG; what has not run is said in it
"""

from __future__ import annotations

import html
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import _study_report as report
import _study_tests as tests
from _study import Cell, Study

WIDTH, TOP, LEFT, ROW = 720, 46, 66, 24
COLOURS = {  # that most colour-blind people tell apart
  "sr_ste": "#d55e00", "mdgf_exponential": "#0072b2", "mdgf_linear": "#009e73",
  "sdgf_stepwise": "#b8860b", "one_shot": "#7a4fb5", "dense": "#222222", "no_ff": "#6b6b6b",
}  # fmt: skip
FILLS = {"holds": "#9fd3b6", "fails": "#f0b8a0", "open": "url(#open)", "missing": "#ffffff"}
WORDS = {"holds": "holds", "fails": "fails", "open": "not told", "missing": "missing"}
PRICED = (  # task, pattern, ticks of cross-entropy
  ("bigram80", "1:16", (0.01, 0.03, 0.1, 0.3, 1, 3, 10)),
  ("bigram80", "1:32", (0.3, 1, 3, 10)),
  ("bigram160", "1:8", (2, 3, 4)),
  ("bigram160", "1:16", (2, 3, 4)),
)
COURSE = (  # of those that H7 compares, at 1:16; more lines cannot be told apart
  "sr_ste, 10 % dense", "sr_ste, 30 % dense", "mdgf_exponential, masked",
  "mdgf_linear, masked, 50 % fine-tuning", "sdgf_stepwise, masked, 50 % fine-tuning",
)  # fmt: skip
SCALES = (  # measure, what an axis says, its ticks
  ("ln cross-entropy", "factor of cross-entropy",
   {math.log(v): f"{v:g}" for v in (0.25, 0.5, 1.0, 2.0)}),
  ("points", "points of accuracy", {v: f"{v:+d}" for v in (-20, 0, 20, 40)}),
)  # fmt: skip
HATCH = (
  '<defs><pattern id="open" width="6" height="6" patternUnits="userSpaceOnUse" '
  'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4f4f4"/>'
  '<line x1="0" y1="0" x2="0" y2="6" stroke="#b5b5b5" stroke-width="2"/></pattern></defs>'
)


class Line(NamedTuple):
  """Points of one colour; joined where `joined`. `tag` is written beside each."""

  name: str
  points: Sequence[tuple[float, float]]
  joined: bool = True
  tag: str = ""


class Axis(NamedTuple):
  """What one direction shows. `ticks`: value -> what is written there."""

  name: str
  ticks: Mapping[float, str]


def text(x: float, y: float, words: str, anchor="start", size=13, colour="#222222") -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
    f"{html.escape(words)}</text>"
  )


def page(title: str, height: float, parts: Sequence[str]) -> str:
  """Returns a whole picture."""
  return "\n".join([
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
    'font-family="sans-serif">',
    f"<title>{html.escape(title)}</title>",
    f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
    HATCH, text(8, 22, title, size=15), *parts, "</svg>", "",
  ])  # fmt: skip


def colour_of(name: str) -> str:
  return COLOURS.get(name.partition(",")[0], "#444444")


def dashes_of(name: str) -> str:
  """Returns how a line is broken: with 50 % of fine-tuning or 30 % of dense steps."""
  return ' stroke-dasharray="6 4"' if "50 %" in name or "30 %" in name else ""


def chart(lines: Sequence[Line], x: Axis, y: Axis, top: float, height: float) -> list[str]:
  """Returns one chart of lines and points, or says that nothing has run."""
  right, bottom = WIDTH - 20, top + height
  parts = [text(LEFT, top - 6, y.name, size=12)]
  if not any(line.points for line in lines):
    return [*parts, text(LEFT + 20, top + height / 2, "no run of it is there", colour="#6b6b6b")]
  ends = lambda axis, at: _ends([*axis.ticks, *(p[at] for line in lines for p in line.points)])
  place = lambda value, low, high, start, end: start + (end - start) * (value - low) / (high - low)
  px: Callable[[float], float] = lambda v: place(v, *ends(x, 0), LEFT, right)
  py: Callable[[float], float] = lambda v: place(v, *ends(y, 1), bottom, top)
  for value, words in y.ticks.items():
    parts.append(
      f'<line x1="{LEFT}" x2="{right}" y1="{py(value):.1f}" y2="{py(value):.1f}" stroke="#e4e4e4"/>'
    )
    parts.append(text(LEFT - 6, py(value) + 4, words, "end", 12))
  for value, words in x.ticks.items():
    parts.append(text(px(value), bottom + 17, words, "middle", 12))
  parts.append(text(right, bottom + 34, x.name, "end", 12))
  for line in lines:
    colour = colour_of(line.name)
    dashes = dashes_of(line.name)
    at = [(px(a), py(b)) for a, b in line.points]
    if line.joined and len(at) > 1:
      path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
      parts.append(
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
      )
    if not line.joined or len(at) < 8:
      parts += [dot(line.name, a, b) for a, b in at]
      parts += [text(a, b - 8, line.tag, "middle", 10) for a, b in at if line.tag]
  return parts


def dot(name: str, x: float, y: float) -> str:
  """Returns the point of a row.

  It is hollow with 50 % of fine-tuning, a square at a constant rate, on its tip where it is tuned.
  """
  fill = "#ffffff" if "50 %" in name else colour_of(name)
  paint = f'fill="{fill}" stroke="{colour_of(name)}" stroke-width="1.5"'
  if "constant" in name or "tuned" in name:
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if "tuned" in name else ""
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {paint}{turn}/>'
  return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {paint}/>'


def _ends(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  return (low, high) if high > low else (low - 1, high + 1)


def legend(lines: Sequence[Line], top: float) -> list[str]:
  """Returns a line for each name that has a point, two in a row."""
  parts, named = [], {line.name: line for line in lines if line.points}
  for i, (name, line) in enumerate(named.items()):
    x, y = LEFT + (i % 2) * 320, top + (i // 2) * 19
    dashes = dashes_of(name)
    parts.append(
      f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" stroke="{colour_of(name)}" '
      f'stroke-width="2"{dashes}/>'
      if line.joined
      else dot(name, x + 12, y)
    )
    parts.append(text(x + 30, y + 4, name, size=12))
  return parts


def told(said: Sequence[tests.Verdict]) -> str:
  """Returns the map of all contrasts: what holds, what fails, what is not told (hatched).

  Those of a rejected task are pale, since they decide nothing.
  """
  parts, y = [], TOP
  for each in said:
    parts.append(text(8, y + 12, f"{each.hypothesis.name}: {each.word}, {each.why}", size=12))
    y += ROW
    pale = each.word == "not decided" and not each.is_open
    paint, ink = (' fill-opacity="0.3"', "#777777") if pale else ("", "#222222")
    for shown in each.shown:
      word = shown.says
      parts.append(
        f'<rect x="8" y="{y}" width="96" height="{ROW - 4}" fill="{FILLS[word]}"{paint} '
        'stroke="#888888"/>'
      )
      parts.append(text(56, y + 14, WORDS[word], "middle", 11, ink))
      first, _, beyond = report.name_of(shown).partition(", beyond ")
      first += ", points" if shown.contrast.measure == "points" else ""
      parts.append(text(112, y + 14, first, size=11))
      if beyond:
        y += 15
        parts.append(text(126, y + 14, f"beyond {beyond}", size=11))
      y += ROW
    y += 6
  return page("What the contrasts of each hypothesis tell", y + 10, parts)


def _cells(records: tests.Records, study: Study, **like: str) -> dict[Cell, list[Any]]:
  """Returns the records of each cell whose fields are those, in the order of the queue."""
  found = {}
  for cell in study.seeds:
    if all(getattr(cell, key) == wanted for key, wanted in like.items()):
      there = [records[run] for run in study.runs(cell) if run in records]
      if there:
        found[cell] = there
  return found


def rate(step: int, steps: int, constant: bool) -> float:
  """Returns the learning rate over its largest, as `_recipes_train` has it."""
  warm = max(1, steps // 10)
  if step < warm or constant:
    return min(1.0, step / warm)
  return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def course(records: tests.Records, study: Study) -> str:
  """Returns losses over time at 1:16, with D, density and rate below: means over seeds."""
  found = _cells(records, study, task="bigram160", pattern="1:16", budget="1600")
  cells = {cell: found[cell] for row in COURSE for cell in found if cell.row == row}
  steps, parts, top = {s: str(s) for s in range(0, 1601, 400)}, [], TOP + 14
  lines: list[Line] = []
  for name, ticks in (
    ("loss", {2: "2", 4: "4", 6: "6"}), ("D", {0: "0", 1: "1"}), ("density", {0: "0", 1: "1"}),
    ("rate, of the largest", {0: "0", 1: "1"}),
  ):  # fmt: skip
    lines = []
    for cell, all_seeds in cells.items():
      of_seeds = [r for r in all_seeds if not r.get("diverged")]  # whose curve ends early
      if not of_seeds:
        continue
      at = of_seeds[0]["curve"]["step"]
      if name.startswith("rate"):
        y = [rate(step, 1600, of_seeds[0]["settings"]["constant"]) for step in at]
      else:
        y = map(statistics.fmean, zip(*(r["curve"][name] for r in of_seeds), strict=True))
      lines.append(Line(cell.row, [*zip(at, y, strict=True)]))
    height = 190 if name == "loss" else 70
    parts += chart(lines, Axis("step", steps), Axis(name, ticks), top, height)
    top += height + 56
  parts += legend(lines, top)
  end = top + 19 * (len(lines) // 2 + 1)
  return page("160 symbols, 1:16: loss of training, and what decays", end, parts)


def price(records: tests.Records, study: Study) -> str:
  """Returns cross-entropy against training FLOPs at both patterns of each table."""
  parts, top, lines = [], TOP + 14, []
  for task, pattern, values in PRICED:
    lines = []
    for cell, rs in _cells(records, study, task=task, pattern=pattern).items():
      name, dense = re.subn(r", \d+ % dense$", ", with that % of dense steps", cell.row)
      tag = re.findall(r"\d+", cell.row)[0] if dense else ""
      lines.append(Line(name, [(rs[0]["flops"] / 1e12, _mean_log(rs))], joined=False, tag=tag))
    ticks = {math.log(v): f"{v:g}" for v in values}
    flops = Axis("training TFLOPs", {v: f"{v:g}" for v in (1.5, 2.0, 2.5, 3.0)})
    name = f"cross-entropy, {report.TASKS[task]}, {pattern}"
    parts += chart(lines, flops, Axis(name, ticks), top, 170)
    parts += legend(lines, top + 226)
    top += 226 + 19 * (len({line.name for line in lines}) // 2 + 2)
  return page("Price and cross-entropy, mean over seeds", top, parts)


def _mean_log(records: Sequence[Mapping[str, Any]]) -> float:
  return statistics.fmean(math.log(r["cross_entropy"]) for r in records)


def gain(records: tests.Records, study: Study) -> str:
  """Returns the gain over a control that is dense for as long, on both scales, of each table."""
  parts, top = [], TOP + 14
  for hypothesis, (measure, name, ticks) in itertools.product(("H1", "H7"), SCALES):
    found: dict[str, list[tuple[float, float]]] = {}
    contrasts = study.hypotheses[hypothesis].contrasts
    for contrast in contrasts:
      d = tests.differences(contrast._replace(measure=measure), records, study)
      if d:
        row = contrast.pair.row
        at = math.log2(int(row.pattern[2:])), statistics.fmean(d.values())
        found.setdefault(row.row, []).append(at)
    lines = [Line(name, points) for name, points in found.items()]
    patterns = dict.fromkeys(c.pair.row.pattern for c in contrasts)
    of = f"{name}, {report.TASKS[contrasts[0].pair.row.task]}"
    parts += chart(lines, _patterns(patterns), Axis(of, ticks), top, 150)
    parts += legend(lines, top + 204)
    top += 204 + 19 * (len(lines) // 2 + 2)
  return page("Gain over SR-STE that is dense for as long", top, parts)


def _patterns(names: Iterable[str]) -> Axis:
  """Returns an axis of patterns 1:m."""
  return Axis("pattern", {math.log2(int(name[2:])): name for name in names})


def noise(records: tests.Records, study: Study) -> str:
  """Returns noise across batches at the same loss against sparsity, of each table."""
  parts, top = [], TOP + 14
  for hypothesis, task in (("H4", "bigram80"), ("H10", "bigram160")):
    cells = dict.fromkeys(c for each in study.hypotheses[hypothesis].contrasts for c in each.cells)
    found: dict[str, list[tuple[float, float]]] = {}
    for cell in sorted(cells, key=lambda c: int(c.pattern[2:])):
      if values := tests.of_seeds(cell, "ln noise", records, study):
        at = math.log2(int(cell.pattern[2:])), statistics.fmean(values.values())
        found.setdefault(cell.row, []).append(at)
    lines = [
      Line(name, found[name]) for name in dict.fromkeys(c.row for c in cells) if name in found
    ]
    ticks = {math.log(v): f"{v:g}" for v in (10, 20, 40, 80, 160)}
    loss = study.declared["noise_at_loss"][task]
    of = Axis(f"noise over signal, {report.TASKS[task]}, where the loss falls to {loss:g}", ticks)
    parts += chart(lines, _patterns(("1:4", "1:8", "1:16", "1:32")), of, top, 190)
    parts += legend(lines, top + 246)
    top += 246 + 19 * (len(lines) // 2 + 2)
  return page("Noise of gradients at the same loss", top, parts)


def pictures(records: Mapping[Any, Any], study: Study) -> dict[str, str]:
  """Returns name of a file -> SVG text: the same records give the same bytes."""
  mine = {run: records[run] for run in study.queue if run in records}
  return {
    "study_told.svg": told(tests.verdicts(mine, study)),
    "study_course.svg": course(mine, study),
    "study_price.svg": price(mine, study),
    "study_gain.svg": gain(mine, study),
    "study_noise.svg": noise(mine, study),
  }
