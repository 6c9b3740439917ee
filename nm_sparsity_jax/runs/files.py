"""Files and folders of a run, whole or not at all, and whether a folder can be written to.

What is made lies beside its name until it is complete, and is renamed then: a kill leaves what was
there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from nm_sparsity_jax.core.text import first_line


@contextlib.contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Makes a file that replaces another one when the `with` block ends well.

      with whole_file("out/predictions.jsonl") as unfinished, unfinished.open("w") as file:
        ...

  Args:
    path: the file. Its folder is there.

  Yields:
    The path to write to, beside it. An error removes it; what a kill leaves, the next call takes.
  """
  path = pathlib.Path(path)
  beside = path.with_name(path.name + ".tmp")
  try:
    yield beside
    os.replace(beside, path)
  finally:
    beside.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
  """Writes all of a small file, or leaves the one before."""
  with whole_file(path) as unfinished:
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(name: str) -> Iterator[pathlib.Path]:
  """Makes a new folder that has its name when the `with` block ends well.

  Args:
    name: the folder, which is not there yet; what is above it is made.

  Yields:
    The folder to write to, beside it. An error removes it, and what was made above it.

  Raises:
    ValueError: it cannot be made, or the block failed: the cause is named.
  """
  path = pathlib.Path(name).absolute()
  above = next(p for p in path.parents if p.exists())  # what is made below it goes, if all fails
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
  except OSError as e:
    _remove_empty(path, above)
    raise ValueError(f"{name!r} cannot be made: {e.strerror or e}") from e
  try:
    yield unfinished
    unfinished.chmod(0o777 & ~_umask())
    os.rename(unfinished, path)
  except Exception as e:
    raise ValueError(f"{name!r} could not be written: {first_line(e)}") from e
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
    _remove_empty(path, above)


def _remove_empty(path: pathlib.Path, above: pathlib.Path) -> None:
  """Removes the empty folders around a path that were made below another folder."""
  for folder in path.parents:
    if folder == above or folder.is_dir() and any(folder.iterdir()):
      break
    if folder.is_dir():
      folder.rmdir()


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask


def probe(folder: str | os.PathLike) -> None:
  """Raises the OSError that a new file in a folder would meet, and leaves nothing there."""
  with tempfile.TemporaryFile(dir=folder):
    pass


@contextlib.contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
  """Names a file in whatever error its content ends in.

      with named(file):
        steps = {entry["step"]: entry for entry in found}

  Raises:
    ValueError: the block failed; the cause is named. An error that names the file already passes.
  """
  try:
    yield
  except Exception as e:
    if isinstance(e, ValueError | OSError) and str(path) in str(e):
      raise
    kind = "" if isinstance(e, ValueError) else f"{type(e).__name__}: "
    raise ValueError(f"{path} is damaged: {kind}{first_line(e)}") from e


MOST_TEXT = 1 << 26  # bytes of a file that is read as one text
_MOST_DIGITS = 19  # of a whole number: 64 bits


def read_text(path: str | os.PathLike, most: int = MOST_TEXT) -> str:
  """Reads a small text file.

  Args:
    path: the file.
    most: how many bytes it may have; more are not read.

  Raises:
    ValueError: it is longer, or is no UTF-8. The error names the file.
  """
  path = pathlib.Path(path)
  if (size := path.stat().st_size) > most:
    raise ValueError(f"{path} has {size:,} bytes, and at most {most:,} are read: it is damaged.")
  try:
    return path.read_text("utf-8")
  except UnicodeDecodeError as e:
    raise ValueError(f"{path} is damaged: not UTF-8 at byte {e.start} ({e.reason})") from e


def parse_json(text: str) -> Any:
  """Parses JSON whose whole numbers have at most 64 bits.

  >>> parse_json('{"step": 100}')
  {'step': 100}

  Raises:
    ValueError: it is no JSON, holds a longer number, or is nested too deeply.
  """
  try:
    return json.loads(text, parse_int=_int)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None


def _int(digits: str) -> int:
  if len(digits.lstrip("-")) > _MOST_DIGITS:
    raise ValueError(f"a whole number of {len(digits):,} digits")
  return int(digits)


def read_json(path: pathlib.Path, default: Any) -> Any:
  """Reads what `write_atomically` wrote; the default where nothing did.

  Raises:
    ValueError: the file is damaged, or holds another kind of value than the default. The error
      names it.
  """
  if not path.is_file():
    return default
  text = read_text(path)
  try:
    found = parse_json(text)
  except ValueError as e:
    raise ValueError(f"{path} is damaged: {e}") from e
  if default is not None and not isinstance(found, type(default)):
    raise ValueError(
      f"{path} is damaged: it holds a {type(found).__name__}, not a {type(default).__name__}"
    )
  return found


def cannot_write(folder: pathlib.Path) -> str:
  """Says why nothing can be written into a folder, which need not be there yet; '' if it can."""
  try:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
  except OSError as e:  # such as a name that is too long
    return f"{e.strerror}: {str(folder)[:80]!r}"
  if not there.is_dir():
    return f"Not a directory: {str(there)!r} is a file"
  return "" if os.access(there, os.W_OK) else f"Permission denied in {str(there)!r}"


def check_folder(what: str, folder: pathlib.Path) -> None:
  """Raises where a folder to write into cannot be made."""
  if why := cannot_write(folder):
    raise ValueError(f"{what}: {why}. Name another place.")
