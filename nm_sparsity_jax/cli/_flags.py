"""Flags that several commands share, and what they mean."""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.errors import quiet

# T5X's flags that mean nothing here. They are accepted, so that a command line of T5X serves.
_OF_T5X = (
  "tfds_data_dir", "seqio_additional_cache_dirs", "multiprocess_gpu", "coordinator_address",
  "process_count", "process_index", "initialization_timeout",
)  # fmt: skip


# --- answers ------------------------------------------------------------------------------------


def add_json(parser: argparse.ArgumentParser) -> None:
  """Adds --json, for `answer`."""
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def answer(args: argparse.Namespace, found: Any, text: Any, ok: bool = True) -> int:
  """Prints what was found, with --json as JSON, else as text; returns the exit code."""
  print(json.dumps(found, indent=2) if args.json else text)
  return 0 if ok else 1


# --- gin ----------------------------------------------------------------------------------------


def add_gin(parser: argparse.ArgumentParser, required: bool = True) -> None:
  """Adds --gin_file, --gin_bindings, --gin_search_paths, --gin.X=VALUE and --import."""
  add = parser.add_argument
  add(
    "--gin_file", action="append", default=[], required=required, metavar="FILE",
    help="in order; may be repeated",
  )  # fmt: skip
  add(
    "--gin_bindings", action="append", default=[], metavar="'X = VALUE'", help="the same as --gin.X"
  )
  add(
    "--gin_search_paths", default=".", metavar="DIR[,DIR]",
    help="where gin files are looked for, before the folder of this package",
  )  # fmt: skip
  add_import(parser)
  parser.add_argument_group(
    "overrides", "--gin.X=VALUE sets X, as in T5X; a string needs quotes: --gin.RECIPE=\"'sr_ste'\""
  )
  for name in _OF_T5X:
    add(f"--{name}", nargs="?", help=argparse.SUPPRESS)


def search_paths(args: argparse.Namespace) -> Sequence[str]:
  """Returns where gin files are looked for; imports what --import names, which they may need."""
  require("gin")
  import_modules(args)
  from nm_sparsity_jax.integrations import gin_files

  gin_files.see_modules_here()
  return [*filter(None, args.gin_search_paths.split(","))]


def add_evaluation(parser: argparse.ArgumentParser) -> None:
  """Adds what a program takes that opens one checkpoint: --memory, and what `add_gin` adds."""
  parser.add_argument(
    "--memory",
    action="store_true",
    help="of a packed file: keep all kernels packed, also where a dense product is faster",
  )
  add_gin(parser)


def read(args: argparse.Namespace, program: str) -> Any:
  """Returns the configuration of a program of the local runner."""
  require("tensorboard")
  paths = search_paths(args)
  from nm_sparsity_jax.integrations import gin_files

  config = gin_files.read(args.gin_file, args.gin_bindings, paths, program)
  if isinstance(module := config.get("MIXTURE_OR_TASK_MODULE"), str):
    gin_files.refuse_missing_module(module)  # before imports of many seconds
  if config.settings("Source") or config.settings("Evaluation"):  # of T5
    require("seqio", "tensorflow")
    from nm_sparsity_jax.trainer import data

    with quiet():
      seqio = data.import_seqio()
    if args.tfds_data_dir:
      seqio.set_tfds_data_dir_override(args.tfds_data_dir)
    if args.seqio_additional_cache_dirs:
      seqio.add_global_cache_dirs(args.seqio_additional_cache_dirs.split(","))
  return config


def call(args: argparse.Namespace, program: str) -> int:
  """Runs `evaluate` or `infer` of the local runner; returns the exit code."""
  config = read(args, program)
  from nm_sparsity_jax.trainer import train

  names = ("model", "evaluation", "checkpoint", "output_dir")
  getattr(train, program)(
    **{name: config.argument(name) for name in names}, config=config.text(), memory=args.memory
  )
  return 0


# --- modules ------------------------------------------------------------------------------------


def add_import(parser: argparse.ArgumentParser) -> None:
  """Adds --import: only this flag, and nothing in a file, makes a command import a module."""
  parser.add_argument(
    "--import", dest="imports", action="append", default=[], metavar="MODULE",
    help="first import this module, which registers recipes or roles of your own; may be repeated",
  )  # fmt: skip


def import_modules(args: argparse.Namespace) -> None:
  """Imports the modules of --import in their order; modules in the current folder are found."""
  if not args.imports:  # gin need not be installed
    return
  from nm_sparsity_jax.integrations import gin_files

  gin_files.see_modules_here()
  for name in args.imports:  # in order: one may need another
    try:
      importlib.import_module(name)
    except Exception as e:
      raise ValueError(
        f"--import {name}: {type(e).__name__}: {e}. Name a module as Python imports it, such as "
        "my_recipes for my_recipes.py, in this folder or on PYTHONPATH."
      ) from e


def require(*modules: str) -> None:
  """Raises where a module of the extra `local` is not installed, before anything takes long."""
  from nm_sparsity_jax.cli import doctor

  if lost := [name for name in modules if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
      f"not installed: {', '.join(lost)}. Run {doctor.install_command('local')}"
    )


# --- checkpoints --------------------------------------------------------------------------------


def add_checkpoint(parser: argparse.ArgumentParser, out: str = "") -> None:
  """Adds a checkpoint, --rules and --axes for one that holds none, --import and --json.

  Args:
    parser: of the command.
    out: help for OUT, of a command that writes.
  """
  parser.add_argument(
    "checkpoint", metavar="CKPT", help="a checkpoint, a folder of them, or a file: see above"
  )
  parser.add_argument(
    "--rules",
    type=_dict,
    metavar="\"{'ff': '1:8'}\"",
    help="place -> pattern, as SPARSITY_RULES in gin; for a checkpoint that holds no rules",
  )
  parser.add_argument(
    "--axes",
    type=_dict,
    metavar='"{REGEX: AXIS}"',
    help="path -> contracted axis, for kernels that a scan over layers has stacked",
  )
  add_import(parser)
  add_json(parser)
  if out:
    parser.add_argument("out", metavar="OUT", help=out)


def rules(args: argparse.Namespace) -> dict[str, Mapping[str, Any] | None]:
  """Returns --rules and --axes, as arguments of `runs.verify`; imports what --import names."""
  import_modules(args)
  return {"rules": args.rules, "axes": args.axes}


def _dict(text: str) -> Mapping[str, Any]:
  try:
    return dict(ast.literal_eval(text))
  except (SyntaxError, ValueError, TypeError) as e:
    raise argparse.ArgumentTypeError(f"{text} is not a dict; strings need quotes") from e


# --- runs ---------------------------------------------------------------------------------------


def add_runs(parser: argparse.ArgumentParser) -> None:
  """Adds folders of runs, the checkpoint that their scores are of, and --import."""
  parser.add_argument("runs", nargs="+", metavar="DIR", help="folder of a run")
  parser.add_argument(
    "--checkpoint", type=_step, default="best", metavar="best|last|STEP",
    help="the step of each task: the one with the best mean of its metrics (the default; the "
    "earliest of equals), its last one, or this one (T5X counts from pre-training on)",
  )  # fmt: skip
  add_import(parser)


def _step(text: str) -> str | int:
  return text if text in ("best", "last") else int(text)
