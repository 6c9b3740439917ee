"""nms.sparse in place: params are W~ of every step, and W, count and masks lie in the state.

All recipes train side by side in one program, each on a problem of its own, so that one compiled
run shows what is true of each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import recipes
from nm_sparsity_jax.training import transform

PHASES = nms.Phases(total=48, dense=4, finetune=12)
STEPS = 200
RECIPES = {name: kind for name, kind in recipes.RECIPES.items() if name != "hold"}  # see below
RECIPES["sr_ste_decoupled"] = recipes.SrSte
FIELDS = {
  "custom": {"path": ((4, "4:8", 1.0), (16, "2:8", 0.5))},
  "sdgf_geometric": {"k": 2},
  "sr_ste": {"lam": 0.5},
  "sr_ste_decoupled": {"lam": 0.5, "decoupled": True},
  "idp": {"lam": 0.5},
  "snip": {"batches": 2},
}


def make(name, phases=PHASES, **fields):
  return nms.recipe(
    name.removesuffix("_decoupled"), pattern="2:8", phases=phases, **FIELDS.get(name, {}) | fields
  )


def rules_of(names=tuple(RECIPES), **fields):
  return nms.Rules({f"{name}/kernel": make(name, **fields) for name in names})


RULES = rules_of()
INNER = optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.05, momentum=0.9))
RATE = optax.exponential_decay(0.05, 10, 0.9)
TX = nms.sparse(INNER, RULES, learning_rate=RATE)


def params_of(seed=0, dtype=jnp.float32, names=tuple(RECIPES)):
  w = np.random.default_rng(seed).normal(size=(len(names), 16, 3))
  kernels = {name: {"kernel": jnp.asarray(x, dtype)} for name, x in zip(names, w, strict=True)}
  # None is what equinox puts where a model holds no array.
  return kernels | {"bias": jnp.zeros(3, dtype), "static": None}


X, TARGET = np.random.default_rng(9).normal(size=(2, 32, 16)).astype(np.float32)


def loss(params):
  def loss_of(kernel):
    x, target = jnp.asarray(X, kernel.dtype), jnp.asarray(TARGET[:, :3], kernel.dtype)
    return jnp.mean((x @ kernel + params["bias"].reshape(1, -1) - target) ** 2)

  return sum(loss_of(params[name]["kernel"]) for name in RECIPES if name in params)


def relaxed(function, *args, **kwargs):
  """A call of code that is not ours."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    return function(*args, **kwargs)


def train_step(tx):
  def step(run, _=None):
    params, opt = run
    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = relaxed(tx.update, grads, opt, params)
    run = relaxed(optax.apply_updates, params, updates), opt
    return run, (*run, value)

  return step


def train(tx, params, steps):
  """Params and state before the first step and after each, and the loss of each."""
  start = params, tx.init(params)
  *later, losses = jax.jit(lambda run: jax.lax.scan(train_step(tx), run, length=steps)[1])(start)
  join = lambda a, b: jnp.concatenate([jnp.asarray(a)[None], b])
  return *jax.tree.map(join, start, tuple(later)), losses


@functools.cache
def trajectory():
  params, opt, losses = train(TX, params_of(), STEPS)
  return params, opt, jax.jit(jax.vmap(nms.dense_params))(params, opt), losses


@functools.cache
def effective():
  """W~ of every step, by `sparsify`."""
  _, opt, dense, _ = trajectory()
  return jax.jit(jax.vmap(lambda p, s: nms.sparsify(p, RULES, s.count, s.masks)))(dense, opt)


def at(tree, i):
  return jax.tree.map(lambda x: x[i], tree)


def close(a, b, tolerance=1e-6):
  # Of the largest value, which straight-through gradients let grow.
  ulps = lambda y: tolerance * max(1, np.abs(y).max())
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 0, ulps(y)), a, b)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def is_two_of_eight(w):
  return ((np.asarray(w).reshape(-1, 8, w.shape[1]) != 0).sum(1) == 2).all()


# --- the equations --------------------------------------------------------------------------------


