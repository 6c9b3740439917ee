"""nms.sparse in place: params are W~ of every step, and W, count and masks lie in the state.

All recipes train side by side in one program, each on a problem of its own, so that one compiled
run shows what is true of each.
"""

import collections
import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import nm_sparsity_jax as nms
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import transform

PHASES = nms.Phases(total=48, dense=4, finetune=12)
STEPS = 50
FIELDS = {
  "custom": {"path": ((4, "4:8", 1.0), (16, "2:8", 0.5))},
  "sdgf_geometric": {"k": 2},
  "sr_ste": {"lam": 0.5},
  "idp": {"lam": 0.5},
  "snip": {"batches": 2},
}
STATEFUL = {"one_shot", "snip", "idp"}


def make(name, phases=PHASES, **fields):
  return nms.recipe(name, pattern="2:8", phases=phases, **FIELDS.get(name, {}) | fields)


def rules_of(names=tuple(RECIPES), **fields):
  return nms.Rules({f"{name}/kernel": make(name, **fields) for name in names})


RULES = rules_of()
INNER = optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.05, momentum=0.9))
TX = nms.sparse(INNER, RULES)
every = pytest.mark.parametrize("name", RECIPES)


def params_of(seed=0, dtype=jnp.float32, names=tuple(RECIPES)):
  w = np.random.default_rng(seed).normal(size=(len(names), 16, 3))
  kernels = {name: {"kernel": jnp.asarray(x, dtype)} for name, x in zip(names, w, strict=True)}
  return kernels | {"bias": jnp.zeros(3, dtype)}


X, TARGET = np.random.default_rng(9).normal(size=(2, 32, 16)).astype(np.float32)


def loss_of(name, params):
  kernel = params[name]["kernel"]
  x, target = jnp.asarray(X, kernel.dtype), jnp.asarray(TARGET[:, :3], kernel.dtype)
  return jnp.mean((x @ kernel + params["bias"].reshape(1, -1) - target) ** 2)


def loss(params):
  return sum(loss_of(name, params) for name in params if name != "bias")


