"""One line in an Equinox loop: models with functions among their leaves, and haliax' named axes."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms

eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = pathlib.Path(__file__).resolve().parents[2]
PHASES = nms.Phases(total=40, dense=4, finetune=10)
RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise", "idp")
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 5, 16))  # (examples, tokens, features)
Y = jnp.sort(X)


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


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


def rules_of(name, pattern="2:8", **fields):
  recipe = nms.recipe(name, pattern=pattern, phases=PHASES, **fields)
  return nms.Rules(dict.fromkeys(("qkv", "o", "ff"), recipe))


def loss_of(model, x, y):
  return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


def train(tx, model, steps=PHASES.total, filtered=True):
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


def is_nm(w, axis, n=2, m=8):
  """By numpy alone: at most n of m, and no more zeros than that takes."""
  groups = np.moveaxis(np.array(w, np.float32), axis, -1).reshape(-1, m)
  return ((groups != 0).sum(-1) <= n).all() and (groups != 0).mean() > 0.9 * n / m


def weights(model):
  """Those that the rules name."""
  a, mlp = model.attention, model.mlp.layers
  projections = a.query_proj, a.key_proj, a.value_proj, a.output_proj
  return [layer.weight for layer in (*projections, *mlp)]


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_the_line_trains_nm_weights(name, filtered):
  rules = rules_of(name)
  model, opt, losses = train(nms.sparse(optax.adamw(1e-2), rules), Block(KEY), filtered=filtered)
  assert all(is_nm(w, axis=1) for w in weights(model)) and len(weights(model)) == 6
  assert np.all(model.out.weight != 0) and losses[-1] < losses[0] / 2
  # The model as it is: functions among its leaves.
  assert nms.verify(model, rules).ok and len(rules.assign(model).places) == 6
  dense = nms.dense_params(model, opt)
  assert dense.mlp.activation is model.mlp.activation and np.all(weights(dense)[0] != 0)


def test_bf16_and_accumulation():
  rules = rules_of("mdgf_exponential")
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules), 2)
  model, opt, _ = train(tx, Block(KEY, jnp.bfloat16), 2 * PHASES.total)
  assert all(w.dtype == jnp.bfloat16 and is_nm(w, axis=1) for w in weights(model))
  assert nms.step_count(opt) == PHASES.total


@pytest.mark.parametrize("name", RECIPES[:2])
def test_losses_are_those_of_a_loop_by_hand(name):
  """W in the loop, masked in the loss: what the line saves one from writing."""
  rules = rules_of(name)
  *_, losses = train(nms.sparse(optax.sgd(0.1), rules), Block(KEY))
  tx = optax.chain(nms.sr_ste(rules), optax.sgd(0.1))
  model = Block(KEY)
  opt = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt):
    masked = lambda w: loss_of(nms.sparsify(w, rules, nms.step_count(opt)), X, Y)
    loss, grads = eqx.filter_value_and_grad(masked)(model)
    updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt, loss

  for want in losses:
    model, opt, loss = step(model, opt)
    assert float(loss) == pytest.approx(want, abs=1e-5)


# --- axes: by computation -------------------------------------------------------------------------


def test_one_feature_meets_one_slice_of_a_weight():
  """Of an input with one feature, only that feature's slice along the axis has a gradient."""
  rules = rules_of("sr_ste")
  places = rules.assign(Block(KEY)).places
  model = Block(KEY)
  layers = {
    **{f"attention/{x}_proj": getattr(model.attention, f"{x}_proj")
       for x in ("query", "key", "value", "output")},
    **{f"mlp/layers/{i}": layer for i, layer in enumerate(model.mlp.layers)},
  }  # fmt: skip
  for name, layer in layers.items():
    axis = places[f"{name}/weight"].axis
    for i in (0, 7):
      x = jnp.zeros(layer.weight.shape[axis]).at[i].set(1.0)
      grad = eqx.filter_grad(lambda layer, x: jnp.sum(layer(x)))(layer, x).weight
      seen = np.flatnonzero(np.abs(np.moveaxis(np.asarray(grad), axis, -1)).sum(0))
      assert seen.tolist() == [i], name


def test_the_trace_says_the_same():
  place = nms.Rules({".*(proj|layers/.|out)/weight": rules_of("sr_ste").places["ff"]})
  traced = place.for_model(lambda model, x: model(x), Block(KEY), X[0]).assign(Block(KEY)).places
  assert {site.axis for site in traced.values()} == {1} and len(traced) == 7
  by_family = rules_of("sr_ste").assign(Block(KEY)).places
  assert all(by_family[path].axis == traced[path].axis for path in by_family)


