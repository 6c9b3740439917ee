"""--import MODULE: modules of the user's own that a command imports before it reads anything.

A checkpoint, a run's folder, a gin file or a sweep may name a recipe or a role that a module
registers. What a file says never makes a command import that module: you name it by this flag.
"""

from __future__ import annotations

import argparse
import importlib


def add(parser: argparse.ArgumentParser) -> None:
  """Adds --import, which may be repeated."""
  parser.add_argument(
    "--import", dest="imports", action="append", default=[], type=_name, metavar="MODULE",
    help="first import this module, which registers recipes or roles of your own; may be repeated",
  )  # fmt: skip


def load(args: argparse.Namespace) -> None:
  """Imports the modules in the order of the flags; modules in the current folder are found too.

  Args:
    args: of a parser that `add` was given.

  Raises:
    ValueError: a module is not found, or its import fails.
  """
  if not args.imports:
    return
  from nm_sparsity_jax.integrations import gin_files

  gin_files.see_modules_here()
  for name in args.imports:
    try:
      importlib.import_module(name)
    except Exception as e:
      raise ValueError(f"--import {name}: {_why(name, e)}") from e


def _name(text: str) -> str:
  """Returns the name of a module; refuses a file, an expression and an empty word."""
  if text.endswith(".py") or not all(word.isidentifier() for word in text.split(".")):
    raise argparse.ArgumentTypeError(
      f"{text!r} is not the name of a module: write it as Python imports it, such as my_recipes "
      "for the file my_recipes.py"
    )
  return text


def _why(name: str, error: Exception) -> str:
  """Says why an import failed, and what to do."""
  lost = error.name if isinstance(error, ModuleNotFoundError) else None
  if lost and f"{name}.".startswith(f"{lost}."):
    return (
      f"there is no module {lost!r} in this folder or on Python's path. Go to the folder that "
      "holds it, or add that folder to PYTHONPATH."
    )
  text = str(error).rstrip(".")
  return f"this module cannot be imported ({type(error).__name__}: {text}). Fix it first."
