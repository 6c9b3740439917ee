"""What `nms.sparse` costs: memory, bytes, step and compilation beside dense and beside two seams.

    python benchmarks/in_place.py                     an MLP, float32 and bfloat16 parameters
    python benchmarks/in_place.py --networks t5 vit   T5-small and ViT-tiny
    python benchmarks/in_place.py --topology v5e:2x2  what a TPU's compiler says; needs libtpu
    python benchmarks/in_place.py --leaves 1000       the update of many small leaves
    python benchmarks/in_place.py --calls             Python calls of one update and one sparsify
    python benchmarks/in_place.py --rules 2000        as many rules, assigned to as many parameters

Two seams is a loop of the pieces: `nms.sparsify` in the loss, `nms.sr_ste` in the chain. Peaks and
bytes are the compiler's. A kernel of Pallas reads and writes each array once. Times are medians
of turns that all three take.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import topology
from nm_sparsity_jax.analysis.compiled import account
from nm_sparsity_jax.models import t5 as t5_model
from nm_sparsity_jax.models import vit as vit_model

PHASES = nms.Phases(total=200, dense=40, finetune=60)
WIDTH, HIDDEN, LAYERS, BATCH = 512, 2048, 4, 256


KEY = jax.random.key(0)


def rules_of(recipe, pattern="1:8", place=".*/kernel"):
  return nms.Rules({place: nms.recipe(recipe, pattern=pattern, phases=PHASES)})


def mlp():
  layer = {"wi": {"kernel": (WIDTH, HIDDEN)}, "wo": {"kernel": (HIDDEN, WIDTH)}}
  struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.tree.map(
    struct, {f"layer_{i}": layer for i in range(LAYERS)}, is_leaf=lambda x: isinstance(x, tuple)
  )

  def loss(params, x):
    h = x.astype(params["layer_0"]["wi"]["kernel"].dtype)
    for layer in params.values():
      h = h + jax.nn.relu(h @ layer["wi"]["kernel"]) @ layer["wo"]["kernel"]
    return jnp.mean((h - jnp.sin(x)).astype(jnp.float32) ** 2)

  x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
  return params, loss, x, ".*/kernel"


def t5():
  """Returns T5-small, whose layers are sparse, embedding and logits dense."""
  network = t5_model.Transformer(t5_model.T5Config.t5_1_1("small"))
  source, target = jax.random.randint(jax.random.key(1), (2, 8, 64), 1, 32000)
  inputs = source, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1], target
  apply = functools.partial(network.apply, enable_dropout=False)
  params = jax.eval_shape(functools.partial(network.init, enable_dropout=False), KEY, *inputs)

  def loss(params, inputs):
    logits = apply({"params": params}, *inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), inputs[2])
    return losses.mean()

  return params["params"], loss, inputs, ".*/layers_\\d+/.*/kernel"


def vit():
  """Returns ViT-tiny, whose blocks are sparse, stem and head dense."""
  config = dict(layers=12, embed=192, heads=3, mlp=768)
  network = vit_model.ViT(vit_model.ViTConfig(**config))
  images = jax.random.normal(jax.random.key(1), (16, 224, 224, 3))
  params = jax.eval_shape(network.init, KEY, images)

  def loss(params, images):
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), jnp.arange(len(images))
    ).mean()

  return params["params"], loss, images, "blocks_\\d+/.*/kernel"


def drawn(shapes, dtype):
  """Returns random parameters of some shapes."""
  leaves, tree = jax.tree.flatten(shapes)
  keys = jax.random.split(KEY, len(leaves))
  scale = lambda x: x.shape[0] ** -0.5 if x.ndim > 1 else 1.0
  draw = lambda key, x: (jax.random.normal(key, x.shape) * scale(x)).astype(dtype)
  return jax.tree.unflatten(tree, map(draw, keys, leaves))


def steps(rules, loss):
  """Yields (name, optimizer, step) of a dense loop, one of two seams, and one in place."""

  def loop(tx, effective):
    def step(params, opt, x):
      grads = jax.grad(lambda p: loss(effective(p, opt), x))(params)
      updates, opt = tx.update(grads, opt, params)
      return optax.apply_updates(params, updates), opt

    return tx, step

  as_it_is = lambda params, opt: params
  masked = lambda params, opt: nms.sparsify(params, rules, nms.step_count(opt))
  yield "dense", *loop(optax.adamw(1e-3), as_it_is)
  yield "two seams", *loop(optax.chain(nms.sr_ste(rules), optax.adamw(1e-3)), masked)
  yield "in place", *loop(nms.sparse(optax.adamw(1e-3), rules), as_it_is)


def compiled(step, params, opt, x, device):
  """Returns the program of a step that donates its buffers, and how long it compiles."""
  if device is not None:  # nothing lies there, and nothing runs
    sharding = jax.sharding.SingleDeviceSharding(device)
    struct = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    params, opt, x = jax.tree.map(struct, (params, opt, x))
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt, x)
  begun = time.perf_counter()
  program = lowered.compile()
  return program, time.perf_counter() - begun


def costs(network, recipe, dtype, turns, device=None):
  """Prints memory, bytes, compilation and time of a step, for the three loops."""
  shapes, loss, x, place = {"mlp": mlp, "t5": t5, "vit": vit}[network]()
  params = drawn(shapes, dtype)
  rules = rules_of(recipe, place=place).for_model(loss, params, x)
  rows, running, times = {}, {}, collections.defaultdict(list)
  for name, tx, step in steps(rules, loss):
    opt = tx.init(params)
    program, seconds = compiled(step, params, opt, x, device)
    found = account(program)  # its memory has no results: they lie in donated buffers
    rows[name] = found.memory / 2**20, found.bytes / 2**20, seconds
    running[name] = program, jax.tree.map(jnp.copy, params), opt
  for _ in range(0 if device else turns):
    for name, (program, p, opt) in running.items():
      begun = time.perf_counter()
      p, opt = jax.block_until_ready(program(p, opt, x))
      times[name].append(time.perf_counter() - begun)
      running[name] = program, p, opt
  print(
    f"{network}, {recipe}, {jnp.dtype(dtype).name}{f', {device.device_kind}' if device else ''}"
  )
  for name, (peak, moved, seconds) in rows.items():
    two = rows["two seams"]
    said = [
      f"peak {peak:6.1f} MiB ({peak / two[0]:.2f} of two seams)",
      f"bytes {moved:5.0f} MiB ({moved / two[1]:.2f})",
      f"compile {seconds:.2f} s",
    ]
    if times:
      step, dense, both = (statistics.median(times[x]) for x in (name, "dense", "two seams"))
      said.append(f"step {1e3 * step:.1f} ms ({step / dense:.2f} of dense, {step / both:.2f})")
    print(f"  {name:9}  {'  '.join(said)}", flush=True)


def leaves(count, recipe):
  """Prints how long an update of many small leaves takes to trace, lower and compile."""
  params = {f"layer_{i}": {"kernel": jnp.full((16, 16), i + 1.0)} for i in range(count)}
  found = {}
  optax.adamw(1e-3).init(params)
  for name, tx in (
    ("dense", optax.adamw(1e-3)),
    (recipe, nms.sparse(optax.adamw(1e-3), rules_of(recipe, "2:8"))),
  ):
    opt, seconds = tx.init(params), []
    for stage in ("trace", "lower", "compile"):
      begun = time.perf_counter()
      if stage == "trace":
        made = jax.jit(tx.update).trace(params, opt, params)
      else:
        made = getattr(made, stage)()
      seconds.append(time.perf_counter() - begun)
    found[name] = seconds
    print(f"  {name:16}", *(f"{s:6.2f} s" for s in seconds))
  ratios = [a / b for a, b in zip(found[recipe], found["dense"], strict=True)]
  whole = sum(found[recipe]) / sum(found["dense"])
  print("  ratio trace, lower, compile, all:", *(f"{r:.1f}" for r in (*ratios, whole)))


def calls(recipe):
  """Prints the Python calls into the package, of the first and of a later trace."""
  root = os.path.dirname(nms.__file__)
  params = {name: {"kernel": jnp.ones((16, 8))} for name in "ab"}
  rules = rules_of(recipe)
  tx = nms.sparse(optax.adamw(1e-3), rules)
  opt, masks = tx.init(params), nms.init_state(params, rules)
  programs = {
    "sparsify": lambda: jax.make_jaxpr(lambda p, s: nms.sparsify(p, rules, s, masks))(
      params, jnp.int32(50)
    ),
    "update": lambda: jax.make_jaxpr(lambda g, o, p: tx.update(g, o, p))(params, opt, params),
  }
  for name, program in programs.items():
    for which in ("first", "later"):
      seen = collections.Counter()

      def note(frame, event, arg, seen=seen):
        del arg
        if event == "call" and frame.f_code.co_filename.startswith(root):
          seen[frame.f_code.co_filename] += 1

      sys.setprofile(note)
      try:
        program()
      finally:
        sys.setprofile(None)
      print(f"  {name:8} {which:5}  {sum(seen.values())} calls in {len(seen)} files")


def places(count):
  """Prints how long rules take to assign, one for each of many parameters."""
  kernel = jax.ShapeDtypeStruct((16, 16), jnp.float32)
  params = {f"layer_{i}": {"kernel": kernel} for i in range(count)}
  one = nms.recipe("sr_ste", pattern="2:4", phases=PHASES)
  rules = nms.Rules({f"layer_{i}/kernel": one for i in range(count)})
  begun = time.perf_counter()
  assigned = rules.assign(params)
  seconds = time.perf_counter() - begun
  print(f"{count} rules on {len(assigned.places)} parameters: {seconds:.2f} s")


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--networks", nargs="+", choices=("mlp", "t5", "vit"), default=["mlp"])
  parser.add_argument("--topology", help="compile for a chip of it in place of running")
  parser.add_argument("--recipes", nargs="+", default=["mdgf_exponential", "sr_ste"])
  parser.add_argument("--turns", type=int, default=12)
  parser.add_argument("--leaves", type=int, metavar="N", help="an update of N small leaves")
  parser.add_argument("--rules", type=int, metavar="N", help="assign N rules to N parameters")
  parser.add_argument("--calls", action="store_true", help="Python calls of two leaves")
  args = parser.parse_args()
  if args.rules:
    return places(args.rules)
  for recipe in args.recipes:
    if args.leaves:
      leaves(args.leaves, recipe)
    elif args.calls:
      print(recipe)
      calls(recipe)
    else:
      device = topology.devices(args.topology)[0] if args.topology else None
      for network in args.networks:
        for dtype in (jnp.float32, jnp.bfloat16):
          costs(network, recipe, dtype, args.turns, device)


if __name__ == "__main__":
  main()
