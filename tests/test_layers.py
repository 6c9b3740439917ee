"""Layers: the plain ones when dense, `sparsify` bit for bit when not, loud when misused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from reference_arrays import assert_same

import nm_sparsity_jax as nms
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
  "Dense, no rules": (layers.Dense, nn.Dense, None, dict(features=3, kernel_init=BOXED)),
  "Dense, dense": (layers.Dense, nn.Dense, DENSE, dict(features=3, **MIXED)),
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


def test_dense_general_is_the_einsum_over_a_two_dimensional_kernel():
  layer = layers.DenseGeneral((3, 2), axis=(1, -1), kernel_axes=("embed", "joined_kv"))
  variables = layer.init(jax.random.key(1), X)
  z = jnp.einsum("abcd,bdef->acef", X, variables["params"]["kernel"].reshape(6, 4, 3, 2))
  np.testing.assert_allclose(layer.apply(variables, X), z, 1e-6, 1e-6)


# --- misuse -------------------------------------------------------------------------------------

EYE = jnp.eye(8)
PHASES = nms.Phases(total=24, dense=4, finetune=6)


def initialized(name, **kwargs):
  recipe = nms.recipe(name, pattern="1:4", phases=PHASES)
  layer = layers.Dense(3, rules=nms.Rules({"kernel": recipe}))
  return layer, layer.init(jax.random.key(0), EYE, **kwargs)


def test_a_layer_without_what_it_needs_says_so():
  plain, variables = initialized("sr_ste")
  snip, snips = initialized("snip")
  assert set(initialized("snip", mutable=["params"])[1]) == {"params"}
  filled = layers.with_step(snips, 3, nms.init_state(snips["params"], snip.rules))
  assert_same(layers.with_step(filled, 3), filled)  # keeps the masks that it got earlier
  whole = layers.with_step(initialized("sr_ste")[1], 9)
  elsewhere = layers.Dense(3, rules=nms.Rules({"wi/kernel": SR_STE}))
  for word, do in (
    ("variable_broadcast", lambda: plain.apply({"params": variables["params"]}, EYE)),
    ("needs the step", lambda: plain.apply(variables, EYE)),
    ("no mask was given", lambda: snip.apply({**filled, layers.STATE_COLLECTION: {}}, EYE)),
    ("init_state", lambda: snip.apply(layers.with_step(snips, PHASES.total), EYE)),
    ("multiple of 4", lambda: plain.init(jax.random.key(0), EYE[:, :6])),
    # A part of a model, whose rules name the path in the whole: not quietly dense.
    ("was sparse", lambda: elsewhere.apply(whole, EYE)),
  ):
    with pytest.raises(ValueError, match=word):
      do()


@pytest.mark.parametrize("name", ["mdgf_linear", "idp"])
def test_a_traced_step_or_mask_that_is_wrong_is_nan(name):
  layer, variables = initialized(name)
  apply, late, recipe = jax.jit(layer.apply), PHASES.finetune_start, layer.rules.places["kernel"]
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
