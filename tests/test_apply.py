"""Whole trees: stored masks step by step, effective weights, exact zeros, proof."""

import contextlib
import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import metrics, recipes

# What snip scores by default is tested here, and warned of.
pytestmark = pytest.mark.filterwarnings("ignore:snip at .* scores:UserWarning")

# In the tests: 4 dense steps, 12 sparsify steps, 4 fine-tune steps.
PHASES = nms.Phases(total=20, dense=4, finetune=4)
K, N = 16, 6
PATH = ("mlp", "wi", "kernel")
# Compiled once: outside jit every lax.cond compiles anew.
update = jax.jit(nms.update_state, static_argnames="rules")
sparsify = jax.jit(nms.sparsify, static_argnames="rules")
finalize = jax.jit(functools.partial(nms.finalize, early=True), static_argnames="rules")
init_state = jax.jit(nms.init_state, static_argnames="rules")
STATELESS = ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric")


def make(name, pattern="2:8", phases=PHASES, **fields):
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


def tree(w):
  return {"mlp": {"wi": {"kernel": jnp.asarray(w), "bias": jnp.ones(3)}}, "scale": jnp.ones(5)}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


def weights(seed, shape=(K, N)):
  """Few values, so that ties are common."""
  values = np.array([-2, -1.5, -1, -0.5, -0.0, 0, 0.5, 1, 1.5, 2], np.float32)
  return np.random.default_rng(seed).choice(values, shape)


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


# --- init_state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATELESS)
def test_no_state_where_no_recipe_keeps_a_mask(name):
  params, rules = tree(weights(0)), nms.Rules({"ff": make(name)})
  state = nms.init_state(params, rules)
  assert state == {}
  assert nms.update_state(state, params, rules, 5) == {}


@pytest.mark.parametrize("name", ["one_shot", "snip", "idp"])
def test_state_mirrors_the_stateful_places(name):
  params = {**tree(weights(0)), "attention": {"query": {"kernel": jnp.ones((8, 2))}}}
  state = nms.init_state(params, nms.Rules({"ff": make(name), "q": make("sr_ste")}))
  more = ["score", "seen"] if name == "snip" else []
  assert sorted(state) == sorted(["made", "mask", "renewed", "step", *more])
  assert state["step"].dtype == jnp.int32 and state["step"].shape == ()
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state["mask"]) == {
    "mlp": {"wi": {"kernel": ((K, N), jnp.bool_)}}
  }
  assert kernel(state["mask"]).all()
  if name == "snip":
    assert kernel(state["score"]).dtype == np.float32 and not kernel(state["score"]).any()
    assert kernel(state["seen"]) == 0
  else:
    assert "score" not in state


# --- update_state ---------------------------------------------------------------------------------


def test_one_shot_takes_the_mask_at_dense_and_keeps_it():
  rules = nms.Rules({"ff": make("one_shot")})
  state = nms.init_state(tree(weights(0)), rules)
  for step in range(1, 21):
    state = update(state, tree(weights(step)), rules, step)
    expected = np.ones((K, N), bool) if step < 4 else top(np.abs(weights(4)), 2, 8)
    np.testing.assert_array_equal(kernel(state["mask"]), expected)
    assert state["step"] == step


def test_one_shot_with_no_dense_phase_takes_it_at_init():
  rules = nms.Rules({"ff": make("one_shot", phases=nms.Phases(total=9))})
  state = init_state(tree(weights(0)), rules)
  expected = top(np.abs(weights(0)), 2, 8)
  np.testing.assert_array_equal(kernel(state["mask"]), expected)
  for step in range(1, 4):
    state = update(state, tree(weights(step)), rules, step)
    np.testing.assert_array_equal(kernel(state["mask"]), expected)


@pytest.mark.parametrize("steps", [(3, 7), (9,), (1, 20)])
def test_one_shot_takes_it_when_a_jump_crosses_dense(steps):
  rules = nms.Rules({"ff": make("one_shot")})
  state = init_state(tree(weights(0)), rules)
  for step in steps:
    state = update(state, tree(weights(step)), rules, step)
  np.testing.assert_array_equal(kernel(state["mask"]), top(np.abs(weights(steps[-1])), 2, 8))


