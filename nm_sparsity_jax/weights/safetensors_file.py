"""Safetensors files: the names in one, one tensor at a time, and a new one.

    path -> [Opened] -> name -> shape, dtype -> array, when it is asked for
    name -> dtype, shape; arrays, in any order -> [Writer] -> a file, whole or not at all

`safetensors_header` reads the header. Tensors are read by position, not mapped: a file that becomes
shorter meanwhile is an error. A file that torch pickled can run any code when it is opened, so none
is.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np

from nm_sparsity_jax.text import first_line
from nm_sparsity_jax.weights import safetensors_header

SUFFIX = ".safetensors"
PICKLED = (".bin", ".pth", ".pt", ".pkl", ".ckpt", ".tar")
PT = {"format": "pt"}  # torch's loaders ask for it
# In the order in which the library `safetensors` writes them.
_DTYPES = {
  "U64": "uint64", "I64": "int64", "F64": "float64", "F32": "float32", "U32": "uint32",
  "I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16",
  "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_AT_ONCE = 1 << 24  # bytes that are copied at a time where an array is written
_THEIRS = {ours: theirs for theirs, ours in _DTYPES.items()}


class Opened:
  """A file whose header was read; it is closed.

  Args:
    path: of the file, on a local disk.

  Attributes:
    path: as given.
    metadata: what the file tells beside its tensors.
    shapes: name -> shape.
    dtypes: name -> numpy's name of the dtype, or the file's where numpy has none.

  Raises:
    ValueError: it is a pickled file, or not a safetensors file.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    refuse_pickled(self.path)
    with self._open() as file:
      self._state = _state(file)
      size = os.fstat(file).st_size
      start = _read(file, 0, min(size, 9)).tobytes()
      length = int.from_bytes(start[:8], "little")
      self._begin = 8 + length
      _refuse_start(self.path, start, size, length)
      text = _read(file, 8, length).tobytes()
      try:
        self.metadata, self._entries = safetensors_header.parse(text, size - self._begin)
      except safetensors_header.Cut as e:
        raise _Said(f"{self.path!r} was cut: {e}: copy it again.") from e
    self.shapes = {name: entry.shape for name, entry in self._entries.items()}
    self.dtypes = {n: _DTYPES.get(entry.dtype, entry.dtype) for n, entry in self._entries.items()}

  def array(self, name: str) -> np.ndarray:
    """Reads one tensor.

    Args:
      name: of a tensor of the file.

    Raises:
      ValueError: the file was changed since it was opened, or numpy has no such dtype.
    """
    entry = self._entries[name]
    if entry.dtype not in _DTYPES:
      raise ValueError(f"{self.path!r}: {name!r} is {entry.dtype}, which numpy does not have.")
    dtype = dtype_of(self.dtypes[name])
    with self._open() as file:
      if _state(file) != self._state:
        raise ValueError("it was changed while it was read")
      raw = _read(file, self._begin + entry.start, entry.stop - entry.start)
    if entry.dtype == "BOOL" and (raw > 1).any():
      raise ValueError(f"{self.path!r} is damaged: {name!r} holds bytes that are no bool.")
    found = raw.view(dtype).reshape(entry.shape)
    return found if sys.byteorder == "little" else found.byteswap()

  @contextlib.contextmanager
  def _open(self) -> Iterator[int]:
    try:
      # A pipe would wait for its writer.
      file = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
      raise FileNotFoundError(f"there is no file {self.path!r}") from None
    try:
      if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ValueError("it is no regular file")
      yield file
    except _Said:
      raise
    except (ValueError, MemoryError) as e:
      raise ValueError(
        f"{self.path!r} is not a safetensors file, or damaged ({first_line(e)})."
      ) from e
    finally:
      os.close(file)


class _Said(ValueError):
  """An error that names its file already."""


def _refuse_start(path: str, start: bytes, size: int, length: int) -> None:
  """Refuses a file by its first 9 bytes: a length, and the first sign of a header."""
  if not size:
    raise _Said(f"{path!r} is empty: copy it again, or name another file.")
  if size < 8 or length > size - 8 and start[8:] not in (b"", b"{"):
    raise _Said(
      f"{path!r} is not a safetensors file, since it does not begin with the length of a header: "
      "name another file."
    )
  if length > safetensors_header.MOST:
    raise ValueError(f"it has {size:,} bytes, and says that its header has {length:,}")
  if length > size - 8:
    raise _Said(
      f"{path!r} was cut: {size - 8:,} of {length:,} bytes of its header are there: copy it again."
    )


