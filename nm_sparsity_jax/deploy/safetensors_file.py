"""Safetensors files: arrays that are read when they are asked for, and written all at once.

    path -> [read] -> name -> Lazy: shape, dtype -> np.asarray reads it
    name -> array -> [write] -> a file, whole or not at all

The library `safetensors` knows the format. A file that torch pickled can run any code when it is
opened, so none is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
import safetensors.numpy

from nm_sparsity_jax.core.files import Lazy, whole
from nm_sparsity_jax.core.text import first_line

SUFFIX = ".safetensors"
PICKLED = (".bin", ".pth", ".pt", ".pkl", ".ckpt", ".tar")
# numpy has no float of 8 bits without a package of its own, so these are not read.
_DTYPES = {
  "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
  "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
  "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def read(path: str | os.PathLike) -> tuple[dict[str, Lazy], dict[str, str]]:
  """Returns name -> array, which is read when it is asked for, and the texts beside them.

  Args:
    path: of the file, on a local disk. Its header is read at once.

  Raises:
    ValueError: it is a pickled file, or not a safetensors file.
  """
  path = os.fspath(path)
  refuse_pickled(path)
  try:
    file: Any = safetensors.safe_open(path, "np")
    return {name: _lazy(file, name) for name in file.keys()}, file.metadata() or {}
  except (safetensors.SafetensorError, IsADirectoryError, KeyError) as e:
    raise ValueError(
      f"{path!r} is not a safetensors file that numpy can read ({first_line(e)}): copy it again, "
      "or name another file."
    ) from e


def _lazy(file: Any, name: str) -> Lazy:
  found = file.get_slice(name)
  dtype = np.dtype(_DTYPES[found.get_dtype()])
  return Lazy(tuple(found.get_shape()), dtype, lambda: file.get_tensor(name))


def refuse_pickled(path: str | os.PathLike) -> None:
  """Raises for a file that torch pickled: its name says so."""
  if os.fspath(path).endswith(PICKLED) and os.path.isfile(path):
    raise ValueError(
      f"{os.fspath(path)!r} is a file that torch pickled. Opening one can run any code, so it is "
      "not read: in torch, load it with weights_only=True and write its state dict with "
      "safetensors.torch.save_file."
    )


def write(
  path: str | os.PathLike, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
  """Writes a new file of arrays: all of it, or nothing.

  Args:
    path: of the file, which must not be there; its folder is made.
    tensors: name -> array.
    metadata: texts to keep with them; None = what torch's loaders ask for.

  Raises:
    ValueError: the file is there.
  """
  # The library writes the bytes as they lie in memory, so a view must become an array of its own.
  arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
  with whole(path) as unfinished:
    safetensors.numpy.save_file(arrays, unfinished, dict(metadata or {"format": "pt"}))
