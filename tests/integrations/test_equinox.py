"""One line in an Equinox loop: models with functions among their leaves, and haliax' named axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  RECIPES,
  assert_nm,
  assert_same,
  assert_sparse,
  assert_sums_over,
  input_of,
  kill_and_resume,
  layer_at,
  losses_by_hand,
  recipe_of,
  rules_of,
  run_example,
)

import nm_sparsity_jax as nms

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 40
RULES = rules_of("2:8", STEPS)
LINEAR = recipe_of("mdgf_linear", "2:8", STEPS)
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 5, 16))  # (examples, tokens, features)
Y = jnp.sort(X)


class Block(eqx.Module):
  attention: eqx.nn.MultiheadAttention
  mlp: eqx.nn.MLP
  out: eqx.nn.Linear

  def __init__(self, key, dtype=jnp.float32):
    a, b, c = jax.random.split(key, 3)
    self.attention = eqx.nn.MultiheadAttention(4, 16, dtype=dtype, key=a)
    self.mlp = eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.gelu, dtype=dtype, key=b)
    self.out = eqx.nn.Linear(16, 16, dtype=dtype, key=c)

  def __call__(self, x):
    x = x + self.attention(x, x, x)
    return jax.vmap(self.out)(x + jax.vmap(self.mlp)(x))


def loss_of(model, x, y):
  return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


def train(tx, model, steps=STEPS, filtered=True):
  """The loop of Equinox' documentation; returns model, state and losses."""
  opt = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    # Many scripts hand in the whole model: functions and all.
    params = eqx.filter(model, eqx.is_inexact_array) if filtered else model
    updates, opt = tx.update(grads, opt, params)
    return eqx.apply_updates(model, updates), opt, loss

  losses = []
  for _ in range(steps):
    model, opt, loss = step(model, opt, X.astype(model.out.weight.dtype), Y)
    losses.append(float(loss))
  return model, opt, losses


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_the_line_trains_nm_weights(name, filtered):
  rules = RULES[name]
  model, opt, losses = train(nms.sparse(optax.adamw(1e-2), rules), Block(KEY), filtered=filtered)
  # The model as it is: functions among its leaves.
  assert_sparse(model, rules, "2:8", places=6)
  assert nms.verify(model, rules).ok
  assert np.all(model.out.weight != 0) and losses[-1] < losses[0] / 2
  dense = nms.dense_params(model, opt)
  assert dense.mlp.activation is model.mlp.activation
  assert np.all(dense.attention.query_proj.weight != 0)


def test_bf16_and_accumulation():
  rules = RULES["mdgf_exponential"]
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules), 2)
  model, opt, _ = train(tx, Block(KEY, jnp.bfloat16), 2 * STEPS)
  assert_sparse(model, rules, "2:8", places=6)
  assert model.mlp.layers[0].weight.dtype == jnp.bfloat16
  assert nms.step_count(opt) == STEPS


@pytest.mark.parametrize("name", RECIPES[:2])
def test_losses_are_those_of_a_loop_by_hand(name):
  rules = RULES[name]
  *_, losses = train(nms.sparse(optax.sgd(0.1), rules), Block(KEY))
  params, static = eqx.partition(Block(KEY), eqx.is_inexact_array)
  loss = lambda w, batch: loss_of(eqx.combine(w, static), *batch)
  by_hand = losses_by_hand(loss, params, rules, optax.sgd(0.1), [(X, Y)] * STEPS)
  np.testing.assert_allclose(losses, by_hand, rtol=0, atol=1e-5)
  # The pieces take the model as it is, too.
  masked = [nms.sparsify(tree, rules, STEPS) for tree in (params, Block(KEY))]
  assert_same(masked[0], eqx.filter(masked[1], eqx.is_inexact_array))


# --- axes: by computation -------------------------------------------------------------------------


def test_the_family_knows_what_the_layers_sum_over_and_so_does_the_trace():
  model = Block(KEY)
  place = nms.Rules({".*(proj|layers/.|out)/weight": recipe_of("sr_ste", "2:8", STEPS)})
  traced = place.for_model(lambda model, x: model(x), model, X[0]).assign(model).sites
  assert {site.axis for site in traced.values()} == {1} and len(traced) == 7
  for path, site in RULES["sr_ste"].assign(model).sites.items():
    layer = layer_at(model, path.removesuffix("/weight"))
    call = lambda w, x, layer=layer: eqx.tree_at(lambda at: at.weight, layer, w)(x)
    assert_sums_over(site, layer.weight, input_of(site), call)
    assert site.axis == traced[path].axis


def test_layers_that_filter_vmap_stacks():
  """Equinox' way of many like layers: made by filter_vmap, run by scan."""
  blocks = eqx.filter_vmap(Block)(jax.random.split(KEY, 3))
  dynamic, static = eqx.partition(blocks, eqx.is_array)
  forward = lambda dynamic, x: jax.lax.scan(
    lambda x, layer: (eqx.combine(layer, static)(x), None), x, dynamic
  )[0]
  traced = RULES["sr_ste"].for_model(forward, dynamic, X[0])  # some have no bias
  assert {site.axis for site in traced.assign(blocks).sites.values()} == {2}


