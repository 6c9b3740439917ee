"""Weights in names of other libraries, told in the keys of a checkpoint.

F.safetensors, of timm's names      -> [read] -> key such as target/head/kernel -> shape, dtype
F.safetensors, packed               ->                                          -> array
FOLDER, Hugging Face's T5           ->
key -> array -> [write_like] -> another such folder
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.deploy import huggingface, packed_file, safetensors_file, timm
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.runs.contents import Contents, Unreadable

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
    opened = safetensors_file.Opened(name)
    if packed_file.is_packed(opened):
      return _read_packed(name)
    return _contents("timm", _timm_arrays(opened, like, config))
  except ValueError as e:  # it names the file
    raise Unreadable(str(e)) from e


def _contents(format_: str, arrays: Mapping[str, Any]) -> Contents:
  """Returns what arrays hold, by our keys such as 'params/head/kernel'."""
  own = {_key(key): x for key, x in arrays.items()}
  leaves = {key: (x.shape, x.dtype.name) for key, x in own.items()}
  return Contents(format_, leaves, lambda key: np.asarray(own[key]))


def _read_packed(name: str) -> Contents:
  opened = packed_file.Opened(name)
  own = {_key(key): key for key in opened.leaves}
  leaves = {key: opened.leaves[name] for key, name in own.items()}
  array = lambda key: opened.array(own[key])
  return Contents("packed", leaves, array, lambda: packed_file.read(name), opened.rules)


def _timm_arrays(
  opened: safetensors_file.Opened, like: Mapping[str, Any] | None, config: Any
) -> Mapping[str, Any]:
  names = list(opened.tensors)
  if "shared.weight" in names:
    raise ValueError(
      f"{opened.path!r} holds a T5 in Hugging Face's names: name its folder, which has config.json."
    )
  if names and not {*timm.FAMILIES.values()} & {*names}:
    known = ", ".join(f"a {family} has {x!r}" for family, x in timm.FAMILIES.items())
    raise ValueError(
      f"{opened.path!r} (its first tensor is {names[0]!r}) is of no kind known here: give a file "
      f"of `nm-sparsity pack`, of timm's names ({known}), or the folder of a Hugging Face T5."
    )
  return timm.from_tensors(opened.tensors, repr(opened.path), like, config)


def _read_huggingface(name: str, config: Any) -> Contents:
  if config is not None and not isinstance(config, T5Config):
    raise ValueError(f"{name!r} is a T5 of Hugging Face, and the network is none.")
  arrays = huggingface.Folder(name).arrays(config)
  return _contents(HUGGING_FACE, {f"params/{key}": x for key, x in arrays.items()})


def is_folder(path: Any) -> bool:
  """Returns whether a path of `folders.path_of` is that of a folder that `read` reads."""
  return isinstance(path, pathlib.Path) and huggingface.is_folder(path)


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
  tensors = huggingface.to_tensors(own, folder.config)
  huggingface.write_folder(out, tensors, folder.json, folder.beside())


def _key(key: str) -> str:
  collection, _, below = key.partition("/")
  return f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"
