"""Checkpoints in T5X's own format: one msgpack file, and the zarr arrays that it refers to."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import Lazy
from nm_sparsity_jax.core.trees import flatten


def read(file: Any) -> dict[str, Any]:
  """Returns key -> array, or `Lazy` that reads it.

  Args:
    file: a path of `folders.contents`. msgpack holds data alone: nothing in it is executed.
  """
  import tensorstore
  from flax import serialization

  tree = serialization.msgpack_restore(file.read_bytes())["optimizer"]
  is_zarr = lambda node: isinstance(node, Mapping) and "kvstore" in node
  found = dict(flatten(tree, is_zarr))
  opened = {k: tensorstore.open(_spec(x, file.parent)) for k, x in found.items() if is_zarr(x)}
  # All were opened before the first result is asked for, which matters in a bucket.
  return {k: _lazy(opened[k].result()) if k in opened else np.asarray(x) for k, x in found.items()}


def _lazy(x: Any) -> Lazy:
  return Lazy(tuple(x.shape), x.dtype.numpy_dtype, lambda: np.asarray(x.read().result()))


def _spec(node: Mapping[str, Any], folder: Any) -> dict[str, Any]:
  # The path is that of the machine that wrote it; the array lies in the checkpoint's folder. Old
  # files have it outside of the kvstore.
  path = str(node["kvstore"].get("path") or node.get("path"))
  store = str(folder / path.strip("/").split("/")[-1])
  if "://" not in store:
    store = f"file://{pathlib.Path(store).absolute()}"
  # T5X writes every chunk, so one that is absent was lost, and is no zeros.
  return {"driver": "zarr", "kvstore": f"{store}/", "fill_missing_data_reads": False}