def relaxed(function, *args, **kwargs):
  """A call of code that is not ours."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    return function(*args, **kwargs)


def train_step(tx):
  def step(run, _=None):
    params, opt = run
    updates, opt = relaxed(tx.update, jax.grad(loss)(params), opt, params)
    run = relaxed(optax.apply_updates, params, updates), opt
    return run, run

  return step


def train(tx, params, steps=STEPS):
  """Params and state before the first step and after each."""
  start = params, tx.init(params)
  later = jax.jit(lambda run: jax.lax.scan(train_step(tx), run, length=steps)[1])(start)
  return jax.tree.map(lambda a, b: jnp.concatenate([jnp.asarray(a)[None], b]), start, later)


@functools.cache
def trajectory():
  return train(TX, params_of())


def at(tree, i):
  return jax.tree.map(lambda x: x[i], tree)


def close(a, b, tolerance=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 0, tolerance), a, b)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def is_two_of_eight(w):
  return ((np.asarray(w).reshape(-1, 8, w.shape[1]) != 0).sum(1) == 2).all()


# --- the equations --------------------------------------------------------------------------------


@every
def test_params_are_the_effective_weights_at_every_step(name):
  """To one ulp of the larger of before and after, since `apply_updates` adds; zeros are exact."""
  params, opt = trajectory()
  want = jax.jit(jax.vmap(lambda p, s: nms.sparsify(p, RULES, s.count, s.masks)))(
    *(at(x, slice(1, None)) for x in (nms_dense(), opt))
  )[name]["kernel"]
  before, now = np.asarray(params[name]["kernel"])[:-1], np.asarray(params[name]["kernel"])[1:]
  ulp = np.spacing(np.maximum(np.abs(before), np.abs(now)))
  assert (np.abs(now - want) <= ulp).all()
  assert (now[np.asarray(want) == 0] == 0).all()
  np.testing.assert_array_equal(opt.count, np.arange(STEPS + 1))
  if name != "dense":
    assert all(is_two_of_eight(w) for w in now[PHASES.finetune_start :])
    assert not is_two_of_eight(now[2])
    assert nms.verify(at(params, -1), RULES).ok


@functools.cache
def nms_dense():
  return jax.jit(jax.vmap(nms.dense_params))(*trajectory())


def by_hand(w, inner, step, masks):
  """W, the inner state and the masks after one update at W, by the pieces."""
  grads = jax.grad(lambda w: loss(nms.sparsify(w, RULES, step, masks)))(w)
  full = transform.add_sr_ste(grads, w, RULES, step, masks)
  moves, inner = relaxed(INNER.update, full, inner, w)
  new = optax.apply_updates(w, moves)
  return new, inner, nms.update_state(masks, new, RULES, step + 1, grads, grads_at=w)


@functools.cache
def each_update_by_hand():
  _, opt = trajectory()
  return jax.jit(jax.vmap(by_hand))(nms_dense(), opt.inner_state, opt.count, opt.masks)


@every
def test_each_update_is_that_of_the_pieces_from_the_same_state(name):
  _, opt = trajectory()
  w, inner, masks = at(each_update_by_hand(), slice(-1))
  later = at(opt, slice(1, None))
  close(w[name], at(nms_dense(), slice(1, None))[name])
  close(inner[1][0].trace[name], later.inner_state[1][0].trace[name], 1e-5)
  for kind in masks:
    if kind != "step" and name in masks[kind]:
      close(masks[kind][name], later.masks[kind][name])
  assert (name in masks["mask"]) == (name in STATEFUL)


@pytest.mark.parametrize("name", ["sr_ste", "mdgf_linear", "one_shot"])
def test_weights_loaded_after_init_are_the_start_and_the_first_pass_sees_all_of_them(name):
  """With dense = 0, too: at count 0 no weight is pruned yet but by a mask that is stored."""
  tx = nms.sparse(optax.sgd(0.5), rules_of([name], phases=nms.Phases(total=20)))
  w, loaded, grads = (params_of(seed, names=[name]) for seed in range(3))
  opt = tx.init(w)
  same(nms.dense_params(loaded, opt), loaded)
  updates, after = tx.update(grads, opt, loaded)
  same((updates, after), tx.update(grads, tx.init(loaded), loaded))
  w, g = (np.asarray(tree[name]["kernel"]) for tree in (loaded, grads))
  if name == "one_shot":
    g = np.where(nms.nm_mask(jnp.abs(w), "2:8"), g, 0)
  np.testing.assert_allclose(after.dense[name]["kernel"], w - 0.5 * g, rtol=1e-6)


# --- what stands around it ------------------------------------------------------------------------


def fed(tx, grads):
  """Params and state after some gradients."""
  update, params = jax.jit(functools.partial(relaxed, tx.update)), params_of()
  opt = tx.init(params)
  for g in grads:
    updates, opt = update(g, opt, params)
    params = optax.apply_updates(params, updates)
  return params, opt


def test_what_is_skipped_counts_nothing():
  grads = [params_of(10 + i) for i in range(6)]
  bad = jax.tree.map(lambda g: g * jnp.nan, grads[0])
  params, opt = fed(TX, grads)
  for around, given in (
    (optax.MultiSteps(TX, 2), [g for g in grads for _ in range(2)]),
    (optax.apply_if_finite(TX, 3), [bad, *grads[:3], bad, bad, *grads[3:]]),
  ):
    got, state = fed(around, given)
    close(got, params, 1e-5)
    state = next(s for s in jax.tree.leaves(state, is_leaf=is_sparse_state) if is_sparse_state(s))
    same(state.masks["mask"], opt.masks["mask"])
    assert nms.step_count(state) == state.masks["step"] == 6


def is_sparse_state(x):
  return isinstance(x, transform.SparseState)


# --- transformations ------------------------------------------------------------------------------


def test_vmap_and_donation():
  """Each seed is its own run."""
  many = jax.tree.map(lambda a, b: jnp.stack([a, b]), params_of(0), params_of(1))
  run = many, jax.vmap(TX.init)(many)
  step = jax.jit(jax.vmap(lambda run: train_step(TX)(run)[0]), donate_argnums=0)
  for _ in range(6):
    run = step(run)
  close(jax.tree.map(lambda x: x[0], run), at(trajectory(), 6), 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype):
  """W is float32 or wider; the inner optimizer and its moments see the parameters' dtype."""
  with jax.enable_x64(dtype == "float64"):
    tx = nms.sparse(optax.adam(1e-2, eps=1e-4), RULES)  # the usual eps is 0 in float16
    params, opt = train(tx, params_of(dtype=jnp.dtype(dtype)))
    wide = "float64" if dtype == "float64" else "float32"
    assert {x.dtype.name for x in jax.tree.leaves(opt.dense)} == {wide}
    kinds = {x.dtype.name for x in jax.tree.leaves((params, opt.inner_state[0].mu))}
    assert kinds == {dtype}
    for name in RULES.assign(at(params, 0)).places:
      w = np.asarray(params[name.split("/")[0]]["kernel"][-1])
      assert is_two_of_eight(w) and np.isfinite(w).all()
    # In the dense phase W is the parameter, up to its rounding: no term, no mask.
    w, seen = (x["sr_ste"]["kernel"][3].astype(wide) for x in (opt.dense, params))
    np.testing.assert_allclose(seen, w, rtol=2e-2, atol=2e-2)


def test_no_term_in_the_dense_phase_where_params_are_an_ulp_away():
  names = ["sr_ste", "idp"]
  tx = nms.sparse(optax.sgd(1.0), rules_of(names, lam=0.5))
  params = params_of(names=names, dtype=jnp.bfloat16)
  opt = tx.init(params)._replace(count=jnp.int32(2))
  params = jax.tree.map(lambda w: w * (1 - 2.0**-7), params)
  _, after = tx.update(jax.tree.map(jnp.zeros_like, params), opt, params)
  same(after.dense, opt.dense)


