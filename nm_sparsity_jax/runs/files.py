"""Small files of a run: written whole or not at all, and named where they are damaged."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from nm_sparsity_jax.core.files import whole
from nm_sparsity_jax.core.text import first_line


def write_atomically(path: str | os.PathLike, text: str) -> None:
  """Writes all of a small file, or leaves the one before."""
  with whole(path, replace=True) as unfinished:
    unfinished.write_text(text, "utf-8")


@contextlib.contextmanager
def named(path: Any) -> Iterator[None]:
  """Names a file in whatever error its content ends in.

      with named(file):
        steps = {entry["step"]: entry for entry in found}

  Raises:
    ValueError: the block failed; the cause is named.
  """
  # A FIFO would never end, and neither would /dev/zero.
  if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
    raise ValueError(f"{path} is neither a file nor a folder.")
  try:
    yield
  # A reader may import its library late: a missing package is no damage.
  except (ImportError, FileNotFoundError):
    raise
  except Exception as e:  # each library has errors of its own
    if isinstance(e, ValueError) and str(path) in str(e):
      raise
    raise ValueError(f"{path} is damaged: {type(e).__name__}: {first_line(e)}") from e


def refuse_unwritable(macro: str, path: str) -> pathlib.Path:
  """Returns the absolute path of a local folder; refuses one that cannot be made or written into.

  Args:
    macro: what the path was given as, such as 'MODEL_DIR'.
    path: of a folder that need not be there.
  """
  if not path.strip() or "://" in path:
    raise ValueError(f"{macro}={path!r}: name a folder of this machine, such as 'run'.")
  folder = pathlib.Path(path).expanduser().absolute()
  there = next(parent for parent in (folder, *folder.parents) if parent.exists())
  if not there.is_dir() or not os.access(there, os.W_OK):
    raise ValueError(
      f"{macro}={path!r}: nothing can be written into {there}, so name another folder."
    )
  return folder


def read_text(path: str | os.PathLike) -> str:
  """Reads a text file; a ValueError names one that is no UTF-8."""
  with named(path):
    return pathlib.Path(path).read_text("utf-8")


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes all of a small JSON file, or leaves the one before."""
  write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Any, default: Any) -> Any:
  """Reads a JSON file; the default where there is none.

  Raises:
    ValueError: the file is damaged. The error names it.
  """
  if not path.is_file():
    return default
  with named(path):
    return json.loads(path.read_text("utf-8"))
