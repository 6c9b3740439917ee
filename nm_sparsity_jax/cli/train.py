"""Trains on the devices of this machine: the gin files, tasks and checkpoints of T5X, without T5X.

You can kill or stop it (SIGTERM saves and ends with 0): the same command continues the run.

  nm-sparsity train --gin_file=gin_configs/models/t5.gin --gin.T5_SIZE="'tiny'" \\
    --gin_file=gin_configs/runs/local_adamw.gin --gin_file=gin_configs/runs/local_finetune.gin \\
    --gin.RECIPE="'mdgf_exponential'" --gin.PATTERN="'1:8'" ...

Exit code: 0 = done, or stopped and saved; 1 = failed; 130 = interrupted and saved.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags

add_arguments = _flags.add_gin  # T5X's flags


def run(args: argparse.Namespace) -> int:
  """Trains."""
  config = _flags.read(args, "train")
  from nm_sparsity_jax.trainer import train

  settings = train.settings_of(config.settings("Run"))
  return train.train(config.argument("run"), settings, config.text())
