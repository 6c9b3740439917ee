"""A safetensors file of timm's names, told in the keys of a checkpoint.

path -> [read] -> key such as target/blocks_0/mlp/fc1/kernel -> shape, dtype -> array
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.runs.contents import Contents, Unreadable
from nm_sparsity_jax.weights import safetensors_file, timm

# Names of files that `read` reads, or refuses in a sentence.
SUFFIXES = (safetensors_file.SUFFIX, *safetensors_file.PICKLED)


def read(
  name: str, file: Any, like: Mapping[str, Any] | None = None, config: Any = None
) -> Contents:
  """Reads the header of a file.

  Args:
    name: of the file, as given.
    file: its path, of `folders.path_of`.
    like: as in `timm.from_timm`.
    config: as in `timm.from_timm`.

  Raises:
    ValueError: it is pickled, damaged, of another network, or not on a local disk.
  """
  if not isinstance(file, pathlib.Path):
    raise Unreadable(f"{name!r}: copy the file to a local disk")
  try:
    held = timm.hold(name, like, config)
  except ValueError as e:  # it names the file
    raise Unreadable(str(e)) from e
  own = {_key(key): key for key in held.leaves}
  leaves = {key: held.leaves[name] for key, name in own.items()}
  return Contents("timm", leaves, lambda key: held.array(own[key]))


def _key(key: str) -> str:
  collection, _, below = key.partition("/")
  return f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"
