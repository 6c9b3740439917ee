"""The two pictures of the study: every decided contrast, and price against score on words.

records -> verdicts, cells -> matplotlib -> docs/study_contrasts.svg, docs/recipes.svg
"""

from __future__ import annotations

import math
import pathlib

import _study_page as page
import _study_statistics as statistic
import matplotlib
from _study import Study
from matplotlib.figure import Figure

# Colours that most colour-blind people tell apart.
COLOURS = {
  "dense": "#222222", "sr_ste": "#d55e00", "mdgf_linear": "#009e73", "mdgf_exponential": "#0072b2",
  "sdgf_stepwise": "#b8860b", "holds": "#009e73", "fails": "#d55e00",
}  # fmt: skip
STYLE = {
  "svg.fonttype": "none",  # text stays text
  "svg.hashsalt": "nm-sparsity-jax",  # the same records give the same file
  "font.family": "sans-serif",
  "font.size": 9,
  "axes.spines.top": False,
  "axes.spines.right": False,
}


def contrasts(study: Study) -> Figure:
  """Returns the forest plot: factors of all contrasts of the hypotheses that are decided."""
  shown = [
    (verdict.hypothesis.name, each)
    for verdict in statistic.verdicts(study)
    if verdict.word != "not decided"
    for each in verdict.shown
    if each.contrast.measure != "points"
  ]
  figure = Figure(figsize=(10, 0.3 * len(shown) + 1.1))
  axes = figure.subplots(gridspec_kw=dict(left=0.53, right=0.85, bottom=0.11, top=0.94))
  margin = study.declared["margin_ratio"]
  axes.axvspan(1 / (1 + margin), 1 + margin, color="#eeeeee")
  axes.axvline(1, color="#888888", linewidth=0.8)
  for y, (_, each) in enumerate(shown):
    mean, low, high = (math.exp(x) for x in (each.mean, each.low, each.high))
    fill = COLOURS[each.says] if each.says == "holds" else "white"
    axes.errorbar(
      mean, y, xerr=[[mean - low], [high - mean]], fmt="o", color=COLOURS[each.says], mfc=fill
    )
    axes.annotate(
      page.mean_of(each), (1, y), (6, -3), xycoords=("axes fraction", "data"),
      textcoords="offset points",
    )  # fmt: skip
  said = lambda name, each: f"{name}  {page.name_of(each.contrast)}".replace(", beyond", "\nbeyond")
  axes.set_yticks(range(len(shown)), [said(*each) for each in shown], fontsize=8, linespacing=0.95)
  axes.set(xscale="log", ylim=(len(shown) - 0.5, -0.5), xlabel="factor of the error, log scale")
  ticks = (0.7, 0.8, 0.9, 1, 1.1, 1.2)
  axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
  axes.minorticks_off()
  axes.set_title("filled: holds, hollow: fails; grey: equal within 5 %", fontsize=9, loc="left")
  return figure


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
  """Writes both pictures."""
  with matplotlib.rc_context(STYLE):
    for name, draw in (("study_contrasts.svg", contrasts), ("recipes.svg", price)):
      draw(study).savefig(folder / name, metadata={"Date": None})
