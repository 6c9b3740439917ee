"""Writes a checkpoint of a ViT, SwinV2 or ResNet as a safetensors file of timm's names.

Zeros stay zeros. Where the checkpoint is sparse, it must be what `nm-sparsity finalize` wrote. The
command reads the file back, compares each tensor, and proves the pattern along axis 1 of timm's
tensors, (out, in) and (out, in, height, width).

  nm-sparsity finalize runs/sparse runs/final
  nm-sparsity export runs/final model.safetensors

timm loads it: `timm.create_model(NAME, checkpoint_path="model.safetensors")`. To start a run from
such a file, name it as INITIAL_CHECKPOINT_PATH.

Exit code: 0 = written, and proven if it is sparse; 1 = not.
"""

from __future__ import annotations

import argparse
import json
import os

from nm_sparsity_jax.commands import _imports, _rules

FLAGS = _rules.FLAGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read and what to write."""
  parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them")
  parser.add_argument("out", metavar="FILE", help="F.safetensors, which must be new")
  _rules.add(parser)
  _imports.add(parser)
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Writes, reads back, proves, prints."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.runs import orbax

  _imports.load(args)
  with orbax.quiet_threads():
    made = runs.export(args.checkpoint, args.out, **_rules.given(args))
  if args.json:
    print(json.dumps(made.as_dict(), indent=2))
    return 0 if made.ok else 1
  print(f"{made.path}: {made.tensors} tensors of {made.source.path}, as they were written")
  print("It is dense: nothing to prove." if made.report is None else f"\n{made.report}")
  return 0 if made.ok else 1
