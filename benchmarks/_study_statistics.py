"""Verdicts of the study: records -> differences by seed -> a family's p and intervals -> a verdict.

    cells by seed -> pairs -> contrast -> "holds", "fails", "open" -> supported, contradicted, ...

A hypothesis that lacks a run decides nothing. study.toml says the rules.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from _study import Cell, Contrast, Hypothesis, Pair, Study
from scipy import stats


class Shown(NamedTuple):
  """What one contrast shows.

  Attributes:
    contrast: that was asked.
    differences: seed -> difference.
    low: end of the interval for all contrasts of the family at once.
    high: the other end.
    p: corrected for the family.
    says: "holds", "fails" or "open".
  """

  contrast: Contrast
  differences: dict[int, float]
  low: float
  high: float
  p: float
  says: str

  @property
  def mean(self) -> float:
    return statistics.fmean(self.differences.values())


class Verdict(NamedTuple):
  """What a hypothesis comes to.

  Attributes:
    hypothesis: that was asked.
    word: "supported", "contradicted", "not decided" or "not run yet".
    why: what decided.
    shown: its contrasts.
  """

  hypothesis: Hypothesis
  word: str
  why: str
  shown: tuple[Shown, ...]


def max_t(d) -> np.ndarray:
  """Returns the p of each contrast, corrected for all: sign-flip, max-T, every flip.

  A flip gives each seed a sign, the same in all contrasts. p is the share of flips in which some
  contrast has a t as far from 0 as the one that was seen.

  Args:
    d: differences [seeds, contrasts].
  """
  d = np.asarray(d)
  signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
  # Flips leave the squares as they are, so t grows with the mean over their root.
  with np.errstate(invalid="ignore"):  # 0 / 0 where no seed differs: a t of 0
    t = np.nan_to_num(np.abs(signs @ d) / np.sqrt(np.square(d).sum(0)))
  return (t.max(1)[:, None] >= t[0] * (1 - 1e-9)).mean(0)


def interval(x: Sequence[float], level: float, members: int = 1) -> tuple[float, float]:
  """Returns the interval of the mean by Student's t, for all members at once (Bonferroni)."""
  mean, error = statistics.fmean(x), statistics.stdev(x) / len(x) ** 0.5
  half = float(stats.t.ppf(1 - level / (2 * members), len(x) - 1)) * error
  return mean - half, mean + half


def noise_at(curve: Mapping[str, Sequence[float]], loss: float, since: float = 0) -> float | None:
  """Returns ln(noise) where a run first falls to a loss; None where it does not.

  Between the two samples ln(noise) is taken as linear in the loss.

  Args:
    curve: steps, losses and noise.
    loss: where noise is read.
    since: a step; samples before it are passed over.
  """
  points = zip(curve["step"], curve["noise_loss"], curve["noise"], strict=True)
  # A run that diverges has no noise from there on.
  points = [(x, noise) for step, x, noise in points if step >= since and x and noise]
  for (above, first), (below, second) in itertools.pairwise(points):
    if above > loss >= below:
      share = (above - loss) / (above - below)
      return math.log(first) * (1 - share) + math.log(second) * share
  return None


def hard_since(record: Mapping[str, Any]) -> float:
  """Returns the step from which no pruned weight takes part in a run."""
  row = record["settings"]
  percent = 100 - row["finetune"] if row["gradient"] else row["dense"]
  return record["steps"] * percent / 100


def value(record: Mapping[str, Any], measure: str, task: str, study: Study) -> float | None:
  """Returns what is measured of a run."""
  if measure == "points":
    return 100 * record["accuracy"]
  if measure == "BLEU":
    return record["bleu"]
  if measure == "ln noise":
    at = study.declared["noise_at_loss"].get(task)
    return noise_at(record["curve"], at) if at and "noise" in record["curve"] else None
  if measure == "ln noise of hard masks":
    at = study.declared["noise_of_hard_masks_at_loss"][record["pattern"]]
    return noise_at(record["curve"], at, hard_since(record))
  return math.log(record[measure.removeprefix("ln ").replace(" ", "_").replace("-", "_")])


def of_seeds(cell: Cell, measure: str, study: Study) -> dict[int, float]:
  """Returns seed -> what is measured, of the runs that have it."""
  records = {run.seed: study.records[run] for run in study.runs(cell)}
  found = {seed: value(r, measure, cell.task, study) for seed, r in records.items()}
  return {seed: x for seed, x in found.items() if x is not None}


