"""Checkpoints in T5X's own format: one msgpack file, and the tensorstore arrays it refers to.

checkpoint_N/checkpoint -> [read] -> key -> shape, dtype -> array, when it is asked for
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.runs import files
from nm_sparsity_jax.runs.contents import Contents, Unreadable

_MOST_MSGPACK = 1 << 30  # bytes: arrays of any size lie beside the file


def read(name: str, file: Any) -> Contents:
  """Reads what a checkpoint holds, but for the arrays beside the file.

  Args:
    name: of the checkpoint, for errors.
    file: a path of `folders.legacy_file`.
  """
  from flax import serialization

  if (size := file.stat().st_size if isinstance(file, pathlib.Path) else 0) > _MOST_MSGPACK:
    raise Unreadable(f"{str(file)!r} has {size:,} bytes, and at most {_MOST_MSGPACK:,} are read")
  contents: Any = serialization.msgpack_restore(file.read_bytes())
  if contents.get("version", 0) < 2:
    version = contents.get("version", 0)
    raise Unreadable(f"{name!r} has version {version}: T5X reads 2 and 3")
  found: dict[str, Any] = {}
  values: dict[str, Any] = {}

  def walk(node, keys):
    if isinstance(node, dict) and {"driver", "kvstore"} <= node.keys():
      found["/".join(keys)] = _shape_and_dtype(node, file.parent)
      values["/".join(keys)] = (node, file.parent)
    elif isinstance(node, dict):
      for key, child in node.items():
        walk(child, (*keys, str(key)))
    elif node is not None:
      array = np.asarray(node)
      found["/".join(keys)] = array.shape, str(array.dtype)
      values["/".join(keys)] = array

  walk(contents["optimizer"], ())
  return Contents("T5X", found, lambda key: _array(values[key]))


def _shape_and_dtype(
  spec: Mapping[str, Any], folder: Any
) -> tuple[tuple[int, ...] | None, str | None]:
  """Returns those of an array that the msgpack file refers to, from its metadata."""
  if spec["driver"] != "zarr":
    raise ValueError(f"an array is stored by {spec['driver']!r}: T5X stores by 'zarr'")
  zarray = folder / _name(spec) / ".zarray"
  if zarray.is_file():
    found = files.parse_json(zarray.read_text())
    name = found["dtype"]
    return tuple(found["shape"]), name if name == "bfloat16" else str(np.dtype(name))
  shape = (spec.get("metadata") or {}).get("shape")
  return None if shape is None else tuple(map(int, shape)), spec.get("dtype")


def _name(spec: Mapping[str, Any]) -> str:
  """Returns the folder of an array: in the store's description, or beside it in old files."""
  name = str(spec["kvstore"].get("path") or spec.get("path", "")).strip("/").split("/")[-1]
  if name in ("", ".", ".."):
    raise ValueError(f"an array is said to lie in the folder {name!r}")
  return name


def _array(value: Any) -> np.ndarray:
  """Returns a value that the file holds, or an array that it refers to."""
  if not isinstance(value, tuple):
    return value
  import tensorstore

  spec, folder = value
  kvstore = f"{folder / _name(spec)}/"
  if "://" not in kvstore:
    kvstore = f"file://{pathlib.Path(kvstore).absolute()}/"
  zarray = files.parse_json((folder / _name(spec) / ".zarray").read_text())
  # Without a fill value every chunk is written, so one that is absent was lost.
  fill = zarray.get("fill_value") is not None
  spec = {"driver": spec["driver"], "kvstore": kvstore, "fill_missing_data_reads": fill}
  return np.asarray(tensorstore.open(spec).result().read().result())
