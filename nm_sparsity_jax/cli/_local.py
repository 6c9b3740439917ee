"""What `train`, `eval` and `infer` share: flags -> configuration of the local runner."""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.integrations import gin_files


def read(args: argparse.Namespace, program: str) -> gin_files.Config:
  """Returns the configuration of a program of the local runner."""
  _flags.require("tensorboard")
  paths = _flags.search_paths(args)
  config = gin_files.read(args.gin_file, args.gin_bindings, paths, program)
  if isinstance(module := config.get("MIXTURE_OR_TASK_MODULE"), str):
    gin_files.refuse_missing_module(module)  # before imports of many seconds
  if config.settings("Source") or config.settings("Evaluation"):  # of T5
    _flags.require("seqio", "tensorflow")
    from nm_sparsity_jax.trainer import data

    with gin_files.quiet():
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
