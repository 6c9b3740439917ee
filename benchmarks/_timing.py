"""How the benchmarks here measure: one pinned core, candidates in turn, medians and intervals.

Absolute times of a shared machine drift by half; ratios of candidates that took turns in one
process do not. So every table gives ratios from one run. On a pinned core the clock is the time
that the process had the processor: what others got meanwhile does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping

clock = time.perf_counter


def parser(doc: str, core: int = 1, blocks: int = 9) -> argparse.ArgumentParser:
  """Returns a parser with the options that the benchmarks share."""
  made = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  made.add_argument("--core", type=int, default=core, help="processor to run on")
  made.add_argument("--blocks", type=int, default=blocks, help="turns of each candidate")
  made.add_argument("--json", help="write the rows to this file")
  return made


def pin(core: int) -> None:
  """Runs this process on one core. Call it before jax is imported."""
  if "jax" in sys.modules:
    raise RuntimeError(
      "pin the process before importing jax: its thread pools are sized at import."
    )
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {core})
    global clock
    clock = time.process_time
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()


def interleave(
  candidates: Mapping[str, Callable[[], object]], blocks: int = 9, seconds: float = 0.01
) -> dict[str, list[float]]:
  """Returns seconds per call of each candidate, one figure a block; candidates take turns.

  Args:
    candidates: name -> a call that returns when its work is done.
    blocks: how many turns each one gets.
    seconds: calls are repeated within a turn until they last about this long.
  """
  repeats = {}
  for name, call in candidates.items():
    call()  # compile and warm up
    start = clock()
    call()
    repeats[name] = max(1, round(seconds / (clock() - start)))
  times: dict[str, list[float]] = {name: [] for name in candidates}
  names = list(candidates)
  for block in range(blocks):
    for name in names[block % len(names) :] + names[: block % len(names)]:
      start = clock()
      for _ in range(repeats[name]):
        candidates[name]()
      times[name].append((clock() - start) / repeats[name])
  return times


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
  """Returns the median of the block-by-block ratio, with its middle half."""
  ratios = sorted(t / b for t, b in zip(times, base, strict=True))
  low, _, high = statistics.quantiles(ratios, n=4)
  return statistics.median(ratios), low, high


def show(found: tuple[float, float, float]) -> str:
  """Returns a ratio and its middle half as the pages have them."""
  return "{:.3f} [{:.3f}, {:.3f}]".format(*found)


def row(*cells: object) -> None:
  """Prints a line of a Markdown table."""
  as_text = lambda x: f"{x:.2f}" if isinstance(x, float) else str(x)
  print("|", " | ".join(map(as_text, cells)), "|", flush=True)


def head(*cells: str) -> None:
  """Prints the head of a Markdown table."""
  row(*cells)
  print("|" + "---|" * len(cells))


def table(rows: list[dict], path: str | None) -> None:
  """Prints rows that have the same keys, and saves them; see `save`."""
  head(*rows[0])
  for cells in rows:
    row(*cells.values())
  save(path, rows)


def machine() -> dict[str, str]:
  """Returns what the figures were measured on."""
  import jax
  import jaxlib

  cpuinfo = pathlib.Path("/proc/cpuinfo")
  names = re.findall("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
  device = jax.devices()[0]
  return {
    "processor": (names or [platform.machine()])[0],
    "device": f"{device.platform} {device.device_kind}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "jaxlib": jaxlib.__version__,
  }


def save(path: str | None, rows: list[dict], **more: str | None) -> None:
  """Writes rows as JSON, with the machine and the command that made them.

  Args:
    path: of the file; None writes nothing.
    rows: one figure or candidate each.
    **more: what else they depend on, beside the machine.
  """
  if path:
    made_by = {"command": "python " + " ".join(sys.argv), "machine": machine() | more}
    with open(path, "w", encoding="utf8") as f:
      json.dump(made_by | {"rows": rows}, f, indent=1)
      f.write("\n")