@pytest.mark.parametrize("batches", [1, 3])
def test_snip_sums_the_first_gradients_after_dense(batches):
  rules = nms.Rules({"ff": make("snip", batches=batches)})
  state = nms.init_state(tree(weights(0)), rules)
  score = np.zeros((K, N), np.float32)
  random = np.random.default_rng(7)
  for step in range(1, 21):
    # The gradient of this step was taken at the weights before the update.
    before, after = weights(step - 1), weights(step)
    g = random.normal(size=(K, N)).astype(np.float32)
    state = update(state, tree(after), rules, step, grads=tree(g), grads_at=tree(before))
    if 4 < step <= 4 + batches:  # steps 4, 5, ... were taken when the count is 5, 6, ...
      score = score + np.abs(g * before)
    np.testing.assert_array_equal(kernel(state["score"]), score)
    assert kernel(state["seen"]) == min(max(step - 4, 0), batches)
    taken = step >= 4 + batches
    expected = top(score, 2, 8) if taken else np.ones((K, N), bool)
    np.testing.assert_array_equal(kernel(state["mask"]), expected)
    # The forward pass turns sparse when the mask is there, neither sooner nor later.
    effective = kernel(sparsify(tree(after), rules, step, state))
    np.testing.assert_array_equal(effective, np.where(expected, after, 0) if taken else after)


def test_snip_without_grads_at_uses_params():
  rules = nms.Rules({"ff": make("snip")})
  g, after = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32), weights(5)
  state = nms.init_state(tree(weights(0)), rules)
  state = update(state, tree(after), rules, 5, grads=tree(g))
  np.testing.assert_array_equal(kernel(state["mask"]), top(np.abs(g * after), 2, 8))


def test_snip_without_gradients_is_an_error():
  rules, params = nms.Rules({"ff": make("snip")}), tree(weights(0))
  with pytest.raises(ValueError, match=r"snip.*mlp/wi/kernel.*grads=grads"):
    nms.update_state(nms.init_state(params, rules), params, rules, 5)


def test_snip_sums_in_float32():
  rules = nms.Rules({"ff": make("snip")})
  w = jnp.full((8, 1), 1, jnp.bfloat16)
  g = jnp.array([1, 1.0078125, 1, 1, 1, 1, 1, 1], jnp.bfloat16).reshape(8, 1) * jnp.bfloat16(3)
  params, grads = ({"mlp": {"wi": {"kernel": x}}} for x in (w, g))
  state = nms.init_state(params, rules)
  state = update(state, params, rules, 5, grads=grads)
  assert kernel(state["score"]).dtype == np.float32
  np.testing.assert_array_equal(kernel(state["score"]), np.abs(np.asarray(g, np.float32)))


# 2:8 walks through 7, 4 and 2 of 8, from steps 4, 8 and 12 on.
IDP_LEVELS = ((4, 7), (8, 4), (12, 2))


def idp_reference(steps):
  """The parent after each update, and the mask in force, by the definition."""
  parent, level, out = np.ones((K, N), bool), 0, []
  for step in steps:
    w = np.abs(weights(step))
    now = max((i for i, (start, _) in enumerate(IDP_LEVELS) if step >= start), default=0)
    while level < now:  # every level crossed chooses among the survivors of the one before
      parent = top(w, IDP_LEVELS[level][1], 8, parent)
      level += 1
    out.append((parent, top(w, IDP_LEVELS[level][1], 8, parent)))
  return out


@pytest.mark.parametrize(
  "steps",
  [tuple(range(1, 21)), (3, 6, 9, 10, 14), (5, 13, 14), (13,), (7, 20), (8, 12, 16)],
  ids=str,
)
def test_idp_inherits_across_levels(steps):
  recipe = make("idp")
  assert tuple((s, p.n) for s, p in recipe.levels()) == IDP_LEVELS
  rules = nms.Rules({"ff": recipe})
  state = nms.init_state(tree(weights(0)), rules)
  for step, (parent, mask) in zip(steps, idp_reference(steps), strict=True):
    params = tree(weights(step))
    state = update(state, params, rules, step)
    np.testing.assert_array_equal(kernel(state["mask"]), parent, err_msg=f"parent at {step}")
    sparse = kernel(sparsify(params, rules, step, state))
    expected = weights(step) if step < 4 else np.where(mask, weights(step), 0)
    np.testing.assert_array_equal(sparse, expected, err_msg=f"mask at {step}")
    assert not (mask & ~parent).any()


