"""What a checkpoint of T5X holds, from its metadata alone, and what a model would take of it.

    path -> Stored: key -> Leaf(shape, dtype) -> [T5X's transformations] -> loaded, initialised, ...

Keys are those of T5X's train state: target/..., state/step, state/param_states/...,
flax_mutables/... Formats: T5X's own (one msgpack file that refers to tensorstore arrays) and Orbax.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array: its key in the checkpoint, shape and dtype; None where the format tells neither."""

  key: str
  shape: tuple[int, ...] | None
  dtype: str | None


@dataclasses.dataclass(frozen=True)
class Stored:
  """One checkpoint.

  Attributes:
    path: its folder.
    format: 'Orbax' or 'T5X'.
    leaves: key -> Leaf.
    step: T5X's global step, None if unknown.
    sparse_step: steps of the sparse run that wrote it, None for a dense one.
    rules: the text of that run's rules, None for a dense one.
  """

  path: str
  format: str
  leaves: Mapping[str, Leaf]
  step: int | None
  sparse_step: int | None
  rules: str | None


def latest(folder: str) -> str | None:
  """The newest `checkpoint_N` in a folder, None where there is none."""
  steps = [m for p in _children(folder) if (m := re.fullmatch(r"checkpoint_(\d+)", p))]
  if not steps:
    return None
  return f"{folder.rstrip('/')}/{max(steps, key=lambda m: int(m[1]))[0]}"


def _children(folder: str) -> list[str]:
  path = _path(folder)
  return [p.name for p in path.iterdir()] if path.is_dir() else []


def _path(name: str):
  from etils import epath

  return epath.Path(name)


def read(name: str) -> Stored:
  """The metadata of a checkpoint."""
  folder = _path(name)
  if not folder.exists():
    raise FileNotFoundError(f"there is no checkpoint {name!r}")
  if folder.is_file() and folder.name == "checkpoint":
    return _read_legacy(name, folder)
  if (folder / "checkpoint").is_file():
    return _read_legacy(name, folder / "checkpoint")
  for state in (folder / "state", folder):
    if (state / "_METADATA").is_file():
      return _read_orbax(name, state)
  if inside := latest(name):
    raise ValueError(f"{name!r} is a folder of checkpoints: name one, such as {inside!r}")
  raise ValueError(
    f"{name!r} is no checkpoint: it has neither a file 'checkpoint' (T5X) nor state/_METADATA "
    "(Orbax)"
  )


def _read_legacy(name: str, file) -> Stored:
  from flax import serialization

  contents: Any = serialization.msgpack_restore(file.read_bytes())
  if contents.get("version", 0) < 2:
    raise ValueError(f"{name!r} has version {contents.get('version', 0)}: T5X reads 2 and 3")
  leaves: dict[str, Leaf] = {}
  values: dict[str, Any] = {}

  def walk(node, keys):
    if isinstance(node, dict) and {"driver", "kvstore"} <= node.keys():
      leaves["/".join(keys)] = Leaf("/".join(keys), *_spec(node, file.parent))
      values["/".join(keys)] = (node, file.parent)
    elif isinstance(node, dict):
      for key, child in node.items():
        walk(child, (*keys, str(key)))
    elif node is not None:
      array = np.asarray(node)
      leaves["/".join(keys)] = Leaf("/".join(keys), array.shape, str(array.dtype))
      values["/".join(keys)] = array

  walk(contents["optimizer"], ())
  known = {key: _small_array(values.get(key)) for key in _SMALL}
  return _stored(name, "T5X", leaves, known)


def _spec(spec: Mapping[str, Any], folder) -> tuple[tuple[int, ...] | None, str | None]:
  """Shape and dtype of an array that the msgpack file refers to, from the array's own metadata."""
  zarray = folder / _name(spec) / ".zarray"
  if zarray.is_file():
    found = json.loads(zarray.read_text())
    return tuple(found["shape"]), _zarr_dtype(found["dtype"])
  shape = (spec.get("metadata") or {}).get("shape")
  return (None if shape is None else tuple(map(int, shape))), spec.get("dtype")


def _name(spec: Mapping[str, Any]) -> str:
  """The folder of an array: in the store's description, or beside it in old files."""
  return str(spec["kvstore"].get("path") or spec.get("path", "")).strip("/").split("/")[-1]


def _zarr_dtype(name: str) -> str:
  return name if name == "bfloat16" else str(np.dtype(name))


def _small_array(value):
  """A value that the file holds, or a small array that it refers to."""
  if not isinstance(value, tuple):
    return value
  import tensorstore

  spec, folder = value
  kvstore = f"{folder / _name(spec)}/"
  if "://" not in kvstore:
    kvstore = f"file://{pathlib.Path(kvstore).absolute()}/"
  spec = {"driver": spec["driver"], "kvstore": kvstore}
  return np.asarray(tensorstore.open(spec).result().read().result())


_SMALL = ("state/step", "flax_mutables/nm_sparsity/step", "flax_mutables/nm_sparsity/rules")


