"""Files of a run, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from nm_sparsity_jax.core.text import first_line


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Makes a file that replaces another one when the `with` block ends well.

      with whole_file("out/predictions.jsonl") as unfinished, unfinished.open("w") as file:
        ...

  Args:
    path: the file. Its folder is made.

  Yields:
    The path to write to, in the same folder, so that a kill leaves the file that was there before.
    An error removes it; what a kill leaves, the next call overwrites.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(path.name + ".tmp")
  try:
    yield unfinished
    os.replace(unfinished, path)
  finally:
    unfinished.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
  """Writes all of a small file, or leaves the one before."""
  with whole_file(path) as unfinished:
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def named(path: Any) -> Iterator[None]:
  """Names a file in whatever error its content ends in.

      with named(file):
        steps = {entry["step"]: entry for entry in found}

  Raises:
    ValueError: the block failed; the cause is named.
  """
  try:
    yield
  # What json raises, and what code raises that reads other values than it expects.
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
    if str(path) in str(e):
      raise
    raise ValueError(f"{path} is damaged: {type(e).__name__}: {first_line(e)}") from e


def read_text(path: str | os.PathLike) -> str:
  """Reads a text file; a ValueError names one that is no UTF-8."""
  with named(path):
    return pathlib.Path(path).read_text("utf-8")


def read_json(path: Any, default: Any) -> Any:
  """Reads a JSON file; the default where there is none.

  Raises:
    ValueError: the file is damaged. The error names it.
  """
  if not path.is_file():
    return default
  with named(path):
    return json.loads(path.read_text("utf-8"))
