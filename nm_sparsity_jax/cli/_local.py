"""What `train`, `eval` and `infer` share: flags -> configuration of the local runner."""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from nm_sparsity_jax.cli import _flags, _imports
from nm_sparsity_jax.integrations import gin_files


def read(
  args: argparse.Namespace, program: str, with_data: bool = True
) -> tuple[gin_files.Config, str]:
  """Returns the configuration of a program of the local runner, and its text for config.gin."""
  if not args.gin_file:
    raise ValueError("no --gin_file: name the files of the run (--help shows an example)")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  gin_files.see_modules_here()
  _imports.load(args)
  paths = [*_flags.search_paths(args), gin_files.folder()]
  config = gin_files.read(args.gin_file, args.gin_bindings, paths, program)
  _refuse_missing(config)
  if with_data and (config.settings("Source") or config.settings("Evaluation")):  # of T5: seqio
    _prepare_seqio(args)
  return config, config.text()


def _refuse_missing(config: gin_files.Config) -> None:
  """Refuses a task module or a checkpoint that is not there, before imports of many seconds."""
  from nm_sparsity_jax.runs import folders

  module = config.get("MIXTURE_OR_TASK_MODULE")
  if isinstance(module, str):
    gin_files.refuse_missing_module(module)
  folder = config.get("MODEL_DIR")
  resumes = isinstance(folder, str) and "://" not in folder and folders.steps(folder)
  for name in ("CHECKPOINT_PATH",) if resumes else ("INITIAL_CHECKPOINT_PATH", "CHECKPOINT_PATH"):
    path = config.get(name)
    if isinstance(path, str) and (said := missing(path)):
      raise ValueError(f"{name}: {said}")


def missing(path: str) -> str:
  """Says that no checkpoint is at a path of this machine, and where that is; '' where one is.

  Args:
    path: of a checkpoint; a bucket is not asked.
  """
  from nm_sparsity_jax.runs import folders

  if "://" in path or folders.path_of(path).exists():
    return ""
  looked = "" if os.path.isabs(path) else f": looked at {folders.path_of(path)}"
  return f"there is no checkpoint {path!r}{looked}"


def _prepare_seqio(args: argparse.Namespace) -> None:
  """Imports seqio, quietly, and tells it where its data lie."""
  from nm_sparsity_jax.trainer import data

  with contextlib.nullcontext() if args.debug else gin_files.quiet():
    seqio = data.import_seqio()
  if args.tfds_data_dir:
    seqio.set_tfds_data_dir_override(args.tfds_data_dir)
  if args.seqio_additional_cache_dirs:
    seqio.add_global_cache_dirs(args.seqio_additional_cache_dirs.split(","))


def call(args: argparse.Namespace, program: str) -> int:
  """Runs `evaluate` or `infer` of the local runner; returns the exit code."""
  config, text = read(args, program)
  from nm_sparsity_jax.trainer import train

  names = ("model", "evaluation", "checkpoint", "output_dir")
  return getattr(train, program)(
    **{n: argument(config, n) for n in names}, config=text, memory=args.memory
  )


def argument(config: gin_files.Config, name: str) -> Any:
  """Returns an argument of the program; rewords an error without gin's account of the way there."""
  try:
    return config.argument(name)
  except Exception as e:
    raise ValueError(gin_files.message(e)) from e
