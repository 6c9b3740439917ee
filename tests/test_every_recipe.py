"""What every recipe promises. A new one joins by a line in CASES, and its fields by OTHERS."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import gradients
from nm_sparsity_jax.recipes import RECIPES

PHASES = nms.Phases(total=24, dense=3, finetune=5)  # 16 sparsify steps; j* = 16.8 - 3
STEPS = range(PHASES.total + 2)
FINETUNE = 19
SHAPE = (16, 3)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
ULP = {"f32": 2**-21, "bf16": 2**-8, "f16": 2**-11}  # of a float32 D, or of one rounding


@dataclasses.dataclass(frozen=True)
class Case:
  """A recipe, and by hand what it must do: the first step of each pattern, D(j), the gradient."""

  recipe: nms.Recipe
  levels: tuple[tuple[int, str], ...]
  decay: object = lambda j: 0.0
  mode: str = "masked"

  @property
  def name(self):
    return self.recipe.name

  def pattern_at(self, step):
    """(n, m) that holds, None = dense."""
    held = [pattern for start, pattern in self.levels if start <= step]
    return tuple(map(int, held[-1].split(":"))) if held else None

  def decay_at(self, step):
    if self.pattern_at(step) is None:
      return 1.0
    return 0.0 if step >= FINETUNE else self.decay(step - 3)


def make(name, pattern="1:4", **fields):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **fields)


def linear(j):
  return max(1 - j / 13.8, 0.0)


def exponential(j):
  return math.exp(-math.log(1000) / 13.8 * j)


def along_path(j):
  return float(np.interp(j + 3, [5, 9, 13, 16, 19], [1.0, 0.5, 0.0, 0.25, 0.0]))


PATH = ((5, "8:16", 1.0), (9, "2:8", 0.5), (13, "3:4", 0.0), (16, "1:2", 0.25))
PATH_LEVELS = ((5, "8:16"), (9, "2:8"), (13, "3:4"), (16, "1:2"), (19, "1:4"))
THIRDS = ((3, "3:4"), (8, "2:4"), (13, "1:4"))
EIGHTHS = ((3, "7:8"), (8, "4:8"), (13, "3:8"))
GEOMETRIC = ((3, "4:16"), (8, "2:8"), (13, "1:4"))
ST = "straight_through"

CASES = {
  "dense": Case(make("dense"), ()),
  "one_shot": Case(make("one_shot"), ((3, "1:4"),)),
  "sr_ste": Case(make("sr_ste", "2:4"), ((3, "2:4"),), mode=ST),
  "mdgf_linear": Case(make("mdgf_linear"), ((3, "1:4"),), linear),
  "mdgf_linear slow": Case(
    make("mdgf_linear", "2:8", beta=0.04), ((3, "2:8"),), lambda j: 1 - 0.04 * j
  ),
  "mdgf_linear st": Case(make("mdgf_linear", gradient=ST), ((3, "1:4"),), linear, ST),
  "mdgf_exponential": Case(make("mdgf_exponential"), ((3, "1:4"),), exponential),
  "sdgf_stepwise": Case(make("sdgf_stepwise"), THIRDS),
  "sdgf_stepwise linear": Case(make("sdgf_stepwise", "3:8", decay_kind="linear"), EIGHTHS, linear),
  "sdgf_geometric": Case(make("sdgf_geometric", k=4), GEOMETRIC),
  "sdgf_geometric exp st": Case(
    make("sdgf_geometric", k=4, decay_kind="exponential", gradient=ST),
    GEOMETRIC,
    exponential,
    ST,
  ),
  "custom": Case(make("custom", path=PATH), PATH_LEVELS, along_path),
  "snip": Case(make("snip", batches=2), ((5, "1:4"),)),
  "idp": Case(make("idp", "3:8"), EIGHTHS, mode=ST),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Only a D between 0 and 1 is a product that a narrow dtype rounds.
FADING = [name for name in CASES if name.startswith("mdgf") or "linear" in name or "exp" in name]
every_dtype = pytest.mark.parametrize(
  "case, dtype",
  [
    *(pytest.param(case, "f32", id=f"{name}-f32") for name, case in CASES.items()),
    *(pytest.param(CASES[name], d, id=f"{name}-{d}") for name in FADING for d in ("bf16", "f16")),
  ],
)


def weights(seed=0, shape=SHAPE, dtype="f32"):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), DTYPES[dtype])


def top(scores, n, m, allowed=None):
  """The mask of the n largest of each m along axis 0, by sorting: larger, then lower index."""
  s = np.asarray(scores).astype(np.float64)
  s = np.where(np.isnan(s), -np.inf, s)
  if allowed is not None:
    s = np.where(allowed, s, -np.inf)
  groups = s.reshape(-1, m, *s.shape[1:])
  order = np.argsort(-groups, axis=1, kind="stable")
  return (np.argsort(order, axis=1) < n).reshape(s.shape)


def magnitude(w):
  return np.abs(np.asarray(w).astype(np.float64))


def stored(case, w, step):
  """The state a training loop carries at `step`; None = keeps none.

  The weights of earlier steps were others, |g| times these, so that today's largest weights
  are not all among the survivors; snip's scores are |g * w| as well.
  """
  if not case.recipe.stateful:
    return None
  keep = np.ones(w.shape, bool)
  scores = magnitude(w) * np.abs(np.random.default_rng(7).normal(size=w.shape))
  held = [p for start, p in case.levels if start <= step]
  if case.name == "idp":
    for pattern in held[:-1]:  # the masks of the levels that are over
      keep = top(scores, *map(int, pattern.split(":")), allowed=keep)
  elif held:
    keep = top(scores, *case.pattern_at(step))
  return jnp.asarray(keep)


def expected_mask(case, w, step):
  if case.pattern_at(step) is None:
    return np.ones(w.shape, bool)
  keep = stored(case, w, step)
  if case.recipe.stateful and case.name != "idp":
    return np.asarray(keep)
  return top(magnitude(w), *case.pattern_at(step), allowed=keep)


def forward_and_backward(recipe, w, step, keep, ct, axis=0):
  """W~, the gradient of sum(ct * W~), the mask, D."""
  out, pull = jax.vjp(lambda w: recipe.effective(w, step, axis, keep), w)
  return out, pull(ct)[0], recipe.mask(w, step, axis, keep), recipe.decay(step)


traces = collections.Counter()


@functools.partial(jax.jit, static_argnames=("recipe", "axis"))
def jitted(recipe, w, step, keep, ct, axis=0):
  traces[recipe, w.dtype, w.shape, axis] += 1
  return forward_and_backward(recipe, w, step, keep, ct, axis)


def run(case, w, step, ct=None, keep=None):
  ct = jnp.ones_like(w) if ct is None else ct
  keep = stored(case, w, step) if keep is None else keep
  return jitted(case.recipe, w, jnp.int32(step), keep, ct)


def bits(x):
  x = np.asarray(x)
  return x if x.dtype == bool else x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(got, want):
  assert got.dtype == want.dtype and got.shape == want.shape
  np.testing.assert_array_equal(bits(got), bits(want))


def a_step_of_each_level(case):
  """0, the last step before and the first of each level, and one within."""
  starts = [start for start, _ in case.levels] + [FINETUNE]
  return sorted({0, *(s - 1 for s in starts), *starts, *(s + 1 for s in starts)})


def test_every_recipe_has_a_case():
  assert {case.name for case in CASES.values()} == set(RECIPES)


@every_dtype
def test_equals_dense_bit_for_bit_while_d_is_one(case, dtype):
  """In the dense phase, and at the first step of a decay: a product would lose what is tiny."""
  w = np.asarray(weights(3, dtype=dtype)).copy()
  w[:8, 0] = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-40, -1e-6])
  w[:4, 1] = np.array([1e-7, -6e-8, 1e-39, -1e-41])
  w, ct = jnp.asarray(w), weights(4, dtype=dtype)
  first = min([start for start, _ in case.levels], default=PHASES.total - 1)
  assert first >= PHASES.dense
  for step in range(first + (case.decay_at(first) == 1)):
    out, grad, mask, decay = run(case, w, step, ct)
    assert_same_bits(out, w)
    assert_same_bits(grad, ct)
    assert decay == 1 and mask.all() == (case.pattern_at(step) is None)


@every_dtype
def test_forward_and_gradient_are_the_equation_in_float64(case, dtype):
  w, ct = weights(8, dtype=dtype), weights(9, dtype=dtype)
  before = traces[case.recipe, w.dtype, w.shape, 0]
  w64, ct64 = (np.asarray(x).astype(np.float64) for x in (w, ct))
  for step in STEPS:
    out, grad, mask, decay = run(case, w, step, ct)
    want_mask, d = expected_mask(case, w, step), case.decay_at(step)
    np.testing.assert_array_equal(mask, want_mask, err_msg=f"step {step}")
    np.testing.assert_allclose(decay, d, rtol=3e-6, atol=2e-7, err_msg=f"step {step}")
    scale = want_mask + d * (1 - want_mask)
    close = functools.partial(np.testing.assert_allclose, rtol=ULP[dtype] * 4, atol=4e-7)
    close(np.asarray(out).astype(np.float64), w64 * scale, err_msg=f"W~ at step {step}")
    want = ct64 * scale if case.mode == "masked" else ct64
    close(np.asarray(grad).astype(np.float64), want, err_msg=f"gradient at step {step}")
    assert_same_bits(np.asarray(out)[want_mask], np.asarray(w)[want_mask])
    if case.mode == ST:
      assert_same_bits(grad, ct)
    assert out.dtype == grad.dtype == w.dtype and mask.dtype == bool and decay.dtype == jnp.float32
  assert traces[case.recipe, w.dtype, w.shape, 0] <= before + 1  # one compilation serves all steps


pulled = jax.jit(lambda recipe, *args: recipe.pull_back(*args), static_argnums=0)


@every_dtype
def test_pull_back_is_the_backward_pass_with_the_term(case, dtype):
  """Also of weights that are an ulp away from W~, as parameters may be that an update made."""
  w, ct = weights(8, dtype=dtype), weights(9, dtype=dtype)
  lam = np.float32(case.recipe.lam)
  for step in STEPS if dtype == "f32" else a_step_of_each_level(case):
    keep = stored(case, w, step)
    out, grad, mask, _ = run(case, w, step, ct)
    term = np.where(mask, 0, lam * np.asarray(w).astype(np.float32))
    want = np.asarray(grad).astype(np.float32) + term
    for seen in (out, np.nextafter(out, out * 0)):
      got = pulled(case.recipe, ct, w, seen, jnp.int32(step), keep)
      assert got.dtype == ct.dtype
      got = np.asarray(got).astype(np.float32)
      np.testing.assert_allclose(got, want, ULP[dtype], err_msg=f"step {step}")


@every
def test_any_axis_equals_transposing(case):
  w, ct = weights(10), weights(11)
  split = weights(13, (2, 8, 3))
  for step in a_step_of_each_level(case):
    keep, t = stored(case, w, step), jnp.int32(step)
    want = run(case, w, step, ct)
    got = jitted(case.recipe, w.T, t, None if keep is None else keep.T, ct.T, -1)
    for a, b in zip(got[:3], want[:3], strict=True):
      assert_same_bits(a.T, b)
    whole = split.reshape(SHAPE)
    keep = stored(case, whole, step)
    keep = None if keep is None else keep.reshape(split.shape)
    got = jitted(case.recipe, split, t, keep, jnp.ones_like(split), (0, 1))
    assert_same_bits(got[0].reshape(SHAPE), run(case, whole, step)[0])


@every
def test_eager_equals_jit_bit_for_bit(case):
  w, ct = weights(19), weights(20)
  for step in STEPS:
    want = run(case, w, step, ct)
    assert_same_bits(case.recipe.decay(jnp.int32(step)), want[3])
    keep = stored(case, w, step)
    if step in (2, 4, 10, 17, 19):  # the others only repeat: eager branches compile at every call
      assert_same_bits(case.recipe.effective(w, jnp.int32(step), 0, keep), want[0])
    if step == 10:  # a Python int is a step too
      for a, b in zip(forward_and_backward(case.recipe, w, 10, keep, ct), want, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["mdgf_linear", "mdgf_exponential", "custom"])
def test_decay_of_a_long_run_is_the_same_eager_jitted_and_scanned(name):
  phases = nms.Phases(total=100_003, dense=10_001, finetune=20_000)
  fields = {"path": ((10_001, "7:8", 1.0), (33_333, "1:8", 0.3))} if name == "custom" else {}
  decay = nms.recipe(name, pattern="1:8", phases=phases, **fields).decay
  fast = jax.jit(decay)
  steps = np.random.default_rng(0).integers(10_000, 81_000, 60).astype(np.int32)
  _, scanned = jax.jit(lambda ts: lax.scan(lambda c, t: (c, decay(t)), 0, ts))(jnp.asarray(steps))
  for t, d in zip(steps, scanned, strict=True):
    assert_same_bits(decay(jnp.int32(t)), fast(jnp.int32(t)))
    assert_same_bits(d, fast(jnp.int32(t)))


@every
def test_timeline_is_what_happens_at_every_step(case):
  w, segments = weights(22), case.recipe.timeline(SHAPE[0])
  starts = [s.start for s in segments]
  assert starts == sorted({*starts, 0}) and [s.stop for s in segments] == [*starts[1:], 24]
  for s in segments:
    low, high = sorted((s.decay_start, s.decay_stop))
    for step in range(s.start, s.stop):
      out, _, _, d = run(case, w, step)
      pattern = case.pattern_at(step)
      assert s.pattern == (pattern and nms.NM(*pattern)), f"step {step}"
      assert np.mean(np.asarray(out) != 0) == s.density, f"step {step}"
      # D may leave 0 only for the segment that follows.
      assert (d > 0) == (s.decay_start > 0) and low - 1e-6 <= d <= high + 1e-6, f"step {step}"
    np.testing.assert_allclose(run(case, w, s.start)[3], s.decay_start, rtol=1e-6)


@every
def test_a_pruned_inf_or_nan_is_exactly_zero(case):
  if case.name == "dense":
    return
  w = np.asarray(weights(23)).copy()
  w[:, 0] = np.inf
  w[:, 1] = -np.inf
  w[3::4, 2] = np.nan
  w = jnp.asarray(w)
  for step in (*(step for step in STEPS if case.decay_at(step) == 0), 10**6):
    keep = stored(case, w, step)
    out, grad, mask, _ = run(case, w, step, keep=keep)
    np.testing.assert_array_equal(bits(out)[~np.asarray(mask)], 0)
    assert_same_bits(np.asarray(out)[mask], np.asarray(w)[mask])
    assert np.isfinite(grad).all()
    assert not mask.all()


def test_gradients_below_the_normal_float16_pass():
  """0.5 * 6e-8 rounds to a float16 subnormal or zero as a cast does; kept weights pass it whole."""
  w = jnp.asarray([1.0, 2.0, 3.0, 4.0], jnp.float16)
  tiny = np.float16(6e-8)
  g = jnp.asarray([tiny, 4 * tiny, tiny, 4 * tiny])
  for mode, want in (("masked", [0.0, 2 * tiny, tiny, 4 * tiny]), ("straight_through", g)):
    mask = jnp.asarray([False, False, True, True])
    f = lambda w, m=mask, mode=mode: gradients.blend(w, m, jnp.float32(0.5), mode)
    (got,) = jax.jit(lambda g, f=f: jax.vjp(f, w)[1](g))(g)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want, np.float16))


@every
def test_a_step_that_was_never_given_is_loudly_wrong(case):
  if case.name == "dense":
    return
  w = weights(25)
  keep = jnp.ones(SHAPE, bool) if case.recipe.stateful else None
  out, _, _, decay = jitted(case.recipe, w, jnp.int32(-1), keep, jnp.ones_like(w))
  assert np.isnan(decay) and np.isnan(out).any()
  with pytest.raises(ValueError, match="step=-1 is negative"):
    case.recipe.effective(w, -1, 0, keep)


# Another value of each field, which must change something that a run can see.
OTHERS = {
  "pattern": "1:8", "phases": nms.Phases(total=24, dense=2, finetune=4), "gradient": ST,
  "lam": 0.5, "beta": 0.05, "k": 2, "decay_kind": "exponential", "path": PATH[:-1], "batches": 5,
}  # fmt: skip


def observed(recipe):
  """Weights, gradients, masks, D and lambda at every step."""
  w, ct = weights(27), weights(28)
  keep = jnp.asarray(top(magnitude(w), 1, recipe.pattern.m)) if recipe.stateful else None
  steps = [jitted(recipe, w, jnp.int32(t), keep, ct) for t in range(PHASES.total)]
  return [np.asarray(x).tobytes() for parts in steps for x in parts], recipe.lam


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"dense"}))
def test_every_field_changes_something(name):
  decays = {"decay_kind": "linear"} if name.startswith("sdgf") else {}  # else beta has no use
  base = dataclasses.replace(CASES[name].recipe, **decays)
  arrays, lam = observed(base)
  for field in dataclasses.fields(base):
    other, other_lam = observed(dataclasses.replace(base, **{field.name: OTHERS[field.name]}))
    # Lambda is of the optimizer's term: what a layer sees stays.
    assert (other == arrays) == (field.name == "lam") == (other_lam != lam), field.name