@functools.cache
def loop_of_pieces(inner=INNER, names=tuple(RECIPES), steps=STEPS):
  """W, the inner state, the masks and the loss of each step, by the functions below `sparse`."""
  rules, start = rules_of(names), params_of(names=names)
  first, last = nms.sr_ste(rules), optax.with_extra_args_support(optax.identity())
  if "sr_ste_decoupled" in names:
    last = nms.sr_ste(rules, learning_rate=RATE)

  def turn(run, step):
    w, before, opt, after, masks = run
    value, grads = jax.value_and_grad(lambda w: loss(nms.sparsify(w, rules, step, masks)))(w)
    moves, before = relaxed(first.update, grads, before, w, nm_state=masks)
    moves, opt = relaxed(inner.update, moves, opt, w)
    moves, after = relaxed(last.update, moves, after, w, nm_state=masks)
    new = relaxed(optax.apply_updates, w, moves)
    run = new, before, opt, after, nms.update_state(masks, new, rules, step + 1, grads, grads_at=w)
    return run, (new, opt, run[-1], value)

  opt, masks = relaxed(inner.init, start), nms.init_state(start, rules)
  start = start, first.init(start), opt, last.init(start), masks
  return jax.jit(lambda run: jax.lax.scan(turn, run, jnp.arange(steps))[1])(start)


@pytest.mark.parametrize("name", RECIPES)
def test_200_steps_in_place_are_those_of_a_loop_of_the_pieces(name):
  """And params are W~: to one ulp of the larger of before and after, since `apply_updates` adds."""
  w, inner, masks, losses = loop_of_pieces()
  params, opt, dense, in_place = trajectory()
  later = at(opt, slice(1, None))
  np.testing.assert_allclose(in_place, losses, 1e-6)
  np.testing.assert_array_equal(opt.count, np.arange(STEPS + 1))
  close(w[name], at(dense[name], slice(1, None)), 2e-6)
  close(inner[1][0].trace[name], later.inner_state[1][0].trace[name], 1e-5)
  for kind in set(masks) - {"step"}:
    assert (name in masks[kind]) == (name in later.masks[kind])
    if name in masks[kind]:
      close(masks[kind][name], later.masks[kind][name], 1e-5)
  assert (name in masks[RECIPES[name].keeps]) == RECIPES[name].stateful
  want, seen = np.asarray(effective()[name]["kernel"])[1:], np.asarray(params[name]["kernel"])
  before, now = seen[:-1], seen[1:]
  ulp = np.spacing(np.maximum(np.abs(before), np.abs(now)))
  assert (np.abs(now - want) <= ulp).all() and (now[want == 0] == 0).all()
  if name != "dense":
    assert all(is_two_of_eight(w) for w in now[PHASES.finetune_start : 60])
    assert not is_two_of_eight(now[2]) and nms.verify(at(params, -1), RULES).ok


@pytest.mark.parametrize("given", [lambda make: make, optax.inject_hyperparams])
def test_a_decoupled_term_is_adamws_decay_by_hand(given):
  """20 steps of AdamW in numpy; what a mask prunes decays by a schedule of its own."""
  names, rate, own = ["sr_ste_decoupled"], lambda t: 0.02 / (1 + t), lambda t: 0.2 * 0.9**t
  rules = rules_of(names, phases=nms.Phases(total=20, dense=3))
  adamw = optax.adamw(rate, weight_decay=0.1)
  tx = given(lambda learning_rate: nms.sparse(adamw, rules, learning_rate))(learning_rate=own)
  (params, target), update = (params_of(seed, names=names) for seed in (0, 1)), jax.jit(tx.update)
  opt, (w, goal) = tx.init(params), (np.float64(x[names[0]]["kernel"]) for x in (params, target))
  m = v = np.zeros_like(w)
  for t in range(20):
    grads = jax.tree.map(jnp.subtract, params, target)
    updates, opt = relaxed(update, grads, opt, params)
    params = relaxed(optax.apply_updates, params, updates)
    keep = np.asarray(nms.nm_mask(jnp.float32(abs(w)), "2:8")) | (t < 3)
    g = np.where(keep, w, 0) - goal
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    adam = m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
    w = w - rate(t) * (adam + 0.1 * w) - own(t) * 0.5 * np.where(keep, 0, w)
    close(nms.dense_params(params, opt)[names[0]]["kernel"], w, 1e-5)


