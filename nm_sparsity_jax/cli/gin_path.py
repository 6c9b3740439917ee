"""Prints the folder that holds gin_configs/, docs/ and examples/.

  python -m t5x.train --gin_search_paths=$(nm-sparsity gin-path) \\
    --gin_file=gin_configs/runs/t5x_finetune.gin ...
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds nothing: the command takes no arguments."""


def run(args: argparse.Namespace) -> int:
  """Prints the folder."""
  from nm_sparsity_jax.integrations import gin_files

  print(gin_files.folder())
  return 0
