"""One process at a time in a folder.

The lock is flock's on FOLDER/.lock: it ends with its process, however that ends. filelock has a
descriptor of its own that no child inherits, and a run that outlives its sweep must keep the lock.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def hold(folder: str | os.PathLike) -> Iterator[int]:
  """Holds the lock of a folder within a `with` block.

  >>> import tempfile
  >>> folder = tempfile.mkdtemp()
  >>> with hold(folder), hold(folder):
  ...   pass
  Traceback (most recent call last):
    ...
  ValueError: ...: another process is at work there, ...

  Args:
    folder: where the lock lies; it is made if it is not there.

  Yields:
    The file descriptor: a child that inherits it (`pass_fds`) holds the lock too.

  Raises:
    ValueError: another process holds it.
  """
  import fcntl  # not on Windows

  path = pathlib.Path(folder)
  path.mkdir(parents=True, exist_ok=True)
  with (path / ".lock").open("a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"{folder}: another process is at work there, or a run that a sweep left. Wait until it "
        "ends, or end it (SIGTERM saves first); the same command continues from there."
      ) from None
    except OSError:  # a file system without locks
      pass
    yield file.fileno()
