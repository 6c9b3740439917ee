"""What a checkpoint may declare, held against the bytes that are there, before anything is read.

A shape is a few digits in a file; the array is as large as they say. A damaged or a hostile file
declares more than it holds, and reading it would take all memory.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# Weights of noise deflate by a tenth, zeros by some thousands.
_MOST_TIMES = 4096
_SMALL = 1 << 26  # bytes that may be declared wherever there is a byte


def bytes_there(folder: Any) -> int | None:
  """Returns the bytes of all files below a folder; None for one that is not on this machine."""
  if not isinstance(folder, pathlib.Path):
    return None
  found = 0
  for room, _, names in os.walk(folder):
    found += sum(os.lstat(os.path.join(room, name)).st_size for name in names)
  return found


def check_array(
  key: str,
  shape: Sequence[Any],
  dtype: str | None,
  there: int | None,
  chunk: Sequence[Any] | None = None,
) -> None:
  """Refuses an array that declares more than can be there, or than fits into memory.

  >>> check_array("w", (1 << 40,), "float32", there=12_000)
  Traceback (most recent call last):
    ...
  ValueError: w declares shape (1099511627776,) of float32, 4,096.0 GiB, and 11.7 KiB are there

  Args:
    key: of the array, for the error.
    shape: as declared.
    dtype: as declared; None is not known.
    there: the bytes of the files that hold it, and maybe others; None is not known.
    chunk: the shape of one chunk, as declared; None is not known.

  Raises:
    ValueError: names the array, what it declares, and the limit.
  """
  size = _bytes(key, shape, dtype)
  what = f"{key} declares shape {tuple(shape)} of {dtype}, {_text(size)}"
  if there is not None and size > _SMALL + _MOST_TIMES * there:
    raise ValueError(f"{what}, and {_text(there)} are there")
  if size > (memory := _memory()):
    raise ValueError(f"{what}, and this machine has {_text(memory)} of memory")
  if chunk is not None and (one := _bytes(key, chunk, dtype)) > max(_SMALL, 4 * size):
    raise ValueError(f"{key} declares chunks of {_text(one)} for an array of {_text(size)}")


def _bytes(key: str, shape: Sequence[Any], dtype: str | None) -> int:
  if not all(isinstance(n, int | np.integer) and 0 <= n < 1 << 63 for n in shape):
    raise ValueError(f"{key} declares shape {tuple(shape)}, which is not a shape")
  try:
    each = np.dtype(dtype).itemsize if dtype else 1
  except TypeError as e:
    raise ValueError(f"{key} declares dtype {dtype!r}, which is not a dtype") from e
  return math.prod(map(int, shape)) * each


def _text(size: int) -> str:
  for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
    if size >= 1 << power:
      return f"{size / (1 << power):,.1f} {unit}"
  return f"{size} bytes"


def _memory() -> int:
  """Returns the bytes of memory of this machine."""
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
