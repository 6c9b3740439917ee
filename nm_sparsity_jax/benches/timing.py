"""How long calls take: in turns, in one process.

calls -> [interleave] -> seconds, one figure a turn -> medians

Absolute times of a shared machine drift by half, and those of calls that take turns drift alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from nm_sparsity_jax.packed import choice

LEAST = 3  # turns
_SECONDS, _MOST = 0.02, 5  # a turn repeats a short call
_CACHE = 1 << 25  # floats, 128 MiB: more than a cache holds

_Name = TypeVar("_Name", bound=Hashable)


def threads() -> int:
  """Returns how many threads XLA multiplies with: the cores of this process, or PJRT_NPROC."""
  told = os.environ.get("PJRT_NPROC", "")
  return int(told) if told else choice.cores()


def clock() -> Callable[[], float]:
  """Returns the clock: with one thread, time that others had the core for does not count."""
  return time.process_time if threads() == 1 else time.perf_counter


def interleave(
  calls: Mapping[_Name, Callable[[], Any]], turns: int, cold: bool = False
) -> dict[_Name, list[float]]:
  """Returns the seconds of a call, one figure a turn; the first to go is another in each turn.

  Args:
    calls: name -> a call that returns when its work is done.
    turns: of each call.
    cold: other memory is read before each call, so that a weight is not in the cache.
  """
  now, repeats, found = clock(), {}, {name: [] for name in calls}
  other = np.ones(_CACHE if cold else 0, np.float32)

  def timed(name: _Name) -> float:
    if cold:
      other.max()
    start = now()
    calls[name]()
    return now() - start

  for name in calls:
    calls[name]()  # compiles
    repeats[name] = min(_MOST, max(1, round(_SECONDS / max(timed(name), 1e-9))))
  names = list(calls)
  for turn in range(turns):
    at = turn % len(names)
    for name in names[at:] + names[:at]:
      spent = [timed(name) for _ in range(repeats[name])]
      found[name].append(statistics.median(spent))
  return found
