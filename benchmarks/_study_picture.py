"""The pictures of the study: price against score on words, and the contrasts that are decided.

records -> cells, verdicts -> matplotlib -> docs/recipes.svg, docs/contrasts.svg
"""

from __future__ import annotations

import math
import pathlib
import textwrap

import _study_page as page
import _study_statistics as statistic
import matplotlib
from _study import Study
from matplotlib.figure import Figure

# Colours that most colour-blind people tell apart.
COLOURS = {
  "dense": "#222222", "sr_ste": "#d55e00", "mdgf_linear": "#009e73",
  "mdgf_exponential": "#cc79a7", "s_ste": "#0072b2",
}  # fmt: skip
# Where the scores of near rows stand, so that none covers another.
BESIDE = {
  ("sr_ste", "1:8"): ((-6, 4), "right"), ("sr_ste", "1:16"): ((-6, 4), "right"),
  ("sr_ste, decoupled", "1:8"): ((6, -10), "left"),
  ("sr_ste, decoupled", "1:16"): ((6, -10), "left"),
  (page.CHOSEN, "1:8"): ((3, -17), "left"),
}  # fmt: skip
STYLE = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "nm-sparsity-jax",  # the same records give the same file
  "font.family": "sans-serif",
  "font.size": 9,
  "axes.spines.top": False,
  "axes.spines.right": False,
}


def price(study: Study) -> Figure:
  """Returns wrong phonemes of tuned rows over training FLOPs, one panel for each pattern."""
  figure = Figure(figsize=(9.5, 3.6), layout="constrained")
  for axes, pattern in zip(figure.subplots(1, 2, sharey=True), ("1:8", "1:16"), strict=True):
    for row in page.WORDS.rows:
      cell = page.WORDS.tuned(row, pattern)
      dense = page.WORDS.tuned("dense", pattern)
      is_whole = page.is_whole(cell, study) and page.is_whole(dense, study)
      if pattern not in page.WORDS.patterns(row) or not is_whole:
        continue
      mean, low, high = page.score(cell, study)
      recipe, _, form = row.partition(",")
      colour = COLOURS[recipe.partition(" of ")[0]]
      # The two forms of SR-STE cost the same: side by side both are seen.
      x = page.price(cell, dense, study) + (0.03 if "decoupled" in form else 0)
      is_hollow = "decoupled" in form or row in page.SMALL
      axes.errorbar(
        x, mean, yerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=colour,
        mfc="white" if is_hollow else colour,
        label="dense, as small as the sparse" if row in page.SMALL else row,
      )  # fmt: skip
      offset, side = BESIDE.get((row, pattern), ((6, 4), "left"))
      axes.annotate(
        f"{mean:.1f}", (x, mean), offset, textcoords="offset points", ha=side, color=colour
      )
    axes.set(xlim=(0, 1.1), title=pattern, xlabel="training FLOPs of dense")
  figure.axes[0].set_ylabel("wrong phonemes, held-out words, %")
  handles = {}
  for axes in figure.axes:
    handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  figure.legend(handles.values(), handles, loc="outside right upper")
  return figure


def forest(study: Study) -> Figure:
  """Returns the contrasts of tuned rows that are decided, with their intervals."""
  decided = [
    (verdict.hypothesis.name, shown)
    for verdict in statistic.verdicts(study)
    if verdict.word in ("supported", "contradicted")
    for shown in verdict.shown
    if "tuned" in shown.contrast.pair.row.row
  ]
  panels = {
    "wrong phonemes, over those of the control": "ln phoneme error rate",
    "points of BLEU over the control": "BLEU",
  }
  parts = [[(n, x) for n, x in decided if x.contrast.measure == of] for of in panels.values()]
  figure = Figure(figsize=(9.5, 1.4 + 0.36 * sum(map(len, parts))), layout="constrained")
  panes = figure.subplots(len(parts), height_ratios=[len(part) for part in parts])
  for axes, part, label in zip(panes, parts, panels, strict=True):
    is_points = "BLEU" in label
    axes.axvline(0 if is_points else 1, color="#999999", linewidth=0.8)
    for y, (_, found) in enumerate(part):
      at = (found.mean, found.low, found.high)
      mean, low, high = at if is_points else map(math.exp, at)
      colour, fill = ("#009e73",) * 2 if found.says == "holds" else ("#d55e00", "white")
      axes.errorbar(
        mean, y, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=colour, mfc=fill
      )
    names = (f"{name}: {page.name_of(found.contrast)}" for name, found in part)
    axes.set_yticks(range(len(part)), [textwrap.fill(name, 68) for name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{label} (filled: holds; not filled: fails or open)")
  return figure


def write(folder: pathlib.Path, study: Study) -> None:
  """Writes the pictures."""
  with matplotlib.rc_context(STYLE):
    for name, draw in (("recipes", price), ("contrasts", forest)):
      draw(study).savefig(folder / f"{name}.svg", metadata={"Date": None})