@pytest.mark.parametrize("name", ["sr_ste", "one_shot"])
def test_weights_loaded_after_init_are_the_start_and_the_first_pass_sees_all_of_them(name):
  """With dense = 0, too: at count 0 no weight is pruned yet but by a mask that is stored."""
  tx = nms.sparse(optax.sgd(0.5), rules_of([name], phases=nms.Phases(total=20)))
  w, loaded, grads = (params_of(seed, names=[name]) for seed in range(3))
  opt = tx.init(w)
  same(nms.dense_params(loaded, opt), loaded)
  _, after = tx.update(grads, opt, loaded)
  w, g = (np.asarray(tree[name]["kernel"]) for tree in (loaded, grads))
  if name == "one_shot":
    g = np.where(nms.nm_mask(jnp.abs(w), "2:8"), g, 0)
  np.testing.assert_allclose(after.dense[name]["kernel"], w - 0.5 * g, rtol=1e-6)


def test_hold_keeps_the_zeros_that_weights_come_with(caplog):
  names, hold = ["sr_ste"], nms.Rules({".*/kernel": nms.recipe("hold", pattern="2:8")})
  given = nms.finalize(params_of(names=names), rules_of(names), 0, early=True)
  w = given["sr_ste"]["kernel"]
  given["sr_ste"]["kernel"] = w = w.at[0:8, 0].set(0.0).at[3, 0].set(0.5)  # one of two
  tx = nms.sparse(optax.adamw(1e-2), hold)
  params, opt, losses = train(tx, given, 60)
  assert "'sr_ste/kernel': groups have 1 non-zeros less" in caplog.text
  assert losses[-1] < losses[0] / 2
  last = params["sr_ste"]["kernel"][-1]
  np.testing.assert_array_equal(last != 0, w != 0)
  assert nms.verify(at(params, -1), hold).ok and nms.step_count(at(opt, -1)) == 60
  dense = nms.dense_params(at(params, -1), at(opt, -1))
  same(nms.finalize(dense, hold, 60, at(opt, -1).masks), at(params, -1))
  # More than n of m may be loaded over, or restored over, after `init`.
  full = params_of(names=names)
  caplog.clear()
  fresh = tx.init(full)
  assert "36 non-zeros too many" in caplog.text
  same(relaxed(tx.update, given, fresh, given)[1].masks, at(opt, 1).masks)
  relaxed(tx.update, given, at(opt, -1), at(params, -1))
  # Else it is an error where the weights are known, and NaN where they are traced.
  with pytest.raises(ValueError, match="2:8 at 'sr_ste/kernel'.* too many"):
    relaxed(tx.update, full, fresh, full)
  for init in (tx.init, jax.jit(tx.init)):
    updates, _ = jax.jit(tx.update)(full, init(full), full)
    assert np.isnan(updates["sr_ste"]["kernel"]).any()
  with pytest.raises(ValueError, match="dense"):
    nms.recipe("hold", pattern="2:8", phases=nms.Phases(total=9, dense=1))


# --- what stands around it ------------------------------------------------------------------------


def other_count():
  """A transformation whose own `count` is not the step."""
  init = lambda p: optax.ScaleByScheduleState(jnp.int32(70))
  return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


LINK, ADAM = nms.sr_ste(rules_of(["sr_ste"])), optax.adam(1e-3)


@pytest.mark.parametrize(
  "tx, updates, steps",
  [
    # The first `count` in the chain, but those that begin anew.
    (optax.chain(other_count(), ADAM), 3, 70),
    (optax.chain(nms.count_steps(), optax.sgd(0.1)), 3, 3),
    (optax.chain(optax.contrib.reduce_on_plateau(accumulation_size=2), ADAM), 3, 3),
    # MultiSteps comes before another `count`, and nms.sparse before all.
    (optax.MultiSteps(optax.chain(LINK, optax.sgd(1.0)), 4), 11, 2),
    (optax.MultiSteps(nms.sparse(optax.chain(other_count(), ADAM), rules_of(["sr_ste"])), 4), 9, 2),
  ],
)
def test_step_count(tx, updates, steps):
  params, tx = params_of(names=["sr_ste"]), optax.with_extra_args_support(tx)
  state, update = tx.init(params), jax.jit(functools.partial(relaxed, tx.update))
  for _ in range(updates):
    _, state = update(params, state, params, value=jnp.float32(1))
  for count in (nms.step_count(state), jax.jit(nms.step_count)(state)):
    assert count.dtype == jnp.int32 and count.shape == () and count == steps


