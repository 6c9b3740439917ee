"""Safetensors files: the names in one, one tensor at a time, and a new one.

    path -> [Opened] -> name -> shape, dtype -> array, when it is asked for
    name -> array    -> [write] -> a file, whole or not at all

The library `safetensors` holds each shape against the bytes of the file when it opens it. A file
that torch pickled can run any code when it is opened, so none is.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from nm_sparsity_jax.text import first_line

SUFFIX = ".safetensors"
PICKLED = (".bin", ".pth", ".pt", ".pkl", ".ckpt", ".tar")
_DTYPES = {
  "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
  "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_AT_ONCE = 1 << 24  # bytes that are copied at a time where an array is written
_THEIRS = {ours: theirs for theirs, ours in _DTYPES.items()}


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


def write_each(
  path: str | os.PathLike,
  header: Mapping[str, tuple[str, tuple[int, ...]]],
  tensors: Iterator[np.ndarray],
) -> None:
  """Writes a file, one tensor in memory at a time.

  Args:
    path: of the file; what was there is overwritten, also where this fails.
    header: name -> numpy's name of the dtype, and shape.
    tensors: at least as many arrays, in this order; the others are left.

  Raises:
    ValueError: an array is not what the header says.
  """
  told: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, (dtype, shape) in header.items():
    start, end = end, end + dtype_of(dtype).itemsize * math.prod(shape)
    told[name] = {"dtype": _THEIRS[dtype], "shape": list(shape), "data_offsets": [start, end]}
  text = json.dumps(told, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    for name, (dtype, shape) in header.items():
      array = next(tensors)
      if (str(array.dtype), array.shape) != (dtype, tuple(shape)):
        raise ValueError(
          f"{name!r} is {array.dtype} {array.shape}, and {dtype} {tuple(shape)} was announced."
        )
      _write_rows(file, array.astype(array.dtype.newbyteorder("<"), copy=False))
      del array  # or it would stay while the next one is made


def _write_rows(file: BinaryIO, array: np.ndarray) -> None:
  """Writes an array in C order, some rows at a time where it lies otherwise."""
  rows = array if array.ndim else array[None]
  at_once = max(1, _AT_ONCE // max(rows[:1].nbytes, 1))
  for start in range(0, len(rows), at_once):
    part = np.ascontiguousarray(rows[start : start + at_once])
    file.write(part.reshape(-1).view(np.uint8).data)


def dtype_of(name: str) -> np.dtype:
  """Returns numpy's dtype of a name of `Opened.dtypes`.

  >>> dtype_of("bfloat16").itemsize
  2
  """
  if name not in _THEIRS:
    raise ValueError(f"{name!r} is no dtype of a safetensors file that numpy has.")
  return np.dtype(name)


def _library(path: str) -> Any:
  """Imports safetensors, or says what to install."""
  try:
    import safetensors
  except ImportError as e:
    raise ModuleNotFoundError(f"{path!r} is a safetensors file: pip install safetensors") from e
  return safetensors
