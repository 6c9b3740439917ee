"""The picture of the study: price against score on words.

records -> cells -> matplotlib -> docs/recipes.svg
"""

from __future__ import annotations

import pathlib

import _study_page as page
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
  for axes, pattern in zip(figure.subplots(1, 2, sharey=True), page.PATTERNS, strict=True):
    for row in page.CHOICE:
      mean, low, high = page.wrong_phonemes(row, pattern, study)
      x, colour = page.price(row, pattern, study), COLOURS[row.partition(",")[0]]
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


def write(folder: pathlib.Path, study: Study) -> None:
  """Writes the picture."""
  with matplotlib.rc_context(STYLE):
    price(study).savefig(folder / "recipes.svg", metadata={"Date": None})
