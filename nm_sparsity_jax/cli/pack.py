"""Writes a checkpoint without its zeros: n values of every m, and their places.

It takes the last checkpoint of a local run or of one of Kauldron, what `nm-sparsity finalize`
writes, a folder of Hugging Face's T5, or a .safetensors file of timm's names. The last two need
--rules. A kernel that is not n:m is an error that names its first group. Layers that a scan stacked
are taken apart. The command reads back what it wrote, and says what each kernel takes, what stayed
dense and why.

  nm-sparsity finalize runs/sparse runs/final
  nm-sparsity pack runs/final model.safetensors
  nm-sparsity pack runs/final small.safetensors --dtype int8

`nm-sparsity verify`, `eval` and `infer` take the file in place of a checkpoint.

Exit code: 0 = written, 1 = not.
"""

from __future__ import annotations

import argparse
import dataclasses

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read, what to write, and the dtype of values."""
  _flags.add_checkpoint(parser, out="F.safetensors, which must be new")
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16", "float16", "int8"),
    help="of packed values; else as they are. int8 rounds, with one scale for each column",
  )


def run(args: argparse.Namespace) -> int:
  """Packs, reads back, prints the sizes."""
  from nm_sparsity_jax import runs

  report = runs.pack(args.checkpoint, args.out, **_flags.rules(args), dtype=args.dtype)
  text = f"{args.out}: the weights of {args.checkpoint}, read back as written\n\n{report}"
  return _flags.answer(args, dataclasses.asdict(report), text)
