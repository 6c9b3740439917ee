"""A checkpoint as a packed file: what is deployed, without the zeros.

checkpoint, its rules -> [pack] -> F.safetensors -> read back -> Written: bytes, what stayed dense

Layers that a scan stacked are taken apart, one array at a time: networks with packed kernels do not
scan. Their rules are those of the layers then.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import deployed, unscanned
from nm_sparsity_jax.roles import matches
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.runs import checkpoint, given, stacks, writing
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.weights import packed_file, safetensors_file

_TARGET, _STATE, _PARAMS = "target/", "flax_mutables/", "params/"
_RUNS_OWN = "nm_sparsity"


@dataclasses.dataclass(frozen=True)
class Written:
  """What `pack` wrote.

  Attributes:
    source: the checkpoint that was read.
    path: of the file.
    bytes: of the file, its header included.
    report: bytes of each kernel, before and after, and what was not packed, with the reason.
  """

  source: Stored
  path: str
  bytes: int
  report: deployed.Report

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    report = self.report
    return {
      "from": self.source.path,
      "file": self.path,
      "bytes": self.bytes,
      "bytes_of_weights": report.total,
      "bytes_with_zeros": report.zeros,
      "packed": {
        path: {
          "pattern": report.patterns[path],
          "weights": report.weights[path],
          "bytes": found.total,
          "bytes_with_zeros": found.dense,
        }
        for path, found in report.sizes.items()
      },
      "dense": dict(report.dense),
      "lost_signs_of_zeros": dict(report.lost),
    }


def pack(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: given.Given = None,
  axes: Mapping[str, Any] | None = None,
  dtype: str | None = None,
) -> Written:
  """Writes the weights of a checkpoint that are n:m without their zeros, and reads them back.

      print(nms.runs.pack("runs/final", "model.safetensors").report)

  One array is in memory at a time. Of a scanned network it is one layer's, where the checkpoint
  was written so: `finalize` and `convert` do. Else it has all layers.

  Args:
    path: a checkpoint of any network that is n:m, a folder of Hugging Face's T5, or a file of
      timm's names.
    out: the file, F.safetensors, which must not be there.
    rules: as in `verify`.
    axes: as in `verify`.
    dtype: of packed values: 'float32', 'bfloat16', 'float16' or 'int8', which rounds with one scale
      for each column. None: as stored. What is not packed keeps its dtype.

  Raises:
    ValueError: a kernel is not n:m, nothing is to be packed, or the file cannot be written.
  """
  file = os.fspath(out)
  if not file.endswith(safetensors_file.SUFFIX):
    raise ValueError(f"{file!r}: name a file that ends in {safetensors_file.SUFFIX}.")
  safetensors_file.refuse_existing(file)
  stored = checkpoint.opened(path)
  if stored.packed is not None:
    raise ValueError(
      f"{stored.path!r} is a packed file already: pack the checkpoint that it was made of."
    )
  whole = _leaves(stored)
  apart = functools.partial(unscanned.shapes_apart, config=_config(stored, whole))
  single = {
    name: (shape, dtype)
    for key, (shape, dtype) in whole.items()
    for name, shape in _apart(apart, key, shape).items()
  }
  made = _rules_apart(given.rules_for(stored, rules, axes), whole, apart)
  sums: dict[str, str] = {}

  def note(name: str, tensor: np.ndarray) -> None:
    sums[name] = writing.sha256(tensor)

  report = packed_file.write_each(file, single, _arrays(stored, whole), made, dtype, note)
  _read_back(file, sums)
  return Written(stored, file, os.path.getsize(file), report)


def _read_back(file: str, sums: Mapping[str, str]) -> None:
  """Raises where the file does not hold what was written, or its own reader refuses it."""
  opened = packed_file.Opened(file)
  for name in opened.kernels:
    opened.packed(name)
  tensors = safetensors_file.Opened(file).tensors
  for name, wanted in sums.items():
    if writing.sha256(np.asarray(tensors[name])) != wanted:
      raise ValueError(f"{file!r}: {name!r} is not what was written.")


# --- what is written ------------------------------------------------------------------------------

_Leaves = dict[str, tuple[tuple[int, ...], str]]


def _leaves(stored: Stored) -> _Leaves:
  """Returns name such as 'params/head/kernel' -> shape and dtype of what is deployed."""
  found: _Leaves = {}
  for key in stored.leaves:
    name = _name(key)
    if name is None:
      continue
    leaf = stored.leaves[stored.deployed(key)]
    if leaf.shape is None or leaf.dtype is None:
      array = stored.array(leaf.key)
      found[name] = array.shape, str(array.dtype)
    else:
      found[name] = leaf.shape, leaf.dtype
  if not any(name.startswith(_PARAMS) for name in found):
    raise ValueError(f"{stored.path} has no parameters: no arrays under 'target'")
  return found


def _name(key: str) -> str | None:
  """Returns the name in a packed file of a key of a checkpoint; None where it is not deployed."""
  if key.startswith(_TARGET):
    return f"{_PARAMS}{key.removeprefix(_TARGET)}"
  if key.startswith(_STATE) and not key.startswith(f"{_STATE}{_RUNS_OWN}/"):
    return key.removeprefix(_STATE)
  return None


def _config(stored: Stored, leaves: _Leaves) -> Any:
  """Returns the config of a network that scans, as far as `unscanned.apart` asks; None without."""
  shapes = {key.removeprefix(_PARAMS): shape for key, (shape, _) in leaves.items()}
  return stacks.config_of(shapes, stored.path)


def _apart(apart: Any, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
  """Returns names and shapes of the arrays that one array is without a scan."""
  if not name.startswith(_PARAMS):
    return {name: shape}
  return {f"{_PARAMS}{key}": own for key, own in apart(name.removeprefix(_PARAMS), shape).items()}


def _arrays(stored: Stored, leaves: _Leaves) -> Iterator[tuple[str, np.ndarray]]:
  """Yields names and arrays, one array of the checkpoint in memory at a time, or a piece of it."""
  config = _config(stored, leaves)
  for key in stored.leaves:
    name = _name(key)
    if name is None:
      continue
    if not name.startswith(_PARAMS):
      yield name, stored.array(stored.deployed(key))
      continue
    path = name.removeprefix(_PARAMS)
    found = unscanned.stacked(path, config)
    axis = found[1] if found and "{}" in found[0] else None
    for first, array in stored.pieces(stored.deployed(key), axis):
      for own, part in unscanned.apart(path, array, config, first):
        yield f"{_PARAMS}{own}", part
        del part  # or it would stay while the next one is read
      del array


# --- rules ----------------------------------------------------------------------------------------


def _rules_apart(rules: Rules, leaves: _Leaves, apart: Any) -> Rules:
  """Returns the rules of a network without a scan that mean the same; without a scan, the same.

  A regex of the rules may name a stack alone. Then the regex of its layers stands in its place.
  """
  paths = {key.removeprefix(_PARAMS): x[0] for key, x in leaves.items() if key.startswith(_PARAMS)}
  single = {key: list(apart(key, shape)) for key, shape in paths.items()}
  stacked = {key: layers for key, layers in single.items() if layers != [key]}
  if not stacked:
    return rules
  found = {path: hit for path in paths if (hit := rules.match(path))}
  table = dict(rules.places)
  for path, (key, recipe) in found.items():
    layers = stacked.get(path, [path])
    if any((rules.match(layer) or ("",))[0] != key for layer in layers):
      table[re.sub(r"_0/", r"_\\d+/", re.escape(layers[0]), count=1)] = recipe
      table.pop(key, None)
  for path, (key, recipe) in found.items():  # named by a regex that is gone now
    if path not in stacked and key not in table:
      table[re.escape(path)] = recipe
  # A kernel of a layer has two axes and contracts the first one, whatever was told of the stack.
  axes = {re.escape(path): _axis(rules, path) for path in found if path not in stacked}
  told = {regex: axis for regex, axis in axes.items() if axis is not None}
  return Rules(table, told, rules.indivisible, rules.roles)


def _axis(rules: Rules, path: str) -> Any:
  """Returns what `axes` of the rules say of a path, None where they do not."""
  return next((axis for regex, axis in rules.axes.items() if matches(regex, path)), None)
