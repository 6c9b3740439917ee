"""What every reader and writer of files shares: arrays not read yet, and new files that are whole.

`runs.files` replaces files of a run; what is made here never overwrites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


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


def refuse_existing(path: str | os.PathLike) -> None:
  """Raises where a new file or folder would overwrite another one."""
  if os.path.lexists(path):
    raise ValueError(f"{os.fspath(path)!r} is there already: it is never overwritten.")


@contextlib.contextmanager
def whole(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Makes a new file or folder that has its name when the `with` block ends well.

  Args:
    path: of it, which must not be there; its parents are made.

  Yields:
    The path to write to, in the same folder. An error removes what is there.

  Raises:
    ValueError: it is there.
  """
  refuse_existing(path)
  made = pathlib.Path(os.path.abspath(path))
  # In the same folder: a rename between two disks is a copy, which can end half way.
  unfinished = made.with_name(f".{made.name}.{os.getpid()}")
  try:
    made.parent.mkdir(parents=True, exist_ok=True)
    yield unfinished
    os.rename(unfinished, made)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)  # a folder
    with contextlib.suppress(OSError):
      unfinished.unlink()
