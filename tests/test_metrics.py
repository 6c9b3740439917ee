"""What metrics report, against numpy in float64 and against what `sparsify` really does."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics, variances

PHASES = nms.Phases(total=20, dense=3, finetune=5)
WI, WO = "mlp/wi/kernel", "mlp/wo/kernel"

# A new recipe joins by one line, if it needs fields.
FIELDS = {
  "custom": {"path": ((4, "4:8", 1.0), (8, "2:4", 0.5), (11, "1:4", 0.0))},
  "sdgf_geometric": {"k": 4, "decay_kind": "linear", "beta": 0.2},
  "snip": {"batches": 2},
}


def make(name, pattern="1:4", **fields):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **{**FIELDS.get(name, {}), **fields})


def draw(seed, dtype=jnp.float32, wi=(16, 6), wo=(32, 5), scale=1.0):
  rng = np.random.default_rng(seed)
  array = lambda shape: jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype))
  return {
    "mlp": {"wi": {"kernel": array(wi)}, "wo": {"kernel": array(wo)}},
    "norm": {"scale": array(wi[:1])},
  }


def leaf(tree, path):
  for word in path.split("/"):
    tree = tree[word]
  return np.asarray(tree)


def close(x, y):
  """Equal up to the roundings of one division."""
  return np.allclose(x, y, rtol=2.5e-7, atol=0)


def wide(x):
  return np.asarray(x, np.float64)


def adam_state(tx, params, grads=()):
  """The state of `tx` after some updates; optax promotes dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    state, update = tx.init(params), jax.jit(tx.update)
    for g in grads:
      _, state = update(g, state, params)
  return state


# --- a whole run of every recipe, one compilation ---------------------------------------------


PAIRS = [("one_shot", "sr_ste"), ("mdgf_exponential", "snip"), ("idp", "sdgf_geometric")]


@pytest.mark.parametrize("first, second", PAIRS)
def test_summary_follows_every_recipe_through_a_run_in_one_compilation(first, second):
  recipes, sizes = {WI: make(first), WO: make(second, "2:8")}, {WI: 96, WO: 160}
  rules = nms.Rules(recipes)
  traces = []

  @jax.jit
  def observe(params, step, state, grads, nu, before):
    traces.append(step)
    opt_state = optax.ScaleByAdamState(count=step, mu=nu, nu=nu)
    out = metrics.summary(params, rules, step, state, grads, opt_state, before)
    return out, metrics.masks_of(params, rules, step, state)

  sparsify = jax.jit(lambda p, t, s: nms.sparsify(p, rules, t, s))
  refresh = jax.jit(lambda s, p, t, g: nms.update_state(s, p, rules, t, grads=g))
  params = draw(0)
  state = nms.init_state(params, rules)
  before = {path: jnp.ones(leaf(params, path).shape, bool) for path in (WI, WO)}
  for step in range(PHASES.total):
    grads, nu = draw(100 + step), jax.tree.map(jnp.square, draw(200 + step))
    seen, masks = observe(params, jnp.int32(step), state, grads, nu, before)
    seen = jax.device_get(seen)
    applied = sparsify(params, jnp.int32(step), state)
    samples = {"g": {"all": [], "kept": []}, "v": {"all": [], "kept": []}}
    used, factor, changed, lost, kept_before = 0, 0.0, 0, 0, 0
    for path, rule in recipes.items():
      w, effective, mask = leaf(params, path), leaf(applied, path), np.asarray(masks[path])
      # D is what became of the pruned weights. A mask that prunes nothing says nothing of D.
      d = wide(effective)[~mask] / wide(w)[~mask] if not mask.all() else rule.decay(step)
      np.testing.assert_allclose(seen[f"nm/D/{path}"], np.broadcast_to(d, np.shape(d)), rtol=1e-5)
      np.testing.assert_array_equal(effective[mask], w[mask])
      assert close(seen[f"nm/density/{path}"], (effective != 0).sum() / w.size)
      segment = next(s for s in rule.timeline(w.shape[0]) if s.start <= step < s.stop)
      now = segment.pattern or nms.NM(1, 1)
      assert (seen[f"nm/n/{path}"], seen[f"nm/m/{path}"]) == (now.n, now.m), step
      assert seen[f"nm/density_target/{path}"] == rule.pattern.density
      old = np.asarray(before[path])
      assert close(seen[f"nm/flip_rate/all/{path}"], (old != mask).sum() / w.size)
      assert close(seen[f"nm/flip_rate/kept/{path}"], (old & ~mask).sum() / old.sum())
      for kind, x in (("g", np.abs(wide(leaf(grads, path)))), ("v", wide(leaf(nu, path)))):
        long = {"g": "grad_abs_var", "v": "second_moment_var"}[kind]
        for which, values in (("all", x.ravel()), ("kept", x[mask])):
          samples[kind][which].append(values)
          np.testing.assert_allclose(seen[f"nm/{long}/{which}/{path}"], values.var(), rtol=2e-6)
          whole = np.concatenate(samples[kind][which])
          if path == WO:
            np.testing.assert_allclose(seen[f"nm/{long}/{which}"], whole.var(), rtol=2e-6)
      used += (effective != 0).sum()
      factor += float(seen[f"nm/D/{path}"]) * sizes[path] / 256
      changed, lost = changed + (old != mask).sum(), lost + (old & ~mask).sum()
      kept_before += old.sum()
    assert close(seen["nm/density"], used / 256)
    np.testing.assert_allclose(seen["nm/D"], factor, rtol=1e-6)
    assert close(seen["nm/flip_rate/all"], changed / 256)
    assert close(seen["nm/flip_rate/kept"], lost / kept_before)
    if step < PHASES.dense:
      assert seen["nm/density"] == seen["nm/D"] == 1
    if step >= PHASES.finetune_start:
      assert close(seen["nm/density"], 0.25) and seen["nm/density_target"] == 0.25
    params = jax.tree.map(
      lambda w, g: np.asarray(w) - np.float32(0.3) * np.asarray(g), params, grads
    )
    state = refresh(state, params, jnp.int32(step + 1), grads)
    before = masks
  assert len(traces) == 1


