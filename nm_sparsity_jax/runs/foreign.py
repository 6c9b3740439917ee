"""Weights in names of other libraries, told in the keys of a checkpoint.

F.safetensors, of timm's names      -> [read] -> key such as target/head/kernel -> shape, dtype
F.safetensors, packed               ->                                          -> array
FOLDER, Hugging Face's T5           ->
key -> array -> [write_like] -> another such folder
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.runs.contents import Contents, Unreadable
from nm_sparsity_jax.weights import (
  huggingface,
  huggingface_folder,
  packed_file,
  safetensors_file,
  timm,
  timm_names,
)

HUGGING_FACE = "Hugging Face"  # the format of a folder

# Names of files that `read` reads, or refuses in a sentence.
SUFFIXES = (safetensors_file.SUFFIX, *safetensors_file.PICKLED)


def read(
  name: str, file: Any, like: Mapping[str, Any] | None = None, config: Any = None
) -> Contents:
  """Reads the header of a file, or the headers in a folder.

  Args:
    name: of the file or folder, as given.
    file: its path, of `folders.path_of`.
    like: as in `timm.from_timm`.
    config: as in `timm.from_timm`; of a T5, as in `huggingface.read`.

  Raises:
    ValueError: it is pickled, damaged, of another network, or not on a local disk.
  """
  if not isinstance(file, pathlib.Path):
    raise Unreadable(f"{name!r}: copy the file to a local disk")
  try:
    if file.is_dir():
      return _read_huggingface(name, config)
    if _is_packed(name):
      return _read_packed(name)
    held = _hold_timm(name, like, config)
  except ValueError as e:  # it names the file
    raise Unreadable(str(e)) from e
  own = {_key(key): key for key in held.leaves}
  leaves = {key: held.leaves[name] for key, name in own.items()}
  return Contents("timm", leaves, lambda key: held.array(own[key]))


def _is_packed(name: str) -> bool:
  try:
    return packed_file.is_packed(safetensors_file.Opened(name))
  except ValueError:  # what reads it as timm's says why
    return False


def _read_packed(name: str) -> Contents:
  opened = packed_file.Opened(name)
  own = {_key(key): key for key in opened.leaves}
  leaves = {key: opened.leaves[name] for key, name in own.items()}
  array = lambda key: opened.array(own[key])
  return Contents("packed", leaves, array, lambda: packed_file.read(name), opened.rules)


def _hold_timm(name: str, like: Mapping[str, Any] | None, config: Any) -> timm.Held:
  try:
    return timm.hold(name, like, config)
  except ValueError:
    names = _names(name)
    if "shared.weight" in names:
      raise ValueError(
        f"{name!r} holds a T5 in Hugging Face's names: name its folder, which has config.json."
      ) from None
    if names and not {*timm_names.TELLING.values()} & {*names}:
      known = ", ".join(f"a {family} has {x!r}" for family, x in timm_names.TELLING.items())
      raise ValueError(
        f"{name!r} (its first tensor is {next(iter(names))!r}) is of no kind known here: give a "
        f"file of `nm-sparsity pack`, a file of timm's names ({known}), or the folder of a Hugging "
        "Face T5."
      ) from None
    raise


def _names(name: str) -> Collection[str]:
  try:
    return safetensors_file.Opened(name).shapes
  except ValueError:
    return ()


def _read_huggingface(name: str, config: Any) -> Contents:
  if config is not None and not isinstance(config, T5Config):
    raise ValueError(f"{name!r} is a T5 of Hugging Face, and the network is none.")
  held = huggingface.hold(name, config)
  leaves = {f"target/{key}": leaf for key, leaf in held.leaves.items()}
  return Contents(HUGGING_FACE, leaves, lambda key: held.array(key.removeprefix("target/")))


def is_folder(path: Any) -> bool:
  """Returns whether a path of `folders.path_of` is that of a folder that `read` reads."""
  return isinstance(path, pathlib.Path) and huggingface_folder.is_folder(path)


def write_like(path: str, out: str, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes a folder of Hugging Face's T5 like another one, with other values.

  Args:
    path: of the other one: config.json, tokenizer and dtypes are its.
    out: of the new folder.
    arrays: by key, such as 'target/token_embedder/embedding'.
  """
  folder, held = huggingface_folder.Folder(path), huggingface.hold(path)
  dtypes = {key: dtype for key, (_, dtype) in held.leaves.items()}
  huggingface.write_each(
    out, folder.config, dtypes, lambda key: arrays[f"target/{key}"], folder.json, folder.beside()
  )


def _key(key: str) -> str:
  collection, _, below = key.partition("/")
  return f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"
