"""Whole trees: stored masks step by step, exact zeros, SR-STE's term, proof."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import ranks, soft

import nm_sparsity_jax as nms
from nm_sparsity_jax.training import metrics, transform

# 4 dense steps, 12 sparsify steps, 4 fine-tune steps. 2:8 walks through 7, 4 and 2 of 8.
PHASES = nms.Phases(total=20, dense=4, finetune=4)
IDP_LEVELS = ((4, 7), (8, 4), (12, 2))
K, N = 16, 6
# Compiled once: outside jit every lax.cond compiles anew.
update = jax.jit(nms.update_state, static_argnames="rules")
sparsify = jax.jit(nms.sparsify, static_argnames="rules")
STATEFUL = ("one_shot", "snip", "idp")


def make(name, pattern="2:8", **fields):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **fields)


def ff(name, *args, **fields):
  return nms.Rules({"ff": make(name, *args, **fields)})


def tree(w):
  w = jnp.asarray(w)
  return {"mlp": {"wi": {"kernel": w, "bias": jnp.ones(w.shape[-1])}}, "scale": jnp.ones(5)}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


def weights(seed):
  """Few values, so that ties are common."""
  values = np.array([-2, -1.5, -1, -0.5, -0.0, 0, 0.5, 1, 1.5, 2], np.float32)
  return np.random.default_rng(seed).choice(values, (K, N))


def normal(seed):
  return np.random.default_rng(seed).normal(size=(K, N)).astype(np.float32)


def top(scores, n, m, parent=None):
  return ranks(scores, m, 0, parent) < n


def same(state, other):
  jax.tree.map(np.testing.assert_array_equal, state, other)


def run(rules, steps, state=None):
  """The state after updates at these steps, each with the weights and gradients of its seed."""
  state = nms.init_state(tree(weights(0)), rules) if state is None else state
  for t in steps:
    before, after = tree(weights(t - 1)), tree(weights(t))
    state = update(state, after, rules, t, tree(normal(t)), before)
  return state


# --- stored masks -----------------------------------------------------------------------------


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
WALKS = [("one_shot", (3, 7), {}), ("snip", EACH, {"batches": 3})]
WALKS += [("idp", steps, {}) for steps in (EACH, (3, 6, 9, 10, 14), (13,))]


@pytest.mark.parametrize("name, steps, fields", WALKS, ids=str)
def test_stored_masks_step_by_step(name, steps, fields):
  """As defined; `sparsify` and the term act by them; a step that was seen changes nothing."""
  rules, state = ff(name, **fields), None
  term = jax.jit(lambda p, t, s: transform.add_sr_ste(tree(np.zeros((K, N))), p, rules, t, s, 2.0))
  for t, (keep, acting) in zip(steps, expected_masks(name, steps, **{"batches": 1} | fields),
                               strict=True):  # fmt: skip
    new, params = run(rules, [t], state), tree(weights(t))
    np.testing.assert_array_equal(kernel(new["mask"]), keep, err_msg=f"stored at {t}")
    for seen in (t, t - 1):
      same(update(new, tree(weights(99)), rules, seen, tree(normal(99))), new)
    out = kernel(sparsify(params, rules, t, new))
    np.testing.assert_array_equal(out, np.where(acting, weights(t), 0), err_msg=f"acts at {t}")
    lam = np.float32(2 * rules.places["ff"].lam)
    np.testing.assert_array_equal(kernel(term(params, t, new)), lam * ~acting * weights(t))
    state = new
  assert list(state["mask"]) == ["mlp"]


SHOT, SNIP, IDP = ff("one_shot"), ff("snip", batches=3), ff("idp")
WRONG = {
  "idp is due": (IDP, EACH[:7], IDP, 8, "out of date"),
  "of a later step": (SHOT, EACH, SHOT, 7, "of step 20"),
  # A step of its window was missed, so its scores are of fewer batches than it needs.
  "a lost gradient": (SNIP, (6, 7, 8, 9), SNIP, 18, "snip needs each gradient"),
  "of other rules": (SHOT, EACH[:18], ff("one_shot", "1:8"), 18, "other rules"),
}


@pytest.mark.parametrize("made_by, calls, rules, step, word", WRONG.values(), ids=WRONG)
def test_a_wrong_mask_is_an_error_and_nan_where_it_is_traced(made_by, calls, rules, step, word):
  state, params = run(made_by, calls), tree(weights(1))
  for use in (nms.sparsify, metrics.masks_of, lambda *args: nms.finalize(*args, early=True)):
    with pytest.raises(ValueError, match=word):
      use(params, rules, step, state)
    if use is not metrics.masks_of:
      traced = jax.jit(lambda params, step, state, use=use: use(params, rules, step, state))
      assert np.isnan(kernel(traced(params, step, state))).any()
  if word == "other rules":  # nor does a renewal make it that of these rules
    later = update(state, params, rules, step + 1, params)
    with pytest.raises(ValueError, match=word):
      nms.sparsify(params, rules, step + 1, later)


def test_mistakes_are_named():
  params, snip = tree(weights(1)), ff("snip")
  snips = nms.init_state(params, snip)
  for word, do in (
    ("init_state", lambda: nms.sparsify(params, IDP, 5)),
    ("early=True", lambda: nms.finalize(params, ff("sr_ste"), 15)),
    # Its mask was never taken, and magnitude is no substitute for what gradients say.
    ("mask.*comes at 5. Train on.$", lambda: nms.finalize(params, snip, 4, snips, early=True)),
  ):
    with pytest.raises(ValueError, match=word):
      do()


# --- finalize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mdgf_linear", *STATEFUL])
def test_finalize_writes_zeros_and_keeps_the_bits_of_survivors(name):
  rules, params = ff(name), tree(weights(20))
  state = run(rules, EACH)
  done = nms.finalize(params, rules, 20, state)
  w, out = kernel(params), kernel(done)
  # What training saw at its last step, and its fixed point.
  np.testing.assert_array_equal(out, kernel(nms.sparsify(params, rules, 20, state)))
  same(nms.finalize(done, rules, 20, state), done)
  kept = kernel(state["mask"]) if name in STATEFUL else None
  kept = kept if name in ("one_shot", "snip") else top(np.abs(w), 2, 8, kept)
  np.testing.assert_array_equal(out.view(np.uint32), np.where(kept, w, 0).view(np.uint32))
  assert done["scale"] is params["scale"] and nms.verify(done, rules).ok
  if name == "mdgf_linear":  # where the step is traced, it waits for the end by NaN
    traced = jax.jit(lambda step: nms.finalize(params, rules, step))
    same(nms.finalize(params, rules, 0, early=True), traced(16))
    early, late = np.asarray(kernel(jax.vmap(traced)(jnp.array([15, 16]))))
    assert np.isnan(kernel(traced(15))).all() and np.isnan(early).all()
    np.testing.assert_array_equal(late, kernel(traced(16)))


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "3:8", "4:4"])
def test_s_ste_scales_by_the_least_squares_of_the_end_of_the_dense_phase(pattern):
  """Finalized early it takes those of now. What is scaled is not scaled again."""
  rules, n, m = ff("s_ste", pattern), *map(int, pattern.split(":"))
  column = np.arange(N)  # one of zeros, some with ties
  mixed = lambda seed: np.where(column < 3, normal(seed), weights(seed)) * (column > 0)
  state = nms.init_state(tree(mixed(1)), rules)
  for step, fitted in ((2, 2), (4, 4), (20, 4)):
    w, then = tree(mixed(step)), soft(mixed(fitted), n, m)
    state = update(state, w, rules, step)
    done = nms.finalize(w, rules, step, state, early=True)
    scale = np.vdot(mixed(fitted), then) / np.vdot(then, then)
    np.testing.assert_allclose(kernel(done), scale * soft(kernel(w), n, m), 1e-5)
    same(nms.finalize(done, rules, step, state, early=True), done)
  assert nms.verify(done, rules).ok
  np.testing.assert_array_equal(kernel(done), kernel(state["scale"]) * soft(kernel(w), n, m))
  same(sparsify(w, rules, 20, state), done)
  assert kernel(nms.init_state(tree(np.zeros((K, N))), rules)["scale"]) == 1


# --- verify ---------------------------------------------------------------------------------------


def report(w, indivisible="error"):
  rules = nms.Rules({".*kernel": make("sr_ste", "2:4")}, indivisible=indivisible)
  return nms.verify({"a": {"kernel": w}}, rules)


def test_verify_of_what_is_not_finite_and_of_no_weight():
  w = np.zeros((8, 3), np.float32)
  assert "every weight is zero" in str(report(w))
  w[0, 0], w[5, 1] = np.nan, np.inf
  found = report(w)
  assert not found.ok and found.sites[0].not_finite == 2 and "2 inf or NaN" in str(found)
  assert not nms.verify(tree(weights(0)), nms.Rules({"ff": nms.recipe("dense")})).ok
  skipped = report(np.zeros((6, 1), np.float32), indivisible="skip")
  assert not skipped.ok and list(skipped.skipped) == ["a/kernel"] and "skipped" in str(skipped)