def test_idp_is_not_stepwise_pruning():
  """A weight that was dropped stays dropped, though it be the largest now."""
  rules = nms.Rules({"ff": make("idp")})
  small_first = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)
  params = tree(small_first)
  state = update(nms.init_state(params, rules), params, rules, 8)
  grown = tree(small_first.at[0, 0].set(100))
  for step in (8, 12):
    state = update(state, grown, rules, step)
    assert kernel(sparsify(grown, rules, step, state))[0, 0] == 0


@pytest.mark.parametrize("name, at", [("one_shot", 4), ("snip", 5), ("idp", 8), ("idp", 12)])
def test_a_step_that_was_seen_changes_nothing(name, at):
  rules, g = nms.Rules({"ff": make(name)}), tree(np.ones((K, N), np.float32))
  state = nms.init_state(tree(weights(0)), rules)
  for step in range(1, at + 1):
    state = update(state, tree(weights(step)), rules, step, grads=g)
  for step in (at, at - 1, 0, at):  # once more, and backwards
    same(update(state, tree(weights(99)), rules, step, grads=g), state)


@pytest.mark.parametrize("name", ["one_shot", "snip", "idp"])
def test_update_state_is_pure_and_compiles_once(name):
  rules = nms.Rules({"ff": make(name)})
  traces = []

  @jax.jit
  def counted(state, params, step, grads):
    traces.append(1)
    return nms.update_state(state, params, rules, step, grads=grads)

  g = tree(np.random.default_rng(3).normal(size=(K, N)).astype(np.float32))
  state = nms.init_state(tree(weights(0)), rules)
  for step in range(1, 21):
    before = jax.tree.map(np.array, state)
    new = counted(state, tree(weights(step)), jnp.int32(step), g)
    same(state, before)
    same(new, update(state, tree(weights(step)), rules, step, grads=g))
    state = new
  same(new, nms.update_state(new, tree(weights(20)), rules, 20, grads=g))  # and outside jit
  assert len(traces) == 1


def test_update_state_runs_inside_scan():
  rules = nms.Rules({"ff": make("idp")})
  w = jnp.stack([jnp.asarray(weights(i)) for i in range(1, 21)])

  def body(state, x):
    return nms.update_state(state, tree(x[0]), rules, x[1]), None

  steps = jnp.arange(1, 21, dtype=jnp.int32)
  state, _ = jax.lax.scan(body, nms.init_state(tree(weights(0)), rules), (w, steps))
  np.testing.assert_array_equal(kernel(state["mask"]), idp_reference(range(1, 21))[-1][0])


def test_a_state_of_other_rules_is_an_error():
  params = {**tree(weights(0)), "attention": {"query": {"kernel": jnp.ones((8, 2))}}}
  state = nms.init_state(params, nms.Rules({"ff": make("idp")}))
  for rules, given in (
    (nms.Rules({"q": make("idp")}), state),
    (nms.Rules({"ff": make("idp"), "q": make("one_shot")}), state),
    (nms.Rules({"ff": make("sr_ste")}), state),
    (nms.Rules({"ff": make("idp")}), {}),
  ):
    with pytest.raises(ValueError, match="other rules.*nms.init_state"):
      nms.update_state(given, params, rules, 1)


def test_steps_are_whole_numbers():
  rules, params = nms.Rules({"ff": make("idp")}), tree(weights(0))
  with pytest.raises(ValueError, match="not a whole number"):
    nms.update_state(nms.init_state(params, rules), params, rules, 1.0)


# --- sparsify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [*STATELESS, "one_shot", "snip", "idp"])
def test_sparsify_is_effective_weight_by_weight(name, dtype):
  recipe = make(name)
  rules = nms.Rules({"ff": recipe})
  params = tree(jnp.asarray(np.random.default_rng(0).normal(size=(K, N)), dtype))
  state = nms.init_state(params, rules)
  effective = jax.jit(lambda w, step, *mask: recipe.effective(w, step, 0, *mask))
  for step in range(26):
    state = update(state, params, rules, step, grads=params)
    if step not in (0, 3, 4, 5, 7, 8, 12, 15, 16, 25):
      continue
    out = sparsify(params, rules, step, state)
    stored = (state["mask"]["mlp"]["wi"]["kernel"],) if state else ()
    expected = effective(params["mlp"]["wi"]["kernel"], step, *stored)
    assert out["mlp"]["wi"]["kernel"].dtype == dtype
    np.testing.assert_array_equal(kernel(out), np.asarray(expected))
    np.testing.assert_array_equal(np.asarray(out["scale"]), 1)
    if step < 4:
      np.testing.assert_array_equal(kernel(out), kernel(params))
    if step >= 16:
      assert nms.verify(out, rules).ok


