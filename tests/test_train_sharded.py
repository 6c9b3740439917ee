"""A whole train step on 8 virtual devices: the bits of one device, no communication added."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import nm_sparsity_jax as nms

# mlp is split in two: 256 rows of wo a shard, whole groups of up to 256.
EMBED, MLP, BATCH = 128, 512, 32
# Gradients are made up here: no optimizer takes them.
pytestmark = [
  pytest.mark.filterwarnings("ignore:snip at .* scores:UserWarning"),
  pytest.mark.filterwarnings("ignore:.* adds lam=:UserWarning"),
]

SPECS = {
  "wi": PartitionSpec(None, "model"),
  "wo": PartitionSpec("model", None),
  "scale": PartitionSpec(),
  "batch": PartitionSpec("data", None),
}
PHASES = nms.Phases(total=40, dense=4, finetune=8)
RECIPES = {
  "sr_ste": nms.recipe("sr_ste", pattern="2:8", phases=PHASES),
  "mdgf": nms.recipe("mdgf_exponential", pattern="1:8", phases=PHASES),
  "sdgf_stepwise": nms.recipe("sdgf_stepwise", pattern="1:128", phases=PHASES),
  "sdgf_geometric": nms.recipe("sdgf_geometric", pattern="1:8", phases=PHASES),
  "idp": nms.recipe("idp", pattern="1:16", phases=PHASES),
  "mdgf_linear": nms.recipe("mdgf_linear", pattern="2:4", phases=PHASES),
  "custom": nms.recipe("custom", pattern="1:8", phases=PHASES, path=((4, "4:16", 1.0),)),
  "one_shot": nms.recipe("one_shot", pattern="1:8", phases=PHASES),
  "snip": nms.recipe("snip", pattern="1:8", phases=PHASES),
}
# One differs from another in the numbers of its curve, its levels or its scores alone.
ALIKE = {"mdgf_linear", "sdgf_geometric", "one_shot"}
COLLECTIVE = re.compile(
  r"= (?P<type>.+?) (?P<kind>all-gather|all-reduce|all-to-all|collective-broadcast|"
  r"collective-permute|ragged-all-to-all|reduce-scatter)(-start)?\("
)


def mesh_of():
  devices = np.reshape(jax.devices(), (4, 2))
  return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def values():
  keys = jax.random.split(jax.random.key(0), 4)
  params = {
    "scale": jnp.ones((EMBED,)),
    "mlp": {
      "wi": {"kernel": jax.random.normal(keys[0], (EMBED, MLP)) / 16},
      "wo": {"kernel": jax.random.normal(keys[1], (MLP, EMBED)) / 16},
    },
  }
  x, y = jax.random.normal(keys[2], (BATCH, EMBED)), jax.random.normal(keys[3], (BATCH, EMBED))
  return params, x, y


def spec_of(keys, leaf):
  """The partition of any leaf that belongs to a parameter; scalars are replicated."""
  name = jax.tree_util.keystr(keys)
  hit = [spec for word, spec in SPECS.items() if f"'{word}'" in name and leaf.ndim == len(spec)]
  return hit[0] if hit else PartitionSpec()


def step_of(rules):
  """A train step, and its start."""
  tx = optax.chain(nms.sr_ste(rules), optax.adamw(1e-2))

  def loss(params, x, y):
    h = jax.nn.relu((x * params["scale"].reshape(1, -1)) @ params["mlp"]["wi"]["kernel"])
    return jnp.mean((h @ params["mlp"]["wo"]["kernel"] - y) ** 2)

  def step(carry, x, y):
    params, opt, masks = carry
    now = nms.step_count(opt)
    value, grads = jax.value_and_grad(lambda p: loss(nms.sparsify(p, rules, now, masks), x, y))(
      params
    )
    with jax.numpy_dtype_promotion("standard"):
      updates, opt = tx.update(grads, opt, params, nm_state=masks)
    params = optax.apply_updates(params, updates)
    masks = nms.update_state(masks, params, rules, nms.step_count(opt), grads)
    return (params, opt, masks), value

  start = lambda params: (params, tx.init(params), nms.init_state(params, rules))
  return step, start


def compiled(rules, mesh):
  """The step for the mesh, and its sharded arguments."""
  params, x, y = values()
  step, start = step_of(rules)
  carry = start(params)
  shardings = jax.tree_util.tree_map_with_path(
    lambda keys, leaf: NamedSharding(mesh, spec_of(keys, leaf)), carry
  )
  batch = NamedSharding(mesh, SPECS["batch"])
  args = jax.device_put(carry, shardings), *jax.device_put((x, y), batch)
  # The carry leaves as it came, so that steps can be chained.
  out = shardings, NamedSharding(mesh, PartitionSpec())
  return jax.jit(step, out_shardings=out).lower(*args).compile(), args


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


def more(found, than):
  """What `found` has beyond `than`."""
  return {k: v for k, v in found.items() if any(np.greater(v, than.get(k, (0, 0))))}


@pytest.fixture(scope="module")
def mesh():
  return mesh_of()


@pytest.fixture(scope="module")
def dense(mesh):
  program, _ = compiled(nms.Rules({"ff": nms.recipe("dense")}), mesh)
  found = collectives(program)
  assert found["all-reduce"][0] >= 1  # data and model parallel: the dense step does communicate
  return found


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in RECIPES],
)
def test_no_collective_more_than_dense_and_the_bits_of_one_device(name, mesh, dense):
  recipe = RECIPES[name]
  rules = nms.Rules({"ff": recipe})
  program, (carry, x, y) = compiled(rules, mesh)
  assert not more(collectives(program), dense)
  for word in ("wi", "wo"):
    assert carry[0]["mlp"][word]["kernel"].sharding.spec == SPECS[word]

  # One step from one state, at steps of all phases: masks equal to the bit, numbers nearly.
  step, _ = step_of(rules)
  alone = jax.jit(step)
  masks_of = jax.jit(lambda params, at, stored: {
      path: place.mask(w, at, stored.get(path))
      for path, place in rules.assign(params).places.items()
      for w in [params["mlp"][path.split("/")[1]]["kernel"]]
  })  # fmt: skip
  again = jax.jit(nms.update_state, static_argnames="rules")
  for at in (0, 3, 4, 11, 25, 39):
    local = jax.device_get(carry)
    opt = local[1]
    opt = (opt[0]._replace(count=np.int32(at)), *opt[1:])
    # The stored masks of that step follow from the same parameters.
    state = again(local[2], local[0], rules, jnp.int32(at), local[0])
    many = again(carry[2], carry[0], rules, jnp.int32(at), carry[0])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(many))
    local = local[0], opt, jax.device_get(state)
    sharded = jax.device_put(local, jax.tree.map(lambda a: a.sharding, carry))
    there, value_there = program(sharded, x, y)
    assert np.isfinite(value_there)
    if name in ("sr_ste", "idp"):  # the others would only take longer to compile
      _, value = alone(jax.device_put(local, jax.devices()[0]), np.asarray(x), np.asarray(y))
      np.testing.assert_allclose(value, value_there, rtol=1e-5)
    assert nms.step_count(there[1]) == at + 1
    stored = [{}, {}]
    if recipe.stateful:
      stored = [
        {f"mlp/{k}/kernel": v["kernel"] for k, v in c[2]["mask"]["mlp"].items()}
        for c in (local, sharded)
      ]
    one = masks_of(local[0], jnp.int32(at), stored[0])
    many = masks_of(sharded[0], jnp.int32(at), stored[1])
    for path in one:
      np.testing.assert_array_equal(np.asarray(one[path]), np.asarray(many[path]))
      assert np.asarray(one[path]).all() == (at < recipe.sparse_from)
    carry = there


@pytest.mark.filterwarnings("ignore:rule .* seems to be that of the outputs:UserWarning")
@pytest.mark.parametrize(
  "rules",
  [
    # Groups as long as the whole of wo's axis, of which a shard has half.
    nms.Rules({r"mlp/wo/kernel": nms.recipe("sr_ste", pattern="64:512", phases=PHASES)}),
    # Groups along the axis that wi is split over.
    nms.Rules(
      {r"mlp/wi/kernel": nms.recipe("sr_ste", pattern="64:512", phases=PHASES)},
      axes={r"mlp/wi/kernel": 1},
    ),
  ],
  ids=["wo", "wi"],
)
def test_the_count_sees_a_group_that_straddles_shards(rules, mesh, dense):
  program, _ = compiled(rules, mesh)
  assert more(collectives(program), dense)


def test_counting():
  text = """ENTRY
  %a = f32[2,3]{1,0} all-reduce(%x), channel_id=1
  %b = (f32[4]{0}, u8[]) all-reduce-start(%x)
  %c = f32[4]{0} all-reduce-done(%b)
  %d = f32[8]{0} all-gather(%x)
  ROOT %e = f32[8]{0} add(%all-reduce.1, %d)"""
  found = collectives(type("Program", (), {"as_text": lambda self: text})())
  assert found == {"all-reduce": (2, 11), "all-gather": (1, 8)}
  assert more(found, {"all-reduce": (2, 11)}) == {"all-gather": (1, 8)}
  assert more(found, {"all-reduce": (2, 10), "all-gather": (1, 8)}) == {"all-reduce": (2, 11)}
  assert not more(found, found)
