"""Evaluates a checkpoint, of `nm-sparsity train` or of T5X, with the weights of its step.

  nm-sparsity eval --gin_file=gin_configs/models/t5.gin --gin.T5_SIZE="'tiny'" \\
    --gin_file=gin_configs/runs/local_eval.gin \\
    --gin.CHECKPOINT_PATH="'.../checkpoint_1000'" --gin.EVAL_OUTPUT_DIR="'...'" ...

The checkpoint holds the rules, and so does a packed file, which may stand in its place. A setting
that says something else is refused. Exit code: 0 = done, 1 = failed.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags

add_arguments = _flags.add_evaluation  # --memory, and T5X's flags


def run(args: argparse.Namespace) -> int:
  """Evaluates."""
  return _flags.call(args, "evaluate")
