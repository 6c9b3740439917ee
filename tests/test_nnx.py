"""flax NNX: one line makes its modules N:M sparse, whatever else their state is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nm_sparsity_jax as nms

pytestmark = pytest.mark.usefixtures("as_users_compute")
STEPS = 12
PHASES = nms.Phases(total=STEPS, dense=4, finetune=4)


class Block(nnx.Module):
  """All kinds of state: batch statistics, random streams, attention, a list."""

  def __init__(self, rngs):
    self.hidden = nnx.Linear(8, 16, rngs=rngs)
    self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
    self.layers = nnx.List([nnx.Dict(attn=attention)])

  def __call__(self, x):
    return self.layers[0]["attn"](self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def recipe_of(name, **fields):
  return nms.recipe(name, pattern="1:4", **({} if name == "hold" else {"phases": PHASES}), **fields)


def rules_of(name):
  recipe = recipe_of(name)
  return nms.Rules({"hidden/kernel": recipe, "qkv": recipe, "o": recipe})


def x_of(step):
  return jax.random.normal(jax.random.key(step), (4, 6, 8))


@nnx.jit
def train_step(model, optimizer, x):
  loss = lambda model: jnp.mean((model(x) - jnp.tile(jnp.sin(x), 2)) ** 2)
  told, grads = nnx.value_and_grad(loss)(model)
  optimizer.update(model, grads)
  return told


def trained(tx, model, steps=STEPS):
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  return optimizer, [float(train_step(model, optimizer, x_of(step))) for step in range(steps)]


# --- training ---------------------------------------------------------------------------------


def by_hand(rules, accumulate):
  """The losses of a loop in two seams: masks in the loss, SR-STE's term before the optimizer."""
  graph, params, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)
  params, rest = nnx.as_pure(params), nnx.as_pure(rest)
  tx = optax.MultiSteps(optax.chain(nms.sr_ste(rules), optax.adamw(1e-2)), accumulate)
  opt, state, losses = tx.init(params), nms.init_state(params, rules), []

  def loss(params, rest, state, count, x):
    model = nnx.merge(graph, nms.sparsify(params, rules, count, state), rest)
    told = jnp.mean((model(x) - jnp.tile(jnp.sin(x), 2)) ** 2)
    return told, nnx.as_pure(nnx.state(model, nnx.Not(nnx.Param)))

  @jax.jit
  def step(params, rest, opt, state, x):
    grad = jax.value_and_grad(loss, has_aux=True)
    (told, rest), grads = grad(params, rest, state, nms.step_count(opt), x)
    updates, opt = tx.update(grads, opt, params, nm_state=state)
    params = optax.apply_updates(params, updates)
    state = nms.update_state(state, params, rules, nms.step_count(opt), grads)
    return params, rest, opt, state, told

  for i in range(STEPS * accumulate):
    params, rest, opt, state, told = step(params, rest, opt, state, x_of(i))
    losses.append(float(told))
  return losses


@pytest.mark.parametrize(("name", "accumulate"), [
  ("sr_ste", 1), ("idp", 2),
])  # fmt: skip
def test_one_line_trains_n_of_m_as_a_loop_by_hand(name, accumulate):
  model, rules = Block(nnx.Rngs(0)), rules_of(name)
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules), accumulate)
  optimizer, losses = trained(tx, model, STEPS * accumulate)
  assert int(nms.step_count(optimizer.opt_state)) == STEPS
  assert nms.verify(nnx.state(model, nnx.Param), rules).ok
  np.testing.assert_allclose(losses, by_hand(rules, accumulate), atol=1e-5, rtol=0)


def test_a_given_mask_is_held_beside_lora_and_adapters_alone_are_refused():
  class Adapted(nnx.Module):
    def __init__(self, rngs):
      self.up = nnx.LoRALinear(8, 16, lora_rank=2, rngs=rngs)

    def __call__(self, x):
      return self.up(x)

  model, rules = Adapted(nnx.Rngs(0)), nms.Rules({"up/kernel": recipe_of("hold")})
  given = np.arange(8)[:, None] % 4 == np.arange(16) % 4
  model.up.kernel[...] = jnp.where(given, model.up.kernel[...], 0)
  before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param)))["up"]
  tx = nms.sparse(optax.adamw(1e-2), rules)
  trained(tx, model)
  after = nnx.as_pure(nnx.state(model, nnx.Param))["up"]
  np.testing.assert_array_equal(np.asarray(after["kernel"]) != 0, before["kernel"] != 0)
  for name in ("kernel", "lora"):
    assert all(map(np.any, jax.tree.leaves(jax.tree.map(np.not_equal, before[name], after[name]))))
  with pytest.raises(ValueError, match="LoRA") as error:
    nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
  assert "no base weights" in str(error.value)


# --- axes ---------------------------------------------------------------------------------------


class Stack(nnx.Module):
  """Layers that a scan runs: their kernels have one axis more."""

  def __init__(self, rngs):
    make = lambda rngs: nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
    self.attn = nnx.vmap(make)(rngs.split(3))

  def __call__(self, x):
    step = lambda x, attn: (attn(x), None)
    return nnx.scan(step, in_axes=(nnx.Carry, 0))(x, self.attn)[0]


@pytest.mark.parametrize(("module", "axes", "certain"), [
  (Block, [0, (0, 1)], True), (Stack, [1, (1, 2)], False),
])  # fmt: skip
def test_the_axes_of_attention_are_known_or_asked_of_the_forward_pass(module, axes, certain):
  model, recipe = module(nnx.Rngs(0)), recipe_of("sr_ste")
  x, rules = jnp.ones((2, 3, 8 if certain else 16)), nms.Rules({"qkv": recipe, "o": recipe})
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  traced = rules.for_model(lambda p, x: nnx.merge(graph, p, rest, copy=True)(x), params, x)
  sites = traced.assign(params).sites
  assert [sites[path].axis for path in sorted(sites)] == [axes[0], axes[1], axes[0], axes[0]]
  if certain:
    assert traced == rules  # test_trace.py holds a trace against derivatives
  else:
    with pytest.raises(ValueError, match="for_model"):
      rules.assign(params)
