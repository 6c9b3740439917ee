"""Which product is the fastest, by what was measured.

    pattern, rows of x, platform -> [best] -> 'cpu_ffi', 'xla_scan', 'unpack' or 'dense'

table.json has the speed of each backend over the best dense product, for m / n and rows of x.
Between two measured points the slower one counts. Beyond the last ones the last one counts. Smaller
weights have rows of their own, since a call costs as much for them, and so have groups of more than
16 of which several are kept, since their x does not fit registers.
Several cores have rows of their own where they were measured: a kernel may gain more or less from
them than a dense product does.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.core.packed.array import NMPacked
from nm_sparsity_jax.core.patterns import NM

_TABLE = pathlib.Path(__file__).with_name("table.json")
_FAIR = 1.0  # a ratio from which on a backend is taken
SIZES = (("", 1 << 21), ("medium", 1 << 17), ("small", 1 << 14), ("tiny", 0))  # from so many on
WIDE = "wide groups"


@functools.cache
def table() -> dict[str, Any]:
  """Returns {"backends": {name: {"rows": rows of x, "speed": {m / n: ratio for each rows}}}}."""
  return json.loads(_TABLE.read_text("utf-8"))


def cores() -> int:
  """Returns how many cores this process may use."""
  allowed = getattr(os, "sched_getaffinity", None)  # not there outside Linux
  return len(allowed(0)) if allowed else os.cpu_count() or 1


def row(backend: str, measured: bool = True) -> str:
  """Returns the table's name of a backend of a CPU, for the cores of this process.

  Args:
    backend: 'cpu_ffi' or 'xla_scan'.
    measured: that of one core where nothing was measured on several.
  """
  one = f"cpu_ffi {cpu.isa()}" if backend == "cpu_ffi" else backend
  several = f"{one}, several cores"
  return several if cores() > 1 and not (measured and several not in table()["backends"]) else one


def speed(backend: str, packed: NMPacked, batch: int) -> float:
  """Returns how many times faster than a dense product a backend is; 0 where nothing is known.

  >>> from nm_sparsity_jax.core.packed import pack
  >>> w = pack(np.zeros((8, 4), np.float32), NM(2, 4))
  >>> speed("xla_scan", w, batch=1) < speed("xla_scan", w, batch=128)
  True
  """
  known = table()["backends"]
  names = [f"{backend}{kind}" for kind in kinds(packed.shape, packed.pattern)]
  there = [known[name] for name in names if name in known] or [known.get(backend)]
  return min(_speed(row, packed.m / packed.n, batch) for row in there)


def kinds(shape: tuple[int, ...], pattern: NM) -> list[str]:
  """Returns which rows of a backend are of such a weight, as ends of their names.

  >>> kinds((128, 512), NM(1, 8)), kinds((1024, 4096), NM(8, 32))
  ([', small'], ['', ', wide groups'])

  Args:
    shape: of the weight with its zeros.
    pattern: n:m.
  """
  size = next(name for name, least in SIZES if math.prod(shape) >= least)
  found = [size, *([WIDE] if pattern.n > 1 and pattern.m > 16 else [])]
  return [f", {name}" if name else "" for name in found]


def _speed(known: Mapping[str, Any] | None, sparsity: float, batch: int) -> float:
  """Returns the ratio that a row of the table has; 0 where it has none."""
  fitting = [key for key in known["speed"] if float(key) <= sparsity] if known else []
  if not known or not fitting:
    return 0.0
  ratios, rows = known["speed"][max(fitting, key=float)], known["rows"]
  above = min(bisect.bisect_left(rows, batch), len(rows) - 1)
  below = above if rows[above] <= batch else max(above - 1, 0)
  return min(ratios[below], ratios[above])


def best(packed: NMPacked, batch: int, dense: bool, platform: str | None = None) -> str:
  """Returns the backend that the table has as the fastest.

  Args:
    packed: the weight.
    batch: rows of x in one call.
    dense: whether 'dense' may be the answer: the weight is unpacked once, outside jit.
    platform: None for that of jax's default device.
  """
  platform = jax.default_backend() if platform is None else platform
  found: dict[str, float] = {}
  if platform == "cpu":
    found["xla_scan"] = speed(row("xla_scan"), packed, batch)
    if not cpu.missing(packed):
      found["cpu_ffi"] = speed(row("cpu_ffi"), packed, batch)
  fastest = max(found, key=lambda name: found[name], default="unpack")
  if not found.get(fastest):  # nothing is known: to make the weight first is a tenth as fast
    fastest = "unpack"
  return "dense" if dense and found.get(fastest, 0.0) < _FAIR else fastest
