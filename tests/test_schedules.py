"""Phases, levels of a pattern, decay factors, and the timeline that people read."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference_arrays import check_timeline

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases


def text(levels):
  return " ".join(map(str, levels))


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "levels",
  ["11:12 6:12 3:12 1:12", "7:8 4:8 3:8", "7:8", "8:8"],
)
def test_stepwise_levels(levels):
  *_, target = levels.split()
  assert text(schedules.stepwise_levels(NM.parse(target))) == levels


@given(
  st.integers(1, 64).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))),
  st.sampled_from([1, 2, 4, 8, 16]),
  st.integers(1, 64),
)
def test_geometric_levels_keep_the_density_and_never_straddle(pair, k, groups):
  target = NM(*pair)
  axis_size = groups * target.m
  levels = schedules.geometric_levels(target, k, axis_size)
  assert levels[-1] == target
  for p in levels:
    assert p.n * target.m == p.m * target.n and axis_size % p.m == 0
  assert [p.m for p in levels] == [target.m << i for i in reversed(range(len(levels)))]
  if len(levels) <= k.bit_length() - 1:
    assert axis_size % (2 * levels[0].m)


def test_each_level_has_a_step_of_the_sparsify_phase():
  recipe = nms.recipe("sdgf_stepwise", pattern="2:4", phases=Phases(total=4, dense=1, finetune=1))
  assert recipe.levels() == ((1, NM(3, 4)), (2, NM(2, 4)))


# --- phases -----------------------------------------------------------------------------------


def test_an_integer_of_numpy_is_a_number_of_steps():
  assert Phases(total=np.int64(5)) == Phases(total=5)


@pytest.mark.parametrize(
  "fields, word",
  [
    ({"total": 10, "dense": 6, "finetune": 5}, "dense=6, finetune=5"),
    ({"total": 0}, "at least 1"),
    ({"total": 10, "dense": -1}, "at least 0"),
    ({"total": 10, "dense": 0.1}, "dense=0.1"),
  ],
)
def test_bad_phases_say_what_holds(fields, word):
  with pytest.raises(ValueError, match=word):
    Phases(**fields)


# --- decay factors and their timeline -----------------------------------------------------------

STEPS = np.arange(66, dtype=np.int32)


def all_decays(recipe):
  """D at steps 0 ... 65."""
  return np.asarray(jax.vmap(recipe.decay)(jnp.asarray(STEPS)))


@st.composite
def phase_lengths(draw):
  dense, sparsify, finetune = (draw(st.integers(0, 20)) for _ in range(3))
  return Phases(total=dense + sparsify + finetune + 1, dense=dense, finetune=finetune)


betas = lambda: st.one_of(st.none(), st.integers(1, 30).map(lambda j: 1 / j), st.floats(1e-9, 300))


# D knows its end in float32, which may round it to a whole step: so must the timeline. e^-87 is the
# last normal float32.
@example(Phases(total=66), 1 / 49, "mdgf_linear")
@example(Phases(total=66), 1 / (49 + 49 * 4e-8), "mdgf_linear")
@example(Phases(total=66), 87.2, "mdgf_exponential")
@example(Phases(total=60, dense=6, finetune=12), None, "mdgf_linear")
@example(Phases(total=60, dense=6, finetune=24), None, "mdgf_linear")
@given(phase_lengths(), betas(), st.sampled_from(["mdgf_linear", "mdgf_exponential"]))
def test_a_decay_is_its_equation_and_what_its_timeline_says(phases, beta, name):
  j, is_linear = STEPS - phases.dense, name == "mdgf_linear"
  horizon = min(0.7 * phases.total, phases.finetune_start) - phases.dense
  assume(beta or horizon > 0)
  recipe = nms.recipe(name, pattern="1:4", phases=phases, beta=beta)
  rate = beta or (1 if is_linear else math.log(1000)) / horizon
  want = np.clip(1 - rate * j if is_linear else np.exp(-rate * np.maximum(j, 0)), 0, 1)
  want[phases.finetune_start :] = 0
  want[: phases.dense] = 1
  d = all_decays(recipe)
  np.testing.assert_allclose(d, want, rtol=1e-5, atol=1e-6)
  check_timeline(recipe, [NM(1, 4) if x >= 0 else None for x in j], d)


@given(phase_lengths(), st.data())
def test_a_custom_path_is_what_its_timeline_says(phases, data):
  assume(phases.sparsify)
  within = st.integers(phases.dense, phases.finetune_start - 1)
  starts = data.draw(st.lists(within, min_size=1, max_size=4, unique=True).map(sorted))
  patterns, values = ["3:4", "2:8", "1:4"], [0.0, 0.0, 0.3, 0.5, 1.0]
  entry = st.tuples(st.sampled_from(patterns), st.sampled_from(values))
  path = tuple((start, *data.draw(entry)) for start in starts)
  recipe = nms.recipe("custom", pattern="1:4", phases=phases, path=path)
  d = all_decays(recipe)
  knots = [(start, value) for start, _, value in path] + [(phases.finetune_start, 0.0)]
  want = np.interp(STEPS, *zip(*knots, strict=True))
  want[: starts[0]] = 1
  np.testing.assert_allclose(d, want, atol=1e-6)
  for start, value in knots:
    assert d[start] == np.float32(value)
  held = lambda step: [p for start, p, _ in path if start <= step]
  patterns = [NM.parse(held(step)[-1]) if held(step) else None for step in STEPS]
  patterns[phases.finetune_start :] = [NM(1, 4)] * 66
  check_timeline(recipe, patterns, d)
