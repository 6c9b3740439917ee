"""On 8 virtual devices: the bits of one device, and no communication for whole groups."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_masks_tpu import AWKWARD

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis.compiled import account
from nm_sparsity_jax.core import groups
from nm_sparsity_jax.core.masks import magnitude_mask
from nm_sparsity_jax.core.patterns import NM

SHAPE = (512, 8)  # rows split by 4: 128 a shard, one whole group of the longest pattern
SPECS = {
  "groups": PartitionSpec("rows", None),
  "both": PartitionSpec("rows", "columns"),
}


def mesh(kind=AxisType.Auto):
  return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(kind, kind))


def scores():
  """Few values, so ties are common."""
  return np.random.default_rng(0).choice(AWKWARD, size=SHAPE)


@pytest.mark.parametrize(
  "text, spec, kind",
  [
    ("64:128", "groups", AxisType.Auto),
    # The mode that `jax.make_mesh` gives by default: types hold the shardings.
    ("2:8", "both", AxisType.Explicit),
  ],
)
def test_same_bits_and_no_collective(text, spec, kind):
  pattern, spec = NM.parse(text), SPECS[spec]
  masks = jax.jit(lambda x, n: magnitude_mask(x, NM(1, pattern.m), n=n))
  x, n, sharding = scores(), jnp.int32(pattern.n), NamedSharding(mesh(kind), spec)
  wanted = np.asarray(masks(x, n))
  with jax.set_mesh(mesh(kind)):
    cut = jax.device_put(x, sharding)
    program = masks.lower(cut, n).compile()
    got = program(cut, n)
  np.testing.assert_array_equal(np.asarray(got), wanted)
  assert got.sharding.is_equivalent_to(sharding, 2) and not account(program).collectives


@pytest.mark.parametrize("axis", [(0, 1), (0, 2)])
def test_explicit_shardings_of_joint_axes(axis):
  """A kernel (heads, head_dim, out) whose heads and outputs are cut, eagerly and under jit."""
  phases = nms.Phases(total=6, dense=1, finetune=1)
  recipe = nms.recipe("idp", pattern="1:4", phases=phases)
  tx = nms.sparse(optax.sgd(0.1), nms.Rules({"a": recipe}, axes={"a": axis}))

  def train(w, update):
    run = {"a": w}, tx.init({"a": w})
    for _ in range(6):
      updates, opt = update(run[0], run[1], run[0])
      run = optax.apply_updates(run[0], updates), opt
    return run[0]["a"]

  w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 8)), jnp.float32)
  want = np.asarray(train(w, tx.update))
  with jax.set_mesh(mesh(AxisType.Explicit)):
    sharding = NamedSharding(mesh(AxisType.Explicit), PartitionSpec("rows", None, "columns"))
    for update in (tx.update, jax.jit(tx.update)):
      got = train(jax.device_put(w, sharding), update)
      assert got.sharding.is_equivalent_to(sharding, 3)
      np.testing.assert_array_equal(np.asarray(got), want)


def test_a_mask_varies_over_devices_as_what_it_is_made_of():
  """A weight that all devices hold has other masks where the parent differs."""
  mask = lambda w: magnitude_mask(w, "1:8", parent=w > jax.lax.axis_index("rows").astype(w.dtype))
  x, whole, rows = scores(), PartitionSpec(), PartitionSpec("rows")
  with pytest.raises(ValueError, match="replication"):
    jax.jit(jax.shard_map(mask, mesh=mesh(), in_specs=whole, out_specs=whole))(x)
  got = jax.jit(jax.shard_map(mask, mesh=mesh(), in_specs=whole, out_specs=rows))(x)
  for i, part in enumerate(np.split(np.asarray(got), 4)):
    want = magnitude_mask(x, "1:8", parent=jnp.asarray(x) > float(i))
    np.testing.assert_array_equal(part, want)


PHASES = nms.Phases(total=8, dense=1, finetune=2)
RECIPES = {
  name: nms.recipe(name, pattern="2:8", phases=PHASES, **({"k": 4} if "geo" in name else {}))
  for name in (
    "sr_ste", "mdgf_linear", "sdgf_stepwise", "sdgf_geometric", "one_shot", "idp", "snip",
  )
}  # fmt: skip


def trained(params, recipes=RECIPES):
  """The weights and the state after four steps of SGD, and what the program of one is."""
  tx = nms.sparse(optax.sgd(0.1), nms.Rules(recipes, axes={".*": 0}))

  @jax.jit
  def step(params, opt):
    grads = jax.tree.map(lambda w: 2 * (w - 1), params)  # elementwise: no sum to reorder
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt

  opt = tx.init(params)
  for _ in range(4):
    params, opt = step(params, opt)
  return params, opt, account(step.lower(params, opt).compile())


def start():
  w = np.random.default_rng(1).normal(size=(len(RECIPES), *SHAPE)).astype(np.float32)
  return dict(zip(RECIPES, map(jnp.asarray, w), strict=True))


@pytest.mark.parametrize("kind, spec", [(AxisType.Auto, "groups"), (AxisType.Explicit, "both")])
def test_each_device_trains_its_own_shard(spec, kind, monkeypatch):
  """As on several TPUs: `init` learns the shardings, masks are made in `shard_map`, same bits.

  The sums of a scale have another order, so its last bits may differ.
  """
  soft, w = {"s_ste": nms.recipe("s_ste", pattern="2:8", phases=PHASES)}, start()
  # Before `shard_map` is watched.
  want, near = trained(w)[:2], trained({"s_ste": w["sr_ste"]}, soft)[0]
  calls, shard_map = [], jax.shard_map
  monkeypatch.setattr(jax, "shard_map", lambda *a, **k: calls.append(1) or shard_map(*a, **k))
  monkeypatch.setattr(groups, "_PLATFORM", "cpu")
  sharding = NamedSharding(mesh(kind), SPECS[spec])
  w = jax.device_put(w, sharding)
  *got, program = trained(w)
  assert calls and not program.collectives
  jax.tree.map(np.testing.assert_array_equal, got, [*want])
  for leaf in jax.tree.leaves((got[1].dense, got[1].masks["mask"])):
    assert leaf.sharding.is_equivalent_to(sharding, 2)
  found, opt, _ = trained({"s_ste": w["sr_ste"]}, soft)
  assert opt.masks["scale"]["s_ste"] > 1 and (near["s_ste"] == 0).any()
  np.testing.assert_allclose(found["s_ste"], near["s_ste"], 1e-6)


def test_a_sharding_that_cuts_a_group_is_passed_over():
  sharding = NamedSharding(mesh(), SPECS["groups"])  # 128 rows a shard
  assert groups.Groups(SHAPE, 0).sharded(sharding, 256).sharding is None
  assert groups.Groups((509, 8), 0, pad=3).sharded(sharding, 8).sharding is None
