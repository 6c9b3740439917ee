"""A whole train step on 8 virtual devices: the weights of one device, no communication added."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import nm_sparsity_jax as nms

# mlp is split in two: 256 rows of wo a shard, whole groups of up to 256.
EMBED, MLP, BATCH = 128, 512, 8
SPECS = {
  "wi": PartitionSpec(None, "model"),
  "wo": PartitionSpec("model", None),
  "batch": PartitionSpec("data", None),
}
PHASES = nms.Phases(total=20, dense=2, finetune=4)
PATTERNS = {"sr_ste": "2:8", "sdgf_stepwise": "1:128", "idp": "1:16", "mdgf_linear": "2:4"}
RECIPES = {
  name: nms.recipe(
    name,
    pattern=PATTERNS.get(name, "1:8"),
    phases=PHASES,
    **({"path": ((4, "4:16", 1.0),)} if name == "custom" else {}),
  )
  for name in nms.recipes.RECIPES
  if name not in ("dense", "hold")
}
RULES = nms.Rules({f"{name}/w[io]/kernel": recipe for name, recipe in RECIPES.items()})
COLLECTIVE = re.compile(
  r"= (?P<type>.+?) (?P<kind>all-gather|all-reduce|all-to-all|collective-broadcast|"
  r"collective-permute|ragged-all-to-all|reduce-scatter)(-start)?\("
)


def values():
  random = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(random.normal(size=shape).astype(np.float32))
  params = {
    name: {"wi": {"kernel": draw(EMBED, MLP) / 16}, "wo": {"kernel": draw(MLP, EMBED) / 16}}
    for name in RECIPES
  }
  return params, draw(BATCH, EMBED), draw(BATCH, EMBED)


def spec_of(keys, leaf):
  """The partition of any leaf that belongs to a parameter; scalars are replicated."""
  name = jax.tree_util.keystr(keys)
  hit = [spec for word, spec in SPECS.items() if f"'{word}'" in name and leaf.ndim == len(spec)]
  return hit[0] if hit else PartitionSpec()


def step_of(tx):
  def loss(params, x, y):
    blocks = [jax.nn.relu(x @ p["wi"]["kernel"]) @ p["wo"]["kernel"] for p in params.values()]
    return sum(jnp.mean((block - y) ** 2) for block in blocks)

  def step(params, opt, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value

  return step


def compiled(rules):
  """The step for the mesh, and its sharded arguments."""
  devices = np.reshape(jax.devices(), (4, 2))
  mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  place = lambda keys, leaf: NamedSharding(mesh, spec_of(keys, leaf))
  params, x, y = values()
  tx = nms.sparse(optax.adamw(1e-2), rules)
  params = jax.device_put(params, jax.tree_util.tree_map_with_path(place, params))
  opt = tx.init(params)
  shardings = jax.tree_util.tree_map_with_path(place, (params, opt))
  same = jax.tree.map(lambda leaf, want: leaf.sharding == want, opt.dense, shardings[1].dense)
  assert jax.tree.all(same)
  batch = NamedSharding(mesh, SPECS["batch"])
  args = *jax.device_put((params, opt), shardings), *jax.device_put((x, y), batch)
  # The carry leaves as it came, so that steps can be chained.
  out = *shardings, NamedSharding(mesh, PartitionSpec())
  return jax.jit(step_of(tx), out_shardings=out).lower(*args).compile(), args


def collectives(program):
  """kind -> (how many, how many numbers they move)."""
  text = program.as_text()
  assert "ENTRY" in text
  found = {}
  for hit in COLLECTIVE.finditer(text):
    shapes = re.findall(r"[a-z]\w*\[([\d,]*)\]", hit["type"])
    moved = sum(int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes)
    count, total = found.get(hit["kind"], (0, 0))
    found[hit["kind"]] = count + 1, total + moved
  return found


def test_no_collective_more_than_dense_and_the_weights_of_one_device():
  """A mask that differed would show in the weights, but where D = 1."""
  program, (params, opt, x, y) = compiled(RULES)
  dense = collectives(compiled(nms.Rules({".*": nms.recipe("dense")}))[0])
  assert dense["all-reduce"][0] >= 1  # data and model parallel: the dense step does communicate
  for kind, found in collectives(program).items():
    assert not np.greater(found, dense.get(kind, (0, 0))).any(), kind
  sparsify = jax.jit(nms.sparsify, static_argnums=1)
  for _ in range(PHASES.total):
    params, opt, _ = program(params, opt, x, y)
    here, state = jax.device_put(jax.device_get((params, opt)), jax.devices()[0])
    want = sparsify(nms.dense_params(here, state), RULES, state.count, state.masks)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), here, want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a == 0, b == 0), here, want)
  assert nms.step_count(opt) == PHASES.total and nms.verify(params, RULES).ok