def test_what_is_skipped_counts_nothing():
  """Of a term by the learning rate, and of each kind of state."""
  names = "sr_ste_decoupled", "idp", "snip", "s_ste", "sdgf_stepwise"
  tx = nms.sparse(INNER, rules_of(names), learning_rate=RATE)

  def fed(tx, grads):
    params = params_of(names=names)
    opt = tx.init(params)
    with jax.disable_jit():  # else XLA fuses the two programs in other ways
      for g in grads:
        updates, opt = relaxed(tx.update, g, opt, params)
        params = optax.apply_updates(params, updates)
    return params, transform.states(opt, transform.SparseState)[0]

  grads = [params_of(10 + i, names=names) for i in range(6)]
  bad = jax.tree.map(lambda g: g * jnp.nan, grads[0])
  params, opt = fed(tx, grads)
  for around, given in (
    (optax.MultiSteps(tx, 2), [g for g in grads for _ in range(2)]),
    (optax.apply_if_finite(tx, 3), [bad, *grads[:3], bad, bad, *grads[3:]]),
  ):
    got, state = fed(around, given)
    same((got, state.dense, state.masks), (params, opt.dense, opt.masks))
    assert nms.step_count(state) == state.masks["step"] == 6


SGD, TWO = optax.sgd(0.05), ("sr_ste", "idp")
LABELS = {name: {"kernel": "a"} for name in TWO} | {"bias": "b", "static": None}
ALL = {name: {"kernel": True} for name in TWO} | {"bias": True, "static": None}
WRAPPERS = {
  "sam": lambda tx: optax.contrib.sam(tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.02))),
  "mechanize": optax.contrib.mechanize,
  "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.05),
  "flatten": optax.flatten,
  "masked": lambda tx: optax.masked(tx, ALL),
  "multi_transform": lambda tx: optax.multi_transform({"a": tx, "b": SGD}, LABELS),
  "a link behind": lambda tx: optax.chain(tx, optax.scale(0.5)),
  "lookahead": lambda tx: optax.lookahead(tx, 5, 0.5),
}
WRAPPED_STEPS = PHASES.total + 1  # an odd number: sam ends with a step away


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_optax_around_it_are_right_or_refused(name):
  params, rules = params_of(names=TWO), rules_of(TWO)
  tx = WRAPPERS[name](nms.sparse(SGD, rules))
  if name in ("masked", "multi_transform"):
    around, opt, _ = train(tx, params, WRAPPED_STEPS)
    close(around, train(nms.sparse(SGD, rules), params, WRAPPED_STEPS)[0])
    assert nms.step_count(at(opt, -1)) == WRAPPED_STEPS
  elif name == "flatten":
    with pytest.raises(ValueError, match="match no parameter"):
      tx.init(params)
  elif name == "a link behind":  # its state is any tuple's
    around, *_ = train(tx, params, WRAPPED_STEPS)
    assert nms.verify(at(around, -1), rules).verdict == "NOT n:m"
  else:
    opt = tx.init(optax.LookaheadParams.init_synced(params) if name == "lookahead" else params)
    for of_state in (nms.step_count, lambda opt: nms.dense_params(params, opt)):
      with pytest.raises(ValueError, match="put it inside"):
        of_state({"step": jnp.int32(0), "opt": opt})


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "lookahead"])
def test_wrappers_of_optax_inside_are_those_of_a_loop_of_the_pieces(name):
  start, rules, wrapped = params_of(names=TWO), rules_of(TWO), WRAPPERS[name]
  want, *_, losses = loop_of_pieces(wrapped(SGD), TWO, WRAPPED_STEPS)
  params, opt, seen = train(nms.sparse(wrapped(SGD), rules), start, WRAPPED_STEPS)
  np.testing.assert_allclose(seen, losses, 1e-5)
  w = nms.dense_params(at(params, -1), at(opt, -1))
  close(w, at(want, -1), 1e-5)
  assert nms.verify(at(params, -1), rules).ok
  assert nms.step_count(at(opt, -1)) == WRAPPED_STEPS


# --- transformations ------------------------------------------------------------------------------


