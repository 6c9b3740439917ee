"""Measures packed weights against dense ones on this machine: a whole network, or products alone.

CKPT is a packed file, a finalized checkpoint, or a folder of them: then the newest. The gin files
name its network: a model file is enough. Nothing is written, and no task is read. A T5 reads inputs
and decodes tokens, others make a forward pass. --shapes measures products of random weights.

  nm-sparsity bench --shapes 1024,4096,1 1024,4096,128 --pattern 1:8
  nm-sparsity bench model.safetensors --cores 1 \\
    --gin_file=gin_configs/models/t5.gin --gin.T5_SIZE="'tiny'"

Exit code: 0 = done, 1 = not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from typing import Any

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to measure, and how."""
  add = parser.add_argument
  one = parser.add_mutually_exclusive_group(required=True).add_argument
  one(
    "checkpoint", nargs="?", metavar="CKPT",
    help="a packed file, a finalized checkpoint, or a folder of them",
  )  # fmt: skip
  one(
    "--shapes", nargs="+", metavar="K,F,ROWS", type=_shape,
    help="products alone: of weights (K, F) and so many rows of x",
  )  # fmt: skip
  add("--pattern", default="1:8", metavar="N:M", help="of --shapes (default: 1:8)")
  add(
    "--dtype", choices=("float32", "bfloat16", "int8"),
    help="of packed values (default: as they are)",
  )  # fmt: skip
  add("--batch", type=int, default=1, metavar="N", help="of CKPT: examples at once (default: 1)")
  add("--inputs", type=int, default=64, metavar="N", help="tokens of a T5's input (default: 64)")
  add("--cores", type=int, metavar="N", help="run on so many cores (default: all there are)")
  _flags.add_json(parser)
  _flags.add_gin(parser, required=False)


def run(args: argparse.Namespace) -> int:
  """Measures and prints."""
  if args.cores is not None:
    # XLA counts the cores of the process when it is imported.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    os.environ["PJRT_NPROC"] = str(args.cores)
  from nm_sparsity_jax.analysis import bench

  if args.shapes is None:
    found = _of_checkpoint(args)
  else:
    found = bench.products(args.shapes, args.pattern, args.dtype)
  return _flags.answer(args, dataclasses.asdict(found), found)


def _shape(text: str) -> tuple[int, int, int]:
  depth, features, rows = map(int, text.split(","))
  return depth, features, rows


def workload_of(args: argparse.Namespace) -> Any:
  """Returns the workload of the network that the gin files name."""
  from nm_sparsity_jax.analysis.plan import build
  from nm_sparsity_jax.integrations import gin_files

  paths = _flags.search_paths(args)
  with gin_files.Config(paths, args.gin_file, args.gin_bindings) as config:
    workload = build.workload_of(config) if not config.errors else None
    if workload is None:
      raise ValueError("; ".join(config.errors) or "name a model file: --gin_file=...")
  return workload


def _of_checkpoint(args: argparse.Namespace) -> Any:
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.analysis import bench
  from nm_sparsity_jax.runs import checkpoint
  from nm_sparsity_jax.trainer import checkpoints
  from nm_sparsity_jax.trainer.step import Model
  from nm_sparsity_jax.trainer.workloads import t5, vision

  model, stored = Model(workload_of(args)), checkpoint.read(args.checkpoint)
  title = stored.path
  if args.dtype is not None or stored.packed is None:
    # A checkpoint is packed as `pack` does it, so its rules and its proof are the same.
    with tempfile.TemporaryDirectory() as room:
      file = f"{room}/packed.safetensors"
      runs.pack(title, file, dtype=args.dtype)
      stored = checkpoint.read(file)
  workload = checkpoints.packed_model(stored, model).workload
  # A network of this package; of a workload of the user's, what it predicts.
  network = workload.network if isinstance(workload, t5.T5 | vision.Images) else workload
  state = dict(stored.packed or {})
  params = state.pop("params")
  return bench.bench(
    network, params, state=state, batch=args.batch, inputs=args.inputs, title=title
  )
