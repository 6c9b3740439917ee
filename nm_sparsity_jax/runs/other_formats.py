"""Weights in names of other libraries, by the keys of a checkpoint, such as target/head/kernel.

F.safetensors, of timm's names  -> [read] -> Stored
F.safetensors, packed           ->
FOLDER, Hugging Face's T5       ->
key -> array -> [write_like] -> another such folder
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.deploy import huggingface, packed_file, safetensors_file, timm
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.runs.stored import Stored

HUGGING_FACE = "Hugging Face"  # the format of a folder


def is_readable(path: Any) -> bool:
  """Returns whether `read` reads a path, or refuses it as a file that torch pickled."""
  if not isinstance(path, pathlib.Path):  # in a bucket, where checkpoints alone are read
    return False
  suffixes = (safetensors_file.SUFFIX, *safetensors_file.PICKLED)
  return path.is_file() and path.name.endswith(suffixes) or huggingface.is_folder(path)


def read(name: str, like: Mapping[str, Any] | None = None, config: Any = None) -> Stored:
  """Reads the header of a file, or the headers in a folder.

  Args:
    name: of the file or folder.
    like: as in `timm.from_timm`.
    config: as in `timm.from_timm`; of a T5, as in `huggingface.read`.

  Raises:
    ValueError: it is pickled, damaged, or of another network.
  """
  if os.path.isdir(name):
    if config is not None and not isinstance(config, T5Config):
      raise ValueError(f"{name!r} is a T5 of Hugging Face, and the network is none.")
    arrays = huggingface.Folder(name).arrays(config)
    return _stored(name, HUGGING_FACE, {f"params/{key}": x for key, x in arrays.items()})
  opened = safetensors_file.Opened(name)
  if packed_file.is_packed(opened):
    return _packed(name)
  if "shared.weight" in opened.tensors:
    raise ValueError(
      f"{name!r} holds a T5 in Hugging Face's names: name its folder, which has config.json."
    )
  return _stored(name, "timm", timm.from_tensors(opened.tensors, repr(name), like, config))


def _stored(name: str, format_: str, arrays: Mapping[str, Any]) -> Stored:
  own = {_key(key): x for key, x in arrays.items()}
  leaves = {key: (x.shape, x.dtype.name) for key, x in own.items()}
  return Stored.of(name, format_, leaves, lambda key: np.asarray(own[key]))


def _packed(name: str) -> Stored:
  opened = packed_file.Opened(name)
  own = {_key(key): key for key in opened.leaves}
  leaves = {_key(key): (x.shape, x.dtype.name) for key, x in opened.leaves.items()}
  array = lambda key: opened.array(own[key])
  return Stored.of(name, "packed", leaves, array, opened.rules, lambda: packed_file.read(name))


def _key(key: str) -> str:
  collection, _, below = key.partition("/")
  return f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"


def write_like(path: str, out: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes a folder of Hugging Face's T5 like another one, with other values.

  Args:
    path: of the other one: config.json, tokenizer and dtypes are its.
    out: of the new folder.
    arrays: by key, such as 'target/token_embedder/embedding'.
  """
  folder = huggingface.Folder(path)
  own = {
    key: arrays[f"target/{key}"].astype(x.dtype, copy=False) for key, x in folder.arrays().items()
  }
  tensors = huggingface.to_huggingface(own, folder.config)
  huggingface.write_folder(out, tensors, folder.json, folder.companions())
