"""Proves, group by group, that a checkpoint's weights are n:m along the axis that is contracted.

It takes a checkpoint of `nm-sparsity train`, of T5X or of Kauldron, a packed file, a .safetensors
file of timm's names, or a folder of Hugging Face's T5. A run's folder stands for its newest
checkpoint. A checkpoint of a sparse run, one that `nm-sparsity finalize` wrote, and a packed file
hold their rules. For all else give --rules. One array is in memory at a time. T5X is not needed.

A local run and one of Kauldron store the weights that are deployed: n:m once the schedule is over.
T5X stores dense weights, on which masks act, and a moving average (EMA_DECAY), which is looked at
where a run keeps one, is dense too: `nm-sparsity finalize` writes the zeros.

  nm-sparsity verify runs/sparse/checkpoint_1100000
  nm-sparsity verify model.safetensors --rules "{'ff': '1:8', 'qkv': '1:4'}"

Exit code: 0 = all of it is n:m and finite; 1 = it is not (inf and NaN are named), no rule makes
anything sparse, or the checkpoint cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os

from nm_sparsity_jax.cli import _imports, _rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the checkpoint, and its rules where it does not hold them."""
  parser.add_argument(
    "checkpoint", metavar="CKPT", help="a checkpoint, a folder of them, or a file: see above"
  )
  _rules.add(parser)
  _imports.add(parser)
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Prints what was found."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.runs import orbax

  _imports.load(args)
  with orbax.quiet():
    proof = runs.verify(args.checkpoint, **_rules.given(args))
  if args.json:
    print(json.dumps(proof.as_dict(), indent=2))
  else:
    print(_rules.head(proof.stored, proof.rules, args.checkpoint))
    print(proof)
    if not proof.ok and proof.stored.average:
      print("The moving average of a run is dense: `nm-sparsity finalize` makes zeros.")
    elif not proof.ok and proof.stored.in_place:
      print("The weights of this run are n:m when its schedule is over.")
    elif not proof.ok and proof.stored.sparse_step is not None:
      print("T5X stores dense weights, on which masks act: `nm-sparsity finalize` makes zeros.")
  return 0 if proof.ok else 1