def test_zeros_are_exact_where_gradients_are_shorter_than_parameters():
  tx, params = nms.sparse(optax.sgd(0.1), rules_of(["sr_ste"])), params_of(names=["sr_ste"])
  opt = tx.init(params)._replace(count=jnp.int32(40))
  params = nms.sparsify(params, rules_of(["sr_ste"]), 3)
  grads = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
  updates, _ = tx.update(grads, opt, params)
  assert is_two_of_eight(relaxed(optax.apply_updates, params, updates)["sr_ste"]["kernel"])


# --- trainers and their trees ---------------------------------------------------------------------


def test_a_flax_train_state_with_none_in_its_tree_saved_and_restored_goes_on(tmp_path):
  """None leaves are what equinox puts where a model holds no array."""
  ocp = pytest.importorskip("orbax.checkpoint")
  free = lambda tree: {name: x for name, x in tree.items() if name != "static"}

  @jax.jit
  def step(state):
    return state.apply_gradients(grads=jax.grad(lambda p: loss(free(p)))(state.params))

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    make = lambda: TrainState.create(apply_fn=None, params=params_of() | {"static": None}, tx=TX)
    state = make()
    for _ in range(6):
      state = step(state)
    close(free(state.params), at(trajectory()[0], 6), 1e-5)
    saver = ocp.StandardCheckpointer()
    saver.save(tmp_path / "run", state)
    saver.wait_until_finished()
    restored = saver.restore(tmp_path / "run", jax.eval_shape(make))
    saver.close()
    same(step(restored), step(state))


def calls_of(program):
  """File -> calls of its functions."""
  root, found = os.path.dirname(nms.__file__), collections.Counter()

  def note(frame, event, arg):
    del arg
    if event == "call" and frame.f_code.co_filename.startswith(root):
      found[frame.f_code.co_filename] += 1

  sys.setprofile(note)
  try:
    program()
  finally:
    sys.setprofile(None)
  return found


@pytest.mark.parametrize("name", ["sr_ste", "mdgf_exponential", "idp"])
def test_a_trace_has_few_hops(name):
  """A newcomer can follow an update, and thousands of kernels are traced in no time."""
  kernels = {f"l{i}": {"kernel": jnp.ones((16, 2))} for i in range(2)}
  rules = nms.Rules({".*/kernel": make(name)})
  tx, masks = nms.sparse(optax.sgd(0.1), rules), nms.init_state(kernels, rules)
  opt, step = tx.init(kernels), jnp.int32(9)
  for program in (
    lambda: jax.make_jaxpr(lambda p, t: nms.sparsify(p, rules, t, masks))(kernels, step),
    lambda: jax.make_jaxpr(tx.update)(kernels, opt, kernels),
  ):
    program()
    found = calls_of(program)
    own = name == "idp"  # whose file is one more
    assert found.total() <= 120 and len(found) <= 10 + own, found


# --- what is refused ------------------------------------------------------------------------------


def test_mistakes_are_said():
  opt, params = TX.init(params_of()), params_of()
  whole = nms.Rules({"bias": make("sr_ste")}, axes={"bias": 0})
  for word, do in (
    ("parameters", lambda: TX.update(params, opt)),
    ("inside", lambda: nms.sparse(optax.MultiSteps(INNER, 2), RULES).init(params)),
    ("inside", lambda: nms.sparse(optax.apply_if_finite(INNER, 3), RULES).init(params)),
    ("match no parameter", lambda: TX.init({"bias": params["bias"]})),
    ("int32", lambda: nms.sparse(INNER, whole).init({"bias": jnp.ones(8, jnp.int32)})),
    ("0 states", lambda: nms.dense_params(params, INNER.init(params))),
    ("2 states", lambda: nms.dense_params(params, (opt, opt))),
  ):
    with pytest.raises(ValueError, match=word):
      do()


@pytest.mark.parametrize("other", ["lam", "fewer", "stateless", "stateful"])
def test_a_state_of_other_rules(other):
  """An error where that is known, also of a traced state; else all kernels it prunes become NaN."""
  names = ["sr_ste", "idp"]
  params = params_of(names=names)
  opt = nms.sparse(INNER, rules_of(names)).init(params)._replace(count=jnp.int32(1))
  kernel = lambda name: f"{name}/kernel"
  rules = {
    "lam": rules_of(names, lam=0.25),
    "fewer": rules_of(names[:1]),
    "stateless": nms.Rules({kernel("idp"): make("sr_ste"), kernel("sr_ste"): make("sr_ste")}),
    "stateful": nms.Rules({kernel("idp"): make("idp"), kernel("sr_ste"): make("idp")}),
  }[other]
  tx = nms.sparse(INNER, rules)
  with pytest.raises(ValueError, match="other rules"):
    tx.update(params, opt, params)
  if other != "lam":
    with pytest.raises(ValueError, match="other rules"):
      jax.jit(tx.update)(params, opt, params)
    return
  for _ in range(2):
    updates, opt = jax.jit(tx.update)(params, opt, params)
    assert all(np.isnan(updates[name]["kernel"]).any() for name in names)
    assert opt.count == -1
