"""From the flags of `train`, `eval` and `infer` to a gin configuration of the local runner."""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from nm_sparsity_jax import gin_files
from nm_sparsity_jax.commands import _flags, gin_path

_RUNS = {
  "train": "local_train.gin or local_finetune.gin",
  "evaluate": "local_eval.gin",
  "infer": "local_infer.gin",
}


def read(args: argparse.Namespace, program: str) -> tuple[gin_files.Config, str]:
  """The configuration, without a mistake in it, and its text."""
  if not args.gin_file:
    raise ValueError("no --gin_file: name the files of the run (--help shows an example)")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  _flags.see_modules_here()
  paths = [path for path in args.gin_search_paths.split(",") if path]
  config = gin_files.Config([*paths, str(gin_path.find())], args.gin_file, args.gin_bindings)
  if config.errors:
    raise ValueError("; ".join(config.errors))
  if config.program != program:
    raise ValueError(f"no run file of this command: gin_configs/runs/{_RUNS[program]}")
  from nm_sparsity_jax.local import data

  with contextlib.nullcontext() if args.debug else _flags.quiet():
    seqio = data.import_seqio()
  if args.tfds_data_dir:
    seqio.set_tfds_data_dir_override(args.tfds_data_dir)
  if args.seqio_additional_cache_dirs:
    seqio.add_global_cache_dirs(args.seqio_additional_cache_dirs.split(","))
  from gin import config as gin

  return config, gin.config_str()


def call(args: argparse.Namespace, program: str) -> int:
  """Does what `evaluate` or `infer` of the local runner does with a checkpoint."""
  config, text = read(args, program)
  from nm_sparsity_jax.local import train

  names = ("model", "evaluation", "checkpoint", "output_dir")
  return getattr(train, program)(**{n: argument(config, n) for n in names}, config=text)


def argument(config: gin_files.Config, name: str) -> Any:
  """An argument of the program, made; a mistake in it without gin's account of the way there."""
  try:
    return config.argument(name)
  except Exception as e:
    raise ValueError(gin_files.message(e)) from e
