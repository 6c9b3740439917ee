"""Safetensors files: arrays that are read when they are asked for, and written one at a time.

    path -> [Opened] -> name -> Lazy: shape, dtype -> np.asarray reads it
    name -> array or Lazy -> [write] -> a file, whole or not at all

The library `safetensors` knows the format. A file that torch pickled can run any code when it is
opened, so none is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
import safetensors

from nm_sparsity_jax.text import first_line

SUFFIX = ".safetensors"
PICKLED = (".bin", ".pth", ".pt", ".pkl", ".ckpt", ".tar")
PT = {"format": "pt"}  # torch's loaders ask for it
# numpy has no float of 8 bits without a package of its own, so these are not read.
_DTYPES = {
  "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
  "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
  "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
  """An array that is made each time `np.asarray` asks for it.

  Attributes:
    shape: of the array.
    dtype: of the array.
    make: returns it.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], np.ndarray]

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.array(self.make(), dtype, copy=copy)


class Opened:
  """A file whose header was read.

  Args:
    path: of the file, on a local disk.

  Attributes:
    path: as given.
    metadata: what the file tells beside its tensors.
    tensors: name -> array, which is read when it is asked for.

  Raises:
    ValueError: it is a pickled file, or not a safetensors file.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    if not os.path.exists(self.path):
      raise FileNotFoundError(f"there is no file {self.path!r}")
    if not os.path.isfile(self.path):  # a pipe would wait for its writer
      raise ValueError(f"{self.path!r} is not a file.")
    try:
      # Not mapped: a file that becomes shorter meanwhile is an error, and kills no process.
      self._file: Any = safetensors.safe_open(self.path, "np", backend="pread")
    except (safetensors.SafetensorError, OSError) as e:
      refuse_pickled(self.path)
      raise ValueError(
        f"{self.path!r} is not a safetensors file, or damaged ({first_line(e)}): copy it again, or "
        "name another file."
      ) from e
    self.metadata: dict[str, str] = self._file.metadata() or {}
    self.tensors = {name: self._lazy(name) for name in self._file.offset_keys()}

  def _lazy(self, name: str) -> Lazy:
    found = self._file.get_slice(name)
    if (code := found.get_dtype()) not in _DTYPES:
      raise ValueError(f"{self.path!r}: {name!r} is {code}, and {', '.join(_DTYPES)} are read.")
    return Lazy(tuple(found.get_shape()), np.dtype(_DTYPES[code]), lambda: self._read(name))

  def _read(self, name: str) -> np.ndarray:
    try:
      return self._file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as e:
      raise ValueError(f"{self.path!r}: {name!r} cannot be read ({first_line(e)}).") from e


def refuse_pickled(path: str | os.PathLike) -> None:
  """Raises for a file that torch pickled: its name or its first bytes say so."""
  file = pathlib.Path(path)
  with file.open("rb") as opened:
    start = opened.read(2)
  if file.suffix in PICKLED or start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04"):
    raise ValueError(
      f"{os.fspath(path)!r} is a file that torch pickled. Opening one can run any code, so it is "
      "not read: in torch, load it with weights_only=True and write its state dict with "
      "safetensors.torch.save_file."
    )


def refuse_existing(path: str | os.PathLike) -> None:
  """Raises where `create` would overwrite."""
  if os.path.lexists(path):
    raise ValueError(f"{os.fspath(path)!r} is there already: it is never overwritten.")


@contextlib.contextmanager
def create(
  path: str | os.PathLike, like: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[str, np.ndarray], None]]:
  """Writes a new file with one array in memory at a time: all of it, or nothing.

      with create("a.safetensors", {"a": jax.ShapeDtypeStruct((2,), "float32")}) as put:
        put("a", np.zeros(2, np.float32))

  Args:
    path: of the file, which must not be there; its folder is made.
    like: name -> what has a shape and a dtype.
    metadata: what is told beside them; None = what torch's loaders ask for.

  Yields:
    A function that writes the array of a name. Each name is written once, in any order.

  Raises:
    ValueError: the file is there, cannot be written, or not every array was given.
  """
  refuse_existing(path)
  file = pathlib.Path(path)
  unfinished = file.with_name(f".{file.name}.{os.getpid()}")
  leaves = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in like.items()}
  left = set(leaves)
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_zeros(unfinished, leaves, PT if metadata is None else metadata)
    with open(unfinished, "r+b") as opened:
      begin = 8 + int.from_bytes(opened.read(8), "little")
      header = json.loads(opened.read(begin - 8))

      def put(name: str, array: np.ndarray) -> None:
        if (array.shape, array.dtype) != leaves[name]:
          shape, dtype = leaves[name]
          raise ValueError(f"{name!r} is {array.dtype} {array.shape}, and not {dtype} {shape}.")
        left.remove(name)
        opened.seek(begin + header[name]["data_offsets"][0])
        np.asarray(array, order="C").tofile(opened)

      yield put
    if left:
      raise ValueError(f"{os.fspath(path)!r}: {min(left)!r} was not written.")
    os.replace(unfinished, file)
  except (safetensors.SafetensorError, OSError) as e:
    raise ValueError(f"{os.fspath(path)!r} could not be written: {e}.") from e
  finally:
    with contextlib.suppress(OSError):
      unfinished.unlink()


def _write_zeros(path: pathlib.Path, leaves: Mapping[str, Any], metadata: Mapping[str, str]):
  # The library wants all tensors at once. It gets the same zeros for each of them, and `create`
  # then writes the values into the file.
  sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in leaves.items()}
  zeros = np.zeros(max(sizes.values(), default=0), np.uint8)
  specs = {
    name: safetensors.TensorSpec(
      dtype=dtype.name, shape=shape, data_ptr=zeros.ctypes.data, data_len=sizes[name]
    )
    for name, (shape, dtype) in leaves.items()
  }
  safetensors.serialize_file(specs, path, dict(metadata) or None)


def write(
  path: str | os.PathLike, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
  """Writes a new file of arrays, each of which is made, written and dropped.

  Args:
    path: as in `create`.
    tensors: name -> array, or `Lazy`.
    metadata: as in `create`.
  """
  with create(path, tensors, metadata) as put:
    for name, x in tensors.items():
      put(name, np.asarray(x))
