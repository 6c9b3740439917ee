"""Where gin files and task modules lie, and where a module that they name is found."""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import sys

import nm_sparsity_jax


def folder() -> pathlib.Path:
  """Returns the folder that holds gin_configs/, to be given as a search path.

  A wheel carries gin_configs/ inside the package. A checkout, an editable installation and an
  unpacked sdist have it beside the package, since an editable installation maps no data into it.
  README.md, docs/ and examples/ lie in the same folder.

  >>> (folder() / "gin_configs" / "sparsity.gin").is_file()
  True
  """
  package = pathlib.Path(nm_sparsity_jax.__file__).resolve().parent
  return package if (package / "gin_configs").is_dir() else package.parent


def find(file: str) -> pathlib.Path:
  """Finds a file that a user names: where they stand, or in the folder that has gin_configs/.

  >>> find("examples/sweep_mini_glue.toml").is_file()
  True

  Raises:
    ValueError: it is in neither place. The error names both.
  """
  for path in (pathlib.Path(file), folder() / file):
    if os.path.isfile(path):  # also where the name is too long
      return path
  raise ValueError(f"no file {file!r} here, in {os.getcwd()}, nor in {folder()}. Give its path.")


def refuse_missing_module(module: str) -> None:
  """Refuses a module of a setting that is not there; imports only the packages around it.

  Args:
    module: what MIXTURE_OR_TASK_MODULE names.

  Raises:
    ValueError: says where it was looked for.
  """
  try:
    is_there = module in sys.modules or importlib.util.find_spec(module) is not None
  except (ImportError, ValueError, AttributeError):
    is_there = False
  if not is_there:
    raise ValueError(
      f"MIXTURE_OR_TASK_MODULE={module!r}: there is no such module in {os.getcwd()} nor on "
      "Python's path. Go to the folder that holds it, or add that folder to PYTHONPATH."
    )


def see_modules_here() -> None:
  """Makes modules in the current folder importable, as `python -m` does.

  Users keep task modules where they stand; a command that pip installed does not look there.
  """
  if os.getcwd() not in sys.path and "" not in sys.path:
    sys.path.insert(0, os.getcwd())


def not_found(record: logging.LogRecord) -> bool:
  """Drops gin's log line of an error for each search path that lacks a file.

  It looks like a failure, and gin raises where no search path has the file.

  Args:
    record: of the root logger.
  """
  return not str(record.msg).startswith("Path not found")
