"""What metrics report, against numpy in float64 and against what `sparsify` really does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics

PHASES = nms.Phases(total=20, dense=3, finetune=5)
WI, WO = "mlp/wi/kernel", "mlp/wo/kernel"
FIELDS = {
  "sdgf_geometric": {"k": 4, "decay_kind": "linear", "beta": 0.2},
  "snip": {"batches": 2},
}


def make(name, pattern="1:4"):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **FIELDS.get(name, {}))


def draw(seed):
  rng = np.random.default_rng(seed)
  array = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  return {
    "mlp": {"wi": {"kernel": array((16, 6))}, "wo": {"kernel": array((32, 5))}},
    "scale": array((16,)),
  }


def wide(tree):
  """path -> float64 array."""
  return {path: np.asarray(x, np.float64) for path, x in flatten(tree)}


PAIRS = [("mdgf_exponential", "snip"), ("idp", "sdgf_geometric")]


@pytest.mark.parametrize("first, second", PAIRS)
def test_summary_follows_every_recipe_through_a_run_in_one_compilation(first, second):
  recipes = {WI: make(first), WO: make(second, "2:8")}
  rules, traces = nms.Rules(recipes), []

  @jax.jit
  def observe(params, step, state, grads, nu, seen):
    traces.append(step)
    seen = seen._replace(scalars=metrics.before(params, rules, step, state, grads).scalars)
    out = metrics.summary(params, rules, step, state, dict(flatten(nu)), seen)
    effective = nms.sparsify(params, rules, step, state)
    return out, metrics.masks_of(params, rules, step, state), effective

  refresh = jax.jit(lambda s, p, t, g: nms.update_state(s, p, rules, t, grads=g))
  params = draw(0)
  state = nms.init_state(params, rules)
  before = {path: jnp.ones(x.shape, bool) for path, x in flatten(params) if path in recipes}
  for step in range(PHASES.total):
    grads, nu = draw(100 + step), jax.tree.map(jnp.square, draw(200 + step))
    seen = metrics.Before(before, {})
    far = jax.tree.map(lambda g: np.float32(1000) + g, grads)  # where E[g^2] - E[g]^2 is noise
    found, masks, effective = observe(params, jnp.int32(step), state, far, nu, seen)
    joined = lambda tree: np.concatenate([wide(tree)[path].ravel() for path in recipes])
    was, mask = joined(before) > 0, joined(masks) > 0
    out, g, v = joined(effective), joined(far), joined(nu)
    want = {
      "density": np.mean(out != 0), "density_target": 0.25,
      "flip_rate/all": np.mean(was ^ mask), "flip_rate/kept": (was & ~mask).sum() / was.sum(),
      "grad_abs_var/all": g.var(), "grad_abs_var/kept": g[mask].var(),
      "second_moment_var/all": v.var(), "second_moment_var/kept": v[mask].var(), "D": 0.0,
    }  # fmt: skip
    for path, recipe in recipes.items():
      segment = next(s for s in recipe.timeline(32) if s.start <= step < s.stop)
      now, mask = segment.pattern or nms.NM(1, 1), masks[path]
      want["D"] += mask.size / 256 * float(recipe.decay(step))
      want |= {f"n/{path}": now.n, f"m/{path}": now.m}
    assert {f"nm/{name}" for name in want} == set(found)
    for name, value in want.items():
      np.testing.assert_allclose(found[f"nm/{name}"], value, rtol=3e-6, err_msg=f"{name}, {step}")
    params = jax.tree.map(lambda w, g: w - jnp.float32(0.3) * g, params, grads)
    state, before = refresh(state, params, jnp.int32(step + 1), grads), masks
  assert len(traces) == 1


def test_nothing_sparse_gives_finite_numbers_and_no_step_is_loud():
  rules, params = nms.Rules({"ff": make("sr_ste", "1:64")}, indivisible="skip"), draw(0)
  found = metrics.summary(
    params, rules, 7, None, {}, metrics.before(params, rules, 7, None, params)
  )
  ones = {"nm/density", "nm/density_target", "nm/D"}
  assert len(found) == 9 and {name: x for name, x in found.items() if x} == dict.fromkeys(ones, 1)
  rules = nms.Rules({"ff": make("mdgf_linear")})
  found = jax.jit(lambda t: metrics.summary(params, rules, t))(jnp.int32(-1))
  assert {name for name, x in found.items() if np.isnan(x)} == {"nm/density", "nm/D"}
  assert found["nm/n/ff"] == found["nm/m/ff"] == 0


def test_counts_are_exact_where_float32_sums_would_stall():
  mask = np.ones(2**24 + 10, bool)
  np.testing.assert_allclose(metrics.flip_rate([mask, mask[:0]], [~mask, mask[:0]]), (1, 1), 1e-7)
  # XLA multiplies by 1 / size, and 41 of 41 would be 0.99999994.
  for size in (41, 47, 55):
    assert (1, 1) == jax.jit(metrics.flip_rate)(mask[:size], ~mask[:size])


# --- second moments -------------------------------------------------------------------------------

# Each parameter has another optimizer, and each of these is wrapped.
PARTS = {
  "a": optax.MultiSteps(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=0.9), 1),
  "b": optax.chain(optax.clip(1e9), nms.count_steps(), optax.adamw(1e-3, b2=0.9)),
  "c": optax.sgd(1.0),
}
LABELS = {"mlp": {"wi": "a", "wo": "b"}, "scale": "c"}


def test_adams_second_moment_is_found_wherever_it_is():
  params, grads, tx = draw(0), [draw(1), draw(2)], optax.multi_transform(PARTS, LABELS)
  with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
    state = tx.init(params)
    for g in grads:
      _, state = jax.jit(tx.update)(g, state, params)
  found = metrics.second_moments(state, params)
  assert set(found) == {WI, WO}
  for path in (WI, WO):
    first, second = (0.1 * wide(g)[path] ** 2 for g in grads)
    np.testing.assert_allclose(found[path], 0.9 * first + second, rtol=1e-5)
  rules = nms.Rules({path: make("sr_ste") for path in (WI, "scale")}, axes={"scale": 0})
  summary = metrics.summary(params, rules, 9, moments=found)  # of all kernels or of none
  assert not any("second_moment_var" in name for name in summary)


def test_adafactors_estimate_is_optaxs():
  params = {"w": jnp.ones((2, 8, 6)), "v": jnp.ones(1)}
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
  state, rng = tx.init(params), np.random.default_rng(1)
  fresh = metrics.second_moments(state, params)
  assert all((x == 0).all() for x in fresh.values())  # and not 0 / 0
  g = jax.tree.map(lambda w: jnp.asarray(rng.standard_normal(w.shape), jnp.float32), params)
  for _ in range(2):
    updates, state = tx.update(g, state, params)
  found = metrics.second_moments(state, params)
  for name in params:
    v = (wide(g)[name] / wide(updates)[name]) ** 2
    np.testing.assert_allclose(found[name], v, rtol=1e-4)
