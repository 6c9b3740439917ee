"""A file of a network whose sparse kernels are packed, version 1.

    name -> shape, dtype; names and arrays, one at a time; rules -> [write_each] -> F.safetensors
    F.safetensors -> `packed_reading`: [Opened], [read]

It is a safetensors file. A packed kernel NAME is two or three tensors of it: NAME.nm_values,
NAME.nm_indices and, of int8, NAME.nm_scale, in the canonical layout of `packed`. Its metadata are

    format   nm_sparsity_jax/1
    rules    the text of the rules
    packed   {NAME: {"n", "m", "axis", "shape", "dtype", "index_bits", "pad"}}

What reads one stands here too: a user imports this module alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax import deployed, rules_text
from nm_sparsity_jax.packed import lost_signs, pack
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.trees import flatten
from nm_sparsity_jax.weights import packed_reading, safetensors_file
from nm_sparsity_jax.weights.packed_reading import PARAMS, Kernel, Opened, is_packed, read

__all__ = ["Kernel", "Opened", "is_packed", "read", "write", "write_each"]


def write(
  path: str | os.PathLike, variables: Mapping[str, Any], rules: Rules, dtype: str | None = None
) -> deployed.Report:
  """Writes a new packed file of a network that is in memory.

      print(write("F.safetensors", {"params": params}, rules))

  Args:
    path: of the file, which must not be there.
    variables: 'params', n:m and not scanned (`unscanned.unstacked`); and other collections.
    rules: the rules.
    dtype: as in `deployed.decide`.
  """
  arrays = {name: np.asarray(x) for name, x in flatten(variables)}
  leaves = {name: (x.shape, str(x.dtype)) for name, x in arrays.items()}
  return write_each(path, leaves, arrays.items(), rules, dtype)


def write_each(
  path: str | os.PathLike,
  leaves: Mapping[str, tuple[tuple[int, ...], str]],
  arrays: Iterable[tuple[str, np.ndarray]],
  rules: Rules,
  dtype: str | None = None,
  seen: Callable[[str, np.ndarray], Any] = lambda name, tensor: None,
) -> deployed.Report:
  """Writes a new packed file, one array in memory at a time: all of it, or nothing.

  Args:
    path: of the file, which must not be there.
    leaves: name such as 'params/head/kernel' -> shape, numpy's name of the dtype.
    arrays: each name and its array, in any order.
    rules: of the tree below 'params'.
    dtype: as in `deployed.decide`.
    seen: is told the name of each tensor of the file, and its values.

  Returns:
    What was packed, what was not, and why.

  Raises:
    ValueError: a kernel is not n:m, or a name cannot be kept.
  """
  shape = lambda leaf: jax.ShapeDtypeStruct(leaf[0], safetensors_file.dtype_of(leaf[1]))
  shapes = {name: shape(leaf) for name, leaf in leaves.items()}
  _refuse_names(leaves)
  params = {p.removeprefix(f"{PARAMS}/"): x for p, x in shapes.items() if _is_param(p)}
  decision = deployed.decide(params, rules, dtype)
  if not decision.packed:
    named = [path for path in decision.dense if rules.match(path)] or list(decision.dense)
    why = f"{named[0]!r}: {decision.dense[named[0]]}" if named else "there are no parameters"
    raise ValueError(f"nothing would be packed ({why}).")
  header: dict[str, tuple[str, tuple[int, ...]]] = {}
  for name, (own, kind) in leaves.items():
    if (key := name.removeprefix(f"{PARAMS}/")) not in decision.packed or not _is_param(name):
      header[name] = kind, tuple(own)
      continue
    for _, full, part in packed_reading.parts(name, decision.like(key)):
      header[full] = np.dtype(part.dtype).name, part.shape
  lost: dict[str, int] = {}
  told = _metadata(decision, rules)
  with safetensors_file.Writer(path, safetensors_file.in_order(header), told) as writer:
    for name, array in arrays:
      for full, tensor in _tensors(name, array, decision, lost):
        seen(full, tensor)
        writer.add(full, tensor)
      del array, tensor  # or they would stay while the next one is made
  return _report(decision, shapes, lost)


def _is_param(name: str) -> bool:
  return name.startswith(f"{PARAMS}/")


def _refuse_names(names: Iterable[str]) -> None:
  for name in names:
    if packed_reading.is_part(name):
      parts = ", ".join(packed_reading.PARTS)
      raise ValueError(f"{name!r} ends like a part of a packed kernel ({parts}): rename it.")
  packed_reading.check_names(list(names))


def _metadata(decision: deployed.Decision, rules: Rules) -> dict[str, str]:
  text = rules_text.describe(rules)
  rules_text.pack(text)  # refuses what no checkpoint could keep
  told = {
    f"{PARAMS}/{path}": {
      "n": place.pattern.n,
      "m": place.pattern.m,
      "axis": list(place.axes),
      "shape": list(place.shape),
      "dtype": decision.dtypes[path],
      "index_bits": decision.like(path).bits,
      "pad": -place.groups.length % place.pattern.m,
    }
    for path, place in decision.packed.items()
  }
  packed = json.dumps(told, separators=(",", ":"), ensure_ascii=False)
  return {"format": packed_reading.FORMAT + packed_reading.VERSION, "packed": packed, "rules": text}


def _tensors(
  name: str, array: np.ndarray, decision: deployed.Decision, lost: dict[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the names and tensors that one array is in the file; `lost` gets what it loses."""
  path = name.removeprefix(f"{PARAMS}/")
  if path not in decision.packed or not _is_param(name):
    yield name, array
    return
  place = decision.packed[path]
  if count := lost_signs(array, place.pattern, place.groups):
    lost[path] = count
  made = pack(array, place.pattern, place.groups, decision.dtypes[path], path)
  for _, full, tensor in packed_reading.parts(name, made):
    yield full, tensor


def _report(
  decision: deployed.Decision, shapes: Mapping[str, Any], lost: Mapping[str, int]
) -> deployed.Report:
  """Returns the report, with the arrays of other collections among those that keep their zeros."""
  own = {name.removeprefix(f"{PARAMS}/") if _is_param(name) else name: x
         for name, x in shapes.items()}  # fmt: skip
  beside = dict.fromkeys((name for name in shapes if not _is_param(name)), "no parameter")
  whole = dataclasses.replace(decision, dense={**decision.dense, **beside})
  return deployed.report(whole, own, lost)
