"""What sparsity costs in a whole train step: sparse over dense, and over the floor.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --only sdgf --layers 2

An encoder-decoder of T5.1.1-small's widths (embed 512, gated MLP of 1024, 6 heads of 64, 4 + 4
layers unless told otherwise, 32,128 words), 8 x (64 + 32) tokens, float32, adamw, the FF kernels
sparse. Each candidate is the same jitted step of loss, gradient, optimizer and stored masks. The
floor masks by a fixed threshold: what masking costs before any mask is computed.

--network vit has layers of ViT-B/16 on 4 images of 224, `ff` at 1:8; --network resnet has one
block and more in each of ResNet-50's four stages on 4 such images, `conv` at 2:8.

Printed: median and middle half of the time over dense and over the floor, and the least time to
compile over dense's. Gates: over floor <= 1.02 or over dense <= 1.04; compilation <= 1.2. Those of
networks of images: over dense <= 1.05; compilation <= 1.25.
"""

from __future__ import annotations

import argparse
import sys

import _timing

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--core", type=int, default=1, help="processor to run on")
PARSER.add_argument("--blocks", type=int, default=9, help="turns of each candidate")
PARSER.add_argument("--network", choices=("t5", "vit", "resnet"), default="t5")
PARSER.add_argument("--layers", type=int, default=4, help="layers of each stack")
PARSER.add_argument("--only", default="", help="candidates whose name contains this")
PARSER.add_argument("--compiles", type=int, default=3, help="compilations of each candidate")
PARSER.add_argument("--json", help="write the rows to this file")
PARSER.add_argument("--any-device", action="store_true", help="neither pin nor insist on the CPU")
ARGS = PARSER.parse_args()
if not ARGS.any_device:
  _timing.pin(ARGS.core)

import _train_step_networks as networks
import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import gradients, trees

TOTAL = 1000


def threshold(params, rules, mode):
  """Applies the floor: the mask is |W| > a constant."""
  places = rules.assign(params).places
  half = jnp.float32(0.5)

  def apply(path, w):
    if path not in places:
      return w
    return gradients.blend(w, jnp.abs(w) > 0.02, half, mode)

  return trees.map_with_names(apply, params)


def train_step(loss_of, rules, floor=None):
  """Returns a jitted (params, opt_state, state, batch) -> the same, and its optimizer."""
  parts = [optax.adamw(1e-4)] if rules is None or floor else [nms.sr_ste(rules), optax.adamw(1e-4)]
  tx = optax.with_extra_args_support(optax.chain(*parts))

  def effective(params, state, step):
    if rules is None:
      return params
    if floor:
      return threshold(params, rules, floor)
    return nms.sparsify(params, rules, step, state)

  def step_fn(params, opt_state, state, batch):
    step = nms.step_count(opt_state)
    value = lambda p: loss_of(effective(p, state, step), batch)
    loss, grads = jax.value_and_grad(value, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params, nm_state=state)
    new = optax.apply_updates(params, updates)
    if state:
      state = nms.update_state(
        state, new, rules, nms.step_count(opt_state), grads=grads, grads_at=params
      )
    return new, opt_state, state, loss

  return jax.jit(step_fn, donate_argnums=(0, 1, 2)), tx


def set_step(opt_state, step):
  """Returns the optimizer state as it is at `step`."""
  at = lambda path, x: jnp.int32(step) if "count" in str(path[-1]) else x
  return jax.tree_util.tree_map_with_path(at, opt_state)


def cases(network):
  """Yields (name, rules or None, floor's gradient mode or None, step to measure at)."""
  phases = nms.Phases(total=TOTAL, dense=100, finetune=200)
  make = lambda name, pattern, **k: nms.Rules(
    {network.place: nms.recipe(name, pattern=pattern, phases=phases, **k)}
  )
  if network.pattern:
    yield from one_pattern(network.pattern, make)
    return
  yield "dense", None, None, 0
  yield "floor masked", make("mdgf_linear", "1:8"), "masked", 0
  yield "floor straight_through", make("mdgf_linear", "1:8"), "straight_through", 0
  for pattern in ("2:4", "1:8", "1:32", "1:128", "64:128"):
    yield f"sr_ste {pattern}", make("sr_ste", pattern), None, 500
  for pattern in ("1:8", "1:32", "1:128", "64:128"):
    yield f"mdgf_linear {pattern}", make("mdgf_linear", pattern), None, 300
  yield "mdgf_exponential 1:32", make("mdgf_exponential", "1:32"), None, 300
  yield "mdgf_exponential 1:32 fine-tune", make("mdgf_exponential", "1:32"), None, 900
  for pattern in ("1:8", "1:32", "1:128"):
    yield f"sdgf_stepwise {pattern}", make("sdgf_stepwise", pattern), None, 300
  yield "sdgf_stepwise 1:128 fine-tune", make("sdgf_stepwise", "1:128"), None, 900
  yield "sdgf_geometric 1:8", make("sdgf_geometric", "1:8"), None, 150
  yield "sdgf_geometric 1:32", make("sdgf_geometric", "1:32"), None, 150
  yield "sdgf_geometric 1:8 fine-tune", make("sdgf_geometric", "1:8"), None, 900
  path = ((100, "4:8", 1.0), (400, "2:16", 0.5))
  yield "custom 1:8", make("custom", "1:8", path=path), None, 500
  yield "one_shot 1:8", make("one_shot", "1:8"), None, 500
  yield "snip 1:8", make("snip", "1:8"), None, 500
  yield "idp 1:8", make("idp", "1:8"), None, 500
  yield "idp 1:128", make("idp", "1:128"), None, 300
  combined = make("sdgf_stepwise", "1:32", decay_kind="linear")
  yield "sdgf_stepwise x linear 1:32", combined, None, 300