def test_functions_say_the_same_as_the_summary_and_jit_the_same_as_eager():
  rules = nms.Rules({"ff": make("sdgf_stepwise", "1:8")})
  params, grads = draw(1), draw(2)
  opt_state = adam_state(optax.adamw(1e-3), params, [grads])
  share = metrics.density(params, rules, 9)
  g = metrics.grad_abs_variance(grads, params, rules, 9)
  v = metrics.second_moment_variance(opt_state, params, rules, 9)
  now = metrics.pattern_now(params, rules, 9)
  summary = jax.jit(lambda t: metrics.summary(params, rules, t, None, grads, opt_state))
  seen = summary(jnp.int32(9))
  for name, value in {
    "nm/density": share.overall,
    f"nm/density_target/{WO}": share.targets[WO],
    "nm/grad_abs_var/kept": g.overall.kept,
    f"nm/grad_abs_var/all/{WO}": g.places[WO].all,
    f"nm/second_moment_var/kept/{WI}": v.places[WI].kept,
    f"nm/D/{WI}": metrics.decay(params, rules, 9)[WI],
    f"nm/n/{WI}": now[WI].n,
  }.items():
    np.testing.assert_allclose(value, seen[name], rtol=1e-6, err_msg=name)
  assert now[WI].n.dtype == now[WI].m.dtype == jnp.int32


# --- a sample in two halves -------------------------------------------------------------------


@functools.cache
def an_update():
  """The rules, both sides of an update, and the summary of both."""
  rules = nms.Rules({WI: make("idp"), WO: make("sdgf_stepwise", "1:8")})
  old, new, grads = draw(0), draw(1), draw(2)
  opt_state = adam_state(optax.adam(1e-3), new, [grads])
  update = jax.jit(lambda state, params, step: nms.update_state(state, params, rules, step))
  state = nms.init_state(old, rules)
  for step in range(1, 9):
    state = update(state, old, step)
  later = update(state, new, 9)
  masks = metrics.masks_of(old, rules, 8, state)
  first = metrics.summary(old, rules, 8, state, grads)
  want = metrics.summary(new, rules, 9, later, None, opt_state, masks)
  want |= {k: v for k, v in first.items() if k.startswith("nm/grad_abs_var")}
  return rules, (old, state, grads), (new, later, opt_state), want


