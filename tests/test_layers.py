"""Layers: the plain ones when dense, `sparsify` bit for bit when not, loud when misused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found
from flax import linen as nn
from reference_arrays import assert_same

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import layers


def normal(seed, *shape):
  """By numpy: jax.random compiles anew for every shape."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(0, 2, 6, 4, 4)
SR_STE = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=9))
NOWHERE = nms.Rules({"elsewhere/kernel": SR_STE})
DENSE = nms.Rules({"kernel": nms.recipe("dense")})

# --- the dense twin ---------------------------------------------------------------------------


def t5x_dense_general(**kwargs):
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  from t5x.examples.t5 import layers as t5x

  return t5x.DenseGeneral(**kwargs)


BOXED = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
MIXED = dict(param_dtype=jnp.bfloat16, dtype=jnp.float32)
BF16 = dict(dtype=jnp.bfloat16)
TWO_AXES = dict(features=(3, 2), axis=(1, -1), kernel_axes=("embed", "joined_kv"), **BF16)
TWINS = {
  "Dense, no rules": (layers.Dense, nn.Dense, None, dict(features=3, kernel_init=BOXED)),
  "Dense, dense": (layers.Dense, nn.Dense, DENSE, dict(features=3, **MIXED)),
  "Conv": (layers.Conv, nn.Conv, NOWHERE,
           dict(features=6, kernel_size=(3, 2), feature_group_count=2, strides=2, **BF16)),
  "DenseGeneral": (layers.DenseGeneral, t5x_dense_general, NOWHERE, TWO_AXES),
}  # fmt: skip
MARKS = {"DenseGeneral": (pytest.mark.t5x, pytest.mark.filterwarnings("ignore"))}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in TWINS])
def test_a_layer_is_the_plain_one_where_no_recipe_acts(name):
  """Same variables after init, same output, same gradients of parameters and input."""
  make, plain, rules, kwargs = TWINS[name]
  ours, plain = make(**kwargs, rules=rules), plain(**kwargs)
  a, b = (m.init(jax.random.key(1), X) for m in (ours, plain))
  assert jax.tree.structure(a) == jax.tree.structure(b)
  assert_same(a, b)

  def loss(module):
    def f(params, x):
      y = module.apply({"params": params}, x)
      return jnp.sum(y.astype(jnp.float32) ** 2), y

    return jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(b["params"], X)

  assert_same(loss(ours), loss(plain))


def test_dense_general_is_the_einsum_over_a_two_dimensional_kernel():
  layer = layers.DenseGeneral((3, 2), axis=(1, -1), kernel_axes=("embed", "joined_kv"))
  variables = layer.init(jax.random.key(1), X)
  axes = nn.partitioning.AxisMetadata(("embed", "joined_kv"))
  assert variables["params_axes"] == {"kernel_axes": axes}
  z = jnp.einsum("abcd,bdef->acef", X, variables["params"]["kernel"].reshape(6, 4, 3, 2))
  np.testing.assert_allclose(layer.apply(variables, X), z, 1e-6, 1e-6)


# --- every recipe, every phase: the network is the dense twin on sparsify's parameters ------------

PHASES = nms.Phases(total=24, dense=4, finetune=6)
STEPS = range(PHASES.total + 2)
WIDTH, DEPTH = 16, 2
FIELDS = {
  "sdgf_stepwise": {"decay_kind": "linear"},
  "sdgf_geometric": {"k": 4},
  "custom": {"path": ((5, "4:8", 1.0), (11, "1:4", 0.5), (14, "1:4", 0.0))},
  "snip": {"batches": 2},
}
# Each recipe owns one layer of the block.
EACH = {
  name: nms.recipe(name, pattern="1:4", phases=PHASES, **FIELDS.get(name, {})) for name in RECIPES
}


def make_layer(kind, name, dtype, rules):
  if kind == "DenseGeneral":  # 4 x 4 features contracted, 4 x 4 made: (16, 16) stored
    return layers.DenseGeneral((4, 4), (-2, -1), dtype=dtype, rules=rules, name=name)
  if kind == "Dense":
    return layers.Dense(WIDTH, dtype=dtype, rules=rules, name=name)
  return layers.Conv(WIDTH, (2,), dtype=dtype, rules=rules, name=name)