def test_layers_that_filter_vmap_stacks():
  """Equinox' way of many like layers: made by filter_vmap, run by scan."""
  blocks = eqx.filter_vmap(Block)(jax.random.split(KEY, 3))
  dynamic, static = eqx.partition(blocks, eqx.is_array)
  forward = lambda dynamic, x: jax.lax.scan(
    lambda x, layer: (eqx.combine(layer, static)(x), None), x, dynamic
  )[0]
  traced = rules_of("sr_ste").for_model(forward, dynamic, X[0])  # some have no bias
  assert {site.axis for site in traced.assign(blocks).places.values()} == {2}


# --- killed and resumed ---------------------------------------------------------------------------

SCRIPT = """
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms

file = pathlib.Path(sys.argv[1])
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
  print(done + 1, flush=True)
assert nms.verify(run[1], rules).ok
"""


def test_killed_and_resumed_is_uninterrupted(tmp_path):
  (tmp_path / "train.py").write_text(SCRIPT)
  env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}

  def run(file, kill_at=None):
    told = []
    command = [sys.executable, str(tmp_path / "train.py"), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
      for line in process.stdout:
        told.append(int(line))
        if told[-1] == kill_at:
          process.send_signal(signal.SIGKILL)
          break
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
    return told

  assert run(tmp_path / "whole.eqx")[-1] == 24
  run(tmp_path / "killed.eqx", kill_at=11)
  assert run(tmp_path / "killed.eqx")[0] in (12, 13)
  assert (tmp_path / "killed.eqx").read_bytes() == (tmp_path / "whole.eqx").read_bytes()


# --- what a user gets wrong -----------------------------------------------------------------------

LINEAR = nms.recipe("mdgf_linear", pattern="2:8", phases=PHASES)


def no_parameters(tx, other, p):
  return tx.update(p, tx.init(p))


def rules_of_another_run(tx, other, p):
  return tx.update(p, other.init(p), p)


def no_axis(tx, other, p):
  """An Embedding has a weight, too, and no product: no axis is guessed."""
  model = {"ids": eqx.nn.Embedding(16, 8, key=KEY), "square": eqx.nn.Linear(8, 8, key=KEY)}
  nms.Rules({".*/weight": LINEAR}).assign(model)


@pytest.mark.parametrize(
  "word, mistake",
  [
    ("needs the parameters", no_parameters),
    ("was made by", rules_of_another_run),
    ("not known for 'ids/weight'.*'square/weight'.*for_model", no_axis),
  ],
)
def test_mistakes_are_one_sentence(word, mistake):
  params = eqx.filter(Block(KEY), eqx.is_inexact_array)
  optimizers = (nms.sparse(optax.sgd(0.1), rules_of("sr_ste", lam=lam)) for lam in (0.1, 0.5))
  with pytest.raises(ValueError, match=word):
    mistake(*optimizers, params)


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

  recipe = nms.recipe("mdgf_linear", pattern="2:8", phases=PHASES)
  x = hax.random.normal(KEY, (hax.Axis("batch", 8), feature))
  model = Named(KEY)
  rules = nms.Rules({"ff": recipe, "(mixed|turned)/weight/0": recipe})
  rules = rules.for_model(lambda model, x: model(x), model, x)
  axes = {path: site.axis for path, site in rules.assign(model).places.items()}
  assert (axes["mixed/weight/0"], axes["turned/weight/0"], len(axes)) == ((0, 1), 1, 4)
  tx = nms.sparse(optax.adamw(1e-2), rules)
  opt = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, opt):
    loss = lambda model: hax.mean(hax.square(model(x) - 1)).array
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt = tx.update(eqx.filter_grad(loss)(model), opt, params)
    return eqx.apply_updates(model, updates), opt

  for _ in range(PHASES.total):
    model, opt = step(model, opt)
  for layer in (*model.mlp.layers, model.mixed, model.turned):
    ins, outs = (a if isinstance(a, tuple) else (a,) for a in (layer.In, layer.Out))
    w = layer.weight.rearrange((*outs, *ins)).array  # haliax itself puts the inputs last
    assert is_nm(w.reshape(-1, np.prod([a.size for a in ins])), axis=1)


# --- the example ----------------------------------------------------------------------------------


def test_the_example_ends_with_its_proof(capsys, monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  import equinox_mlp

  monkeypatch.setattr(equinox_mlp, "STEPS", 60)
  equinox_mlp.main()
  out = capsys.readouterr().out
  assert out.endswith("\nok\n") and out.count("87.5%") == 2