def one_pattern(pattern, make):
  """Yields the cases of a network with one pattern, which has no floor."""
  yield "dense", None, None, 0
  for name in ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise"):
    yield f"{name} {pattern}", make(name, pattern), None, 300


def main():
  network = networks.NETWORKS[ARGS.network](ARGS.layers)
  params, batch = network.params, network.batch
  arguments, compiled, compile_s, modes = {}, {}, {}, {}
  chosen = [
    c for c in cases(network) if ARGS.only in c[0] or c[0] == "dense" or c[0].startswith("floor")
  ]
  carried = {}
  for name, rules, floor, at in chosen:
    _, tx = train_step(network.loss, rules, floor)
    opt_state = set_step(tx.init(params), at)
    state = nms.init_state(params, rules) if rules is not None and not floor else {}
    if state:
      state["step"] = jnp.int32(at)
    mode = floor or (rules.places[network.place].gradient_mode if rules else "masked")
    modes[name] = f"floor {mode}"
    shapes = jax.eval_shape(lambda x: x, opt_state)
    carried[name] = (opt_state if name == "dense" else shapes, state, at)
    arguments[name] = rules, floor, (params, shapes, state, batch)
  for turn in range(ARGS.compiles):
    for name, (rules, floor, args) in arguments.items():
      jax.clear_caches()  # or a second compilation would only be looked up
      lowered = train_step(network.loss, rules, floor)[0].lower(*args)
      start = _timing.clock()
      compiled[name] = lowered.compile()
      took = _timing.clock() - start
      compile_s[name] = min(took, compile_s.get(name, took))
      print(f"compiled {name}, turn {turn}: {took:.1f} s", file=sys.stderr, flush=True)

  # One copy of parameters and moments serves every candidate: a call donates and returns them.
  moments_of = lambda opt_state: [x for x in jax.tree.leaves(opt_state) if x.ndim]
  live = {"params": params, "adam": moments_of(carried["dense"][0])}

  def rebuild(like, at):
    leaves, tree = jax.tree.flatten(like)
    moments = iter(live["adam"])
    return tree.unflatten([next(moments) if x.ndim else jnp.int32(at) for x in leaves])

  def call(name):
    opt_state, state, at = carried[name]
    held = {"state": state}

    def run():
      state = {**held["state"], "step": jnp.int32(at)} if held["state"] else {}
      out = compiled[name](live["params"], rebuild(opt_state, at), state, batch)
      jax.block_until_ready(out)
      live["params"], live["adam"], held["state"] = out[0], moments_of(out[1]), out[2]

    return run

  times = _timing.interleave({name: call(name) for name in compiled}, ARGS.blocks, seconds=0.0)
  rows = []
  print(f"{'candidate':34} {'ms':>7}  {'over dense':>20}  {'over floor':>20}  {'compile':>7}")
  show = lambda r: f"{r[0]:.3f} [{r[1]:.3f}, {r[2]:.3f}]"
  for name in compiled:
    dense, base = _timing.ratio(times[name], times["dense"]), modes[name]
    floor = _timing.ratio(times[name], times[base]) if base in times else None
    middle = sorted(times[name])[len(times[name]) // 2] * 1e3
    took = compile_s[name] / compile_s["dense"]
    told = show(floor) if floor else ""
    print(f"{name:34} {middle:7.1f}  {show(dense):>20}  {told:>20}  {took:7.2f}")
    rows.append({
      "candidate": name, "ms": middle, "over_dense": dense,
      **({"over_floor": floor} if floor else {}), "compile_over_dense": took,
    })  # fmt: skip
  _timing.save(ARGS.json, rows, "python " + " ".join(sys.argv))


if __name__ == "__main__":
  main()
