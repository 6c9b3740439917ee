"""How long calls take: in turns, in one process; and the table of what was found.

Absolute times of a shared machine drift by half, and those of calls that take turns drift alike.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.text import columns

_SECONDS, _MOST = 0.02, 5  # a turn repeats a short call
CACHE = 1 << 27  # bytes, 128 MiB: more than a cache holds


@dataclasses.dataclass(frozen=True)
class Timing:
  """What one thing takes, with dense weights in float32 and with packed ones.

  Attributes:
    what: a product such as '1,024 x 4,096, 1 row', or what a network computes at once.
    dense: seconds, the median of all turns.
    packed: the same with packed weights.
    times: how many times faster it is with packed weights.
    dense_bytes: of a product its weight; of a network the weights and temporaries that its program
      holds at most, as XLA says.
    packed_bytes: the same with packed weights.
    ways: of a product the fastest dense one, and the packed one.
  """

  what: str
  dense: float
  packed: float
  times: float
  dense_bytes: int
  packed_bytes: int
  ways: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
  """What a bench found; its `str` is a table.

  Attributes:
    title: what was looked at.
    timings: one for each thing that was timed.
    threads: that XLA multiplies with.
    turns: of each call.
  """

  title: str
  timings: Sequence[Timing]
  threads: int
  turns: int

  def __str__(self) -> str:
    head = "", "dense, us", "packed, us", "faster", "dense, bytes", "packed, bytes", ""
    rows = [
      [
        t.what, f"{t.dense * 1e6:,.1f}", f"{t.packed * 1e6:,.1f}", f"{t.times:.2f}x",
        f"{t.dense_bytes:,}", f"{t.packed_bytes:,}", t.ways,
      ]
      for t in self.timings
    ]  # fmt: skip
    clock = "processor time" if self.threads == 1 else "time of the clock"
    how = f"{self.threads} threads, {clock}, medians of {self.turns} turns; dense is float32."
    return "\n".join([self.title, how, "", *columns([head, *rows])])


def threads() -> int:
  """Returns how many threads XLA multiplies with: the cores of this process, or PJRT_NPROC."""
  return int(os.environ.get("PJRT_NPROC") or installed.cores())


def interleave(
  calls: Mapping[str, Callable[[], Any]], turns: int, cold: int = 0
) -> dict[str, float]:
  """Returns the median seconds of each call; the first to go is another one in each turn.

  Args:
    calls: name -> a call that returns when its work is done.
    turns: of each call.
    cold: bytes of other memory that are read before each call, so that no weight is in the cache.
  """
  # With one thread, time that others had the core for does not count.
  now = time.process_time if threads() == 1 else time.perf_counter
  repeats, found = {}, {name: [] for name in calls}
  other = np.ones(cold // 4, np.float32)

  def timed(name: str) -> float:
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
      found[name].append(statistics.median(timed(name) for _ in range(repeats[name])))
  return {name: statistics.median(times) for name, times in found.items()}
