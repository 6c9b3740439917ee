"""A forward pass of a ViT on one image: packed weights over dense ones, and the memory of each.

    python benchmarks/encode.py                                  # ViT-L/16, 24 layers, one core
    python benchmarks/encode.py --layers 4 --patterns 1:4 --values int8

Feed-forward and attention kernels are packed; patches, norms and head stay dense. `nms.bench`
measures: dense and packed weights take turns in one process on one pinned core, and a figure is a
median. The peak is the resident memory of a process that has weights of one kind alone, and runs
them: interpreter, XLA and compilation are in it.
"""

from __future__ import annotations

import functools
import math

import _memory
import _timing


def arguments(argv=None):
  parser = _timing.parser(__doc__, core=0, blocks=7)
  parser.add_argument("--patterns", nargs="+", default=["1:8", "1:32"])
  parser.add_argument("--values", help="dtype of packed values (default: float32)")
  parser.add_argument("--layers", type=int, default=24)
  parser.add_argument("--peak", metavar="KIND", help="only run 'dense' or n:m, and print its peak")
  return parser.parse_args(argv)


def network_of(args):
  """Returns a ViT of large size, shapes of its parameters, and images."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.models import vit

  sizes = dict(layers=args.layers, embed=1024, heads=16, mlp=4096)
  network = vit.ViT(vit.config("vit_b16", **sizes))
  images = jnp.ones((1, 224, 224, 3), jnp.float32)
  init = functools.partial(network.init, train=False)
  return network, jax.eval_shape(init, jax.random.key(0), images)["params"], images


def peak(args):
  """Runs one kind of weights, and says what the process held at most."""
  import jax

  from nm_sparsity_jax.deploy import inference_tree

  network, shapes, images = network_of(args)
  rows = inference_tree.rows_of(network.config, 1)
  params = _memory.tree(shapes, args.peak, rows, args.values)
  run = jax.jit(functools.partial(network.apply, train=False))
  for _ in range(2):
    jax.block_until_ready(run({"params": params}, images))
  _memory.report()


def measured(args):
  """Yields a row for dense weights and one for each pattern."""
  import jax

  from nm_sparsity_jax.analysis import bench

  network, shapes, _ = network_of(args)
  same = ["--layers", str(args.layers), "--core", str(args.core)]
  same += ["--values", args.values] if args.values else []

  def row(kind, seconds, over, weights):
    peak = _memory.most(__file__, "--peak", kind, *same)
    return {
      "weights": kind, "pass_ms": round(seconds * 1e3, 1), "over_dense": round(over, 2),
      "weights_MB": round(weights / 1e6), "peak_MB": round(peak / 1e6),
    }  # fmt: skip

  for pattern in args.patterns:
    tree = _memory.tree(shapes, pattern, values=args.values)
    (whole,) = bench.bench(network, tree, batch=1, turns=args.blocks).timings
    if pattern == args.patterns[0]:
      dense = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(shapes))
      yield row("dense", whole.dense, 1.0, dense)
    yield row(pattern, whole.packed, whole.times, sum(x.nbytes for x in jax.tree.leaves(tree)))


def main():
  args = arguments()
  _timing.pin(args.core)
  if args.peak:
    return peak(args)
  return _timing.table(list(measured(args)), args.json)


if __name__ == "__main__":
  main()