@pytest.mark.filterwarnings("ignore:sr_ste at .* adds lam:UserWarning")
@pytest.mark.parametrize("name, mode", [("mdgf_linear", "masked"), ("sr_ste", "straight_through")])
def test_gradients_flow_through_sparsify(name, mode):
  recipe = make(name)
  rules, params = nms.Rules({"ff": recipe}), tree(weights(0))
  c = np.random.default_rng(1).normal(size=(K, N)).astype(np.float32)

  def loss(params, step):
    out = nms.sparsify(params, rules, step)
    return jnp.sum(out["mlp"]["wi"]["kernel"] * c) + jnp.sum(out["scale"])

  for step in (0, 6, 18):
    grads = jax.jit(jax.grad(loss))(params, jnp.int32(step))
    mask = top(np.abs(weights(0)), 2, 8)
    d = np.float32(recipe.decay(step))
    expected = c if mode == "straight_through" else np.where(mask, c, c * d)
    np.testing.assert_allclose(kernel(grads), expected, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(grads["scale"]), 1)


def test_what_no_rule_names_is_passed_through():
  params = tree(weights(0))
  out = nms.sparsify(params, nms.Rules({"ff": make("sr_ste")}), 5)
  assert out["scale"] is params["scale"]
  assert out["mlp"]["wi"]["bias"] is params["mlp"]["wi"]["bias"]


@pytest.mark.parametrize("name", ["one_shot", "snip", "idp"])
def test_sparsify_needs_the_state_of_stateful_recipes(name):
  rules = nms.Rules({"ff": make(name)})
  with pytest.raises(ValueError, match=f"{name}.*init_state"):
    nms.sparsify(tree(weights(0)), rules, 5)
  with pytest.raises(ValueError, match=f"{name}.*nms.finalize"):
    nms.finalize(tree(weights(0)), rules)


@pytest.mark.parametrize("lost", ["made", "renewed"])
def test_a_state_without_its_stamps_is_an_error(lost):
  params, rules = tree(weights(0)), nms.Rules({"ff": make("idp")})
  state = {key: x for key, x in nms.init_state(params, rules).items() if key != lost}
  for use in (
    lambda: nms.sparsify(params, rules, 0, state),
    lambda: nms.finalize(params, rules, state),
    lambda: nms.update_state(state, params, rules, 1),
  ):
    with pytest.raises(ValueError, match=f"idp at 'mlp/wi/kernel'.*no {lost!r}.*whole"):
      use()


def test_a_state_for_a_recipe_that_keeps_none_is_an_error():
  state = nms.init_state(tree(weights(0)), nms.Rules({"ff": make("idp")}))
  with pytest.raises(ValueError, match="sr_ste derives its mask"):
    nms.sparsify(tree(weights(0)), nms.Rules({"ff": make("sr_ste")}), 5, state)


@pytest.mark.parametrize("name, due", [("one_shot", 4), ("snip", 5), ("idp", 8)])
def test_a_forgotten_update_state_cannot_pass_unseen(name, due):
  rules, params = nms.Rules({"ff": make(name)}), tree(weights(1))
  state = nms.init_state(params, rules)
  old = nms.update_state(state, params, rules, due - 1, grads=params)
  for given in (state, old):
    same(sparsify(params, rules, due - 1, given), nms.sparsify(params, rules, due - 1, given))
    assert np.isfinite(kernel(sparsify(params, rules, due - 1, given))).all()
    assert np.isnan(kernel(sparsify(params, rules, due, given))).any()
    with pytest.raises(ValueError, match=f"'mlp/wi/kernel': at step {due}.*{name}.*update_state"):
      nms.sparsify(params, rules, due, given)
    with pytest.raises(ValueError, match=f"{name}.*out of date"):
      metrics.masks_of(params, rules, due, given)
  new = update(old, params, rules, due, grads=params)
  assert np.isfinite(kernel(sparsify(params, rules, due, new))).all()


