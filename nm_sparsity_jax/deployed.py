"""A whole parameter tree whose sparse kernels are packed: what is deployed.

    params (exact zeros), rules -> [decide] -> which kernels are packed, and why others are not

Decisions need shapes alone, so what writes a file and what fills a network decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.packed import MOST, like, sizes
from nm_sparsity_jax.places import Place
from nm_sparsity_jax.rules import Rules, require
from nm_sparsity_jax.text import printable, table
from nm_sparsity_jax.trees import alike, flatten

VALUES = ("float32", "bfloat16", "float16", "int8")  # of a packed weight
_FLOATS = VALUES[:3]  # what `packed.pack` takes


@dataclasses.dataclass(frozen=True)
class Decision:
  """What becomes of each parameter of a tree; its `str` is a table.

  Attributes:
    packed: path -> Place, of the kernels that a file holds packed.
    dense: path -> why a parameter keeps its zeros.
    dtypes: path -> numpy's name of the dtype of the packed values.
  """

  packed: Mapping[str, Place]
  dense: Mapping[str, str]
  dtypes: Mapping[str, str]

  def in_network(self, path: str) -> str:
    """Says why a layer takes a kernel with its zeros though a file holds it packed; '' if packed.

    Args:
      path: of `packed`.
    """
    rank = len(self.packed[path].shape)
    return "" if rank == 2 else f"a layer takes a kernel of {rank} axes with its zeros"

  def __str__(self) -> str:
    facts = {
      path: (p.shape, str(p.pattern), self.dtypes[path], self.in_network(path))
      for path, p in self.packed.items()
    }
    rows = [(name, *told, len(paths)) for name, paths, told in alike(facts)]
    lines = table(("packed", "shape", "pattern", "values", "remarks", "kernels"), rows)
    lines += [f"dense  {name}: {why}" for name, _, why in alike(self.dense)]
    return "\n".join(map(printable, lines))


def decide(params: Any, rules: Rules, dtype: Any = None) -> Decision:
  """Returns which parameters of a tree are packed. It looks at shapes and dtypes alone.

  A kernel is packed where the rules give it a pattern n:m with n < m along what its layer
  contracts, and where that saves bytes. The pattern is the last one of its recipe.

      print(decide(params, rules))

  Args:
    params: the finalized parameters, or their shapes, not scanned: see `unstacked`. A flat dict of
      paths will do.
    rules: the rules.
    dtype: of the values: 'float32', 'bfloat16', 'float16' or 'int8'. None: that of each kernel.
  """
  require(rules, "nms.deployed.decide(params, rules)")
  if dtype is not None and np.dtype(dtype).name not in VALUES:
    raise ValueError(f"dtype={dtype!r}: packed values are {', '.join(VALUES)}, or as they are.")
  known = {path: np.dtype(getattr(x, "dtype", np.float32)) for path, x in flatten(params)}
  assignment = rules.assign(params)
  packed: dict[str, Place] = {}
  dense: dict[str, str] = {}
  dtypes: dict[str, str] = {}
  for path, own in known.items():
    place = assignment.places.get(path)
    kind = own if dtype is None else np.dtype(dtype)
    if place is None:
      dense[path] = assignment.skipped.get(path, "no rule makes it sparse")
    elif why := _refused(place, own, kind):
      dense[path] = why
    else:
      packed[path], dtypes[path] = place, kind.name
  return Decision(packed, dense, dtypes)


def _refused(place: Place, own: np.dtype, kind: np.dtype) -> str:
  """Says why a kernel stays dense, '' where it is packed."""
  pattern = place.pattern
  if place.path.rpartition("/")[-1] != "kernel":
    return "a table or vector, and only kernels are packed"
  if len(place.shape) < 2 or (len(place.shape) == 2 and place.axes != (0,)):
    return f"its groups lie along axis {place.axis}, and its layer contracts axis 0"
  if pattern.n == pattern.m:
    return f"{pattern} keeps every weight"
  if pattern.m > MOST:
    return f"{pattern}: an index reaches through {MOST} entries at most"
  if own.name not in _FLOATS:
    return f"weights of {own} are not packed"
  found = sizes(like(pattern, place.groups, kind))
  zeros = math.prod(place.shape) * own.itemsize
  if found.total >= zeros:
    return f"{pattern} takes {found.total:,} bytes packed, and {zeros:,} with its zeros"
  return ""
