"""A safetensors file of timm's names, told in the keys of a checkpoint.

path -> [open_timm] -> key such as target/blocks_0/mlp/fc1/kernel -> shape, dtype -> array
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from nm_sparsity_jax.weights import safetensors_file, timm

# Names of files that `open_timm` reads, or refuses in a sentence.
SUFFIXES = (safetensors_file.SUFFIX, *safetensors_file.PICKLED)


def open_timm(
  path: str | os.PathLike,
) -> tuple[dict[str, tuple[tuple[int, ...], str]], Callable[[str], np.ndarray]]:
  """Reads the header of a file.

  Args:
    path: of the file, on a local disk.

  Returns:
    key -> (shape, dtype), in our names and layouts; and what reads the array of a key.

  Raises:
    ValueError: it is pickled, damaged, or not of a network that we know.
  """
  opened = safetensors_file.Opened(path)
  found: dict[str, tuple[tuple[int, ...], str]] = {}
  sources: dict[str, timm.Source] = {}
  for name, source in timm.layout(opened.shapes, repr(opened.path)).items():
    collection, _, below = name.partition("/")
    key = f"{'target' if collection == 'params' else f'flax_mutables/{collection}'}/{below}"
    found[key] = source.shape(opened.shapes[source.name]), opened.dtypes[source.name]
    sources[key] = source

  def array(key: str) -> np.ndarray:
    return np.array(sources[key].take(opened.array(sources[key].name)), order="C")

  return found, array
