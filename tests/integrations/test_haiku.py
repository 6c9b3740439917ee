"""One line in a haiku loop: its attention, MLP, ResNet and stacked layers."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  BLOCKS,
  RECIPES,
  assert_same,
  assert_sparse,
  assert_sums_over,
  losses_by_hand,
  recipe_of,
  rules_of,
)

import nm_sparsity_jax as nms

hk = pytest.importorskip("haiku")
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 40
RULES = rules_of("2:8", STEPS)
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 5, 16))  # (examples, tokens, features)
Y = jnp.sort(X)


def attention():
  return hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0))


@hk.without_apply_rng
@hk.transform
def network(x):
  x = x + attention()(x, x, x)
  return hk.Linear(16, name="out")(x + hk.nets.MLP([32, 16])(x))


def loss_of(params, x=X, y=Y):
  return jnp.mean((network.apply(params, x) - y).astype(jnp.float32) ** 2)


def train(tx, params, steps=STEPS, opt=None, first=0):
  """The loop of haiku's documentation; a checkpoint is (params, state)."""
  opt = tx.init(params) if opt is None else opt

  @jax.jit
  def step(params, opt, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss

  losses = []
  for i in range(first, steps):
    x = jnp.roll(X, i, 0).astype(params["out"]["w"].dtype)
    params, opt, loss = step(params, opt, x)
    losses.append(float(loss))
  return params, opt, losses


def start(dtype=jnp.float32):
  return jax.tree.map(lambda x: x.astype(dtype), network.init(KEY, X))


@pytest.mark.parametrize("name", RECIPES)
def test_the_line_trains_nm_weights_and_resumes_to_the_same_bits(name, tmp_path):
  rules = RULES[name]
  tx = nms.sparse(optax.adamw(1e-2), rules)
  params, opt, losses = train(tx, start())
  assert_sparse(params, rules, "2:8", places=6)
  assert np.all(params["out"]["w"] != 0)
  assert losses[-1] < losses[0] and nms.verify(params, rules).ok
  # The way of haiku's examples: a pickle of numpy arrays.
  half = train(tx, start(), 17)[:2]
  (tmp_path / "state.pkl").write_bytes(pickle.dumps(jax.device_get(half)))
  loaded, state = pickle.loads((tmp_path / "state.pkl").read_bytes())
  assert_same(train(tx, loaded, opt=state, first=17)[:2], (params, opt))


def test_bf16_and_accumulation():
  rules = RULES["mdgf_exponential"]
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules), 2)
  params, opt, _ = train(tx, start(jnp.bfloat16), 2 * STEPS)
  assert_sparse(params, rules, "2:8", places=6)
  assert all(w.dtype == jnp.bfloat16 for w in jax.tree.leaves(params))
  assert nms.step_count(opt) == STEPS


def test_losses_are_those_of_a_loop_by_hand():
  rules = RULES["sr_ste"]
  *_, losses = train(nms.sparse(optax.sgd(0.1), rules), start())
  batches = [jnp.roll(X, i, 0) for i in range(STEPS)]
  by_hand = losses_by_hand(loss_of, start(), rules, optax.sgd(0.1), batches)
  np.testing.assert_allclose(losses, by_hand, rtol=0, atol=1e-5)


# --- axes: by computation -------------------------------------------------------------------------


def test_the_family_knows_what_the_layers_sum_over():
  params, inputs = start(), {}

  def note(run, args, kwargs, context):
    if context.method_name == "__call__":
      inputs[context.module.module_name] = args[0]
    return run(*args, **kwargs)

  with hk.intercept_methods(note):
    network.apply(params, X)

  def linear(layer):
    one = hk.transform(lambda x: hk.Linear(len(layer["b"]), name="one")(x))
    return lambda w, x: hk.without_apply_rng(one).apply({"one": layer | {"w": w}}, x)

  sites = RULES["sr_ste"].assign(params).sites
  assert len(sites) == 6
  for path, site in sites.items():
    name = path.removesuffix("/w")
    assert_sums_over(site, params[name]["w"], inputs[name], linear(params[name]))


SPARSE = recipe_of("sr_ste", "1:4", STEPS)
IMAGE = jnp.zeros((1, 32, 32, 3))
# name -> (network, its input, places)
NETWORKS = {
  "attention and MLP": (
    lambda x: attention()(x, x, x) + hk.nets.MLP([32, 16])(x), X, BLOCKS),
  "layer_stack": (
    lambda x: hk.experimental.layer_stack(3)(lambda h: hk.Linear(16)(attention()(h, h, h)))(x),
    X, ("qkv", "o", ".*/linear/w")),
  "ResNet-18": (
    lambda x: hk.nets.ResNet18(8)(x, is_training=True), IMAGE, ("conv", "shortcut", "head")),
  "Linear and Conv2D": (
    lambda x: hk.Linear(8)(hk.Conv2D(16, 3)(hk.Conv2D(4, 3, data_format="NCHW")(x))),
    jnp.zeros((1, 4, 8, 8)), (r"conv2_d_1/w", "linear/w")),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_the_trace_says_the_same_as_the_family(name):
  function, x, places = NETWORKS[name]
  made = hk.without_apply_rng(hk.transform_with_state(function))
  params, state = jax.eval_shape(made.init, KEY, x)
  state = jax.tree.map(lambda x: jnp.ones(x.shape), state)
  apply = lambda params, x: made.apply(params, state, x)[0]
  rules = nms.Rules(dict.fromkeys(places, SPARSE))
  assert rules.assign(params).sites  # the family knows every axis
  assert rules.for_model(apply, params, x) == rules  # and the program agrees: it adds none


def test_no_axis_is_guessed():
  """A square `w` that has a name of its own."""
  with pytest.raises(ValueError, match="not known for 'out/w'"):
    nms.Rules({"out/w": SPARSE}).assign(start())
