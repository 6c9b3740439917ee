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
from reference_arrays import assert_same, check_timeline, magnitude, ranks, soft

import nm_sparsity_jax as nms
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import rules_text

PHASES = nms.Phases(total=24, dense=3, finetune=5)  # 16 sparsify steps; j* = 16.8 - 3
STEPS = range(PHASES.total + 2)
FINETUNE = 19
EAGER = (2, 10, FINETUNE)  # a step of each phase; eager ones take long
SHAPE = (16, 3)
SCALE = np.float32(1.7)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
ULP = {"f32": 2**-21, "bf16": 2**-8, "f16": 2**-11}  # of a float32 D, or of one rounding
# Where D is 1 or 0 these keep their bits or are exactly 0; a product would lose them.
AWKWARD = (np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-40, -1e-6, 1e-7, -6e-8, 1e-39, -1e-41)


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
    """The pattern that holds, None = dense."""
    held = [pattern for start, pattern in self.levels if start <= step]
    return nms.NM.parse(held[-1]) if held else None

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
  "sr_ste decoupled": Case(make("sr_ste", "2:4", decoupled=True), ((3, "2:4"),), mode=ST),
  "s_ste": Case(make("s_ste"), ((3, "1:4"),), mode=ST),
  "mdgf_linear": Case(make("mdgf_linear"), ((3, "1:4"),), linear),
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
  "hold": Case(
    nms.recipe("hold", pattern="1:4", phases=nms.Phases(total=24, finetune=5)), ((0, "1:4"),)
  ),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Only a D between 0 and 1, or a scale, makes a product that a narrow dtype rounds.
ROUNDED = [
  name for name in CASES if name.startswith(("mdgf", "s_ste")) or "linear" in name or "exp" in name
]
every_dtype = pytest.mark.parametrize(
  "case, dtype",
  [
    *(pytest.param(case, "f32", id=f"{name}-f32") for name, case in CASES.items()),
    *(pytest.param(CASES[name], d, id=f"{name}-{d}") for name in ROUNDED for d in ("bf16", "f16")),
  ],
)


def weights(seed, dtype="f32"):
  return jnp.asarray(np.random.default_rng(seed).normal(size=SHAPE), DTYPES[dtype])


def top(scores, pattern, parent=None):
  return ranks(scores, pattern.m, 0, parent) < pattern.n


def stored(case, w, step):
  """The state a training loop carries at `step`; None = keeps none.

  The weights of earlier steps were others, |g| times these, so that today's largest weights
  are not all among the survivors; snip's scores are |g * w| as well.
  """
  if not case.recipe.stateful:
    return None
  if case.recipe.keeps == "scale":
    return jnp.full(w.shape, SCALE)
  keep = np.ones(w.shape, bool)
  scores = magnitude(w) * np.abs(np.random.default_rng(7).normal(size=w.shape))
  held = [nms.NM.parse(p) for start, p in case.levels if start <= step]
  for pattern in held[:-1] if case.name == "idp" else held:  # of idp the levels that are over
    keep = top(scores, pattern, keep)
  return jnp.asarray(keep)


def expected_mask(case, w, step):
  if case.pattern_at(step) is None:
    return np.ones(w.shape, bool)
  if case.recipe.keeps == "scale":
    return soft(w, 1, 4) != 0
  keep = stored(case, w, step)
  if case.recipe.stateful and case.name != "idp":
    return np.asarray(keep)
  return top(magnitude(w), case.pattern_at(step), keep)


def forward_and_backward(recipe, w, step, keep, ct, axis=0):
  """W~, the gradient of sum(ct * W~), the mask, D."""
  out, pull = jax.vjp(lambda w: recipe.effective(w, step, axis, keep), w)
  return out, pull(ct)[0], recipe.mask(w, step, axis, keep), recipe.decay(step)


traces = collections.Counter()


