"""T5X's flags for gin, and quiet imports, for every command that reads gin files."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys


def add(parser: argparse.ArgumentParser, search_paths: str) -> None:
  """--gin_file, --gin_bindings, --gin_search_paths, --gin.X=VALUE; others of T5X are ignored."""
  add = parser.add_argument
  add("--gin_file", action="append", default=[], metavar="FILE", help="in order; may be repeated")
  add(
    "--gin_bindings", action="append", default=[], metavar="'X = VALUE'", help="the same as --gin.X"
  )
  add("--gin_search_paths", default=".", metavar="DIR[,DIR]", help=search_paths)
  parser.add_argument_group(
    "overrides", "--gin.X=VALUE sets X, as in T5X; a string needs quotes: --gin.RECIPE=\"'sr_ste'\""
  )
  for name in (  # T5X's, without a meaning here
      "tfds_data_dir", "seqio_additional_cache_dirs", "multiprocess_gpu", "coordinator_address",
      "process_count", "process_index", "initialization_timeout",
  ):  # fmt: skip
    add(f"--{name}", nargs="?", help=argparse.SUPPRESS)
  parser.parse_args = _with_overrides(parser)  # type: ignore[method-assign]


def _with_overrides(parser: argparse.ArgumentParser):
  """`parse_args` that knows --gin.X=VALUE, which argparse has no words for."""
  parse = parser.parse_args

  def parse_args(args=None, namespace=None):
    rewritten = []
    for arg in sys.argv[1:] if args is None else args:
      if arg.startswith("--gin."):
        if "=" not in arg:
          parser.error(f"{arg}: give it a value, {arg}=VALUE, without a space")
        name, _, value = arg.removeprefix("--gin.").partition("=")
        arg = f"--gin_bindings={name} = {value}"
      rewritten.append(arg)
    return parse(rewritten, namespace)

  return parse_args


def see_modules_here() -> None:
  """Task modules lie where the user stands, and `python -m` sees them there: so does a command."""
  if os.getcwd() not in sys.path and "" not in sys.path:
    sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def quiet():
  """No warnings of our own, for the plan says it all, and no chatter of imports.

  TensorFlow writes to the file descriptor, past Python, when it is imported.
  """
  loggers = [logging.getLogger(name) for name in ("nm_sparsity_jax", "absl")]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.ERROR)
  sys.stderr.flush()
  saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    sys.stderr.flush()
    os.dup2(saved, 2)
    os.close(saved)
    os.close(nowhere)
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)
