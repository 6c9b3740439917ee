"""flax NNX: one line makes its modules N:M sparse, whatever else their state is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from integrations.conformance import assert_sparse, losses_by_hand

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


def loss_of(model, x):
  return jnp.mean((model(x) - jnp.tile(jnp.sin(x), 2)) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
  of = nnx.DiffState(0, optimizer.wrt)
  told, grads = nnx.value_and_grad(loss_of, argnums=of)(model, x)
  optimizer.update(model, grads)
  return told


def trained(tx, model, steps=STEPS, wrt=nnx.Param):
  optimizer = nnx.Optimizer(model, tx, wrt=wrt)
  return optimizer, [float(train_step(model, optimizer, x_of(step))) for step in range(steps)]


# --- training ---------------------------------------------------------------------------------


def by_hand(rules, accumulate):
  """The losses of a loop in two seams. Of the other state, dropout's count alone moves them."""
  graph, params, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)
  params, rest = nnx.as_pure(params), nnx.as_pure(rest)

  def loss(params, batch):
    count, x = batch
    stream = {**rest["dropout"]["rngs"], "count": count}
    now = nnx.State({**rest, "dropout": {"rngs": stream}})
    return loss_of(nnx.merge(graph, params, now), x)

  batches = [(jnp.uint32(i), x_of(i)) for i in range(STEPS * accumulate)]
  return losses_by_hand(loss, params, rules, optax.adamw(1e-2), batches, accumulate)


@pytest.mark.parametrize(("name", "accumulate"), [
  ("sr_ste", 1), ("idp", 2),
])  # fmt: skip
def test_one_line_trains_n_of_m_as_a_loop_by_hand(name, accumulate):
  model, rules = Block(nnx.Rngs(0)), rules_of(name)
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules), accumulate)
  optimizer, losses = trained(tx, model, STEPS * accumulate)
  assert int(nms.step_count(optimizer.opt_state)) == STEPS
  assert_sparse(nnx.as_pure(nnx.state(model, nnx.Param)), rules, "1:4", 5)
  np.testing.assert_allclose(losses, by_hand(rules, accumulate), atol=1e-5, rtol=0)


def test_statistics_and_random_streams_move_as_in_a_dense_program():
  dense, sparse = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
  trained(optax.adamw(1e-2), dense, PHASES.dense)
  tx = nms.sparse(optax.adamw(1e-2), rules_of("sr_ste"))
  optimizer, _ = trained(tx, sparse, PHASES.dense)
  kinds = nnx.Any(nnx.BatchStat, nnx.RngCount)
  others = lambda model: jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, kinds)))
  jax.tree.map(np.testing.assert_array_equal, others(sparse), others(dense))
  assert np.any(others(Block(nnx.Rngs(0)))["norm"]["mean"] != others(sparse)["norm"]["mean"])
  then = others(sparse)["norm"]
  for step in range(PHASES.dense, STEPS):
    train_step(sparse, optimizer, x_of(step))
  end = others(sparse)
  for name in ("mean", "var"):
    assert np.any(then[name] != end["norm"][name])
  assert int(end["dropout"]["rngs"]["count"]) == STEPS
  sparse.eval()
  assert np.all(sparse(x_of(0)) == sparse(x_of(0)))


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


def test_the_family_knows_the_axes_of_attention():
  """A stack has none: test_rules.py. A trace is held against derivatives: test_trace.py."""
  rules = rules_of("sr_ste")
  graph, params, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)
  forward = lambda p, x: nnx.merge(graph, p, rest, copy=True)(x)
  traced = rules.for_model(forward, params, jnp.ones((2, 3, 8)))
  sites = traced.assign(params).sites
  assert [sites[path].axis for path in sorted(sites)] == [0, 0, (0, 1), 0, 0] and traced == rules


# --- resume ---------------------------------------------------------------------------------------


def test_a_program_that_orbax_saves_goes_on_to_the_same_bits(tmp_path):
  """The state of `nms.sparse` is a tree that any checkpointer saves."""
  ocp = pytest.importorskip("orbax.checkpoint")
  tx = nms.sparse(optax.adamw(1e-2), rules_of("idp"))

  def run(folder, steps):
    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with ocp.CheckpointManager(tmp_path / folder) as manager:
      done = manager.latest_step() or 0
      if done:
        graph, state = nnx.split((model, optimizer))
        state = manager.restore(done, args=ocp.args.StandardRestore(state))
        model, optimizer = nnx.merge(graph, state)
      for step in range(done, steps):
        train_step(model, optimizer, x_of(step))
      manager.save(steps, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
    assert int(nms.step_count(optimizer.opt_state)) == steps
    return nnx.as_pure(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))

  whole = run("whole", STEPS)
  run("parts", 5)  # amid the levels
  jax.tree.map(np.testing.assert_array_equal, run("parts", STEPS), whole)
