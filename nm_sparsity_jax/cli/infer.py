"""Writes the predictions of a checkpoint of `nm-sparsity train` or T5X: a JSONL file for each task.

  nm-sparsity infer --gin_file=gin_configs/models/t5.gin --gin.T5_SIZE="'tiny'" \\
    --gin_file=gin_configs/runs/local_infer.gin \\
    --gin.CHECKPOINT_PATH="'.../checkpoint_1000'" --gin.INFER_OUTPUT_DIR="'...'" ...

The checkpoint holds the rules, and so does a packed file, which may stand in its place. A setting
that says something else is refused. The files are those of t5x.infer, with `idx` where a task has
it: `nm-sparsity glue submit` reads them. A workload of your own takes
gin_configs/runs/local_workload_infer.gin, which writes a file for each split. Exit code: 0 = done,
1 = failed.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags

add_arguments = _flags.add_evaluation  # --memory, and T5X's flags


def run(args: argparse.Namespace) -> int:
  """Predicts."""
  return _flags.call(args, "infer")