@functools.partial(jax.jit, static_argnames=("recipe", "axis"))
def jitted(recipe, w, step, keep, ct, axis=0):
  traces[recipe, w.dtype, w.shape, axis] += 1
  return forward_and_backward(recipe, w, step, keep, ct, axis)


def run(case, w, step, ct):
  return jitted(case.recipe, w, jnp.int32(step), stored(case, w, step), ct)


@functools.partial(jax.jit, static_argnums=0)
def pulled(recipe, ct, *seen):
  """The gradient at W, and SR-STE's term."""
  return recipe.pull_back(ct, *seen), recipe.pruned_term(*seen)


@every_dtype
def test_weights_and_gradients_are_the_equation_at_every_step(case, dtype):
  """To the bit: products are float32, rounded once."""
  w, ct = (np.asarray(weights(seed, dtype=dtype)).copy() for seed in (8, 9))
  w[: len(AWKWARD), 0] = AWKWARD
  ct[:4, 1] = 6e-8  # a subnormal of float16
  before, lam = traces[case.recipe, w.dtype, w.shape, 0], np.float32(case.recipe.lam)
  for step in (*STEPS, 10**6):
    out, grad, mask, decay = run(case, w, step, ct)
    kept, d = expected_mask(case, w, step), case.decay_at(step)
    np.testing.assert_array_equal(mask, kept, err_msg=f"step {step}")
    np.testing.assert_allclose(decay, d, rtol=3e-6, atol=2e-7, err_msg=f"step {step}")
    scale = np.where(kept, np.float32(1), decay)
    with np.errstate(invalid="ignore"):  # a pruned inf
      scaled = lambda x, scale=scale: (x.astype(np.float32) * scale).astype(x.dtype)
      want = np.where(scale == 0, np.zeros_like(w), np.where(scale == 1, w, scaled(w)))
    # A product of what is not finite, or too small for float32, is not compared.
    sure = (scale == 0) | (scale == 1) | (np.arange(SHAPE[1]) > 0)
    if case.name == "s_ste" and d == 0:
      want = (SCALE * soft(w, 1, 4)).astype(w.dtype)
      sure = np.isfinite(want)
      assert not np.isfinite(out[~sure]).any()
    assert_same(np.asarray(out)[sure], want[sure])
    assert_same(grad, scaled(ct) if case.mode == "masked" else ct)
    assert mask.dtype == bool and decay.dtype == jnp.float32
    # The pulled gradient is the one of the backward pass with SR-STE's term, also where parameters
    # are an ulp away from W~, as an update may make them. What is not finite tells no mask.
    as_float = lambda x: np.asarray(x)[:, 1:].astype(np.float32)
    term = np.where(kept[:, 1:], 0, lam * as_float(w))
    want = as_float(grad) + (0 if case.recipe.decoupled else term)
    for seen in (out, np.nextafter(out, out * 0)):
      got, alone = pulled(case.recipe, ct, w, seen, jnp.int32(step), stored(case, w, step))
      np.testing.assert_array_equal(as_float(alone), term, err_msg=f"step {step}")
      np.testing.assert_allclose(as_float(got), want, ULP[dtype], 6e-8, err_msg=f"step {step}")
      assert got.dtype == ct.dtype
  assert traces[case.recipe, w.dtype, w.shape, 0] <= before + 1  # one compilation serves all steps


@every
def test_any_axis_and_eager_mode_give_the_same_bits(case):
  w, ct = weights(10), weights(11)
  for step in (2, 4, 10, 14, 17, 19):
    keep, want = stored(case, w, step), run(case, w, step, ct)
    found = []
    if step in EAGER:  # a Python int is a step too
      found.append(forward_and_backward(case.recipe, w, step, keep, ct))
    for turn, back, axis in (
      (lambda x: x.T, lambda x: x.T, -1),
      (lambda x: x.reshape(2, 8, 3), lambda x: x.reshape(SHAPE), (0, 1)),
    ):
      turned = None if keep is None else turn(keep)
      *got, decay = jitted(case.recipe, turn(w), jnp.int32(step), turned, turn(ct), axis)
      found.append([*map(back, got), decay])
    for got in found:
      assert_same(got, want)