@pytest.mark.parametrize("per_place", [True, ("density", "n")])
def test_a_sample_in_two_halves_is_the_summary_of_both_sides_of_an_update(per_place):
  rules, (old, state, grads), (new, later, opt_state), want = an_update()
  half = lambda p, t, s, g: metrics.before(p, rules, t, s, g, per_place=per_place)
  seen = jax.jit(half)(old, jnp.int32(8), state, grads)
  rest = lambda p, t, s, b, o: metrics.after(p, rules, t, s, b, o, per_place=per_place)
  got = jax.jit(rest)(new, jnp.int32(9), later, seen, opt_state)
  in_place = lambda name: name.endswith((WI, WO))
  if per_place is not True:
    stems = tuple(f"nm/{name}/" for name in per_place or ())
    kept = lambda k: not in_place(k) or k in {s + p for s in stems for p in (WI, WO)}
    want = {k: v for k, v in want.items() if kept(k)}
  for name, now in metrics.pattern_now(new, rules, 9).items():  # here a rule is one place
    want = want | {f"nm/n/{name}": now.n, f"nm/m/{name}": now.m}
  assert set(got) == set(want)
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)
    assert got[name].dtype == jnp.float32
  assert got["nm/flip_rate/all"] > 0 and got["nm/density"] < 1


def test_a_sample_leaves_out_what_the_optimizer_does_not_keep():
  rules = nms.Rules({"ff": make("sdgf_geometric", "1:4")})
  params = draw(0, wi=(16, 6), wo=(32, 5))
  masks = metrics.before(params, rules, 9).masks
  assert metrics.before(params, rules, 9).scalars == {}
  names = lambda o: {
    k for k in metrics.after(params, rules, 9, None, metrics.Before(masks, {}), o) if "moment" in k
  }
  kinds = lambda name: {f"nm/{name}/all", f"nm/{name}/kept"}
  masked = optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.shape == (16, 6), p))
  assert names(None) == names(optax.sgd(1e-3).init(params)) == names(masked.init(params)) == set()
  assert names(optax.adam(1e-3).init(params)) == kinds("second_moment_var")
  moments = dict(flatten(params))
  assert names(metrics.SecondMoments(moments)) == kinds("second_moment_var")
  assert names(metrics.SecondMoments(moments, True)) == kinds("second_moment_var_factored")


# --- names and kinds --------------------------------------------------------------------------

BASE = {"density", "density_target", "D"}
SPLIT = {"flip_rate": "masks_before", "grad_abs_var": "grads", "second_moment_var": "opt_state"}


def names_of(given, paths):
  overall = BASE | {f"{k}/{w}" for k, arg in SPLIT.items() if arg in given for w in ("all", "kept")}
  each = {f"{k}/{p}" for k in overall | {"n", "m"} for p in paths}
  return {f"nm/{k}" for k in overall | each}


@pytest.mark.parametrize("names", [(), ("grads",), tuple(SPLIT.values())])
@pytest.mark.parametrize("per_place", [True, False])
def test_names_depend_only_on_the_arguments_and_values_are_float32_scalars(names, per_place):
  rules = nms.Rules({"ff": make("mdgf_exponential")})
  params = draw(3)
  masks = {WI: jnp.ones((16, 6), bool), WO: jnp.ones((32, 5), bool)}
  given = {"grads": params, "masks_before": masks}
  given["opt_state"] = adam_state(optax.adam(1e-3), params)
  given = {k: given[k] for k in names}
  seen = jax.eval_shape(
    lambda t: metrics.summary(params, rules, t, per_place=per_place, **given), jnp.int32(8)
  )
  assert set(seen) == names_of(names, (WI, WO) if per_place else ())
  assert {(x.shape, x.dtype.name) for x in seen.values()} == {((), "float32")}


def test_nothing_sparse_gives_finite_numbers_under_the_same_names():
  rules, params = nms.Rules({"ff": make("sr_ste", "1:64")}, indivisible="skip"), draw(0)
  given = {"grads": params, "opt_state": adam_state(optax.adam(1e-3), params), "masks_before": {}}
  seen = jax.jit(lambda t: metrics.summary(params, rules, t, **given))(jnp.int32(7))
  assert set(seen) == names_of(given, ())
  ones = {"nm/density", "nm/density_target", "nm/D"}
  assert {k for k, v in seen.items() if v == 1} == ones
  assert all(v == 0 for k, v in seen.items() if k not in ones)
  assert metrics.masks_of(params, rules, 7) == {}