def _pair(pair: Pair, measure: str, study: Study) -> dict[int, float]:
  row, over = (of_seeds(cell, measure, study) for cell in pair)
  return {seed: row[seed] - over[seed] for seed in row if seed in over}


def differences(contrast: Contrast, study: Study) -> dict[int, float]:
  """Returns seed -> difference: each seed of a row against the same seed of the other."""
  found = _pair(contrast.pair, contrast.measure, study)
  if contrast.beyond:
    less = _pair(contrast.beyond, contrast.measure, study)
    found = {seed: x - less[seed] for seed, x in found.items() if seed in less}
  return found


def says(contrast: Contrast, mean: float, low: float, high: float, p: float, study: Study) -> str:
  """Returns "holds", "fails" or "open" of one contrast, by the rules of study.toml."""
  declared = study.declared
  margins = {"points": declared["margin_points"], "BLEU": declared["margin_bleu"]}
  margin = margins.get(contrast.measure, math.log(1 + declared["margin_ratio"]))
  is_significant = p < declared["level"]
  if contrast.expect == "not more":
    return "holds" if high < margin else "fails" if is_significant and mean > 0 else "open"
  if contrast.expect == "more":
    mean, low = -mean, -high
  if low > -margin:
    return "fails"
  return "holds" if is_significant and mean < 0 else "open"


def family(contrasts: Sequence[Contrast], study: Study) -> tuple[Shown, ...]:
  """Returns what the contrasts of one family show, corrected for all of them."""
  found = [differences(contrast, study) for contrast in contrasts]
  ps = max_t([[d[seed] for d in found] for seed in study.seeds[contrasts[0].pair.row]])
  shown = []
  for contrast, d, p in zip(contrasts, found, ps, strict=True):
    ends = interval([*d.values()], study.declared["level"], len(found))
    word = says(contrast, statistics.fmean(d.values()), *ends, p, study)
    shown.append(Shown(contrast, d, *ends, p, word))
  return tuple(shown)


def verdict(hypothesis: Hypothesis, study: Study) -> Verdict:
  """Returns what a hypothesis comes to: nothing is decided where a gate is shut."""
  runs = [run for cell in hypothesis.cells for run in study.runs(cell)]
  if lost := sum(run not in study.records for run in runs):
    return Verdict(hypothesis, "not run yet", f"{lost} of {len(runs)} runs are missing", ())
  if any(len(differences(c, study)) < len(study.seeds[c.pair.row]) for c in hypothesis.contrasts):
    return Verdict(hypothesis, "not decided", "a run does not have what is measured", ())
  shown = family(hypothesis.contrasts, study)
  word, why = decided(hypothesis.needs, shown)
  for gate in hypothesis.gates:
    row, over = gate.pair
    gap = -statistics.fmean(_pair(gate.pair, "points", study).values())  # points behind
    if gap < gate.points:
      where = " at the same training FLOPs" if row.budget != over.budget else ""
      side = "behind" if gap >= 0 else "ahead of"
      rejected = f"{row.row}{where} is {abs(gap):.1f} points {side} {over.row}"
      why = f"the task is rejected: {rejected} ({why})"
      return Verdict(hypothesis, "not decided", why, shown)
  return Verdict(hypothesis, word, why, shown)


def decided(needs: str, shown: Sequence[Shown]) -> tuple[str, str]:
  """Returns the word of a whole family, and how many contrasts, or rows, made it."""
  asked = {}
  for each in shown:
    one = each.contrast.pair.row if needs == "any row" else each.contrast
    asked.setdefault(one, set()).add(each.says)
  # A row is as good as the worst that it shows.
  words = [min(said, key=("fails", "open", "holds").index) for said in asked.values()]
  holds, fails, n = words.count("holds"), words.count("fails"), len(words)
  why = f"{holds} of {n} hold, {fails} fail, {n - holds - fails} are open"
  supported = holds == n if needs == "all" else holds > 0
  contradicted = fails > 0 if needs == "all" else fails == n
  return "supported" if supported else "contradicted" if contradicted else "not decided", why


def verdicts(study: Study) -> list[Verdict]:
  """Returns all verdicts in the order of study.toml."""
  return [verdict(each, study) for each in study.hypotheses.values()]
