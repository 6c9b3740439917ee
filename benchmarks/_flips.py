"""Tests of paired differences: sign-flip max-T over a family, and intervals for all of it at once.

differences by seed, one mapping a member -> p of each member; the interval of each mean
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from scipy import stats

LEVEL = 0.05  # of a whole family


def t_of(d: Sequence[float]) -> float:
  """Returns the mean over its standard error; inf where all are alike and not 0."""
  mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(len(d))
  return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0


def max_t(family: Sequence[Mapping[int, float]]) -> list[float]:
  """Returns the p of each member, corrected for all: sign-flip, max-T, every flip.

  A flip gives each seed a sign, the same in all members. p is the share of flips in which some
  member has a t as far from 0 as the one that was seen.

  Args:
    family: differences by seed, of two seeds and more.
  """
  seeds = sorted({seed for d in family for seed in d})
  seen, worst = [abs(t_of([*d.values()])) for d in family], []
  for signs in itertools.product((1, -1), repeat=len(seeds)):
    sign = dict(zip(seeds, signs, strict=True))
    worst.append(max(abs(t_of([x * sign[s] for s, x in d.items()])) for d in family))
  return [sum(w >= t * (1 - 1e-9) for w in worst) / len(worst) for t in seen]


def interval(x: Sequence[float], members: int = 1) -> tuple[float, float]:
  """Returns the interval of the mean by Student's t, 95 % for all members at once (Bonferroni)."""
  mean = statistics.fmean(x)
  if len(x) < 2:
    return mean, mean
  half = stats.t.ppf(1 - LEVEL / (2 * members), len(x) - 1) * statistics.stdev(x) / len(x) ** 0.5
  return mean - float(half), mean + float(half)
