"""Phases, levels of a pattern, decay factors, and the timeline that is told to people."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases


def text(levels):
  return " ".join(map(str, levels))


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "levels",
  ["7:8 4:8 2:8 1:8", "31:32 16:32 8:32 4:32 2:32 1:32", "11:12 6:12 3:12 1:12", "3:4 2:4",
   "7:8 4:8 3:8", "7:8", "8:8"],
)  # fmt: skip
def test_stepwise_levels(levels):
  *_, target = levels.split()
  assert text(schedules.stepwise_levels(NM.parse(target))) == levels


@pytest.mark.parametrize(
  "levels, fitting",  # how many of the levels an axis of that length holds; 768 % 512 = 256
  [("16:512 8:256 4:128 2:64 1:32", {512: 5, 768: 4}),
   ("16:2048 8:1024 4:512 2:256 1:128", {512: 3, 768: 2, 2048: 5, 3072: 4})],
)  # fmt: skip
def test_geometric_levels(levels, fitting):
  levels = levels.split()
  target = NM.parse(levels[-1])
  for axis_size, count in {None: 5, **fitting}.items():
    found = schedules.geometric_levels(target, axis_size=axis_size)
    assert text(found).split() == levels[5 - count :]


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


@pytest.mark.parametrize(
  "target, phases, starts",
  [
    # S = 16, L = 3: floor(16/3), floor(32/3)
    ("1:4", Phases(total=24, dense=3, finetune=5), [3, 8, 13]),
    # S = 11, L = 6
    ("1:32", Phases(total=12, dense=0, finetune=1), [0, 1, 3, 5, 7, 9]),
    ("2:4", Phases(total=2), [0, 1]),
  ],
)
def test_levels_share_the_sparsify_phase(target, phases, starts):
  recipe = nms.recipe("sdgf_stepwise", pattern=target, phases=phases)
  levels = schedules.stepwise_levels(NM.parse(target))
  assert recipe.levels() == tuple(zip(starts, levels, strict=True))


# --- phases and steps -------------------------------------------------------------------------


def test_phases_add_up():
  p = Phases(total=100_000, dense=10_000, finetune=20_000)
  assert (p.sparsify, p.finetune_start) == (70_000, 80_000)
  assert Phases(total=np.int64(5)) == Phases(total=5)
  assert Phases(total=30, dense=10, finetune=20).sparsify == 0


@pytest.mark.parametrize(
  "fields, word",
  [
    ({"total": 10, "dense": 6, "finetune": 5}, "dense . finetune = 11"),
    ({"total": 0}, "at least 1"),
    ({"total": 10, "dense": -1}, "at least 0"),
    ({"total": 10, "dense": 0.1}, "dense=0.1"),
    ({"total": True}, "total=True"),
  ],
)
def test_bad_phases_say_what_holds(fields, word):
  with pytest.raises(ValueError, match=word):
    Phases(**fields)


# --- decay factors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, finetune, beta, due",  # of 100 steps, 10 of them dense
  [
    # j* = min(70, 80) - 10 = 60
    ("linear", 20, None, {9: 1, 10: 1, 25: 0.75, 69: 1 / 60, 70: 0}),
    ("linear", 40, None, {10: 1, 35: 0.5, 60: 0}),  # the fine-tune phase comes first
    ("linear", 20, 0.01, {10: 1, 60: 0.5, 79: 0.31, 80: 0}),  # 0.3 is left at 80
    ("exponential", 20, None, {10: 1, 30: 0.1, 70: 0.001, 79: 1000 ** -(69 / 60), 80: 0}),
  ],
)
def test_decay_by_hand(name, finetune, beta, due):
  phases = Phases(total=100, dense=10, finetune=finetune)
  recipe = nms.recipe(f"mdgf_{name}", pattern="1:8", phases=phases, beta=beta)
  for step, d in due.items():
    np.testing.assert_allclose(recipe.decay(step), d, rtol=1e-5, atol=0)


STEPS = jnp.arange(66, dtype=jnp.int32)


def all_decays(recipe):
  """D at steps 0 ... 65."""
  return np.asarray(jax.vmap(recipe.decay)(STEPS))


@st.composite
def phase_lengths(draw):
  dense, sparsify, finetune = (draw(st.integers(0, 20)) for _ in range(3))
  return Phases(total=dense + sparsify + finetune + 1, dense=dense, finetune=finetune)


betas = lambda: st.one_of(st.integers(1, 30).map(lambda j: 1 / j), st.floats(1e-9, 300))


# D knows its end in float32, which may round it to a whole step: so must the timeline. e^-87 is the
# last normal float32.
@example(Phases(total=66), 1 / 49, "mdgf_linear")
@example(Phases(total=66), 1 / (49 + 49 * 4e-8), "mdgf_linear")
@example(Phases(total=66), 1 / (3 - 3e-7), "mdgf_linear")
@example(Phases(total=66), 87.2, "mdgf_exponential")
@example(Phases(total=66), 1.37, "mdgf_exponential")
@given(phase_lengths(), betas(), st.sampled_from(["mdgf_linear", "mdgf_exponential"]))
def test_decay_falls_from_one_to_zero_as_the_timeline_says(phases, beta, name):
  recipe = nms.recipe(name, pattern="1:4", phases=phases, beta=beta)
  d = all_decays(recipe)
  assert ((0 <= d) & (d <= 1)).all()
  assert (np.diff(d) <= 0).all()
  assert (d[: phases.dense] == 1).all() and (d[phases.finetune_start :] == 0).all()
  if phases.sparsify:
    assert d[phases.dense] == 1
  check_timeline(recipe, d)


def check_timeline(recipe, d):
  segments = recipe.timeline()
  assert segments[0].start == 0 and segments[-1].stop == recipe.phases.total
  for a, b in zip(segments, segments[1:], strict=False):
    assert a.stop == b.start
  for s in segments:
    assert s.start < s.stop
    inside = d[s.start : s.stop]
    assert ((inside > 0) == (s.decay_start > 0)).all(), s
    np.testing.assert_allclose(inside[0], s.decay_start, rtol=1e-5)
    low, high = sorted((s.decay_start, s.decay_stop))
    assert ((low - 1e-6 <= inside) & (inside <= high + 1e-6)).all(), s
    assert s.density == (1.0 if s.pattern is None or (inside > 0).any() else s.pattern.density)


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
  want = np.interp(np.arange(66), *zip(*knots, strict=True))
  want[: starts[0]] = 1
  np.testing.assert_allclose(d, want, atol=1e-6)
  for start, value in knots:
    assert d[start] == np.float32(value)
  check_timeline(recipe, d)