@pytest.mark.parametrize("name", ["mdgf_linear", "mdgf_exponential", "custom"])
def test_decay_of_a_long_run_is_the_same_eager_jitted_and_scanned(name):
  phases = nms.Phases(total=100_003, dense=10_001, finetune=20_000)
  fields = {"path": ((10_001, "7:8", 1.0), (33_333, "1:8", 0.3))} if name == "custom" else {}
  decay = nms.recipe(name, pattern="1:8", phases=phases, **fields).decay
  steps = jnp.asarray(np.random.default_rng(0).integers(10_000, 81_000, 60), jnp.int32)
  _, scanned = jax.jit(lambda ts: lax.scan(lambda c, t: (c, decay(t)), 0, ts))(steps)
  for each in (decay, jax.jit(decay)):
    assert_same(np.stack([each(t) for t in steps]), scanned)


@every
def test_timeline_is_what_happens_at_every_step(case):
  steps = range(PHASES.total)
  check_timeline(case.recipe, [*map(case.pattern_at, steps)], [*map(case.decay_at, steps)])


@every
def test_a_step_that_was_never_given_is_loudly_wrong(case):
  w, recipe = weights(25), case.recipe
  keep = jnp.ones(SHAPE, bool) if recipe.stateful else None
  out, _, _, decay = jitted(recipe, w, jnp.int32(-1), keep, w)
  assert np.isnan(decay) and np.isnan(out).any() == (case.name != "dense")
  for step in (12.0, True, jnp.arange(2), -1) if case.name != "dense" else ():
    with pytest.raises(ValueError, match="step"):
      recipe.effective(w, step, 0, keep)
  with pytest.raises(ValueError, match="step"):
    jax.jit(recipe.decay)(12.0)
  if recipe.stateful:
    with pytest.raises(ValueError, match=f"no {recipe.keeps} was given"):
      recipe.effective(w, jnp.int32(0))


# Another value of each field, which must change something that a run can see.
OTHERS = {
  "pattern": "1:8", "phases": nms.Phases(total=21, finetune=4), "gradient": ST,
  "lam": 0.5, "beta": 0.05, "k": 2, "decay_kind": "exponential", "path": PATH[:-1], "batches": 5,
  "decoupled": True,
}  # fmt: skip


def observed(recipe):
  """Weights, gradients, masks and D at every step; what SR-STE's term is."""
  w, ct = weights(27), weights(28)
  keep = jnp.asarray(top(magnitude(w), nms.NM(1, recipe.pattern.m))) if recipe.stateful else None
  steps = [jitted(recipe, w, jnp.int32(t), keep, ct) for t in range(PHASES.total)]
  return [np.asarray(x).tobytes() for parts in steps for x in parts], (recipe.lam, recipe.decoupled)


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_is_in_the_text_of_rules_and_changes_something(name):
  decays = {"decay_kind": "linear"} if name.startswith("sdgf") else {}  # else beta has no use
  base = dataclasses.replace(CASES[name].recipe, **decays)  # every recipe has a case
  arrays, term = observed(base)
  for field in dataclasses.fields(base):
    changed = dataclasses.replace(base, **{field.name: OTHERS[field.name]})
    rules = nms.Rules({"ff": changed})
    assert rules_text.parse(rules_text.describe(rules)) == rules, field.name
    if name in ("dense", "hold"):  # the mask of hold is that of its first weights at every step
      continue
    other, other_term = observed(changed)
    # That term is the optimizer's: what a layer sees stays.
    is_of_term = field.name in ("lam", "decoupled")
    assert (other == arrays) == is_of_term == (other_term != term), field.name
