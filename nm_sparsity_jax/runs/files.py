"""Small files of a run, whole or not at all, and whether a folder can be written to."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def write_atomically(path: pathlib.Path, text: str) -> None:
  """All of a small file, or the one before."""
  beside = path.with_name(path.name + ".tmp")
  beside.write_text(text)
  os.replace(beside, path)


def read_json(path: pathlib.Path, default: Any) -> Any:
  """What `write_atomically` wrote, or the default where nothing did."""
  return json.loads(path.read_text()) if path.is_file() else default


def cannot_write(folder: pathlib.Path) -> str:
  """Why nothing can be written into a folder, which need not be there yet; "" if it can."""
  there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  if not there.is_dir():
    return f"Not a directory: {str(there)!r} is a file"
  return "" if os.access(there, os.W_OK) else f"Permission denied in {str(there)!r}"


def check_folder(what: str, folder: pathlib.Path) -> None:
  """Raises where a folder to write into cannot be made."""
  if why := cannot_write(folder):
    raise ValueError(f"{what}: {why}. Name another place.")