def _state(file: int) -> tuple[int, ...]:
  """Returns what is another one once the file has been written or replaced."""
  found = os.fstat(file)
  return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: int, start: int, count: int) -> np.ndarray:
  """Returns bytes of a file; `count` must be known to lie in it."""
  found = np.empty(count, np.uint8)
  done = 0
  while done < count:
    read = os.preadv(file, [found.data[done : done + _AT_ONCE]], start + done)
    if not read:
      raise ValueError("it became shorter while it was read")
    done += read
  return found


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
  """Raises where `Writer` would overwrite."""
  if os.path.lexists(path):
    raise ValueError(f"{os.fspath(path)!r} is there already: it is never overwritten.")


# --- writing --------------------------------------------------------------------------------------

Header = Mapping[str, tuple[str, tuple[int, ...]]]


class Writer:
  """Writes a new file, one array in memory at a time: all of it, or nothing.

      with Writer("a.safetensors", {"a": ("float32", (2,))}) as writer:
        writer.add("a", np.zeros(2, np.float32))

  Args:
    path: of the file, which must not be there; its folder is made.
    tensors: name -> numpy's name of the dtype, and shape: where each lies follows from these.
    metadata: what is told beside them.

  Raises:
    ValueError: the file is there, cannot be written, or not every tensor was added once.
  """

  def __init__(
    self, path: str | os.PathLike, tensors: Header, metadata: Mapping[str, str] | None = None
  ):
    self._path = pathlib.Path(path)
    refuse_existing(path)
    self._tensors = {name: (dtype_of(dtype), tuple(s)) for name, (dtype, s) in tensors.items()}
    theirs = {name: (_THEIRS[str(dtype)], s) for name, (dtype, s) in self._tensors.items()}
    text = safetensors_header.text_of(theirs, PT if metadata is None else metadata)
    self._head = struct.pack("<Q", len(text)) + text
    self._left = {name: _bytes(leaf) for name, leaf in self._tensors.items()}
    self._starts: dict[str, int] = {}
    end = len(self._head)
    for name, size in self._left.items():
      self._starts[name], end = end, end + size
    self._unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")

  def __enter__(self) -> Writer:
    with self._told():
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._file: BinaryIO = open(self._unfinished, "wb")
    try:
      with self._told():
        self._file.write(self._head)
    except BaseException:
      self._drop()
      raise
    return self

  def add(self, name: str, array: np.ndarray, first: int = 0) -> None:
    """Writes a tensor, or some rows of it.

    Args:
      name: of the tensor.
      array: its values.
      first: the row that the array begins with, where others are added by other calls.
    """
    dtype, shape = self._tensors[name]
    rows = (*shape[:1], *array.shape[1:]) if shape else ()
    fits = first + len(array) <= shape[0] if shape and array.ndim else array.shape == shape
    if array.dtype != dtype or rows != shape or not fits or array.nbytes > self._left[name]:
      raise ValueError(f"{name!r} is {array.dtype} {array.shape}, and not {dtype} {shape}.")
    self._left[name] -= array.nbytes
    whole = max(shape[0], 1) if shape else 1
    with self._told():
      self._file.seek(self._starts[name] + first * (_bytes((dtype, shape)) // whole))
      _write_rows(self._file, array.astype(array.dtype.newbyteorder("<"), copy=False))

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    try:
      if kind is None:
        if lost := [name for name, left in self._left.items() if left]:
          raise ValueError(f"{os.fspath(self._path)!r}: {lost[0]!r} was not written.")
        with self._told():
          self._file.close()
          os.replace(self._unfinished, self._path)
    finally:
      self._drop()

  def _drop(self) -> None:
    with contextlib.suppress(OSError):  # a full disk, again
      self._file.close()
    self._unfinished.unlink(missing_ok=True)

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    try:
      yield
    except OSError as e:
      raise ValueError(f"{os.fspath(self._path)!r} could not be written: {e.strerror or e}.") from e


def write(
  path: str | os.PathLike,
  tensors: Mapping[str, np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes a new file of arrays that are in memory, as the library `safetensors` does.

  Args:
    path: as in `Writer`.
    tensors: name -> array.
    metadata: as in `Writer`.
  """
  header = in_order({name: (str(x.dtype), x.shape) for name, x in tensors.items()})
  with Writer(path, header, metadata) as writer:
    for name in header:
      writer.add(name, tensors[name])


def in_order(tensors: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
  """Returns the tensors in the library's order: then each lies at a multiple of its own width.

  >>> list(in_order({"a": ("int8", ()), "b": ("float32", ()), "c": ("float32", ())}))
  ['b', 'c', 'a']

  Args:
    tensors: as in `Writer`.
  """
  ranks = {ours: rank for rank, ours in enumerate(_THEIRS)}
  order = sorted(tensors, key=lambda name: (ranks[str(dtype_of(tensors[name][0]))], name))
  return {name: tensors[name] for name in order}


def _bytes(leaf: tuple[np.dtype, tuple[int, ...]]) -> int:
  dtype, shape = leaf
  return dtype.itemsize * math.prod(shape)


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
    raise ValueError(f"{name!r} is not a dtype of a safetensors file that numpy has.")
  return np.dtype(name)
