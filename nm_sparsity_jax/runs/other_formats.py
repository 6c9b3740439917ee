"""Weights in names of other libraries, by the keys of a checkpoint, such as target/head/kernel.

F.safetensors, of timm's names  -> [read] -> key -> array
F.safetensors, packed           ->
FOLDER, Hugging Face's T5       ->
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import Lazy
from nm_sparsity_jax.core.packed import unpack
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import (
  huggingface,
  inference_tree,
  packed_file,
  safetensors_file,
  timm,
)


def is_readable(path: Any) -> bool:
  """Returns whether `read` reads a path, or refuses it as a file that torch pickled."""
  if not isinstance(path, pathlib.Path):  # in a bucket, where checkpoints alone are read
    return False
  suffixes = (safetensors_file.SUFFIX, *safetensors_file.PICKLED)
  return path.is_file() and path.name.endswith(suffixes) or huggingface.is_folder(path)


def read(
  name: str, like: Mapping[str, Any] | None = None, config: Any = None
) -> tuple[str, dict[str, Any], str | None, Any]:
  """Returns the format, key -> array not read yet, and of a packed file rules and variables.

  Args:
    name: of the file or folder.
    like: as in `timm.from_timm`.
    config: of a T5, as in `huggingface.read`.

  Raises:
    ValueError: it is pickled, damaged, or of another network.
  """
  if os.path.isdir(name):
    arrays = huggingface.arrays_in(name, config)
    return "Hugging Face", {f"target/{key}": x for key, x in arrays.items()}, None, None
  tensors, metadata = safetensors_file.read(name)
  if packed_file.ENTRY in metadata:
    variables, rules = packed_file.read(name)
    leaves = flatten(variables, inference_tree.is_packed)
    zeros = lambda x: Lazy(x.shape, np.dtype(x.dtype), lambda: unpack(x))
    found = {_key(key): zeros(x) if inference_tree.is_packed(x) else x for key, x in leaves}
    return "packed", found, rules, variables
  arrays = timm.from_tensors(tensors, repr(name), like)
  return "timm", {_key(key): x for key, x in arrays.items()}, None, None


def _key(key: str) -> str:
  collection, _, below = key.partition("/")
  return f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"