class Block(nn.Module):
  """x + tanh of the sum of one layer a recipe, so that no recipe's gradient hides another's."""

  kind: str
  names: tuple[str, ...]
  dtype: jnp.dtype
  rules: nms.Rules | None

  @nn.compact
  def __call__(self, x):
    shape = (*x.shape[:-1], 4, 4) if self.kind == "DenseGeneral" else x.shape
    total = jnp.zeros(shape, self.dtype)
    for name in self.names:
      total += make_layer(self.kind, name, self.dtype, self.rules)(x.reshape(shape))
    return x + jnp.tanh(total).reshape(x.shape)


class Net(nn.Module):
  """One block, or DEPTH of them under remat and a scan that stacks parameters along axis 1."""

  scanned: bool
  kind: str = "DenseGeneral"
  names: tuple[str, ...] = tuple(EACH)
  dtype: jnp.dtype = jnp.float32
  rules: nms.Rules | None = None

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block, prevent_cse=False) if self.scanned else Block
    block = block(self.kind, self.names, self.dtype, self.rules, name="blocks")
    if not self.scanned:
      return block(x)
    scan = nn.scan(
      lambda block, x, _: (block(x), None),
      variable_axes={"params": 1, layers.STATE_COLLECTION: 1, "params_axes": 1},
      variable_broadcast=layers.COLLECTION,
      split_rngs={"params": True},
      length=DEPTH,
    )
    return scan(block, x, None)[0]


def rules_for(scanned, kind, names):
  """The axes are for the tree functions: layers know their own, and see no stacked axis."""
  axis = 1 + scanned if kind == "Conv" else 0
  return nms.Rules({rf"(.*/)?{name}/kernel": EACH[name] for name in names}, {".*/kernel": axis})


def stored(blocks, scanned):
  """The trees of single blocks as the net stores them."""
  return jax.tree.map(lambda *x: jnp.stack(x, 1), *blocks) if scanned else blocks[0]


def with_near_ties(shapes, seed):
  """Kernels in which most groups hold weights that bfloat16 cannot tell apart."""
  rng = np.random.default_rng(seed)
  draw = lambda x: (np.round(rng.normal(size=x.shape)) + 1e-3 * rng.normal(size=x.shape)) / 8
  return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


BATCH = normal(2, 2, 3, WIDTH)


@functools.cache
def trajectory(kind, names):
  """[step][block] -> (parameters, state). The parameters wander, so that parent masks matter."""
  rules = rules_for(False, kind, names)
  shapes = jax.eval_shape(Net(False, kind, names).init, jax.random.key(0), BATCH)["params"]
  blocks = [with_near_ties(shapes, seed) for seed in range(DEPTH)]
  blocks = [(params, nms.init_state(params, rules)) for params in blocks]

  @jax.jit
  def update(params, state, step):
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  found = []
  for step in STEPS:
    found.append(blocks)
    blocks = [update(params, state, jnp.int32(step)) for params, state in blocks]
  return found


def outputs_and_grads(model):
  def loss(params, rest):
    y = model.apply({**rest, "params": params}, BATCH.astype(model.dtype))
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

  return jax.value_and_grad(loss, has_aux=True)


# One of each kind: no mask, D between 1 and 0, a parent that is renewed, scores that are summed.
SOME = ("dense", "mdgf_exponential", "idp", "snip")
# All recipes in the hardest structure; some in others, in other layers and pairs of dtypes.
CASES = {
  "all": (True, "DenseGeneral", tuple(EACH), "float32", "bfloat16"),
  "plain": (False, "DenseGeneral", SOME, "bfloat16", "bfloat16"),
  "Dense": (True, "Dense", SOME, "float32", "float32"),
  "Conv": (True, "Conv", SOME, "float32", "bfloat16"),
}


@pytest.mark.parametrize("scanned, kind, names, store, compute", CASES.values(), ids=CASES)
def test_sparse_net_is_the_dense_net_on_sparsified_parameters(scanned, kind, names, store, compute):
  rules, dtype = rules_for(scanned, kind, names), jnp.dtype(compute)
  sparse, dense = (Net(scanned, kind, names, dtype, r) for r in (rules, None))
  rest = jax.eval_shape(sparse.init, jax.random.key(0), BATCH.astype(dtype))

  @jax.jit
  def run_sparse(params, step, state):
    return outputs_and_grads(sparse)(params, layers.with_step(rest, step, state))

  @jax.jit
  def by_sparsify(params, step, state, grads):
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    return effective, back(grads)[0]

  run_dense = jax.jit(lambda params: outputs_and_grads(dense)(params, {}))
  for step, blocks in zip(STEPS, trajectory(kind, names), strict=True):
    params = [jax.tree.map(lambda w: w.astype(store), params) for params, _ in blocks]
    params, step = stored(params, scanned), jnp.int32(step)
    state = blocks[0][1] | {"mask": stored([state["mask"] for _, state in blocks], scanned)}
    got, got_grads = run_sparse(params, step, state)
    effective, _ = by_sparsify(params, step, state, params)
    want, grads = run_dense(effective)
    assert_same(got, want)
    _, want_grads = by_sparsify(params, step, state, grads)
    assert_same(got_grads, want_grads)
  assert run_sparse._cache_size() == 1  # one compilation serves all steps


