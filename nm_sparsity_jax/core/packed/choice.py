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
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.core.packed.array import NMPacked

_TABLE = pathlib.Path(__file__).with_name("table.json")
_FAIR = 1.0  # a ratio from which on a backend is taken
# Ends of names in the table, and from how many weights on they hold.
_SIZES = (("", 1 << 21), (", medium", 1 << 17), (", small", 1 << 14), (", tiny", 0))


@functools.cache
def table() -> dict[str, Any]:
  """Returns {"backends": {name: {"rows": rows of x, "speed": {m / n: ratio for each rows}}}}."""
  return json.loads(_TABLE.read_text("utf-8"))


def speed(backend: str, packed: NMPacked, batch: int) -> float:
  """Returns how many times faster than a dense product a backend is; 0 where nothing is known.

  >>> from nm_sparsity_jax.core.packed import pack
  >>> w = pack(np.zeros((8, 4), np.float32), NM(2, 4))
  >>> speed("xla_scan", w, batch=1) < 1  # so small a weight is better multiplied as it is
  True

  Args:
    backend: 'cpu_ffi' or 'xla_scan'.
    packed: the weight; its leaves may be shapes.
    batch: rows of x in one call.
  """
  known = table()["backends"]
  name = f"cpu_ffi {cpu.isa()}" if backend == "cpu_ffi" else backend
  if installed.cores() > 1 and f"{name}, several cores" in known:
    name += ", several cores"
  kinds = [next(size for size, least in _SIZES if math.prod(packed.shape) >= least)]
  if packed.n > 1 and packed.m > 16:
    kinds.append(", wide groups")
  rows = [known[name + kind] for kind in kinds if name + kind in known]
  return min((_ratio(row, packed.m / packed.n, batch) for row in rows), default=0.0)


def _ratio(row: Mapping[str, Any], sparsity: float, batch: int) -> float:
  """Returns the ratio that a row of the table has; 0 for groups denser than the measured ones."""
  fitting = [key for key in row["speed"] if float(key) <= sparsity]
  if not fitting:
    return 0.0
  ratios, batches = row["speed"][max(fitting, key=float)], row["rows"]
  above = min(bisect.bisect_left(batches, batch), len(batches) - 1)
  below = above if batches[above] <= batch else max(above - 1, 0)
  return min(ratios[below], ratios[above])


def best(packed: NMPacked, batch: int, dense: bool) -> str:
  """Returns the backend that the table has as the fastest on jax's default device.

  Args:
    packed: the weight.
    batch: rows of x in one call.
    dense: whether 'dense' may be the answer: the weight is unpacked once, outside jit.
  """
  # Where nothing is known: to make the weight first is a tenth as fast as a dense product.
  found = {"unpack": 0.0}
  if jax.default_backend() == "cpu":
    found["xla_scan"] = speed("xla_scan", packed, batch)
    if not cpu.missing(packed):
      found["cpu_ffi"] = speed("cpu_ffi", packed, batch)
  fastest = max(found, key=found.__getitem__)
  return "dense" if dense and found[fastest] < _FAIR else fastest
