"""Verdicts of the study: records -> differences by seed -> a family's p and intervals -> a verdict.

    cells by seed -> pairs -> contrast -> "holds", "fails", "open" -> supported, contradicted, ...

Nothing is decided before all runs of a family are there. study.toml says the rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import _flips
from _recipes_rows import Run
from _study import Cell, Contrast, Gate, Hypothesis, Pair, Study

Records = Mapping[Run, Mapping[str, Any]]


class Shown(NamedTuple):
  """What one contrast shows.

  Attributes:
    contrast: that was asked.
    differences: seed -> difference, of the seeds whose runs are all there.
    low: end of the interval for all contrasts of the family at once; None below two seeds.
    high: the other end.
    p: corrected for the family, None before all of it is there.
    says: "holds", "fails", "open", or "missing" before the family is whole.
  """

  contrast: Contrast
  differences: dict[int, float]
  low: float | None
  high: float | None
  p: float | None
  says: str

  @property
  def mean(self) -> float | None:
    return statistics.fmean(self.differences.values()) if self.differences else None


class Verdict(NamedTuple):
  """What a hypothesis comes to.

  Attributes:
    hypothesis: that was asked.
    word: "supported", "contradicted" or "not decided".
    why: what decided, or what is missing.
    shown: its contrasts.
    there: runs that are there.
    wanted: runs of its contrasts and gates.
  """

  hypothesis: Hypothesis
  word: str
  why: str
  shown: tuple[Shown, ...]
  there: int
  wanted: int
  is_open: bool  # all runs are there and the task ranks; still no word


def noise_at(curve: Mapping[str, Sequence[float]], loss: float) -> float | None:
  """Returns ln(noise) where a run first falls to a loss; None where it does not.

  Between the two samples ln(noise) is taken as linear in the loss.
  """
  points = list(zip(curve["noise_loss"], curve["noise"], strict=True))
  for (above, first), (below, second) in zip(points, points[1:], strict=False):
    if above > loss >= below:
      share = (above - loss) / (above - below)
      return math.log(first) * (1 - share) + math.log(second) * share
  return None


def value(record: Mapping[str, Any], measure: str, task: str, study: Study) -> float | None:
  """Returns what is measured of a run."""
  if measure == "points":
    return 100 * record["accuracy"]
  if measure == "ln noise":
    at = study.declared["noise_at_loss"].get(task)
    is_there = at and "noise" in record["curve"]  # diverged runs may lack it
    return noise_at(record["curve"], at) if is_there else None
  return math.log(record[measure.removeprefix("ln ").replace(" ", "_").replace("-", "_")])


def of_seeds(cell: Cell, measure: str, records: Records, study: Study) -> dict[int, float]:
  """Returns seed -> what is measured, of the runs that are there and have it."""
  runs = [run for run in study.runs(cell) if run in records]
  found = {run.seed: value(records[run], measure, cell.task, study) for run in runs}
  return {seed: x for seed, x in found.items() if x is not None}


def _pair(pair: Pair, measure: str, records: Records, study: Study) -> dict[int, float]:
  row, over = (of_seeds(cell, measure, records, study) for cell in pair)
  return {seed: row[seed] - over[seed] for seed in row if seed in over}


def differences(contrast: Contrast, records: Records, study: Study) -> dict[int, float]:
  """Returns seed -> difference: each seed of a row against the same seed of the other."""
  found = _pair(contrast.pair, contrast.measure, records, study)
  if contrast.beyond:
    less = _pair(contrast.beyond, contrast.measure, records, study)
    found = {seed: x - less[seed] for seed, x in found.items() if seed in less}
  return found


def margin(contrast: Contrast, study: Study) -> float:
  """Returns how far from 0 still counts as equal, on the scale of the contrast."""
  if contrast.measure == "points":
    return study.declared["margin_points"]
  return math.log(1 + study.declared["margin_ratio"])


def says(expect: str, p: float, mean: float, low: float, high: float, within: float) -> str:
  """Returns "holds", "fails" or "open" of one contrast, by the rules of study.toml."""
  if expect == "not more":
    if high < within:
      return "holds"
    return "fails" if p < _flips.LEVEL and mean > 0 else "open"
  if expect == "more":
    mean, low, high = -mean, -high, -low
  if low > -within:
    return "fails"
  return "holds" if p < _flips.LEVEL and mean < 0 else "open"


def family(contrasts: Sequence[Contrast], records: Records, study: Study) -> tuple[Shown, ...]:
  """Returns what the contrasts of one family show, corrected for all of them."""
  found = [differences(contrast, records, study) for contrast in contrasts]
  wanted = [set(study.seeds[contrast.pair.row]) for contrast in contrasts]
  is_whole = all(d.keys() == seeds for d, seeds in zip(found, wanted, strict=True))
  ps = _flips.max_t(found) if is_whole else [None] * len(found)
  shown = []
  for contrast, d, p in zip(contrasts, found, ps, strict=True):
    low, high = _flips.interval([*d.values()], len(found)) if len(d) > 1 else (None, None)
    word = "missing"
    if p is not None and low is not None and high is not None:
      mean = statistics.fmean(d.values())
      word = says(contrast.expect, p, mean, low, high, margin(contrast, study))
    shown.append(Shown(contrast, d, low, high, p, word))
  return tuple(shown)


def behind(gate: Gate, records: Records, study: Study) -> float | None:
  """Returns the points by which a gate's row is behind; None before all of its runs are there."""
  d = _pair(gate.pair, "points", records, study)
  is_whole = len(d) == len(study.seeds[gate.pair.row])
  return 0.0 - statistics.fmean(d.values()) if is_whole else None