# --- masks and flips --------------------------------------------------------------------------


JITTED_FLIP_RATE = jax.jit(metrics.flip_rate)
BITS = st.tuples(st.booleans(), st.booleans())


@given(st.sampled_from([0, 1, 13]).flatmap(lambda k: st.lists(BITS, min_size=k, max_size=k)))
def test_flip_rate_is_its_definition(pairs):
  before = np.array([a for a, _ in pairs], bool)
  after = np.array([b for _, b in pairs], bool)
  rate = metrics.flip_rate(before, after)
  changed = sum(a != b for a, b in pairs) / max(len(pairs), 1)
  lost = sum(a and not b for a, b in pairs) / max(sum(before), 1)
  assert close(rate.all, changed) and close(rate.kept, lost)
  assert rate.all.dtype == rate.kept.dtype == jnp.float32
  # A tree is one long mask, however it is cut.
  i = len(pairs) // 3
  cut = lambda x: {"a": {"b": jnp.asarray(x[:i])}, "c": [jnp.asarray(x[i:])]}
  assert close(JITTED_FLIP_RATE(cut(before), cut(after)), rate)


# --- variances --------------------------------------------------------------------------------


@functools.cache
def _stable():
  """One compilation for all cases below."""
  params, rules = draw(0, wi=(512, 64), wo=(256, 96)), nms.Rules({"ff": make("sr_ste", "1:16")})
  found = jax.jit(lambda g, t: metrics.grad_abs_variance(g, params, rules, t))
  return params, metrics.masks_of(params, rules, 9), found


@pytest.mark.parametrize("offset, scale", [(0, 1), (1000, 0.1), (1, 1e-4), (3, 0)])
def test_variance_is_stable(offset, scale):
  rng = np.random.default_rng(0)
  params, masks, variances = _stable()
  x = {p: (offset + scale * rng.random(leaf(params, p).shape)).astype(np.float32) for p in (WI, WO)}
  grads = {"mlp": {"wi": {"kernel": jnp.asarray(-x[WI])}, "wo": {"kernel": jnp.asarray(x[WO])}}}
  found = variances(grads, jnp.int32(9))
  pairs = [(wide(x[p]), np.asarray(masks[p])) for p in (WI, WO)]
  whole = np.concatenate([a.ravel() for a, _ in pairs])
  kept = np.concatenate([a[m] for a, m in pairs])
  tolerance = 1e-6 if not offset else 1e-3
  np.testing.assert_allclose(found.overall.all, whole.var(), rtol=tolerance)
  np.testing.assert_allclose(found.overall.kept, kept.var(), rtol=tolerance)
  for path, (a, m) in zip((WI, WO), pairs, strict=True):  # one place: the correction at work
    np.testing.assert_allclose(found.places[path].all, a.var(), rtol=3e-6)
    np.testing.assert_allclose(found.places[path].kept, a[m].var(), rtol=3e-6)


# --- where the second moment is ---------------------------------------------------------------


