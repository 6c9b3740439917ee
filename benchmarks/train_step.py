"""What sparsity costs in a whole train step: sparse over dense, and over the floor.

    python benchmarks/train_step.py
    python benchmarks/train_step.py --only sdgf --layers 2

T5.1.1-small with 4 + 4 layers unless --layers says another, 8 x (64 + 32) tokens, float32, adamw,
the FF kernels sparse. Each candidate is the same jitted step of loss, gradient, optimizer and
stored masks. The floor masks by a fixed threshold: what masking costs before any mask is computed.

--network vit has layers of ViT-B/16 on 4 images of 224, `ff` at 1:8; --network resnet has one
block and more in each of ResNet-50's four stages on 4 such images, `conv` at 2:8.

Printed: median and middle half of the time over dense and over the floor, and the least time to
compile over dense's.
"""

from __future__ import annotations

import statistics

import _timing

PLACES = {"t5": ("ff", None), "vit": ("ff", "1:8"), "resnet": ("conv", "2:8")}


def arguments(argv=None):
  parser = _timing.parser(__doc__)
  parser.add_argument("--network", choices=tuple(PLACES), default="t5")
  parser.add_argument("--layers", type=int, default=4, help="layers of each stack")
  parser.add_argument("--only", default="", help="candidates whose name contains this")
  parser.add_argument("--compiles", type=int, default=3, help="compilations of each candidate")
  return parser.parse_args(argv)


def cases(network):
  """Yields (name, rules, floor's gradient mode or None, step to measure at)."""
  import nm_sparsity_jax as nms

  place, only = PLACES[network]
  phases = nms.Phases(total=1000, dense=100, finetune=200)

  def case(name, pattern, at, more="", **fields):
    recipe = nms.recipe(name, pattern=pattern, phases=phases, **fields)
    return f"{name} {pattern}{more}", nms.Rules({place: recipe}), None, at

  yield "dense", nms.Rules({".*": nms.recipe("dense")}), None, 0
  if only:
    for name in ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise"):
      yield case(name, only, 300)
    return
  for mode in ("masked", "straight_through"):
    _, rules, _, _ = case("mdgf_linear", "1:8", 0)
    yield f"floor {mode}", rules, mode, 0
  for pattern in ("2:4", "1:8", "1:32", "1:128", "64:128"):
    yield case("sr_ste", pattern, 500)
  for pattern in ("1:8", "1:32", "1:128", "64:128"):
    yield case("mdgf_linear", pattern, 300)
  for at, more in ((300, ""), (900, " fine-tune")):
    yield case("mdgf_exponential", "1:32", at, more)
  for pattern in ("1:8", "1:32", "1:128"):
    yield case("sdgf_stepwise", pattern, 300)
  yield case("sdgf_stepwise", "1:128", 900, " fine-tune")
  for pattern in ("1:8", "1:32"):
    yield case("sdgf_geometric", pattern, 150)
  yield case("sdgf_geometric", "1:8", 900, " fine-tune")
  yield case("custom", "1:8", 500, path=((100, "4:8", 1.0), (400, "2:16", 0.5)))
  for name in ("one_shot", "snip", "idp"):
    yield case(name, "1:8", 500)
  yield case("idp", "1:128", 300)
  _, rules, _, _ = case("sdgf_stepwise", "1:32", 300, decay_kind="linear")
  yield "sdgf_stepwise x linear 1:32", rules, None, 300


def step_of(loss_of, rules, floor):
  """Returns a jitted (params, opt_state, state, batch) -> the same and the loss; its optimizer."""
  import jax
  import jax.numpy as jnp
  import optax

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.core import gradients, trees

  tx = optax.chain(nms.sr_ste(rules), optax.adamw(1e-4))

  def threshold(params):
    sites, half = rules.assign(params).sites, jnp.float32(0.5)
    mask = lambda w: gradients.blend(w, jnp.abs(w) > 0.02, half, floor)
    return trees.map_with_names(lambda path, w: mask(w) if path in sites else w, params)

  def step_fn(params, opt_state, state, batch):
    step = nms.step_count(opt_state)
    effective = lambda p: threshold(p) if floor else nms.sparsify(p, rules, step, state)
    value = lambda p: loss_of(effective(p), batch)
    loss, grads = jax.value_and_grad(value, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params, nm_state=state)
    new = optax.apply_updates(params, updates)
    count = nms.step_count(opt_state)
    state = nms.update_state(state, new, rules, count, grads=grads, grads_at=params)
    return new, opt_state, state, loss

  return jax.jit(step_fn, donate_argnums=(0, 1, 2)), tx


def set_step(tree, step):
  """Returns a state as it is at `step`."""
  import jax
  import jax.numpy as jnp

  is_count = lambda path: str(path[-1]).strip("[]'.") in ("count", "step")
  at = lambda path, x: jnp.int32(step) if is_count(path) else x
  return jax.tree_util.tree_map_with_path(at, tree)


def compile_all(chosen, network, live, states, turns):
  """Returns the compiled steps, and the least time that each took."""
  import jax

  compiled, seconds = {}, {}
  for _ in range(turns):
    for name, rules, floor, _ in chosen:
      jax.clear_caches()  # or a second compilation would only be looked up
      step, _ = step_of(network.loss, rules, floor)
      lowered = step.lower(live["params"], live["opt"], states[name], network.batch)
      start = _timing.clock()
      compiled[name] = lowered.compile()
      seconds[name] = min(seconds.get(name, float("inf")), _timing.clock() - start)
  return compiled, seconds


def main():
  args = arguments()
  _timing.pin(args.core)
  import _networks
  import jax

  import nm_sparsity_jax as nms

  make = {"t5": _networks.t5, "vit": _networks.vit_b16, "resnet": _networks.resnet50}
  network = make[args.network](args.layers)
  always = lambda name: name == "dense" or name.startswith("floor")
  chosen = [case for case in cases(args.network) if args.only in case[0] or always(case[0])]
  # One copy of parameters and moments serves every candidate: a call donates and returns them.
  _, tx = step_of(network.loss, chosen[0][1], None)
  live = {"params": network.params, "opt": tx.init(network.params)}
  states = {name: nms.init_state(network.params, rules) for name, rules, *_ in chosen}
  compiled, seconds = compile_all(chosen, network, live, states, args.compiles)

  def call(name, at):
    def run():
      opt, state = set_step(live["opt"], at), set_step(states[name], at)
      out = jax.block_until_ready(compiled[name](live["params"], opt, state, network.batch))
      live["params"], live["opt"], states[name], _ = out

    return run

  calls = {name: call(name, at) for name, _, _, at in chosen}
  times = _timing.interleave(calls, args.blocks, seconds=0.0)
  rows = []
  _timing.head("candidate", "over dense", "over the floor", "compilation")
  for name, rules, floor, _ in chosen:
    row = {"candidate": name, "ms": statistics.median(times[name]) * 1e3}
    row["over_dense"] = _timing.ratio(times[name], times["dense"])
    (recipe,) = set(rules.places.values())
    base = times.get(f"floor {floor or recipe.gradient_mode if name != 'dense' else 'masked'}")
    if base:
      row["over_floor"] = _timing.ratio(times[name], base)
    row["compile_over_dense"] = seconds[name] / seconds["dense"]
    rows.append(row)
    ratios = (_timing.show(row[key]) if key in row else "" for key in ("over_dense", "over_floor"))
    _timing.row(name, *ratios, row["compile_over_dense"])
  _timing.save(args.json, rows)


if __name__ == "__main__":
  main()
