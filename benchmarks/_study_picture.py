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
  "dense": "#222222", "sr_ste": "#d55e00", "mdgf_linear": "#009e73", "mdgf_exponential": "#0072b2",
  "sdgf_stepwise": "#b8860b",
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
  """Returns wrong phonemes over training FLOPs, one panel for each pattern."""
  figure = Figure(figsize=(9.5, 3.6), layout="constrained")
  for axes, pattern in zip(figure.subplots(1, 2, sharey=True), ("1:8", "1:16"), strict=True):
    for row in page.UNTUNED:
      cell = page.word_cell(row, pattern)
      mean, low, high = page.wrong_phonemes(cell, study)
      x, colour = page.price(cell, study), COLOURS[row.partition(",")[0]]
      axes.errorbar(
        x, mean, yerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=colour,
        mfc="white" if row == page.BASE else colour, label=page.label(row),
      )  # fmt: skip
      # The lowest row is said below its point, since the bars of others are above it.
      offset, side = ((6, -11), "left") if row == page.LINEAR else ((-5, 4), "right")
      axes.annotate(
        f"{mean:.1f}", (x, mean), offset, textcoords="offset points", ha=side, color=colour
      )
    axes.set(xlim=(0.15, 1.05), ylim=(12, 34), title=pattern, xlabel="training FLOPs of dense")
  figure.axes[0].set_ylabel("wrong phonemes, held-out words, %")
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
  return figure


def forest(study: Study) -> Figure:
  """Returns the factors of the hypotheses that are decided, with their intervals."""
  shown = [
    (verdict.hypothesis.name, shown)
    for verdict in statistic.verdicts(study)
    if verdict.word in ("supported", "contradicted")
    for shown in verdict.shown
    if shown.contrast.measure != "points"
  ]
  figure = Figure(figsize=(9.5, 0.8 + 0.36 * len(shown)), layout="constrained")
  axes = figure.subplots()
  axes.axvline(1, color="#999999", linewidth=0.8)
  for y, (_, found) in enumerate(shown):
    mean, low, high = (math.exp(x) for x in (found.mean, found.low, found.high))
    colour, fill = ("#009e73",) * 2 if found.says == "holds" else ("#d55e00", "white")
    axes.errorbar(
      mean, y, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=colour, mfc=fill
    )
  names = (f"{name}: {page.name_of(found.contrast)}" for name, found in shown)
  axes.set_yticks(range(len(shown)), [textwrap.fill(name, 68) for name in names], fontsize=8)
  axes.invert_yaxis()
  axes.set_xlabel("error over that of the control (filled: holds; not filled: fails or open)")
  return figure


def write(folder: pathlib.Path, study: Study) -> None:
  """Writes the pictures."""
  with matplotlib.rc_context(STYLE):
    for name, draw in (("recipes", price), ("contrasts", forest)):
      draw(study).savefig(folder / f"{name}.svg", metadata={"Date": None})
