"""Whole trees: stored masks step by step, effective weights, exact zeros, proof."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.training import metrics
from nm_sparsity_jax.training.sites import Site

# 4 dense steps, 12 sparsify steps, 4 fine-tune steps. 2:8 walks through 7, 4 and 2 of 8.
PHASES = nms.Phases(total=20, dense=4, finetune=4)
IDP_LEVELS = ((4, 7), (8, 4), (12, 2))
K, N = 16, 6
PATH = "mlp/wi/kernel"
# Compiled once: outside jit every lax.cond compiles anew.
update = jax.jit(nms.update_state, static_argnames="rules")
sparsify = jax.jit(nms.sparsify, static_argnames="rules")
STATELESS = ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric")
STATEFUL = ("one_shot", "snip", "idp")


def make(name, pattern="2:8", phases=PHASES, **fields):
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


def ff(name, *args, **fields):
  return nms.Rules({"ff": make(name, *args, **fields)})


def tree(w):
  w = jnp.asarray(w)
  return {"mlp": {"wi": {"kernel": w, "bias": jnp.ones(w.shape[-1])}}, "scale": jnp.ones(5)}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


def weights(seed, shape=(K, N)):
  """Few values, so that ties are common."""
  values = np.array([-2, -1.5, -1, -0.5, -0.0, 0, 0.5, 1, 1.5, 2], np.float32)
  return np.random.default_rng(seed).choice(values, shape)


def normal(seed, shape=(K, N)):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def top(scores, n, m, parent=None):
  """The mask by its definition, along axis 0: the n first by (score down, index up)."""
  scores = np.asarray(scores, np.float64)
  if parent is not None:
    scores = np.where(parent, scores, -1.0)
  groups = scores.reshape(-1, m, *scores.shape[1:])
  rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1, kind="stable")
  return (rank < n).reshape(scores.shape)


def same(state, other):
  assert jax.tree.structure(state) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def run(rules, steps, state=None):
  """The state after updates at these steps, each with the weights and gradients of its seed."""
  state = nms.init_state(tree(weights(0)), rules) if state is None else state
  for t in steps:
    before, after = tree(weights(t - 1)), tree(weights(t))
    state = update(state, after, rules, t, tree(normal(t)), before)
  return state


# --- stored masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*STATELESS, *STATEFUL])
def test_a_state_mirrors_the_stateful_places(name):
  params = {**tree(weights(0)), "attention": {"query": {"kernel": jnp.ones((8, 2))}}}
  rules = nms.Rules({"ff": make(name), "q": make("sr_ste")})
  state = nms.init_state(params, rules)
  if name in STATELESS:
    assert state == nms.update_state(state, params, rules, 5) == {}
    return
  more = ["score", "seen"] if name == "snip" else []
  assert sorted(state) == sorted(["made", "mask", "renewed", "step", *more])
  assert kernel(state["mask"]).all() and list(state["mask"]) == ["mlp"]


def expected_masks(name, steps, batches):
  """After each update, by the definition: the stored mask, and the one that acts."""
  keep, score, levels = np.ones((K, N), bool), np.zeros((K, N), np.float32), list(IDP_LEVELS)
  acting, last = keep, 0
  for t in steps:
    w = np.abs(weights(t))
    if name == "one_shot" and last < 4 <= t:
      acting = keep = top(w, 2, 8)
    if name == "snip" and 4 < t <= 4 + batches:
      score = score + np.abs(normal(t) * weights(t - 1))
      acting = keep = top(score, 2, 8) if t == 4 + batches else keep
    if name == "idp":
      while len(levels) > 1 and t >= levels[1][0]:
        keep = top(w, levels.pop(0)[1], 8, keep)
      acting = top(w, levels[0][1], 8, keep) if t >= 4 else np.ones((K, N), bool)
    yield keep, acting
    last = t


EACH = tuple(range(1, 21))
WALKS = [("one_shot", s, {}) for s in (EACH, (3, 7), (9,))]
WALKS += [("snip", EACH, {"batches": b}) for b in (1, 3)]
WALKS += [("idp", s, {}) for s in (EACH, (3, 6, 9, 10, 14), (13,), (8, 12, 16))]


@pytest.mark.parametrize("name, steps, fields", WALKS, ids=str)
def test_stored_masks_step_by_step(name, steps, fields):
  """As defined; `sparsify` acts by them, and a step that was seen changes nothing."""
  rules, state = ff(name, **fields), None
  for t, (keep, acting) in zip(steps, expected_masks(name, steps, **{"batches": 1} | fields),
                               strict=True):  # fmt: skip
    before = jax.tree.map(np.array, state) if state else None
    new = run(rules, [t], state)
    same(before, state) if state else None
    np.testing.assert_array_equal(kernel(new["mask"]), keep, err_msg=f"stored at {t}")
    for seen in (t, t - 1):
      same(update(new, tree(weights(99)), rules, seen, tree(normal(99))), new)
    out = kernel(sparsify(tree(weights(t)), rules, t, new))
    np.testing.assert_array_equal(out, np.where(acting, weights(t), 0), err_msg=f"acts at {t}")
    state = new
  same(jax.jit(lambda: run(rules, steps))(), new)


# --- a stored mask that is not the right one ------------------------------------------------------


def test_a_fingerprint_differs_where_masks_differ():
  idp, groups = make("idp"), Groups((16, 2), 0)
  found = [
    Site(PATH, recipe, at).fingerprint
    for recipe, at in (
      (idp, groups),
      (dataclasses.replace(idp, lam=0.5), groups),
      (dataclasses.replace(idp, pattern="1:8"), groups),
      (idp, Groups((24, 2), 0)),
      (idp, Groups((12, 2), 0, 4)),
    )
  ]
  assert len({*found}) == 5 and all(0 <= x < 2**31 for x in found)
  assert Site(PATH, idp, Groups((3, 16, 2), 1)).fingerprint == found[0]  # the stack of a scan


OLD = {"one_shot": 4, "snip": 5, "idp": 8}  # the first step that needs a renewal
WRONG = [(ff(name), step - 1, ff(name), step, "out of date") for name, step in OLD.items()]
WRONG += [(ff("one_shot"), 20, ff("one_shot"), 7, "of step 20")]
WRONG += [
  (ff("one_shot"), 18, nms.Rules({"ff": other}), 18, "other rules")
  for other in (make("one_shot", "1:8"), make("idp"), make("one_shot", gradient="masked"))
]


@pytest.mark.parametrize("made_by, upto, rules, step, word", WRONG)
def test_a_wrong_mask_is_an_error_and_nan_where_it_is_traced(made_by, upto, rules, step, word):
  state, params = run(made_by, range(1, upto + 1)), tree(weights(1))
  assert np.isfinite(kernel(sparsify(params, made_by, upto, state))).all()
  for use in (nms.sparsify, metrics.masks_of):
    with pytest.raises(ValueError, match=word):
      use(params, rules, step, state)
  assert np.isnan(kernel(sparsify(params, rules, step, state))).any()
  if word == "other rules":  # nor does a renewal make it that of these rules
    later = update(state, params, rules, step + 1, params)
    with pytest.raises(ValueError, match=word):
      nms.sparsify(params, rules, step + 1, later)


@pytest.mark.parametrize("calls", [(6, 7, 8, 9), (12,)])
def test_snip_without_a_step_of_its_window_has_no_mask(calls):
  rules, params = ff("snip", batches=3), tree(weights(1))
  state = run(rules, calls)
  assert kernel(state["mask"]).all()
  assert np.isnan(kernel(sparsify(params, rules, 18, state))).any()
  with pytest.raises(ValueError, match="out of date"):
    nms.finalize(params, rules, 18, state)
  for other in (rules, ff("snip", "1:8", batches=3)):
    done = jax.jit(lambda params, state, rules=other: nms.finalize(params, rules, 18, state))
    assert np.isnan(kernel(done(params, state))).all()


def test_mistakes_with_a_state():
  params, idp, snip = tree(weights(1)), ff("idp"), ff("snip")
  state, snips = nms.init_state(params, idp), nms.init_state(params, snip)
  without = lambda key: {k: x for k, x in state.items() if k != key}
  for word, do in (
    ("init_state", lambda: nms.sparsify(params, idp, 5)),
    ("init_state", lambda: nms.sparsify(params, idp, 0, without("made"))),
    ("other rules", lambda: nms.update_state(state, params, ff("sr_ste"), 1)),
    ("other rules", lambda: nms.update_state({}, params, idp, 1)),
    ("other rules", lambda: nms.finalize(params, ff("idp", "1:8"), 20, state)),
    ("grads=grads", lambda: nms.update_state(snips, params, snip, 5)),
    ("whole number", lambda: nms.update_state(state, params, idp, 1.0)),
    ("out of date", lambda: nms.finalize(params, ff("one_shot"), 3,
                                         run(ff("one_shot"), (3,)), early=True)),
    ("int8", lambda: nms.sparsify(tree(np.ones((8, 2), np.int8)), ff("sr_ste"), 3)),
    ("complex64", lambda: nms.finalize(tree(np.ones((8, 2), np.complex64)), ff("sr_ste"), 20)),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=word):
      do()


# --- sparsify and finalize ------------------------------------------------------------------------


def test_sparsify_is_each_recipes_own_weight_and_gradient(dtype=jnp.bfloat16):
  """What recipes do to one weight is told in test_every_recipe.py."""
  names = (*STATELESS, *STATEFUL)
  rules = nms.Rules({f"{name}/kernel": make(name) for name in names})
  params = {name: {"kernel": jnp.asarray(normal(i), dtype)} for i, name in enumerate(names)}
  params["scale"] = jnp.ones(5)
  c = {name: {"kernel": jnp.asarray(normal(50 + i), dtype)} for i, name in enumerate(names)}
  c["scale"] = jnp.ones(5)
  own = lambda w, t, m: {
    name: {"kernel": make(name).effective(w[name]["kernel"], t, 0,
                                          m["mask"].get(name, {}).get("kernel"))}
    for name in names
  } | {"scale": w["scale"]}  # fmt: skip
  both = jax.jit(lambda w, t, m: [
      jax.vjp(f, w)[0:1] + jax.vjp(f, w)[1](c)
      for f in (lambda w: nms.sparsify(w, rules, t, m), lambda w: own(w, t, m))
  ])  # fmt: skip
  state = nms.init_state(params, rules)
  for step in range(21):
    state = update(state, params, rules, step, grads=params)
    if step in (0, 6, 20):
      same(*both(params, jnp.int32(step), state))
  assert nms.sparsify(params, rules, step, state)["scale"] is params["scale"]


@pytest.mark.parametrize("name", [*STATELESS, *STATEFUL])
def test_finalize_writes_zeros_and_keeps_the_bits_of_survivors(name):
  rules, params = ff(name), tree(weights(20))
  state = run(rules, EACH)
  done = nms.finalize(params, rules, 20, state)
  w, out = kernel(params), kernel(done)
  # What training saw at its last step, and its fixed point.
  np.testing.assert_array_equal(out, kernel(nms.sparsify(params, rules, 20, state)))
  same(nms.finalize(done, rules, 20, state), done)
  kept = kernel(state["mask"]) if name in ("one_shot", "snip") else None
  if kept is None:
    kept = top(np.abs(w), 2, 8, kernel(state["mask"]) if name == "idp" else None)
  np.testing.assert_array_equal(out.view(np.uint32), np.where(kept, w, 0).view(np.uint32))
  assert done["scale"] is params["scale"] and nms.verify(done, rules).ok


def test_finalize_waits_for_the_end_of_every_schedule():
  """An error, NaN where the step is traced; with early=True the target, whatever the step is."""
  recipes = {"ff": make("mdgf_linear"), "q": make("sr_ste", phases=nms.Phases(total=20))}
  rules = nms.Rules(recipes)
  params = {**tree(normal(0)), "attention": {"query": {"kernel": jnp.ones((16, 2))}}}
  traced = jax.jit(lambda step: nms.finalize(params, rules, step))
  done = nms.finalize(params, rules, 20)
  same(nms.finalize(params, rules, 0, early=True), done)
  same(traced(20), done)
  with pytest.raises(ValueError, match="early=True"):
    nms.finalize(params, rules, 19)
  assert np.isnan(kernel(traced(15))).all() and np.isfinite(kernel(traced(16))).all()


@pytest.mark.parametrize("pattern", ["1:4", "3:8", "5:128"])
def test_finalized_weights_full_of_ties_verify(pattern):
  rules = ff("sr_ste", pattern)
  n, m = map(int, pattern.split(":"))
  for w in (weights(3, (128, 7)), np.ones((128, 7)), np.zeros((128, 7))):
    params = tree(jnp.asarray(w, jnp.bfloat16))
    done = nms.finalize(params, rules, 20)
    assert nms.verify(done, rules).ok
    expected = np.where(top(np.abs(w), n, m), kernel(params), 0)
    np.testing.assert_array_equal(kernel(done), expected)


# --- verify ---------------------------------------------------------------------------------------


def report(w, pattern="2:4", axes=None, indivisible="error"):
  rules = nms.Rules({".*kernel": make("sr_ste", pattern)}, axes, indivisible)
  return nms.verify({"a": {"kernel": w}}, rules)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize(
  "value, counts",
  [(0.0, 0), (-0.0, 0), (np.nan, 1), (-np.inf, 1), (-1.0, 1), (6e-8, 1), (1e-40, 1), (-1e-45, 1)],
)
def test_what_counts_as_a_zero(value, counts, dtype):
  if 0 < abs(value) < 1e-30 and dtype != np.float32:
    pytest.skip("no such number")
  w = np.ones((4, 1), dtype)
  w[2:] = np.asarray(value, dtype)
  for x in (w, jnp.asarray(w)):
    assert report(x).ok == (not counts)


def test_verify_of_integers_of_complex_numbers_and_of_what_is_not_finite():
  assert not report(np.array([[-128], [-128], [-128], [5]], np.int8), "1:4").ok
  assert report(np.array([[0], [-128], [0], [0]], np.int8), "1:4").ok
  with pytest.raises(ValueError, match="complex64"):
    report(np.ones((4, 1), np.complex64))
  w = np.zeros((8, 3), np.float32)
  w[0, 0], w[5, 1] = np.nan, np.inf
  found = report(w)
  assert not found.ok and found.places[0].not_finite == 2 and "warning" in str(found)


@pytest.mark.parametrize(
  "shape, axes, bad, first",
  [
    ((8, 3), 0, [(4, 1), (5, 1), (7, 1)], (4, 1)),
    ((4, 2, 3), (0, 1), [(2, 0, 1), (2, 1, 1), (3, 1, 1)], (2, 0, 1)),
    ((2, 2, 2, 3), (1, 2), [(1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 1, 1)], (1, 0, 0, 1)),
    ((3, 8, 2), (-2,), [(2, 4, 0), (2, 5, 0), (2, 6, 0)], (2, 4, 0)),
    # A scan's axis between those of a group.
    ((2, 3, 4, 2), (0, 2), [(1, 2, 0, 1), (1, 2, 1, 1), (1, 2, 3, 1)], (1, 2, 0, 1)),
  ],
)
def test_verify_counts_along_any_axis(shape, axes, bad, first):
  w = np.zeros(shape, np.float32)
  for index in bad[:2]:
    w[index] = 1
  (place,) = report(w, axes={".*": axes}).places
  assert report(w, axes={".*": axes}).ok and place.first is None
  assert (place.groups, place.density) == (w.size // 4, 2 / w.size)
  w[bad[2]] = 1
  (place,) = report(w, axes={".*": axes}).places
  assert (place.bad_groups, place.first) == (1, first)


def test_a_proof_about_no_weight_proves_nothing():
  assert not nms.verify(tree(weights(0)), nms.Rules({"ff": nms.recipe("dense")})).ok
  skipped = report(np.zeros((6, 1), np.float32), indivisible="skip")
  assert not skipped.ok and list(skipped.skipped) == ["a/kernel"] and "skipped" in str(skipped)


def test_kernels_of_like_layers_are_one_row():
  layer = {"mlp": {name: {"kernel": jnp.asarray(weights(0, (8, 8)))} for name in ("wi_0", "wi_1")}}
  params, rules = {f"layers_{i}": layer for i in range(3)}, ff("sr_ste", "2:4")
  name = "layers_{0..2}/mlp/wi_{0,1}/kernel"
  _, row = str(rules.assign(params)).splitlines()
  assert row.split()[0] == name and row.split()[5] == str(6 * 16)
  done = nms.finalize(params, rules, PHASES.total)
  _, row, verdict = str(nms.verify(done, rules)).splitlines()
  assert row.split()[:5] == [name, "2:4", "0", "96", "0"] and verdict == "ok"
  # A bad kernel has a row of its own, and its first bad group.
  done["layers_1"]["mlp"]["wi_0"]["kernel"] = jnp.ones((8, 8))
  _, *rows, verdict = str(nms.verify(done, rules)).splitlines()
  bad = next(row for row in rows if row.startswith("layers_1/mlp/wi_0/kernel"))
  assert bad.split()[3:5] == ["16", "16"] and "(0, 0)" in bad and verdict == "NOT n:m"
  assert sum(int(row.split()[3]) for row in rows) == 96
