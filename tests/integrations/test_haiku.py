"""One line in a haiku loop: its attention, MLP, ResNet and stacked layers."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms

hk = pytest.importorskip("haiku")
pytestmark = pytest.mark.filterwarnings("ignore")

PHASES = nms.Phases(total=40, dense=4, finetune=10)
RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise", "idp")
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (6, 5, 16))  # (examples, tokens, features)
Y = jnp.sort(X)
ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "linear"}


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def attention():
  return hk.MultiHeadAttention(4, 4, w_init=hk.initializers.VarianceScaling(1.0))


@hk.without_apply_rng
@hk.transform
def network(x):
  x = x + attention()(x, x, x)
  return hk.Linear(16, name="out")(x + hk.nets.MLP([32, 16])(x))


def rules_of(name, **fields):
  recipe = nms.recipe(name, pattern="2:8", phases=PHASES, **fields)
  return nms.Rules(dict.fromkeys(("qkv", "o", "ff"), recipe))


def loss_of(params, x=X, y=Y):
  return jnp.mean((network.apply(params, x) - y).astype(jnp.float32) ** 2)


def train(tx, params, steps=PHASES.total, opt=None, first=0):
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


def is_nm(w, axis, n=2, m=8):
  """By numpy alone: at most n of m, and no more zeros than that takes."""
  groups = np.moveaxis(np.array(w, np.float32), axis, -1).reshape(-1, m)
  return ((groups != 0).sum(-1) <= n).all() and (groups != 0).mean() > 0.9 * n / m


def weights(params):
  names = [f"multi_head_attention/{x}" for x in ATTENTION.values()]
  return [params[name]["w"] for name in (*names, "mlp/~/linear_0", "mlp/~/linear_1")]


@pytest.mark.parametrize("name", RECIPES)
def test_the_line_trains_nm_weights_and_resumes_to_the_same_bits(name, tmp_path):
  rules = rules_of(name)
  params, opt, losses = train(nms.sparse(optax.adamw(1e-2), rules), start())
  assert all(is_nm(w, axis=0) for w in weights(params))
  assert np.all(params["out"]["w"] != 0) and losses[-1] < losses[0]
  assert nms.verify(params, rules).ok
  # The way of haiku's examples: a pickle of numpy arrays.
  half = train(nms.sparse(optax.adamw(1e-2), rules), start(), 17)[:2]
  (tmp_path / "state.pkl").write_bytes(pickle.dumps(jax.device_get(half)))
  loaded, state = pickle.loads((tmp_path / "state.pkl").read_bytes())
  resumed = train(nms.sparse(optax.adamw(1e-2), rules), loaded, opt=state, first=17)[:2]
  same = jax.tree.map(np.array_equal, resumed, (params, opt))
  assert all(jax.tree.leaves(same))


def test_bf16_and_accumulation():
  tx = optax.MultiSteps(nms.sparse(optax.adamw(1e-2), rules_of("mdgf_exponential")), 2)
  params, opt, _ = train(tx, start(jnp.bfloat16), 2 * PHASES.total)
  assert all(w.dtype == jnp.bfloat16 and is_nm(w, axis=0) for w in weights(params))
  assert nms.step_count(opt) == PHASES.total


def test_losses_are_those_of_a_loop_by_hand():
  rules = rules_of("sr_ste")
  *_, losses = train(nms.sparse(optax.sgd(0.1), rules), start())
  tx, w = optax.chain(nms.sr_ste(rules), optax.sgd(0.1)), start()
  opt = tx.init(w)

  @jax.jit
  def step(w, opt, x):
    masked = lambda w: loss_of(nms.sparsify(w, rules, nms.step_count(opt)), x)
    loss, grads = jax.value_and_grad(masked)(w)
    updates, opt = tx.update(grads, opt, w)
    return optax.apply_updates(w, updates), opt, loss

  for i, want in enumerate(losses):
    w, opt, loss = step(w, opt, jnp.roll(X, i, 0))
    assert float(loss) == pytest.approx(want, abs=1e-5)


# --- axes: by computation -------------------------------------------------------------------------


def test_one_feature_meets_one_slice_of_a_weight():
  """The slice along the axis is that of one input; the slice along the other that of one output."""
  places = rules_of("sr_ste").assign(start()).places
  assert {site.axis for site in places.values()} == {0} and len(places) == 6
  one = hk.without_apply_rng(hk.transform(lambda x: attention()(x, x, x)))
  params = one.init(KEY, X)
  x = jnp.zeros((5, 16)).at[:, 3].set(jnp.arange(1.0, 6))  # 3 alone, and not equal in all tokens
  grads = jax.grad(lambda p: jnp.sum(jnp.sin(one.apply(p, x))))(params)
  for name in ("query", "key", "value"):
    w = np.asarray(grads[f"multi_head_attention/{name}"]["w"])
    assert np.flatnonzero(np.abs(w).sum(1)).tolist() == [3], name
  grads = jax.grad(lambda p: jnp.sum(one.apply(p, X)[..., 3]))(params)
  w = np.asarray(grads["multi_head_attention/linear"]["w"])
  assert np.flatnonzero(np.abs(w).sum(0)).tolist() == [3]  # so the other one is summed over
  mlp = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16])(x)))
  params = mlp.init(KEY, X)
  grads = jax.grad(lambda p: jnp.sum(mlp.apply(p, x)[..., 7]))(params)
  assert np.flatnonzero(np.abs(grads["mlp/~/linear_0"]["w"]).sum(1)).tolist() == [3]
  assert np.flatnonzero(np.abs(grads["mlp/~/linear_1"]["w"]).sum(0)).tolist() == [7]


SPARSE = nms.recipe("sr_ste", pattern="1:4", phases=PHASES)
IMAGE = jnp.zeros((1, 32, 32, 3))
# name -> (network, its input, places)
NETWORKS = {
  "attention and MLP": (
    lambda x: attention()(x, x, x) + hk.nets.MLP([32, 16])(x), X, ("qkv", "o", "ff")),
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
  assert rules.assign(params).places  # the family knows every axis
  assert rules.for_model(apply, params, x) == rules  # and the program agrees: it adds none


# --- what a user gets wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
  "word, make",
  [
    # haiku's own examples call update(grads, state), as many optimizers allow.
    ("needs the parameters", lambda tx, p: tx.update(p, tx.init(p))),
    # A square `w` that has a name of its own.
    ("not known for 'out/w'", lambda tx, p: nms.Rules({"out/w": SPARSE}).assign(p)),
  ],
)
def test_mistakes_are_one_sentence(word, make):
  with pytest.raises(ValueError, match=word):
    make(nms.sparse(optax.sgd(0.1), rules_of("sr_ste")), start())