def _read_orbax(name: str, state) -> Stored:
  try:
    import orbax.checkpoint as ocp
  except ImportError as e:
    raise ModuleNotFoundError(
      f"{name!r} is an Orbax checkpoint: pip install orbax-checkpoint"
    ) from e
  level = logging.getLogger("absl").level
  logging.getLogger("absl").setLevel(logging.ERROR)  # it misses files that T5X does not write
  try:
    reader = ocp.PyTreeCheckpointer()
    found: Any = reader.metadata(state)
    found = getattr(found, "item_metadata", found)
    leaves: dict[str, Leaf] = {}

    def walk(node, keys):
      if isinstance(node, Mapping):
        for key, child in node.items():
          walk(child, (*keys, str(key)))
      elif hasattr(node, "dtype"):
        key = "/".join(keys)
        leaves[key] = Leaf(key, tuple(getattr(node, "shape", ())), str(np.dtype(node.dtype)))

    walk(getattr(found, "tree", found), ())
    wanted: dict[str, Any] = {}
    for key in _SMALL:
      if key in leaves:
        node = wanted
        *folders, last = key.split("/")
        for word in folders:
          node = node.setdefault(word, {})
        node[last] = ocp.RestoreArgs(restore_type=np.ndarray)
    values: Any = {}
    if wanted:
      args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True)
      values = reader.restore(state, args=args)
  finally:
    logging.getLogger("absl").setLevel(level)
  return _stored(name, "Orbax", leaves, {key: _at(values, key) for key in _SMALL})


def _at(tree, key: str):
  for word in key.split("/"):
    tree = tree.get(word) if isinstance(tree, Mapping) else None
  return tree


def _stored(name, kind, leaves, known) -> Stored:
  import zlib

  step, sparse_step, rules = (known[key] for key in _SMALL)
  if rules is not None:  # as t5x_adapter packs it
    rules = zlib.decompressobj().decompress(np.asarray(rules).tobytes()).decode()
  number = lambda x: None if x is None else int(np.asarray(x))
  return Stored(name, kind, leaves, number(step), number(sparse_step), rules)


# --- what a model takes of it -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Restore:
  """What becomes of each key.

  Attributes:
    load: key of the model -> (leaf of the checkpoint, dtype after loading).
    initialise: keys of the model that start afresh.
    drop: keys of the checkpoint that the model does not take.
    errors: what T5X would refuse, or load wrongly without a word.
  """

  load: Mapping[str, tuple[Leaf, str | None]]
  initialise: Sequence[str]
  drop: Sequence[str]
  errors: Sequence[str]


def restore(
  stored: Stored,
  model: Mapping[str, Any],
  dtype: str | None,
  transformations: Sequence[Callable] = (),
  fallback: bool = False,
) -> Restore:
  """Goes through the steps of T5X's restore on keys instead of arrays.

  Args:
    stored: the checkpoint.
    model: key -> something with shape and dtype, what the model wants.
    dtype: floating arrays become this; None = as stored.
    transformations: `RestoreCheckpointConfig.state_transformation_fns`.
    fallback: `RestoreCheckpointConfig.fallback_to_scratch`.
  """
  errors: list[str] = []
  state: Any = _nested(stored.leaves)
  for function in transformations:
    try:
      state = function(state, _nested(model))
    except Exception as e:
      errors.append(f"restoring from {stored.path}: {e}")
      break
  found = dict(_flat(state))
  load: dict[str, tuple[Leaf, str | None]] = {}
  initialise: list[str] = []
  for key, wanted in model.items():
    leaf = found.get(key)
    if leaf is None:
      initialise.append(key)
      continue
    if leaf.shape is not None and leaf.shape != tuple(wanted.shape):
      errors.append(f"{key} has shape {leaf.shape} in {stored.path} and {wanted.shape} here")
    load[key] = leaf, dtype if dtype and _is_cast(key, leaf, stored.format) else leaf.dtype
  taken = {leaf.key for leaf, _ in load.values()}
  drop = [key for key in stored.leaves if key not in taken]
  if initialise and not fallback and not errors:
    errors.append(
      f"{stored.path} lacks {len(initialise)} of {len(model)} arrays, such as {initialise[0]}, and "
      "RestoreCheckpointConfig.fallback_to_scratch is not set: T5X will fail"
    )
  return Restore(load, initialise, drop, errors)


def _is_cast(key: str, leaf: Leaf, kind: str) -> bool:
  """Whether T5X's restore dtype applies: to parameters, and to what is not sharded.

  So the step, an int32, becomes a float32 in a run that restored it.
  """
  alone = leaf.shape == () and not key.startswith("flax_mutables/")
  return kind == "T5X" or key.startswith("target/") or alone


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for key, value in flat.items():
    *folders, last = key.split("/")
    node = tree
    for word in folders:
      node = node.setdefault(word, {})
    node[last] = value
  return tree


def _flat(tree, keys=()):
  if isinstance(tree, Mapping):
    for key, child in tree.items():
      yield from _flat(child, (*keys, str(key)))
  else:
    yield "/".join(keys), tree