def test_snip_needs_every_step_of_its_window():
  """A sum over other steps would be another score; a mask that was never taken is none."""
  rules, params = nms.Rules({"ff": make("snip", batches=3)}), tree(weights(1))
  for calls in ([6, 7, 8, 9], [5, 7, 8, 9], [12]):
    state = nms.init_state(params, rules)
    for step in calls:
      state = update(state, params, rules, step, grads=params)
    assert kernel(state["mask"]).all()
    assert np.isnan(kernel(sparsify(params, rules, 18, state))).any()
    with pytest.raises(ValueError, match="never taken.*gradients of steps 4 to 6, each once"):
      nms.finalize(params, rules, state)
  for step in range(1, 10):
    state = update(
      nms.init_state(params, rules) if step == 1 else state, params, rules, step, params
    )
  assert nms.verify(sparsify(params, rules, 18, state), rules).ok


def test_snip_refuses_gradients_of_another_shape():
  rules, params = nms.Rules({"ff": make("snip")}), tree(weights(1))
  with pytest.raises(ValueError, match=r"'mlp/wi/kernel' has shape \(1, 6\), the weight \(16, 6\)"):
    nms.update_state(nms.init_state(params, rules), params, rules, 5, tree(np.ones((1, 6))))


@pytest.mark.parametrize(
  "other", [make("one_shot", "1:8"), make("idp"), make("snip"), make("one_shot", gradient="masked")]
)
def test_a_mask_that_was_made_for_other_rules(other):
  params, old, new = tree(weights(1)), nms.Rules({"ff": make("one_shot")}), nms.Rules({"ff": other})
  state = nms.init_state(params, old)
  for step in range(1, 19):
    state = update(state, params, old, step)
  assert np.isfinite(kernel(sparsify(params, old, 18, state))).all()
  assert np.isnan(kernel(sparsify(params, new, 18, state))).any()
  for use in (nms.sparsify, metrics.masks_of):
    with pytest.raises(ValueError, match="'mlp/wi/kernel'.*made for another recipe.*init_state"):
      use(params, new, 18, state)
  with pytest.raises(ValueError, match="made for another recipe"):
    nms.finalize(params, new, state)


def test_a_state_of_a_later_step_is_refused():
  """A finished run's state beside a fresh optimizer."""
  rules = nms.Rules({"ff": make("one_shot")})
  params, state = trained(rules)
  with pytest.raises(ValueError, match="at step 7.*of step 20"):
    nms.sparsify(params, rules, 7, state)
  assert np.isnan(kernel(sparsify(params, rules, 7, state))).any()


def test_eager_calls_compile_once():
  """A notebook calls these outside jit; each call used to compile its branches anew."""
  rules = nms.Rules({"ff": make("sdgf_geometric", "1:2"), "q": make("idp", "2:8")})
  params = {**tree(weights(1)), "attention": {"query": {"kernel": jnp.ones((16, 2))}}}
  state = nms.init_state(params, rules)
  once = lambda: (
    nms.sparsify(params, rules, 5, state),
    nms.update_state(state, params, rules, 13),
    nms.finalize(params, nms.Rules({"ff": make("sdgf_geometric", "1:2")}), 20),
  )
  first = once()
  with jax.log_compiles(), caught_compilations() as messages:
    same(once(), first)
  assert messages == []


@contextlib.contextmanager
def caught_compilations():
  messages: list[str] = []

  class Catch(logging.Handler):
    def emit(self, record):
      if "Compiling" in record.getMessage():
        messages.append(record.getMessage())

  handler, logger = Catch(logging.WARNING), logging.getLogger("jax")
  logger.addHandler(handler)
  try:
    yield messages
  finally:
    logger.removeHandler(handler)