def test_no_axis_is_guessed():
  """An Embedding has a weight, too, and no product."""
  model = {"ids": eqx.nn.Embedding(16, 8, key=KEY), "square": eqx.nn.Linear(8, 8, key=KEY)}
  with pytest.raises(ValueError, match="not known for 'ids/weight'.*'square/weight'.*for_model"):
    nms.Rules({".*/weight": LINEAR}).assign(model)


# --- killed and resumed ---------------------------------------------------------------------------

SCRIPT = """
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms

file = pathlib.Path(sys.argv[1] + ".eqx")
phases = nms.Phases(total=24, dense=3, finetune=6)
rules = nms.Rules({
  "layers/0/weight": nms.recipe("idp", pattern="2:8", phases=phases),
  "layers/1/weight": nms.recipe("mdgf_exponential", pattern="1:4", phases=phases),
})
model = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(0))
tx = nms.sparse(optax.adamw(1e-2), rules)
run = 0, model, tx.init(eqx.filter(model, eqx.is_inexact_array))
if file.exists():
  run = eqx.tree_deserialise_leaves(file, run)


@eqx.filter_jit
def train_step(model, opt, x):
  loss = lambda model: jnp.mean((jax.vmap(model)(x) - jnp.sin(x[:, :4])) ** 2)
  params = eqx.filter(model, eqx.is_inexact_array)
  updates, opt = tx.update(eqx.filter_grad(loss)(model), opt, params)
  return eqx.apply_updates(model, updates), opt


while run[0] < phases.total:
  done, model, opt = run
  model, opt = train_step(model, opt, jax.random.normal(jax.random.key(done), (8, 16)))
  run = done + 1, model, opt
  eqx.tree_serialise_leaves(file.with_suffix(".new"), run)
  file.with_suffix(".new").replace(file)
  print("step", done + 1, flush=True)
assert nms.verify(run[1], rules).ok
"""


def test_killed_and_resumed_is_uninterrupted(tmp_path):
  (tmp_path / "train.py").write_text(SCRIPT)
  assert kill_and_resume(tmp_path / "train.py", tmp_path, steps=24, kill_at=11) in (12, 13)
  assert (tmp_path / "killed.eqx").read_bytes() == (tmp_path / "whole.eqx").read_bytes()


# --- haliax ---------------------------------------------------------------------------------------


def test_haliax_axes_come_from_the_program():
  """A weight has several axes, of inputs and outputs, in either order: the trace tells them."""
  hax = pytest.importorskip("haliax", reason="no haliax here: pip install marin-haliax")
  feature, out, heads = hax.Axis("feature", 16), hax.Axis("out", 12), hax.make_axes(head=2, size=8)

  class Named(eqx.Module):
    mlp: hax.nn.MLP
    mixed: hax.nn.Linear  # sums over two axes
    turned: hax.nn.Linear

    def __init__(self, key):
      a, b, c = jax.random.split(key, 3)
      self.mlp = hax.nn.MLP.init(feature, heads, 24, 1, key=a)
      self.mixed = hax.nn.Linear.init(heads, feature, key=b, out_first=False)
      self.turned = hax.nn.Linear.init(feature, out, key=c, out_first=True)

    def __call__(self, x):
      return self.turned(self.mixed(self.mlp(x)))

  x = hax.random.normal(KEY, (hax.Axis("batch", 8), feature))
  model = Named(KEY)
  rules = nms.Rules({"ff": LINEAR, "(mixed|turned)/weight/0": LINEAR})
  rules = rules.for_model(lambda model, x: model(x), model, x)
  axes = {path: site.axis for path, site in rules.assign(model).sites.items()}
  assert (axes["mixed/weight/0"], axes["turned/weight/0"], len(axes)) == ((0, 1), 1, 4)
  tx = nms.sparse(optax.adamw(1e-2), rules)
  opt = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt):
    loss = lambda model: hax.mean(hax.square(model(x) - 1)).array
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt = tx.update(eqx.filter_grad(loss)(model), opt, params)
    return eqx.apply_updates(model, updates), opt

  for _ in range(STEPS):
    model, opt = step(model, opt)
  for layer in (*model.mlp.layers, model.mixed, model.turned):
    ins, outs = (a if isinstance(a, tuple) else (a,) for a in (layer.In, layer.Out))
    w = layer.weight.rearrange((*outs, *ins)).array  # haliax itself puts the inputs last
    assert_nm(w.reshape(-1, np.prod([a.size for a in ins])), 1, "2:8")


# --- the example ----------------------------------------------------------------------------------


def test_the_example_ends_with_its_proof(capsys):
  run_example("equinox_mlp.py", {"STEPS, BATCH, WIDTH = 1500,": "STEPS, BATCH, WIDTH = 60,"})
  out = capsys.readouterr().out
  assert out.endswith("\nok\n") and out.count("87.5%") == 2
