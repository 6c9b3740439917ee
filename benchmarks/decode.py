"""A token of a T5 that decodes: packed weights over dense ones, and the memory of each.

    python benchmarks/decode.py                               # 12 layers of base size, one row
    python benchmarks/decode.py --patterns 1:4 --rows 8
    python benchmarks/decode.py --peaks dense 1:8 1:32        # memory of a process, each in its own

Weights are random, and no row ends. All candidates take turns in one process on one pinned core; a
figure is a median. A token is the time of a search over `--steps` tokens less that of one over a
single token. `layers` is what a token takes more than one of the same network with one layer, for
all layers. Feed-forward and attention kernels are packed; embedding and head stay dense.
"""

from __future__ import annotations

import re
import statistics
import sys

import _memory
import _timing


def arguments(argv=None):
  parser = _timing.parser(__doc__, core=0, blocks=7)
  parser.add_argument("--version", default="t5_1_0", help="t5_1_0 (tied head) or t5_1_1")
  parser.add_argument("--size", default="base")
  parser.add_argument("--layers", type=int, default=12, help="of the decoder")
  parser.add_argument("--inputs", type=int, default=64, help="tokens that the encoder reads")
  parser.add_argument("--steps", type=int, default=16, help="tokens to decode")
  parser.add_argument("--rows", type=int, default=1)
  parser.add_argument("--patterns", nargs="+", default=["1:8", "1:32"], help="of packed weights")
  parser.add_argument("--peaks", nargs="+", metavar="KIND", help="memory: 'dense' or n:m")
  parser.add_argument("--peak", metavar="KIND", help="only run one of these, and print its memory")
  return parser.parse_args(argv)


def shaped(args):
  """Returns (network, shapes of its parameters); one layer of the encoder is enough."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.models.t5 import T5Config, Transformer

  sizes = dict(num_encoder_layers=1, num_decoder_layers=args.layers, dropout_rate=0.0)
  network = Transformer(T5Config.preset(args.version, args.size, **sizes))
  tokens = jnp.ones((1, 1), jnp.int32)
  init = jax.eval_shape(network.init, jax.random.key(0), tokens, tokens, tokens)
  return network, init["params"]


def one_layer(network, params):
  """Returns the same network and parameters with the first layer of the decoder alone."""
  others = re.compile("layers_(?!0$)")
  decoder = {name: x for name, x in params["decoder"].items() if not others.match(name)}
  config = network.config.replace(num_decoder_layers=1)
  return type(network)(config), params | {"decoder": decoder}


def searches(network, params, args):
  """Returns number of tokens -> a call that decodes so many."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.trainer.workloads import decoding

  inputs = jnp.full((args.rows, args.inputs), 2, jnp.int32)
  run = jax.jit(
    lambda params, inputs, n: decoding.greedy(network, params, inputs, n, eos_id=-1),
    static_argnums=2,
  )
  return {n: lambda n=n: jax.block_until_ready(run(params, inputs, n)) for n in (1, args.steps)}


def per_token(network, trees, args):
  """Returns (name of a tree, "token" or "layers") -> seconds a token."""
  candidates = {}
  for name, params in trees.items():
    parts = {"token": (network, params), "one": one_layer(network, params)}
    for part, run in parts.items():
      for n, call in searches(*run, args).items():
        candidates[name, part, n] = call
  times = _timing.interleave(candidates, args.blocks)
  spent, depth = {}, network.config.num_decoder_layers
  for name in trees:
    median = lambda part, n, name=name: statistics.median(times[name, part, n])
    token, one = (
      (median(part, args.steps) - median(part, 1)) / (args.steps - 1) for part in ("token", "one")
    )
    spent[name, "token"], spent[name, "layers"] = token, (token - one) * depth / (depth - 1)
  return spent


def bytes_of_layers(params):
  """Returns the bytes of weights of the decoder's layers that a token reads."""
  import jax

  from nm_sparsity_jax.core.trees import flatten

  # Keys and values of the input are computed once a sequence.
  once = "(encoder|token_embedder|.*/logits_dense|.*encoder_decoder_attention/(key|value))/.*"
  read = [x for path, x in flatten(params) if not re.fullmatch(once, path)]
  return sum(part.nbytes for part in jax.tree.leaves(read))  # a packed kernel has several


def packed(network, params, args, pattern):
  """Returns the parameters with packed kernels of feed-forward and attention layers."""
  import nm_sparsity_jax as nms

  rules = _memory.rules_of(pattern)
  tree, _ = nms.inference_tree.pack_tree(nms.finalize(params, rules, 1), rules)
  rows = nms.inference_tree.rows_of(network.config, args.rows, args.inputs)
  return nms.inference_tree.prepare(tree, rows)


def over_dense(network, params, args):
  """Returns a row for dense weights, and for each of `--patterns`.

  `bound` of the layers is the ratio of their bytes. That of a token has this of the layers, and all
  else takes as long as in a token of dense weights.
  """
  trees = {"dense": params, **{p: packed(network, params, args, p) for p in args.patterns}}
  spent = per_token(network, trees, args)
  layers, token = spent["dense", "layers"], spent["dense", "token"]
  size = {name: bytes_of_layers(tree) for name, tree in trees.items()}
  rows = []
  for name in trees:
    ratio = size["dense"] / size[name]
    bounds = {"layers": ratio, "token": token / (token - layers + layers / ratio)}
    row: dict = {"weights": name}
    for part, bound in bounds.items():
      row[f"{part}_ms"] = round(spent[name, part] * 1e3, 2)
      row[f"{part}_x"] = round(spent["dense", part] / spent[name, part], 2)
      row[f"{part}_bound"] = round(bound, 2)
    rows.append(row)
  return rows


def peak(args):
  """Decodes with one kind of weights, and prints what the process held at most."""
  from nm_sparsity_jax.deploy import inference_tree

  network, shapes = shaped(args)
  rows = inference_tree.rows_of(network.config, args.rows, args.inputs)
  params = _memory.tree(shapes, args.peak, rows)
  searches(network, params, args)[args.steps]()
  _memory.report()


def peaks(args):
  """Returns a row for each of `--peaks`: the most that a process of its own holds."""
  words = [word for word in sys.argv[1:] if word not in ("--peaks", *args.peaks)]
  words = words[: words.index("--json")] if "--json" in words else words
  most = lambda kind: round(_memory.most(__file__, *words, "--peak", kind) / 1e6)
  return [{"weights": kind, "peak_MB": most(kind)} for kind in args.peaks]


def main():
  args = arguments()
  _timing.pin(args.core)
  if args.peak:
    return peak(args)
  if args.peaks:
    rows = peaks(args)
  else:
    network, shapes = shaped(args)
    rows = over_dense(network, _memory.tree(shapes, _memory.DENSE), args)
  return _timing.table(rows, args.json)


if __name__ == "__main__":
  main()
