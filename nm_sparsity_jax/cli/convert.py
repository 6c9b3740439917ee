"""Writes a folder of Hugging Face's T5 as a checkpoint that T5X restores: OUT/checkpoint_0.

It is dense and of step 0. Name it as INITIAL_CHECKPOINT_PATH of a run in T5X. The local runner
takes the folder itself.

  nm-sparsity convert t5-small start

`nm-sparsity export` goes the other way.

Exit code: 0 = written, 1 = not.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read and where to write."""
  parser.add_argument("folder", metavar="FOLDER", help="has config.json and model.safetensors")
  parser.add_argument("out", metavar="OUT", help="gets OUT/checkpoint_0, which must be new")
  parser.add_argument(
    "--scan-layers", action="store_true", help="stack the layers, for a network that scans them"
  )


def run(args: argparse.Namespace) -> int:
  """Converts, and says where the checkpoint lies."""
  from nm_sparsity_jax import runs

  made = runs.convert(args.folder, args.out, args.scan_layers)
  print(f"{made}: the weights of {args.folder}, for INITIAL_CHECKPOINT_PATH")
  return 0
