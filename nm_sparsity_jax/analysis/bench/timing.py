"""How long calls take: in turns, in one process.

Absolute times of a shared machine drift by half, and those of calls that take turns drift alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from nm_sparsity_jax.core import installed

_SECONDS, _MOST = 0.02, 5  # a turn repeats a short call
CACHE = 1 << 27  # bytes, 128 MiB: more than a cache holds

_Name = TypeVar("_Name", bound=Hashable)


def threads() -> int:
  """Returns how many threads XLA multiplies with: the cores of this process, or PJRT_NPROC."""
  cores = os.environ.get("PJRT_NPROC", "")
  return int(cores) if cores else installed.cores()


def interleave(
  calls: Mapping[_Name, Callable[[], Any]], turns: int, cold: int = 0, nothing: Any = None
) -> dict[_Name, list[float]]:
  """Returns the seconds of a call, one figure a turn; the first to go is another in each turn.

  Args:
    calls: name -> a call that returns when its work is done.
    turns: of each call.
    cold: bytes of other memory that are read before each call, so that no weight is in the cache.
    nothing: the name of a call without work. Where `cold` is given it goes before each call, so
      that what starts a call is in the cache again.
  """
  # With one thread, time that others had the core for does not count.
  now = time.process_time if threads() == 1 else time.perf_counter
  repeats, found = {}, {name: [] for name in calls}
  other = np.ones(cold // 4, np.float32)

  def timed(name: _Name) -> float:
    if cold:
      other.max()
    if cold and nothing in calls:
      calls[nothing]()
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
