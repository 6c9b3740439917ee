"""What `nms.sparse` costs: memory, bytes, step and compilation beside dense and beside two seams.

    python benchmarks/in_place.py                     an MLP, float32 and bfloat16 parameters
    python benchmarks/in_place.py --networks t5 vit   T5-small and ViT-tiny
    python benchmarks/in_place.py --topology v5e:2x2  what a TPU's compiler says; needs libtpu
    python benchmarks/in_place.py --leaves 1000       the update of many small leaves

Two seams is a loop of the pieces: `nms.sparsify` in the loss, `nms.sr_ste` in the chain. Peaks and
bytes are the compiler's. Times are medians of turns that all three take.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import _networks
import _timing
import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import topology
from nm_sparsity_jax.analysis.compiled import account

PHASES = nms.Phases(total=200, dense=40, finetune=60)
# Embedding, stem, logits and head stay dense.
NETWORKS = {
  "mlp": (_networks.mlp, ".*/kernel"),
  "t5": (lambda: _networks.t5(8), ".*/layers_\\d+/.*/kernel"),
  "vit": (_networks.vit_tiny, "blocks_\\d+/.*/kernel"),
}


def rules_of(recipe, pattern="1:8", place=".*/kernel"):
  return nms.Rules({place: nms.recipe(recipe, pattern=pattern, phases=PHASES)})


def steps(rules, loss):
  """Yields (name, optimizer, step) of a dense loop, one of two seams, and one in place."""

  def loop(tx, effective):
    def step(params, opt, x):
      grads = jax.grad(lambda p: loss(effective(p, opt), x)[0])(params)
      updates, opt = tx.update(grads, opt, params)
      return optax.apply_updates(params, updates), opt

    return tx, step

  as_it_is = lambda params, opt: params
  masked = lambda params, opt: nms.sparsify(params, rules, nms.step_count(opt))
  yield "dense", *loop(optax.adamw(1e-3), as_it_is)
  yield "two seams", *loop(optax.chain(nms.sr_ste(rules), optax.adamw(1e-3)), masked)
  yield "in place", *loop(nms.sparse(optax.adamw(1e-3), rules), as_it_is)


def struct(device, a):
  """Returns an array's shape as it would lie on a device."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def costs(name, recipe, dtype, turns, device=None):
  """Prints memory, bytes, compilation and time of a step, for the three loops."""
  make, place = NETWORKS[name]
  network = make()
  params = jax.tree.map(lambda x: x.astype(dtype), network.params)
  rules = rules_of(recipe, place=place).for_model(lambda *a: network.loss(*a)[0], params,
                                                  network.batch)  # fmt: skip
  found, running = {}, {}
  for loop, tx, step in steps(rules, network.loss):
    args = params, tx.init(params), network.batch
    if device is not None:  # nothing lies there, and nothing runs
      args = jax.tree.map(functools.partial(struct, device), args)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
    begun = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - begun
    used = account(program)  # its memory has no results: they lie in donated buffers
    found[loop] = used.memory / 2**20, used.bytes / 2**20, seconds
    if device is None:
      running[loop] = [program, *jax.tree.map(jnp.copy, args[:2])]

  def call(loop):
    program, p, opt = running[loop]
    running[loop][1:] = jax.block_until_ready(program(p, opt, network.batch))

  calls = {loop: lambda loop=loop: call(loop) for loop in running}
  times = _timing.interleave(calls, turns, seconds=0.0) if calls else {}
  print(f"{name}, {recipe}, {jnp.dtype(dtype).name}")
  two = found["two seams"]
  for loop, (peak, moved, seconds) in found.items():
    cells = [
      f"peak {peak:6.1f} MiB ({peak / two[0]:.2f} of two seams)",
      f"bytes {moved:5.0f} MiB ({moved / two[1]:.2f})",
      f"compile {seconds:.2f} s",
    ]
    if times:
      step, dense, both = (statistics.median(times[x]) for x in (loop, "dense", "two seams"))
      cells.append(f"step {1e3 * step:.1f} ms ({step / dense:.2f} of dense, {step / both:.2f})")
    print(f"  {loop:9}  {'  '.join(cells)}", flush=True)


def leaves(count, recipe):
  """Prints how long an update of many small leaves takes to trace, lower and compile."""
  params = {f"layer_{i}": {"kernel": jnp.full((16, 16), i + 1.0)} for i in range(count)}
  sparse = nms.sparse(optax.adamw(1e-3), rules_of(recipe, "2:8"))
  seconds = {}
  for name, tx in (("dense", optax.adamw(1e-3)), (recipe, sparse)):
    opt, begun = tx.init(params), time.perf_counter()
    jax.jit(tx.update).lower(params, opt, params).compile()
    seconds[name] = time.perf_counter() - begun
  print(f"  {seconds}: {seconds[recipe] / seconds['dense']:.1f} times as long as dense")


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=["mlp"])
  parser.add_argument("--topology", help="compile for a chip of it in place of running")
  parser.add_argument("--recipes", nargs="+", default=["mdgf_exponential", "sr_ste"])
  parser.add_argument("--turns", type=int, default=12)
  parser.add_argument("--leaves", type=int, metavar="N", help="an update of N small leaves")
  args = parser.parse_args()
  device = topology.devices(args.topology)[0] if args.topology else None
  for recipe in args.recipes:
    if args.leaves:
      leaves(args.leaves, recipe)
    else:
      for network in args.networks:
        for dtype in (jnp.float32, jnp.bfloat16):
          costs(network, recipe, dtype, args.turns, device)


if __name__ == "__main__":
  main()