def test_vmap_and_donation():
  """Each seed is its own run."""
  many = jax.tree.map(lambda *x: jnp.stack(x), params_of(0), params_of(1))
  run = many, jax.vmap(TX.init)(many)
  step = jax.jit(jax.vmap(lambda run: train_step(TX)(run)[0]), donate_argnums=0)
  for _ in range(6):
    run = step(run)
  close(at(run, 0), at(trajectory()[:2], 6), 1e-5)


def test_parameters_of_bfloat16():
  """W is float32; the inner optimizer and its moments see the parameters' dtype."""
  tx = nms.sparse(optax.adam(1e-2), RULES, learning_rate=1e-2)
  params, opt, _ = train(tx, params_of(dtype=jnp.bfloat16), 50)
  assert {x.dtype.name for x in jax.tree.leaves(opt.dense)} == {"float32"}
  kinds = {x.dtype.name for x in jax.tree.leaves((params, opt.inner_state[0].mu))}
  assert kinds == {"bfloat16"}
  for name in RULES.assign(at(params, 0)).sites:
    w = np.asarray(params[name.split("/")[0]]["kernel"][-1])
    assert is_two_of_eight(w) and np.isfinite(w).all()


def test_a_schedule_without_a_sparse_step_is_said_once(caplog):
  phases = nms.Phases(total=40, dense=40)
  nms.sparse(INNER, rules_of(["sr_ste", "one_shot"], phases=phases)).init(params_of())
  assert caplog.text.count("no step that is sparse") == 1
  TX.init(params_of())
  assert caplog.text.count("no step that is sparse") == 1


def test_zeros_are_exact_where_gradients_are_shorter_than_parameters():
  rules = rules_of(["sr_ste"])
  tx, params = nms.sparse(optax.sgd(0.1), rules), params_of(names=["sr_ste"])
  opt = tx.init(params)._replace(count=jnp.int32(40))
  grads = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
  updates, _ = tx.update(grads, opt, nms.sparsify(params, rules, 3))
  params = relaxed(optax.apply_updates, nms.sparsify(params, rules, 3), updates)
  assert is_two_of_eight(params["sr_ste"]["kernel"])


# --- what is refused ------------------------------------------------------------------------------


def test_mistakes_are_said():
  opt, params = TX.init(params_of()), params_of()
  several = optax.MultiSteps(INNER, 2).gradient_transformation()
  for word, do in (
    ("needs the parameters", lambda: TX.update(params, opt)),
    ("inside", lambda: nms.sparse(optax.chain(optax.clip(1), several), rules_of(TWO)).init(params)),
    ("learning_rate=rate", lambda: nms.sparse(INNER, RULES)),
    ("by itself", lambda: nms.sparse(nms.sr_ste(rules_of(TWO)), rules_of(TWO)).init(params)),
    ("fast and slow", lambda: nms.sparse(WRAPPERS["lookahead"](SGD), rules_of(TWO)).init(params)),
    ("grad_fn=.*dense", lambda: TX.update(params, opt, params, grad_fn=jax.grad(loss))),
    ("0 states", lambda: nms.dense_params(params, INNER.init(params))),
    ("mask as state", lambda: nms.sr_ste(RULES).update(params, opt, params)),
    ("add nothing", lambda: nms.sr_ste(rules_of(["sr_ste_decoupled"])).init(params)),
    ("add nothing", lambda: nms.sr_ste(rules_of(["sr_ste"]), learning_rate=1.0).init(params)),
    ("count_steps", lambda: nms.step_count(INNER.init(params))),
    ("2 states", lambda: nms.dense_params(params, (opt, opt))),
  ):
    with pytest.raises(ValueError, match=word):
      do()


def test_a_state_of_other_rules_is_an_error_and_nan_where_only_a_traced_hash_tells():
  params, tx = params_of(names=["idp"]), nms.sparse(INNER, rules_of(["idp"]))
  opt = nms.sparse(INNER, rules_of(["idp"], lam=0.25)).init(params)._replace(count=jnp.int32(1))
  with pytest.raises(ValueError, match="was made by"):
    tx.update(params, opt, params)
  for _ in range(2):
    updates, opt = jax.jit(tx.update)(params, opt, params)
    assert np.isnan(updates["idp"]["kernel"]).any() and opt.count == -1
