"""A forward pass of a ViT on one image: packed weights over dense ones, and the memory of each.

    python benchmarks/encode.py                                  # ViT-L/16, 24 layers, one core
    python benchmarks/encode.py --layers 4 --patterns 1:4 --values int8

Feed-forward and attention kernels are packed; patches, norms and head stay dense. `nms.bench`
measures: dense and packed weights take turns in one process on one pinned core, and a figure is a
median. The peak is the resident memory of a process that has weights of one kind alone, and runs
them: interpreter, XLA and compilation are in it.
"""

from __future__ import annotations

import argparse
import functools
import sys

import _memory
import _timing


def arguments():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument("--turns", type=int, default=7)
  parser.add_argument("--patterns", nargs="+", default=["1:8", "1:32"])
  parser.add_argument("--values", help="dtype of packed values (default: float32)")
  parser.add_argument("--layers", type=int, default=24)
  parser.add_argument("--batch", type=int, default=1)
  parser.add_argument("--peak", metavar="KIND", help="only run 'dense' or n:m, and print its peak")
  parser.add_argument("--json", help="write the figures to this file")
  return parser.parse_args()


def network_of(args):
  """Returns a ViT of large size, shapes of its parameters, and images."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.models import vit

  sizes = dict(layers=args.layers, embed=1024, heads=16, mlp=4096)
  network = vit.ViT(vit.config("vit_b16", **sizes))
  images = jnp.ones((args.batch, 224, 224, 3), jnp.float32)
  init = functools.partial(network.init, train=False)
  return network, jax.eval_shape(init, jax.random.key(0), images)["params"], images


def peak(args):
  """Runs one kind of weights, and says what the process held at most."""
  import jax

  from nm_sparsity_jax.deploy import inference_tree

  network, shapes, images = network_of(args)
  rows = inference_tree.rows_of(network.config, args.batch)
  params = _memory.tree(shapes, args.peak, rows, args.values)
  run = jax.jit(functools.partial(network.apply, train=False))
  for _ in range(2):
    jax.block_until_ready(run({"params": params}, images))
  _memory.report()


def measured(args):
  """Yields a row for dense weights and one for each pattern."""
  from nm_sparsity_jax.analysis import bench
  from nm_sparsity_jax.deploy import inference_tree

  network, shapes, _ = network_of(args)
  rows = inference_tree.rows_of(network.config, args.batch)
  same = ["--layers", str(args.layers), "--batch", str(args.batch), "--core", str(args.core)]
  same += ["--values", args.values] if args.values else []
  held = lambda kind: round(_memory.most(__file__, "--peak", kind, *same) / 1e6)
  is_first = True
  for pattern in args.patterns:
    tree = _memory.tree(shapes, pattern, rows, args.values, keep=True)
    found = bench.bench(network, tree, batch=args.batch, turns=args.turns)
    (whole,) = found.wholes
    if is_first:
      is_first = False
      yield {
        "weights": "dense", "pass_ms": round(whole.dense * 1e3, 1), "over_dense": 1.0,
        "bound": 1.0, "weights_MB": round(found.dense_bytes / 1e6), "peak_MB": held("dense"),
      }  # fmt: skip
    yield {
      "weights": pattern, "pass_ms": round(whole.packed * 1e3, 1),
      "over_dense": round(whole.times, 2), "bound": round(whole.bound, 2),
      "weights_MB": round(found.packed_bytes / 1e6), "peak_MB": held(pattern),
    }  # fmt: skip


def main():
  args = arguments()
  _timing.pin(args.core)
  if args.peak:
    return peak(args)
  rows = list(measured(args))
  head = ["weights", "pass, ms", "over dense", "bound", "weights, MB", "peak, MB"]
  print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
  for row in rows:
    print("|", " | ".join(cell(x) for x in row.values()), "|")
  command = "python benchmarks/encode.py " + " ".join(sys.argv[1:])
  return _timing.save(args.json, rows, command.strip())


def cell(x):
  return f"{x:,}" if isinstance(x, int) else f"{x:.2f}" if isinstance(x, float) else x


if __name__ == "__main__":
  main()
