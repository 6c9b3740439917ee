"""Layers: the plain ones when dense, `sparsify` bit for bit when not, loud when misused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from reference_arrays import assert_same, drawn
from test_every_recipe import CASES, PHASES

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import layers


def normal(seed, *shape):
  """By numpy: jax.random compiles anew for every shape."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(0, 2, 6, 4, 4)
SR_STE = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=9))
NOWHERE = nms.Rules({"elsewhere/kernel": SR_STE})
DENSE = nms.Rules({"kernel": nms.recipe("dense")})

# --- the dense twin ---------------------------------------------------------------------------


BOXED = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
MIXED = dict(param_dtype=jnp.bfloat16, dtype=jnp.float32)
TWINS = {
  "Dense": (layers.Dense, nn.Dense, DENSE, dict(features=3, kernel_init=BOXED, **MIXED)),
  "Conv": (layers.Conv, nn.Conv, NOWHERE,
           dict(features=6, kernel_size=(3, 2), feature_group_count=2, dtype=jnp.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
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


# --- every recipe: a network is its dense twin on sparsify's parameters ---------------------------

EACH = {  # `hold` is sparse from the start
  name: CASES[name].recipe for name in nms.recipes.RECIPES if name != "hold"
}
KINDS = {"DenseGeneral": (layers.DenseGeneral, {}), "Conv": (layers.Conv, {"kernel_size": (2,)})}


class Block(nn.Module):
  """The sum of one layer a recipe, so that no recipe's gradient hides another's."""

  kind: str
  rules: nms.Rules | None

  @nn.compact
  def __call__(self, x, _):
    make, fields = KINDS[self.kind]
    # bfloat16, so that a mask after the cast would be another.
    each = (make(16, **fields, dtype=jnp.bfloat16, rules=self.rules, name=name) for name in EACH)
    return x + jnp.tanh(sum(layer(x) for layer in each)).astype(x.dtype), None


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_layers_are_the_dense_ones_on_sparsified_parameters(kind):
  """Outputs and gradients, one under remat in a scan that stacks parameters along axis 1."""
  block = Block
  if kind == "DenseGeneral":
    axes = {"params": 1, layers.STATE_COLLECTION: 1, "params_axes": 1}
    block = nn.scan(
      nn.remat(Block, prevent_cse=False), variable_axes=axes, variable_broadcast=layers.COLLECTION,
      split_rngs={"params": True}, length=2,
    )  # fmt: skip
  # The axes are for the tree functions: layers know their own, and see no stacked axis.
  layer_rules = nms.Rules({f"{name}/kernel": recipe for name, recipe in EACH.items()})
  rules = layer_rules.with_axes({".*": 1 if kind == "Conv" else 0})
  sparse, dense, x = block(kind, layer_rules), block(kind, None), normal(2, 2, 3, 16)
  empty = dict(jax.eval_shape(sparse.init, jax.random.key(0), x, None))
  shapes = empty.pop("params")
  params = jax.tree.map(jnp.asarray, drawn(shapes, 1 / 8))
  state = nms.init_state(params, rules)
  assert {p: m.shape for p, m in flatten(empty[layers.STATE_COLLECTION])} == {
    p: m.shape for p, m in flatten(state["mask"])
  }

  def outputs_and_grads(network, params, rest):
    def loss(params):
      y = network.apply({**rest, "params": params}, x, None)[0]
      return jnp.sum(jnp.sin(y)), y

    return jax.value_and_grad(loss, has_aux=True)(params)

  @jax.jit
  def both(params, step, state):
    got = outputs_and_grads(sparse, params, layers.with_step(empty, step, state))
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    want, grads = outputs_and_grads(dense, effective, {})
    return got, (want, back(grads)[0])

  @jax.jit
  def update(params, state, step):
    """Parameters wander, so that parent masks matter."""
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  for step in map(jnp.int32, range(PHASES.total + 1)):
    assert_same(*both(params, step, state))
    params, state = update(params, state, step)
  assert both._cache_size() == 1  # one compilation serves all steps


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
  nothing = layers.Dense(3, rules=DENSE).init(jax.random.key(0), EYE)
  assert_same(layers.with_step(nothing, 9, rules=DENSE)["params"], nothing["params"])
  elsewhere = layers.Dense(3, rules=nms.Rules({"wi/kernel": SR_STE}))
  # A plain layer that the rules name, beside one that masks itself.
  beside = {**variables, "params": {**variables["params"], "wo": {"kernel": EYE}}}
  everywhere = nms.Rules({".*kernel": SR_STE})
  for word, do in (
    ("variable_broadcast", lambda: plain.apply({"params": variables["params"]}, EYE)),
    ("needs the step", lambda: plain.apply(variables, EYE)),
    ("init_state", lambda: snip.apply(layers.with_step(snips, PHASES.total), EYE)),
    ("name wo/kernel", lambda: layers.with_step(beside, 9, rules=everywhere)),
    # A part of a model, whose rules name the path in the whole: not quietly dense.
    ("was sparse", lambda: elsewhere.apply(whole, EYE)),
  ):
    with pytest.raises(ValueError, match=word):
      do()


def test_a_traced_step_or_mask_that_is_wrong_is_nan():
  layer, variables = initialized("idp")
  apply, late = jax.jit(layer.apply), PHASES.finetune_start
  state = nms.init_state(variables["params"], layer.rules)
  due = layers.with_step(variables, late, state)
  with pytest.raises(ValueError, match="out of date"):
    layer.apply(due, EYE)
  renewed = {"kernel": jnp.int32(EACH["idp"].renewals_due(late))}
  good = layers.with_step(variables, late, state | {"step": late, "renewed": renewed})
  wrong = variables, layers.with_step(variables, late), due
  assert all(np.isnan(apply(v, EYE)).any() for v in wrong)
  assert np.isfinite(apply(good, EYE)).all()
