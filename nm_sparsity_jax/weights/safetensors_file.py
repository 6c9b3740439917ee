"""Safetensors files: the names in one, one tensor at a time, and a new one.

    path -> [Opened] -> name -> shape, dtype -> array, when it is asked for
    name -> array    -> [write] -> a file, whole or not at all

The library `safetensors` holds each shape against the bytes of the file when it opens it. A file
that torch pickled can run any code when it is opened, so none is.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.text import first_line

SUFFIX = ".safetensors"
PICKLED = (".bin", ".pth", ".pt", ".pkl", ".ckpt", ".tar")
_DTYPES = {
  "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
  "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class Opened:
  """A file whose header was read; it is closed.

  Args:
    path: of the file, on a local disk.

  Attributes:
    path: as given.
    shapes: name -> shape.
    dtypes: name -> numpy's name of the dtype, or the file's where numpy has none.

  Raises:
    ValueError: it is a pickled file, or not a safetensors file.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    refuse_pickled(self.path)
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    with self._file() as file:
      for name in file.keys():
        found = file.get_slice(name)
        self.shapes[name] = tuple(found.get_shape())
        self.dtypes[name] = _DTYPES.get(str(found.get_dtype()), str(found.get_dtype()))

  def array(self, name: str) -> np.ndarray:
    """Reads one tensor."""
    with self._file() as file:
      return np.asarray(file.get_tensor(name))

  @contextlib.contextmanager
  def _file(self) -> Iterator[Any]:
    try:
      with _library(self.path).safe_open(self.path, framework="numpy") as file:
        yield file
    except FileNotFoundError:
      raise FileNotFoundError(f"there is no file {self.path!r}") from None
    except ModuleNotFoundError:
      raise
    except Exception as e:
      raise ValueError(
        f"{self.path!r} is not a safetensors file, or damaged ({first_line(e)})."
      ) from e


def refuse_pickled(path: str | os.PathLike) -> None:
  """Raises for a file that torch pickled, by its name or its first bytes."""
  file = pathlib.Path(path)
  start = b""
  if file.is_file():
    with file.open("rb") as opened:
      start = opened.read(2)
  if file.suffix in PICKLED or start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):
    raise ValueError(
      f"{os.fspath(path)!r} is a file that torch pickled. Opening one can run any code, so it is "
      "not read: in torch, load it with weights_only=True and write its state dict with "
      "safetensors.torch.save_file."
    )


def refuse_existing(path: str | os.PathLike) -> None:
  """Raises where `write` would overwrite."""
  if os.path.lexists(path):
    raise ValueError(f"{os.fspath(path)!r} is there already: it is never overwritten.")


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
  """Writes a new file: all of it, or nothing.

  Args:
    path: of the file, which must not be there; its folder is made.
    tensors: name -> array.
  """
  file = pathlib.Path(path)
  refuse_existing(path)
  _library(os.fspath(path))
  from safetensors.numpy import save_file

  # Of a transposed array the library would write the bytes as they lie.
  whole = {name: np.array(x, order="C") for name, x in tensors.items()}
  file.parent.mkdir(parents=True, exist_ok=True)
  beside = file.with_name(file.name + ".tmp")
  try:
    save_file(whole, beside, metadata={"format": "pt"})  # torch's loaders ask for it
    os.replace(beside, file)
  finally:
    beside.unlink(missing_ok=True)


def _library(path: str) -> Any:
  """Imports safetensors, or says what to install."""
  try:
    import safetensors
  except ImportError as e:
    raise ModuleNotFoundError(f"{path!r} is a safetensors file: pip install safetensors") from e
  return safetensors