def verdict(hypothesis: Hypothesis, records: Records, study: Study) -> Verdict:
  """Returns what a hypothesis comes to; nothing is decided before all of its runs are there."""
  runs = [run for cell in hypothesis.cells for run in study.runs(cell)]
  there = sum(run in records for run in runs)
  shown = family(hypothesis.contrasts, records, study)
  word, why, is_open = "not decided", "", False
  gaps = [(gate, behind(gate, records, study)) for gate in hypothesis.gates]
  if there < len(runs):
    why = f"{there} of {len(runs)} runs are there"
  elif any(each.says == "missing" for each in shown):
    why = "some runs never have what is measured"
  elif closed := [(gate, gap) for gate, gap in gaps if gap is None or gap < gate.points]:
    why = f"the task is rejected: {_closed(*closed[0])}"
  else:
    word, why = decided(hypothesis.needs, [each.says for each in shown])
    is_open = word == "not decided"
  return Verdict(hypothesis, word, why, shown, there, len(runs), is_open)


def _closed(gate: Gate, gap: float | None) -> str:
  """Says why a gate is shut."""
  row, over = gate.pair
  where = " at the same training FLOPs" if row.budget != over.budget else ""
  if gap is None:  # a run of it has no score
    return f"{row.row}{where} was not compared with {over.row}"
  return (
    f"{row.row}{where} is {abs(gap):.1f} points {'behind' if gap >= 0 else 'ahead of'} {over.row}"
  )


def decided(needs: str, words: Sequence[str]) -> tuple[str, str]:
  """Returns the word of a whole family, and how many contrasts made it."""
  holds, fails, n = words.count("holds"), words.count("fails"), len(words)
  why = f"of {n} contrasts {holds} hold, {fails} fail, {n - holds - fails} are open"
  supported = holds > 0 if needs == "any" else holds == n
  contradicted = fails == n if needs == "any" else fails > 0
  return "supported" if supported else "contradicted" if contradicted else "not decided", why


def verdicts(records: Records, study: Study) -> list[Verdict]:
  """Returns all verdicts in the order of study.toml."""
  return [verdict(each, records, study) for each in study.hypotheses.values()]


def answer(name: str, said: Sequence[Verdict]) -> Verdict:
  """Returns what is known best of a hypothesis, or of one that asks it again.

  A decided one comes first, then one whose task ranks and whose contrasts are open, then its own.
  """
  asked = [v for v in said if name in (v.hypothesis.name, v.hypothesis.again)]
  asked.sort(key=lambda v: v.hypothesis.name != name)
  known = lambda v: (v.word != "not decided", v.is_open)
  return max(asked, key=known)
