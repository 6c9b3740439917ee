"""The file of results: a line of JSON a run. Any number of processes may work on one file.

    processes -> [claim of a run] -> append -> file -> read -> records by run

A claim is a lock on one byte of the file beside it. The system gives it back where a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from _recipes_rows import Run


def read(path: pathlib.Path) -> tuple[dict[Run, dict[str, Any]], int]:
  """Returns the records of a results file by run, and the number of torn lines."""
  found: dict[Run, dict[str, Any]] = {}
  torn = 0
  for line in path.read_text("utf8").splitlines() if path.exists() else ():
    if not line:
      continue
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      torn += 1
      continue
    run = Run(*(record[name] for name in Run._fields))
    if run in found:
      raise ValueError(f"{path} has two results of {run}: delete one of these lines.")
    found[run] = record
  return found, torn


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
  """Adds a line by one write; after a torn line it begins a new one."""
  line = json.dumps(record, allow_nan=False) + "\n"
  with open(path, "ab+", buffering=0) as f:
    fcntl.flock(f, fcntl.LOCK_EX)  # nobody writes between the look at the end and the write
    size = f.seek(0, os.SEEK_END)
    if size:
      f.seek(size - 1)
      line = line if f.read(1) == b"\n" else "\n" + line
    f.write(line.encode())
    os.fsync(f.fileno())


class Claims:
  """What this process takes from a queue that others work on too.

  The locks are those of POSIX: they are of a process, and all of them go when it closes the file.
  So the file of the locks is not that of the results, which each line opens and closes.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._file = open(path.with_name(f"{path.name}.lock"), "ab")

  def take(self, run: Run) -> bool:
    """Says whether the run is still to be done, and by nobody else: then it is this process's."""
    place = int.from_bytes(hashlib.sha256(repr(run).encode()).digest()[:7])
    try:
      fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
      return False
    return run not in read(self._path)[0]  # after the claim: who had it before may be through

  def close(self) -> None:
    self._file.close()


@contextlib.contextmanager
def claims(path: pathlib.Path) -> Iterator[Claims]:
  """Gives the claims of this process back at the end."""
  made = Claims(path)
  try:
    yield made
  finally:
    made.close()
