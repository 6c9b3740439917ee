"""The table of rebus in docs/results.md: accuracies of finalized networks, paired by seed.

    records by run -> accuracy by row and seed -> declared pairs -> intervals, p of one family

What is asked stands below as data, and was there before the first run. `recipes.REBUS` declares
the rows, and `recipes.rebus_grid` the seeds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import _recipes_report as report
from scipy import stats

BASE = report.BASE
LEVEL = 0.05  # of the whole family of pairs
MARGIN = 5.0  # points of accuracy: two rows whose whole interval is within them count as equal
LEAST_DENSE, MOST_NO_FF = 85.0, 55.0  # percent: what the task promises
PROGRESSIVE = ("mdgf_exponential, masked", "mdgf_linear, masked", "sdgf_stepwise, masked")
AGAINST_BASE = (*PROGRESSIVE, "one_shot")


def pairs(matched: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
  """Returns the family: (row, what it is compared with).

  Args:
    matched: row -> SR-STE with as much dense exposure.
  """
  return (*((row, BASE) for row in AGAINST_BASE), *((row, matched[row]) for row in PROGRESSIVE))


def differences(a: Mapping[int, Any], b: Mapping[int, Any]) -> list[float]:
  """Returns points of accuracy of a over b, of the seeds that both have."""
  return [100 * (a[s]["accuracy"] - b[s]["accuracy"]) for s in sorted(a.keys() & b.keys())]


def t_of(d: Sequence[float]) -> float:
  """Returns the mean over its standard error; inf where all are alike and not 0."""
  mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d))
  return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0


def max_t(family: Sequence[Sequence[float]]) -> list[float]:
  """Returns the p of each member, corrected for all: sign-flip, max-T, every flip.

  A flip gives each seed a sign, the same in all members. p is the share of flips in which some
  member has a t as far from 0 as the one that was seen.

  Args:
    family: differences by seed, as many in each.
  """
  seen = [abs(t_of(d)) for d in family]
  flips = list(itertools.product((1, -1), repeat=len(family[0])))
  worst = [
    max(abs(t_of([x * s for x, s in zip(d, f, strict=True)])) for d in family) for f in flips
  ]
  return [sum(w >= t * (1 - 1e-9) for w in worst) / len(flips) for t in seen]


def interval(d: Sequence[float], members: int) -> tuple[float, float]:
  """Returns the interval of the mean by Student's t, 95 % for all members at once (Bonferroni)."""
  half = stats.t.ppf(1 - LEVEL / (2 * members), len(d) - 1) * statistics.stdev(d) / len(d) ** 0.5
  return statistics.fmean(d) - float(half), statistics.fmean(d) + float(half)


def told(p: float, low: float, high: float) -> str:
  """Returns what a comparison shows."""
  words = []
  if p < LEVEL:
    words.append("more" if low + high > 0 else "less")
  if -MARGIN < low and high < MARGIN:
    words.append(f"equal within {MARGIN:g} points")
  return ", ".join(words) or "not told"
