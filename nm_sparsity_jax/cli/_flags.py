"""T5X's flags for gin and --import, for every command that reads gin files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nm_sparsity_jax.cli import _imports


def add(parser: argparse.ArgumentParser, search_paths: str) -> None:
  """Adds --gin_file, --gin_bindings, --gin_search_paths, --gin.X=VALUE and --import.

  T5X's other flags are accepted and ignored.

  Args:
    parser: gets the flags.
    search_paths: the help of --gin_search_paths.
  """
  add = parser.add_argument
  add("--gin_file", action="append", default=[], metavar="FILE", help="in order; may be repeated")
  add(
    "--gin_bindings", action="append", default=[], metavar="'X = VALUE'", help="the same as --gin.X"
  )
  add("--gin_search_paths", default=".", metavar="DIR[,DIR]", help=search_paths)
  _imports.add(parser)
  parser.add_argument_group(
    "overrides", "--gin.X=VALUE sets X, as in T5X; a string needs quotes: --gin.RECIPE=\"'sr_ste'\""
  )
  for name in (  # T5X's, without a meaning here
      "tfds_data_dir", "seqio_additional_cache_dirs", "multiprocess_gpu", "coordinator_address",
      "process_count", "process_index", "initialization_timeout",
  ):  # fmt: skip
    add(f"--{name}", nargs="?", help=argparse.SUPPRESS)
  parser.parse_args = _with_overrides(parser)  # type: ignore[method-assign]


def add_of_one(parser: argparse.ArgumentParser) -> None:
  """Adds what a program takes that opens one checkpoint: --memory, and what `add` adds."""
  parser.add_argument(
    "--memory",
    action="store_true",
    help="of a packed file: keep all kernels packed, also where a dense product is faster",
  )
  add(parser, "where gin files are looked for, before the folder of this package")


def checkpoint(text: str) -> str | int:
  """Returns the value of --checkpoint: 'best', 'last' or a step."""
  if text in ("best", "last"):
    return text
  try:
    return int(text.replace("_", ""))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not best, last or a step") from None


def _with_overrides(parser: argparse.ArgumentParser):
  """Returns a `parse_args` that knows --gin.X=VALUE, which argparse cannot express."""
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


def search_paths(args: argparse.Namespace) -> Sequence[str]:
  """Returns the folders that --gin_search_paths names."""
  return [path for path in args.gin_search_paths.split(",") if path]