def test_a_recipe_of_your_own_may_keep_a_mask():
  """Renewed every four steps, with the number of renewals as state of its own."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class EveryFour(recipes.OneShot):
    name = "every_four"

    def renewals(self, step):
      return jnp.asarray(step, jnp.int32) // 4

    def first_state(self, groups, w):
      return {"mask": groups.magnitude_mask(w, self.pattern), "times": jnp.int32(0)}

    def next_state(self, groups, state, w, step, last, grad, grad_at):
      due = self.renewals(step) > self.renewals(last)
      mask = jnp.where(due, groups.magnitude_mask(w, self.pattern), state["mask"])
      return {"mask": mask, "times": state["times"] + due.astype(jnp.int32)}

  rules = nms.Rules({"ff": EveryFour(pattern=nms.NM(2, 8), phases=nms.Phases(total=20))})
  state = nms.init_state(tree(weights(0)), rules)
  for step in range(1, 10):
    state = update(state, tree(weights(step)), rules, step)
    np.testing.assert_array_equal(kernel(state["mask"]), top(abs(weights(step // 4 * 4)), 2, 8))
    assert kernel(state["times"]) == step // 4
  out = kernel(sparsify(tree(weights(9)), rules, 9, state))
  np.testing.assert_array_equal(out, weights(9) * kernel(state["mask"]))


def test_a_stateful_recipe_must_say_what_it_stores():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Half(recipes.SrSte):
    name = "half"
    stateful = True

  rules = nms.Rules({"ff": Half(pattern=nms.NM(2, 8), phases=PHASES)})
  with pytest.raises(NotImplementedError, match="half is stateful.*first_state"):
    nms.init_state(tree(weights(0)), rules)


# --- finalize -------------------------------------------------------------------------------------


def trained(rules, upto=20):
  params = tree(weights(upto))
  state = nms.init_state(tree(weights(0)), rules)
  for step in range(1, upto + 1):
    p = tree(weights(step))
    state = update(state, p, rules, step, grads=p)
  return params, state


@pytest.mark.parametrize("name", [*STATELESS, "one_shot", "snip", "idp"])
def test_finalize_writes_zeros_and_keeps_the_bits_of_survivors(name):
  rules = nms.Rules({"ff": make(name)})
  params, state = trained(rules)
  done = nms.finalize(params, rules, state or 20)
  w, out = kernel(params), kernel(done)
  # What training saw at its last step, and its fixed point.
  np.testing.assert_array_equal(out, kernel(nms.sparsify(params, rules, 20, state)))
  same(nms.finalize(done, rules, state or 20), done)
  kept = kernel(state["mask"]) if name in ("one_shot", "snip") else None
  if kept is None:
    kept = top(np.abs(w), 2, 8, kernel(state["mask"]) if name == "idp" else None)
  np.testing.assert_array_equal(out.view(np.uint32), np.where(kept, w, 0).view(np.uint32))
  assert done["scale"] is params["scale"]
  assert nms.verify(done, rules).ok


def test_finalize_works_on_the_target_whatever_the_step_was():
  rules = nms.Rules({"ff": make("sdgf_geometric")})
  w = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
  done = nms.finalize(tree(w), rules, early=True)
  np.testing.assert_array_equal(kernel(done), np.where(top(np.abs(w), 2, 8), w, 0))


@pytest.mark.parametrize("name", ["one_shot", "snip"])
def test_finalize_refuses_a_mask_that_was_never_taken(name):
  rules = nms.Rules({"ff": make(name)})
  params, state = trained(rules, upto=3)
  with pytest.raises(ValueError, match=f"mlp/wi/kernel.*{name}.*never taken.*update_state"):
    nms.finalize(params, rules, state)


def test_finalize_under_jit():
  rules = nms.Rules({"ff": make("one_shot")})
  params, state = trained(rules)
  same(jax.jit(lambda p, s: nms.finalize(p, rules, s))(params, state),
       nms.finalize(params, rules, state))  # fmt: skip


# --- verify ---------------------------------------------------------------------------------------


def report(w, pattern="2:4", axes=None, indivisible="error"):
  recipe = nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  rules = nms.Rules({".*kernel": recipe}, axes=axes, indivisible=indivisible)
  return nms.verify({"a": {"kernel": w}}, rules)


def test_verify_counts():
  w = np.zeros((8, 3), np.float32)
  w[[0, 3], 1] = 1
  w[4, 2] = -1
  found = report(w)
  (place,) = found.places
  assert found.ok and (place.groups, place.bad_groups, place.most) == (6, 0, 2)
  assert place.density == 3 / 24 and place.first is None
  assert str(found).splitlines()[-1] == "ok"


def test_verify_of_integers_and_of_what_has_no_zero():
  assert not report(np.array([[-128], [-128], [-128], [5]], np.int8), "1:4").ok
  assert report(np.array([[0], [-128], [0], [0]], np.int8), "1:4").ok
  with pytest.raises(ValueError, match="'a/kernel' has dtype complex64"):
    report(np.ones((4, 1), np.complex64))


def test_verify_says_what_is_not_finite():
  w = np.zeros((8, 3), np.float32)
  w[0, 0], w[5, 1] = np.nan, np.inf
  found = report(w)
  assert not found.ok and "warning  a/kernel: 2 inf or NaN" in str(found)
  w[5, 1] = w[0, 0] = 1
  assert "warning" not in str(report(w))


def test_verify_names_the_first_path_and_index():
  w = np.zeros((8, 3), np.float32)
  w[4:7, 1] = 1
  w[4:8, 2] = 1
  params = {"a": {"kernel": np.zeros((4, 1), np.float32)}, "b": {"kernel": w}}
  recipe = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=1))
  found = nms.verify(params, nms.Rules({".*": recipe}))
  assert not found.ok
  bad = [p for p in found.places if p.bad_groups]
  assert [(p.path, p.first, p.bad_groups, p.most) for p in bad] == [("b/kernel", (4, 1), 2, 4)]
  assert "b/kernel" in str(found) and "(4, 1)" in str(found) and "NOT n:m" in str(found)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
  "value, counts",
  [(0.0, False), (-0.0, False), (np.nan, True), (-np.inf, True), (-1.0, True), (6e-8, True)],
)
def test_what_counts_as_a_zero(value, counts, dtype):
  w = np.ones((4, 1), dtype)
  w[2:] = np.asarray(value, dtype)
  assert report(w).ok == (not counts)
  assert report(jnp.asarray(w)).ok == (not counts)


@pytest.mark.parametrize("value", [1e-40, -1e-45])
def test_subnormals_are_not_zero(value):
  w = np.array([1, 1, value, 0], np.float32).reshape(4, 1)
  assert not report(w).ok
  assert not report(jnp.asarray(w)).ok


@pytest.mark.filterwarnings("ignore:rule .* seems to be that of the outputs:UserWarning")
@pytest.mark.parametrize(
  "shape, axes, bad, first",
  [
    ((3, 8), -1, [(1, 5), (1, 6), (1, 7)], (1, 4)),
    ((2, 8, 3), 1, [(1, 0, 2), (1, 1, 2), (1, 3, 2)], (1, 0, 2)),
    ((4, 2, 3), (0, 1), [(2, 0, 1), (2, 1, 1), (3, 1, 1)], (2, 0, 1)),
    ((2, 2, 2, 3), (1, 2), [(1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 1, 1)], (1, 0, 0, 1)),
    ((3, 8, 2), (-2,), [(2, 4, 0), (2, 5, 0), (2, 6, 0)], (2, 4, 0)),
  ],
)
def test_verify_along_any_axis(shape, axes, bad, first):
  w = np.zeros(shape, np.float32)
  for index in bad[:2]:
    w[index] = 1
  assert report(w, axes={".*": axes}).ok
  w[bad[2]] = 1
  (place,) = report(w, axes={".*": axes}).places
  assert place.bad_groups == 1 and place.first == first


def test_verify_where_the_last_group_is_short():
  w = np.zeros((6, 1), np.float32)
  w[:2] = w[4:] = 1
  found = report(w, indivisible="pad")
  assert found.ok and found.places[0].groups == 2 and found.places[0].density == 4 / 6
  assert not report(w, "1:4", indivisible="pad").ok
  assert report(w, "1:4", indivisible="pad").places[0].first == (0, 0)


def test_verify_of_nothing_sparse_is_not_ok():
  """A proof about no weight proves nothing."""
  assert not nms.verify(tree(weights(0)), nms.Rules({"ff": nms.recipe("dense")})).ok
  assert not report(np.zeros((6, 1), np.float32), indivisible="skip").ok


def test_dense_weights_are_not_n_m():
  assert not report(np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)).ok


@pytest.mark.filterwarnings("ignore:rule .* keeps:UserWarning")
@pytest.mark.parametrize("pattern", ["1:4", "2:8", "3:8", "31:32", "5:128"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_finalized_weights_full_of_ties_verify(pattern, dtype):
  recipe = nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  rules = nms.Rules({"ff": recipe})
  for w in (weights(3, (128, 7)), np.ones((128, 7)), np.zeros((128, 7)), -np.ones((128, 7))):
    params = tree(jnp.asarray(w, dtype))
    done = finalize(params, rules)
    assert nms.verify(done, rules).ok
    n, m = recipe.pattern.n, recipe.pattern.m
    expected = np.where(top(np.abs(w), n, m), kernel(params), 0)
    np.testing.assert_array_equal(kernel(done), expected)


def test_finalize_and_verify_under_pad():
  recipe = nms.recipe("sr_ste", pattern="2:8", phases=nms.Phases(total=1))
  rules = nms.Rules({"ff": recipe}, indivisible="pad")
  w = weights(5, (21, 4))
  done = finalize(tree(w), rules)
  assert nms.verify(done, rules).ok and not nms.verify(tree(np.ones((21, 4))), rules).ok
  padded = np.concatenate([w, np.zeros((3, 4))])
  np.testing.assert_array_equal(kernel(done), np.where(top(np.abs(padded), 2, 8)[:21], w, 0))


def test_verify_names_what_was_skipped():
  params = {
    "mlp": {
      "wi": {"kernel": np.eye(8, dtype=np.float32)},
      "wo": {"kernel": np.ones((6, 8), np.float32)},
    }
  }
  rules = nms.Rules({"ff": make("sr_ste", "1:8")}, indivisible="skip")
  report = nms.verify(params, rules)
  assert report.ok and list(report.skipped) == ["mlp/wo/kernel"]
  assert "skipped  mlp/wo/kernel" in str(report) and "no multiple of 8" in str(report)


def test_a_finalized_checkpoint_trains_on_under_its_zeros():
  """Point 11: the supported way to train longer, a second run by one_shot without a dense phase."""
  first = nms.Rules({"ff": make("mdgf_linear")})
  params = nms.finalize(tree(weights(0)), first, PHASES.total)
  longer = nms.Rules({"ff": make("one_shot", phases=nms.Phases(total=3))})
  tx = nms.sparse(optax.sgd(0.1), longer)
  opt, now = tx.init(params), params
  assert (kernel(nms.sparsify(now, longer, opt)) == kernel(params)).all()
  for _ in range(3):
    updates, opt = tx.update(jax.tree.map(jnp.ones_like, now), opt, now)
    now = optax.apply_updates(now, updates)
  zeros = kernel(params) == 0
  done = kernel(nms.finalize(now, longer, opt))
  kept = top(np.abs(kernel(params)), 2, 8)
  assert (done[zeros & ~kept] == 0).all() and (done[kept] == kernel(now)[kept]).all()


def test_kernels_of_like_layers_are_one_row():
  """Point 10: `finalize` and `verify` printed a row for each kernel, 30 of them."""
  layer = {"mlp": {name: {"kernel": jnp.asarray(weights(0, (8, 8)))} for name in ("wi_0", "wi_1")}}
  params = {f"layers_{i}": layer for i in range(3)}
  rules = nms.Rules({"ff": make("sr_ste", pattern="2:4")})
  name = "layers_{0..2}/mlp/wi_{0,1}/kernel"
  head, row = str(rules.assign(params)).splitlines()
  assert row.split()[0] == name and row.split()[5] == str(6 * 16)
  done = nms.finalize(params, rules, PHASES.total)
  head, row, verdict = str(nms.verify(done, rules)).splitlines()
  assert row.split()[:5] == [name, "2:4", "0", "96", "0"] and verdict == "ok"
  # A bad kernel has a row of its own, and its first bad group.
  done["layers_1"]["mlp"]["wi_0"]["kernel"] = jnp.ones((8, 8))
  head, *rows, verdict = str(nms.verify(done, rules)).splitlines()
  bad = next(row for row in rows if row.startswith("layers_1/mlp/wi_0/kernel"))
  assert bad.split()[3:5] == ["16", "16"] and "(0, 0)" in bad and verdict == "NOT n:m"
  assert sum(int(row.split()[3]) for row in rows) == 96
  report = str(nms.verify(params, rules))
  assert report.count("kernel") == 2 and "layers_0/mlp/wi_0/kernel (0, " in report