# --- variables ----------------------------------------------------------------------------------


def test_init_creates_steps_and_masks_that_mirror_params():
  net = Net(True, rules=rules_for(True, "DenseGeneral", tuple(EACH)))
  variables = jax.eval_shape(net.init, jax.random.key(0), BATCH)
  dense = jax.eval_shape(Net(True).init, jax.random.key(0), BATCH)
  assert set(dense) == {"params", "params_axes"} and dense.items() <= variables.items()
  params = dict(flatten(variables["params"]))
  stateful = [path for path in params if EACH[path.split("/")[-2]].stateful]
  masks, steps = (
    dict(flatten(variables[name])) for name in (layers.STATE_COLLECTION, layers.COLLECTION)
  )
  assert {path: (m.shape, m.dtype) for path, m in masks.items()} == {
    path: (params[path].shape, bool) for path in stateful
  }
  own = [path for path in steps if path.endswith("/step")]
  assert len(own) == len(EACH) - 1 and len(steps) == len(own) + 3 * len(stateful)
  assert {(x.shape, x.dtype.name) for x in steps.values()} == {((), "int32")}
  layer = layers.Dense(3, rules=nms.Rules({"kernel": EACH["snip"]}))
  assert set(layer.init(jax.random.key(0), jnp.eye(8), mutable=["params"])) == {"params"}


# --- misuse -------------------------------------------------------------------------------------

EYE = jnp.eye(8)


def initialized(name):
  layer = layers.Dense(3, rules=nms.Rules({"kernel": EACH[name]}))
  return layer, layer.init(jax.random.key(0), EYE)


def test_a_layer_without_what_it_needs_says_so():
  plain, variables = initialized("sr_ste")
  snip, snips = initialized("snip")
  filled = layers.with_step(snips, 3, nms.init_state(snips["params"], snip.rules))
  assert_same(layers.with_step(filled, 3), filled)  # keeps the masks that it got earlier
  whole = layers.with_step(initialized("sr_ste")[1], 9)
  elsewhere = layers.Dense(3, rules=nms.Rules({"wi/kernel": SR_STE}))
  for word, do in (
    ("variable_broadcast", lambda: plain.apply({"params": variables["params"]}, EYE)),
    ("needs the step", lambda: plain.apply(variables, EYE)),
    ("no mask was given", lambda: snip.apply({**filled, layers.STATE_COLLECTION: {}}, EYE)),
    ("init_state", lambda: snip.apply(layers.with_step(snips, PHASES.total), EYE)),
    ("no sparse layer", lambda: layers.with_step({"params": {}}, 3)),
    ("multiple of 4", lambda: plain.init(jax.random.key(0), EYE[:, :6])),
    # A part of a model, whose rules name the path in the whole: not quietly dense.
    ("was sparse", lambda: elsewhere.apply(whole, EYE)),
  ):
    with pytest.raises(ValueError, match=word):
      do()


@pytest.mark.parametrize("name", ["mdgf_linear", "one_shot", "idp"])
def test_a_traced_step_or_mask_that_is_wrong_is_nan(name):
  layer, variables = initialized(name)
  apply, late, recipe = jax.jit(layer.apply), PHASES.finetune_start, EACH[name]
  state = nms.init_state(variables["params"], layer.rules)
  wrong, good = [variables], layers.with_step(variables, late, state)
  if recipe.stateful:
    wrong += [layers.with_step(variables, late), good]
    with pytest.raises(ValueError, match="out of date"):
      layer.apply(good, EYE)
    renewed = {"kernel": jnp.int32(recipe.renewals(late))}
    good = layers.with_step(variables, late, state | {"step": late, "renewed": renewed})
  assert all(np.isnan(apply(v, EYE)).any() for v in wrong)
  assert np.isfinite(apply(good, EYE)).all()
