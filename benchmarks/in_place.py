"""What `nms.sparse` costs: memory, bytes, step and compilation beside dense and beside two seams.

    python benchmarks/in_place.py                     an MLP, float32 and bfloat16 parameters
    python benchmarks/in_place.py --leaves 1000       the update of many small leaves
    python benchmarks/in_place.py --calls             Python calls of one update and one sparsify

Two seams is a loop of the pieces: `nms.sparsify` in the loss, `nms.sr_ste` in the chain. Peaks and
bytes are the compiler's and exact. Times are medians of turns that all three take.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms

PHASES = nms.Phases(total=200, dense=40, finetune=60)
WIDTH, HIDDEN, LAYERS, BATCH = 512, 2048, 4, 256


def rules_of(recipe, pattern="1:8"):
  return nms.Rules({".*/kernel": nms.recipe(recipe, pattern=pattern, phases=PHASES)})


def mlp(dtype):
  keys = iter(jax.random.split(jax.random.key(0), 2 * LAYERS))
  kernel = lambda shape: (jax.random.normal(next(keys), shape) / shape[0] ** 0.5).astype(dtype)
  layer = lambda: {
    "wi": {"kernel": kernel((WIDTH, HIDDEN))},
    "wo": {"kernel": kernel((HIDDEN, WIDTH))},
  }
  return {f"layer_{i}": layer() for i in range(LAYERS)}


def loss(params, x):
  h = x
  for layer in params.values():
    h = h + jax.nn.relu(h @ layer["wi"]["kernel"]) @ layer["wo"]["kernel"]
  return jnp.mean((h - jnp.sin(x)).astype(jnp.float32) ** 2)


def steps(rules):
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


def costs(recipe, dtype, turns):
  params = mlp(dtype)
  x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH)).astype(dtype)
  rows, running, times = {}, {}, collections.defaultdict(list)
  for name, tx, step in steps(rules_of(recipe)):
    opt = tx.init(params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt, x)
    begun = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - begun
    m = program.memory_analysis()
    peak = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    peak = (peak + m.temp_size_in_bytes) / 2**20
    rows[name] = peak, program.cost_analysis()["bytes accessed"] / 2**20, seconds
    running[name] = program, jax.tree.map(jnp.copy, params), opt
  for _ in range(turns):
    for name, (program, p, opt) in running.items():
      begun = time.perf_counter()
      p, opt = jax.block_until_ready(program(p, opt, x))
      times[name].append(time.perf_counter() - begun)
      running[name] = program, p, opt
  print(f"{recipe}, {jnp.dtype(dtype).name}")
  dense = statistics.median(times["dense"])
  for name, (peak, moved, seconds) in rows.items():
    ratio = peak / rows["two seams"][0]
    step = statistics.median(times[name])
    print(
      f"  {name:9}  peak {peak:6.1f} MiB ({ratio:.2f} of two seams)  bytes {moved:5.0f} MiB  "
      f"compile {seconds:.2f} s  step {1e3 * step:.1f} ms ({step / dense:.2f} of dense)"
    )


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


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--recipes", nargs="+", default=["mdgf_exponential", "sr_ste"])
  parser.add_argument("--turns", type=int, default=12)
  parser.add_argument("--leaves", type=int, metavar="N", help="an update of N small leaves")
  parser.add_argument("--calls", action="store_true", help="Python calls of two leaves")
  args = parser.parse_args()
  for recipe in args.recipes:
    if args.leaves:
      leaves(args.leaves, recipe)
    elif args.calls:
      print(recipe)
      calls(recipe)
    else:
      for dtype in (jnp.float32, jnp.bfloat16):
        costs(recipe, dtype, args.turns)


if __name__ == "__main__":
  main()
