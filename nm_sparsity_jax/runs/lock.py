"""One process at a time in a folder.

The lock is flock's on FOLDER/.lock: it ends with its process, however that ends. filelock has a
descriptor of its own that no child inherits, and a run that outlives its sweep must keep the lock.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import IO


class Lock:
  """A lock that is held, by the open file `.lock`."""

  def __init__(self, file: IO[str]):
    self._file = file

  def fileno(self) -> int:
    """Returns the file descriptor: a child that inherits it (`pass_fds`) holds the lock too."""
    return self._file.fileno()

  def note(self, holder: object) -> None:
    """Writes who holds the lock; a process that is refused reads it."""
    self._file.truncate(0)
    self._file.write(str(holder))
    self._file.flush()


@contextlib.contextmanager
def hold(folder: str | os.PathLike, refusal: Callable[[str], str]) -> Iterator[Lock]:
  """Holds the lock of a folder within a `with` block.

  >>> import tempfile
  >>> folder = tempfile.mkdtemp()
  >>> with hold(folder, "process {} is at work there".format) as lock:
  ...   lock.note(42)
  ...   with hold(folder, "process {} is at work there".format):
  ...     pass
  Traceback (most recent call last):
    ...
  ValueError: process 42 is at work there

  Args:
    folder: where the lock lies; it is made if it is not there.
    refusal: what `Lock.note` said last, '' for nothing -> the text of the error.

  Raises:
    ValueError: another process holds it.
  """
  import fcntl  # not on Windows

  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  with (path / ".lock").open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(refusal(file.read())) from None
    except OSError:  # a file system without locks
      pass
    yield Lock(file)
