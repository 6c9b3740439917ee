"""Measures packed weights against dense ones on this machine: per layer and end to end.

CKPT is a packed file, a finalized checkpoint, or a folder of them: then the newest. It comes with
the gin files and settings of `infer`. Nothing is written, and no task is read, so you need not name
one. It measures each distinct product without the cost of a call, and end to end what the network
computes at once: a T5 reads inputs and decodes a token, others make a forward pass. --shapes
measures products of random weights alone.

  nm-sparsity bench --shapes 1024,4096,1 1024,4096,128 --pattern 1:8
  nm-sparsity bench model.safetensors --cores 1 \\
    --gin_file=gin_configs/models/t5.gin --gin.T5_SIZE="'tiny'" \\
    --gin_file=gin_configs/runs/local_infer.gin ...

Exit code: 0 = done, 1 = not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import tempfile
from typing import Any

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to measure, and how."""
  add = parser.add_argument
  add(
    "checkpoint", nargs="?", metavar="CKPT",
    help="a packed file, a finalized checkpoint, or a folder of them",
  )  # fmt: skip
  add(
    "--shapes", nargs="+", metavar="K,F,ROWS", type=_shape,
    help="products alone: of weights (K, F) and so many rows of x",
  )  # fmt: skip
  add("--pattern", default="1:8", metavar="N:M", help="of --shapes (default: 1:8)")
  add(
    "--dtype", choices=("float32", "bfloat16", "int8"),
    help="of packed values; of a packed file they are as they are",
  )  # fmt: skip
  add("--batch", type=int, default=1, metavar="N", help="examples at once (default: 1)")
  add(
    "--inputs", type=int, metavar="N",
    help="tokens of an input of a T5 (default: that of TASK_FEATURE_LENGTHS, or 64)",
  )  # fmt: skip
  add("--tokens", type=int, default=16, metavar="N", help="that a T5 decodes (default: 16)")
  add("--turns", type=int, default=9, metavar="N", help="of each call (default: 9)")
  add(
    "--backend", choices=("auto", "cpu_ffi", "xla_scan"), default="auto",
    help="of packed products (default: auto, the fastest by a measured table)",
  )  # fmt: skip
  add("--cores", type=int, metavar="N", help="run on so many cores (default: all there are)")
  add("--json", action="store_true", help="print the findings as JSON")
  _flags.add_gin(parser, required=False)


def run(args: argparse.Namespace) -> int:
  """Measures and prints."""
  if (args.checkpoint is None) == (args.shapes is None):
    raise ValueError("give a checkpoint, or --shapes K,F,ROWS for products alone.")
  if args.cores is not None:
    # XLA counts the cores of the process when it is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    os.environ["PJRT_NPROC"] = str(args.cores)
  from nm_sparsity_jax.analysis import bench

  if args.shapes is None:
    found = _of_checkpoint(args)
  else:
    found = bench.products(args.shapes, args.pattern, args.dtype, args.turns, args.backend)
  print(json.dumps(dataclasses.asdict(found), indent=2) if args.json else found)
  return 0


def _shape(text: str) -> tuple[int, int, int]:
  depth, features, rows = map(int, text.split(","))
  return depth, features, rows


def configuration(args: argparse.Namespace) -> Any:
  """Returns that of `infer`, of the checkpoint that the arguments name; it reads no data.

  Args:
    args: of the command.
  """
  from nm_sparsity_jax.cli import _local

  args.gin_bindings[:0] = [
    f"CHECKPOINT_PATH = {args.checkpoint!r}", "INFER_OUTPUT_DIR = 'nowhere'",
  ]  # fmt: skip
  try:
    return _local.read(args, "infer", with_data=False)[0]
  except ValueError as e:
    # A macro that nothing reads is refused, so only those that it asks for are set.
    if not (unset := re.findall(r"(MIXTURE_OR_TASK_NAME|TASK_FEATURE_LENGTHS) is not set", str(e))):
      raise
    args.gin_bindings[:0] = [f"{name} = None" for name in unset]
    return _local.read(args, "infer", with_data=False)[0]


def _of_checkpoint(args: argparse.Namespace) -> Any:
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.analysis import bench
  from nm_sparsity_jax.cli import _local
  from nm_sparsity_jax.runs import checkpoint
  from nm_sparsity_jax.trainer import checkpoints

  args.checkpoint = checkpoint.find(args.checkpoint)
  config = configuration(args)
  model = _local.argument(config, "model")
  lengths: Any = config.get("TASK_FEATURE_LENGTHS") or {}
  with tempfile.TemporaryDirectory() as room:
    stored = checkpoints.opened(args.checkpoint, model)
    if stored.packed is None:
      file = f"{room}/packed.safetensors"
      runs.pack(args.checkpoint, file, dtype=args.dtype)
      stored = checkpoints.opened(file, model)
    elif args.dtype is not None:
      raise ValueError(f"--dtype={args.dtype}: a packed file has values of its own dtype.")
    assert stored.packed is not None
    variables = dict(stored.packed())
  workload: Any = checkpoints.packed_model(stored, model).workload
  return bench.bench(
    getattr(workload, "network", workload),
    variables.pop("params"),
    state=variables,
    batch=args.batch,
    inputs=args.inputs or lengths.get("inputs") or 64,
    tokens=args.tokens,
    turns=args.turns,
    backend=args.backend,
    title=str(args.checkpoint),
  )
