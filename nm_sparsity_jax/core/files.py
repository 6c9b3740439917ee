"""What every reader and writer of files shares: arrays not read yet, and new files that are whole.

A file of a run may be replaced; all else never overwrites.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
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
  """Raises where a new file or folder would overwrite another one, or not be on a local disk."""
  if "://" in os.fspath(path):
    raise ValueError(f"{path!r}: name a place on a local disk, and copy it from there.")
  if os.path.lexists(path):
    raise ValueError(f"{os.fspath(path)!r} is there already: it is never overwritten.")


@contextlib.contextmanager
def whole(path: str | os.PathLike, replace: bool = False) -> Iterator[pathlib.Path]:
  """Makes a file or folder that has its name when the `with` block ends well.

      with whole("out/predictions.jsonl", replace=True) as unfinished:
        unfinished.write_text(...)

  Args:
    path: of it; its parents are made.
    replace: take the place of a file of that name. A kill leaves the one that was there before.

  Yields:
    The path to write to, in the same folder. An error removes what is there.

  Raises:
    ValueError: it is there, and not to be replaced.
  """
  if not replace:
    refuse_existing(path)
  made = pathlib.Path(os.path.abspath(path))
  # In the same folder: a rename between two disks is a copy, which can end half way.
  unfinished = made.with_name(f".{made.name}.{os.getpid()}.unfinished")
  try:
    made.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(made)
    yield unfinished
    if not replace and unfinished.is_file():
      try:  # another process may have made it meanwhile, and `replace` would take its place
        os.link(unfinished, made)
      except FileExistsError:
        refuse_existing(made)
    else:
      os.replace(unfinished, made)
  finally:
    _remove(unfinished)


def _remove_left(made: pathlib.Path) -> None:
  """Removes what processes that were killed left of a file or folder."""
  for left in made.parent.glob(f".{glob.escape(made.name)}.[0-9]*.unfinished"):
    try:
      os.kill(int(left.suffixes[-2][1:]), 0)  # whether that process is alive
    except ProcessLookupError:
      _remove(left)
    except (OSError, ValueError, OverflowError):  # it is somebody else's
      pass


def _remove(path: pathlib.Path) -> None:
  shutil.rmtree(path, ignore_errors=True)  # a folder
  with contextlib.suppress(OSError):
    path.unlink()
