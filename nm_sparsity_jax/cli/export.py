"""Writes a checkpoint for another library: timm's for images, Hugging Face's for a T5.

Zeros stay zeros. Where the checkpoint is sparse, it must be n:m: the last one of a local run or of
one of Kauldron, or what `nm-sparsity finalize` wrote. The command reads back what it wrote
and proves it. Groups lie along axis 1 of their tensors, (out, in) and (out, in, height, width).

A ViT, SwinV2 or ResNet becomes a file. timm loads it:
`timm.create_model(NAME, checkpoint_path="model.safetensors")`.

  nm-sparsity finalize runs/sparse runs/final
  nm-sparsity export runs/final model.safetensors

A T5, of this package or of T5X, becomes a folder with model.safetensors and config.json.
transformers loads it: `T5ForConditionalGeneration.from_pretrained("model")`.

  nm-sparsity export runs/final model

To start a run from such a file or folder, name it as INITIAL_CHECKPOINT_PATH. For a run in T5X,
`nm-sparsity convert` makes a checkpoint of the folder first.

Exit code: 0 = written, and proven if it is sparse; 1 = not.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read and what to write."""
  _flags.add_checkpoint(parser, out="F.safetensors, or a folder for a T5; it must be new")
  parser.add_argument(
    "--feed-forward",
    metavar="WORDS",
    help="feed_forward_proj of a T5, where its run did not note it; else gated-gelu (T5 1.1) or "
    "relu (T5 1.0)",
  )


def run(args: argparse.Namespace) -> int:
  """Writes, reads back, proves, prints."""
  from nm_sparsity_jax import runs

  rules = _flags.rules(args)
  proof = runs.export(args.checkpoint, args.out, **rules, feed_forward=args.feed_forward)
  said = "It is dense: nothing to prove." if proof is None else f"\n{proof}"
  text = f"{args.out}: the weights of {args.checkpoint}, as they were written\n{said}"
  return _flags.answer(args, proof and proof.as_dict(), text, proof is None or proof.ok)
