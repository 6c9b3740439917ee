"""A token of a T5 that decodes: milliseconds by parts, and what reading its weights once takes.

    python benchmarks/decode.py                               # 12 layers of base size, one row
    python benchmarks/decode.py --patterns 1:8 1:32           # packed weights over dense ones
    python benchmarks/decode.py --peaks dense 1:8 1:32        # memory of a process, each in its own

`before` is the search through T5X's cache, `after` the one through `start` and `step`. Weights are
random, and no row ends. All candidates take turns in one process on one pinned core; a figure is a
median. A token is the time of a search over `--steps` tokens less that of one over a single token.
`layers` is what a token takes more than one of the same network with one layer, for all layers.
With `--patterns`, feed-forward and attention kernels are packed; embedding and head stay dense.
"""

from __future__ import annotations

import re
import statistics
import sys

import _memory
import _timing
import numpy as np


def arguments(argv=None):
  parser = _timing.parser(__doc__, core=0, blocks=7)
  parser.add_argument("--version", default="t5_1_0", help="t5_1_0 (tied head) or t5_1_1")
  parser.add_argument("--size", default="base")
  parser.add_argument("--layers", type=int, default=12, help="of the decoder")
  parser.add_argument("--inputs", type=int, default=64, help="tokens that the encoder reads")
  parser.add_argument("--steps", type=int, default=16, help="tokens to decode")
  parser.add_argument("--rows", type=int, default=1)
  parser.add_argument("--patterns", nargs="+", help="time packed weights too, such as 1:8")
  parser.add_argument("--peaks", nargs="+", metavar="KIND", help="memory: 'dense' or n:m")
  parser.add_argument("--peak", metavar="KIND", help="only run one of these, and print its memory")
  return parser.parse_args(argv)


class Before:
  """A network with T5X's interface alone."""

  def __init__(self, network):
    self.config = network.config
    self.apply, self.encode, self.decode = network.apply, network.encode, network.decode


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


def per_token(runs, args, others=None):
  """Returns (name, "token" or "layers") -> seconds a token, and medians of other calls.

  Args:
    runs: name -> (network, its parameters, what wraps it).
    args: of the command.
    others: name -> a call that takes turns with them.
  """
  candidates = dict(others or {})
  for name, (network, params, wrap) in runs.items():
    for part, (net, tree) in {
      "token": (network, params),
      "one": one_layer(network, params),
    }.items():
      for n, call in searches(wrap(net), tree, args).items():
        candidates[name, part, n] = call
  times = _timing.interleave(candidates, args.blocks)
  median = {name: statistics.median(found) for name, found in times.items()}
  spent = {}
  for name, (network, _, _) in runs.items():
    token, one = (
      (median[name, part, args.steps] - median[name, part, 1]) / (args.steps - 1)
      for part in ("token", "one")
    )
    depth = network.config.num_decoder_layers
    spent[name, "token"], spent[name, "layers"] = token, (token - one) * depth / (depth - 1)
  return spent, median


def parts(network, params, args):
  """Returns name -> a call that embeds `--steps` tokens, or makes logits, one after the other."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.models.t5 import layers

  cfg = network.config
  embed = layers.Embed(cfg.vocab_size, cfg.emb_dim, one_hot=True)

  # The next token is the likeliest: so nothing can be left out.
  def lookup(params, token, gather):
    x = embed.apply({"params": params["token_embedder"]}, token, gather=gather)
    return jnp.argmax(x, -1).astype(jnp.int32)

  def head(params, token):
    x = jnp.ones((args.rows, 1, cfg.emb_dim)) * token[..., None].astype(jnp.float32)
    if cfg.logits_via_embedding:
      x = embed.apply({"params": params["token_embedder"]}, x, method="attend")
    else:
      x = x @ params["decoder"]["logits_dense"]["kernel"]
    return jnp.argmax(x, -1).astype(jnp.int32)

  def repeated(one):
    first = jnp.ones((args.rows, 1), jnp.int32)
    loop = lambda params: jax.lax.fori_loop(0, args.steps, lambda _, x: one(params, x), first)
    run = jax.jit(loop)
    return lambda: jax.block_until_ready(run(params))

  return {
    ("before", "embedding"): repeated(lambda params, x: lookup(params, x, False)),
    ("after", "embedding"): repeated(lambda params, x: lookup(params, x, True)),
    ("before", "head"): repeated(head),
    ("after", "head"): repeated(head),
  }


def read(network, params, args):
  """Returns part -> bytes of weights that a token cannot do without."""
  import jax

  from nm_sparsity_jax.core.trees import flatten

  cfg = network.config
  bytes_of = lambda x: sum(part.nbytes for part in jax.tree.leaves(x))  # a packed one has several
  size = {path: bytes_of(x) for path, x in flatten(params)}
  # Keys and values of the input are computed once a sequence.
  once = re.compile("(encoder|token_embedder|.*encoder_decoder_attention/(key|value))/.*")
  head = "token_embedder/embedding" if cfg.logits_via_embedding else "decoder/logits_dense/kernel"
  layers = sum(n for path, n in size.items() if path != head and not once.fullmatch(path))
  row = size["token_embedder/embedding"] // cfg.vocab_size
  found = {"embedding": args.rows * row, "layers": layers, "head": size[head]}
  return found | {"token": sum(found.values())}


def reading():
  """Returns calls that read 256 MiB, and these bytes: the fastest says what the memory gives."""
  import jax
  import jax.numpy as jnp

  weights, x = np.ones((1 << 11, 1 << 15), np.float32), np.ones((1, 1 << 11), np.float32)
  there, product = jnp.asarray(weights), jax.jit(jnp.matmul)
  calls = {
    "numpy": lambda: x @ weights,
    "max": lambda: weights.max(),
    "xla": lambda: jax.block_until_ready(product(x, there)),
  }
  return {("memory", name): call for name, call in calls.items()}, weights.nbytes


def account(network, params, args):
  """Returns a row for each part: milliseconds a token before and after, and the bound."""
  calls, size = reading()
  runs = {"before": (network, params, Before), "after": (network, params, lambda net: net)}
  spent, median = per_token(runs, args, calls | parts(network, params, args))
  rate = size / min(median[name] for name in calls)
  print(f"one core reads {rate / 1e9:.1f} GB/s\n")
  spent |= {key: median[key] / args.steps for key in median if key[1] in ("embedding", "head")}
  return [
    {
      "part": part,
      "before_ms": round(spent["before", part] * 1e3, 2),
      "after_ms": round(spent["after", part] * 1e3, 2),
      "bound_ms": round(count / rate * 1e3, 2),
      "megabytes": round(count / 1e6, 1),
    }
    for part, count in read(network, params, args).items()
  ]


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
  runs = {name: (network, tree, lambda net: net) for name, tree in trees.items()}
  spent, _ = per_token(runs, args)
  layers, token = spent["dense", "layers"], spent["dense", "token"]
  size = {name: read(network, tree, args)["layers"] for name, tree in trees.items()}
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
    import jax
    import jax.numpy as jnp

    network, shapes = shaped(args)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32) / 32)
    rows = (over_dense if args.patterns else account)(network, jax.tree.map(draw, shapes), args)
  _timing.head(*rows[0])
  for row in rows:
    _timing.row(*row.values())
  return _timing.save(args.json, rows)


if __name__ == "__main__":
  main()
