"""Checkpoints in T5X's own format: one msgpack file, and the zarr arrays that it refers to."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def read(file: Any) -> tuple[dict[str, tuple[tuple[int, ...], str]], Callable[[str], np.ndarray]]:
  """Returns key -> shape and dtype, and what reads the array of a key.

  Args:
    file: a path of `folders.t5x_file`. msgpack holds data alone: nothing in it is executed.
  """
  import tensorstore
  from flax import serialization

  found: dict[str, Any] = {}

  def walk(node: Any, key: str) -> None:
    if isinstance(node, Mapping) and "kvstore" in node:
      found[key] = tensorstore.open(_spec(node, file.parent))
    elif isinstance(node, Mapping):
      for name, child in node.items():
        walk(child, f"{key}/{name}" if key else str(name))
    elif node is not None:
      found[key] = np.asarray(node)

  walk(serialization.msgpack_restore(file.read_bytes())["optimizer"], "")
  # They were opened all at once, which matters in a bucket.
  arrays = {k: x if isinstance(x, np.ndarray) else x.result() for k, x in found.items()}
  leaves = {key: (tuple(x.shape), x.dtype.name) for key, x in arrays.items()}

  def array(key: str) -> np.ndarray:
    x = arrays[key]
    return x if isinstance(x, np.ndarray) else np.asarray(x.read().result())

  return leaves, array


def _spec(node: Mapping[str, Any], folder: Any) -> dict[str, Any]:
  # The path is that of the machine that wrote it; the array lies in the checkpoint's folder. Old
  # files have it outside of the kvstore.
  path = str(node["kvstore"].get("path") or node.get("path"))
  store = str(folder / path.strip("/").split("/")[-1])
  if "://" not in store:
    store = f"file://{pathlib.Path(store).absolute()}"
  # T5X writes every chunk, so one that is absent was lost, and is no zeros.
  return {"driver": "zarr", "kvstore": f"{store}/", "fill_missing_data_reads": False}