KERNELS = lambda p: jax.tree.map(lambda x: x.ndim == 2, p)
LABELS = lambda p: {"mlp": {"wi": "a", "wo": "b"}, "norm": "c"}
OPTIMIZERS = {
  "chain": optax.chain(optax.clip(1e9), nms.count_steps(), optax.adamw(1e-3, b2=0.9)),
  "parts": optax.multi_transform(
    {"a": optax.adam(1.0, b2=0.9), "b": optax.adamw(1.0, b2=0.9), "c": optax.sgd(1.0)}, LABELS
  ),
  "deep": optax.MultiSteps(
    optax.chain(
      optax.masked(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=0.9), KERNELS)
    ),
    every_k_schedule=1,
  ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_second_moment_is_found_wherever_it_is(kind):
  rules = nms.Rules({WI: make("sr_ste")})
  params, steps = draw(0), [draw(1), draw(2), draw(3)]
  opt_state = adam_state(OPTIMIZERS[kind], params, steps)
  found = jax.jit(lambda s, t: metrics.second_moment_variance(s, params, rules, t))(
    opt_state, jnp.int32(9)
  )
  moments = metrics.second_moments(opt_state, params)
  for path in (WI, WO):
    v = np.zeros(leaf(params, path).shape)
    for g in steps:
      v = 0.9 * v + 0.1 * wide(leaf(g, path)) ** 2
    np.testing.assert_allclose(moments[path], v, rtol=1e-5)
  for path, mask in metrics.masks_of(params, rules, 9).items():
    v = wide(moments[path])
    np.testing.assert_allclose(found.places[path].all, v.var(), rtol=1e-5)
    np.testing.assert_allclose(found.places[path].kept, v[mask].var(), rtol=1e-5)


@pytest.mark.parametrize("least", [9, 99])  # factored are: wi (16 x 12), none
def test_adafactors_second_moment_has_a_name_of_its_own_where_it_is_factored(least):
  rules, params = nms.Rules({"ff": make("sr_ste")}), draw(0, wi=(16, 12), wo=(12, 8))
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=least)
  opt_state = (adam_state(tx, params, [draw(1, wi=(16, 12), wo=(12, 8))]),)
  moments = metrics.second_moments(opt_state, params)
  found = metrics.summary(params, rules, 9, opt_state=opt_state)
  name = "nm/second_moment_var_factored" if least < 16 else "nm/second_moment_var"
  assert {k.split("/")[1] for k in found if "moment" in k} == {name.split("/")[1]}
  for path in (WI, WO):
    np.testing.assert_allclose(found[f"{name}/all/{path}"], wide(moments[path]).var(), rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 6), (1,)], ids=str)
def test_adafactors_axes_are_optaxs(shape):
  params, tx = {"w": jnp.ones(shape)}, optax.scale_by_factored_rms(min_dim_size_to_factor=2)
  state = tx.init(params)
  fresh = metrics.second_moments(state, params)["w"]
  assert fresh.shape == shape and (fresh == 0).all()  # and not 0 / 0
  g = {"w": jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)}
  for _ in range(2):
    updates, state = tx.update(g, state, params)
  v = (wide(g["w"]) / wide(updates["w"])) ** 2
  np.testing.assert_allclose(metrics.second_moments(state, params)["w"], v, rtol=1e-4)


def test_mistakes_are_named():
  params, rules, mask = draw(0), nms.Rules({"ff": make("sr_ste")}), jnp.ones((4, 2), bool)
  adam = optax.scale_by_adam()
  state = lambda *links: optax.chain(*links).init(params)
  norm = optax.masked(adam, lambda p: {"mlp": False, "norm": True})
  moment = lambda state: metrics.second_moment_variance(state, params, rules, 0)
  only_wo = {"mlp": {"wo": params["mlp"]["wo"]}}
  for word, do in (
    ("'b'", lambda: metrics.flip_rate({"a": mask, "b": mask}, {"a": mask})),
    ("pair up", lambda: metrics.summary(params, rules, 0, masks_before={WI: mask})),
    ("no second moment", lambda: moment(state(optax.sgd(1e-3)))),
    ("no second moment", lambda: moment(state(norm))),
    ("two second moments", lambda: moment(state(adam, adam))),
    ("no gradient", lambda: metrics.summary(params, rules, 0, grads=only_wo)),
    ("match no parameter", lambda: metrics.density({"norm": params["norm"]}, rules, 0)),
    ("negative", lambda: metrics.density(params, rules, -1)),
    ("whole", lambda: metrics.pattern_now(params, rules, 1.0)),
  ):
    with pytest.raises(ValueError, match=word):
      do()
  assert moment(state(adam, adam)[1]).overall.all == 0  # a part can be given


def test_a_traced_negative_step_is_loud():
  rules = nms.Rules({"ff": make("mdgf_linear")})
  seen = jax.jit(lambda t: metrics.summary(draw(0), rules, t))(jnp.int32(-1))
  for name in ("density", f"density/{WI}", "D", f"D/{WI}"):
    assert np.isnan(seen[f"nm/{name}"]), name
  assert seen[f"nm/n/{WI}"] == seen[f"nm/m/{WI}"] == 0


# --- odds and ends ----------------------------------------------------------------------------


def test_counts_are_exact_where_float32_sums_would_stall():
  mask = np.ones(2**24 + 10, bool)
  assert int(variances.count(mask)) == 2**24 + 10
  assert metrics.flip_rate(mask, mask) == (0, 0)


def test_the_examples_in_the_docstrings_run():
  found = doctest.testmod(metrics)
  assert found.attempted and not found.failed
