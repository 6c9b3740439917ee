"""The mask contract against its equation in exact numbers: any n:m, axis, dtype, transform.

The reference sorts float64s, which hold every narrower float exactly, by (dropped by the parent,
NaN, -value, index). Scores come from few values, so that ties are common.
"""

import doctest
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.masks import magnitude_mask, making, nm_mask, selection
from nm_sparsity_jax.core.patterns import NM

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
BYTES = (jnp.float8_e4m3fn, jnp.float8_e5m2)
# 254, 255 and 256, as 65534 ... below, are where counts outgrow an integer type.
SIZES = (*range(1, 41), 48, 64, 96, 127, 128, 254, 255, 256, 257, 509, 512, 640)
# On both sides of the bounds where a mask takes another path (8, 16, 32) `make test` keeps sizes.
ALIKE = {5, 6, 10, 11, 12, 13, 14, *range(18, 31), *range(34, 41), 48, 96, 509}


def sizes():
  """(i, m); those that repeat what their neighbours show are slow."""
  for i, m in enumerate(SIZES):
    yield pytest.param(i, m, marks=[pytest.mark.slow] if m in ALIKE else [], id=f"m{m}")


def ranks(scores, m, axis=0, parent=None):
  """How many of its group of `m` come before each score; the mask is `ranks < n`."""
  scores = np.asarray(scores)
  axes = [a % scores.ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
  order = [a for a in range(scores.ndim) if a not in axes] + axes
  shape = [scores.shape[a] for a in order]

  def groups(x):
    return x.transpose(order).reshape(-1, m)

  with np.errstate(invalid="ignore"):  # a signalling NaN
    value = groups(scores.astype(np.float64))
  dropped = np.zeros(value.shape, bool) if parent is None else ~groups(np.asarray(parent))
  nan = np.isnan(value) & ~dropped
  value = np.where(nan | dropped, 0.0, value)
  index = np.broadcast_to(np.arange(m), value.shape)
  rank = np.argsort(np.lexsort((index, -value, nan, dropped), axis=-1), axis=-1)
  return rank.reshape(shape).transpose(np.argsort(order))


def magnitude(x):
  """|x| by clearing the sign bit, whatever the dtype and the NaN."""
  x = np.asarray(x)
  unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
  return (x.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)).view(x.dtype)


@functools.cache
def special(dtype):
  """The bits of the values where an order of floats may go wrong."""
  about = jnp.finfo(dtype)
  values = [0, 1e-40, 1, 1 + float(about.eps), 0.5, math.inf, math.nan]
  values += [float(v) for v in (about.smallest_subnormal, about.tiny, about.max)]
  with np.errstate(over="ignore"):
    floats = np.array(values + [-v for v in values]).astype(dtype)
  return [int(b) for b in floats.view(f"uint{8 * floats.dtype.itemsize}")]


@st.composite
def scores(draw, shape, dtype):
  """Few values (special ones, or any bits), or close ones, or all different ones."""
  dtype = np.dtype(dtype)
  unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  kind = draw(st.sampled_from(["few", "few", "close", "any"]))
  if kind == "few":
    anything = st.integers(0, int(np.iinfo(unsigned).max))
    one = st.one_of(st.sampled_from(special(dtype)), st.sampled_from(special(dtype)), anything)
    palette = np.array(draw(st.lists(one, min_size=1, max_size=6)), unsigned)
    return palette[rng.integers(len(palette), size=shape)].view(dtype)
  bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
  if kind == "close":
    bits = bits.flat[0] + rng.integers(0, 600, shape).astype(unsigned)
  return bits.view(dtype)


def name_of(dtype):
  return jnp.dtype(dtype).name


def same(mask, expected):
  assert mask.dtype == bool
  np.testing.assert_array_equal(np.asarray(mask), expected)


def divisor(m):
  return next((d for d in range(2, m) if m % d == 0), 1)


def layouts(m):
  """Shapes and axes: ranks 1 to 4, the axis anywhere, two axes as one, scanned dimensions."""
  d = divisor(m)
  return [
    ((2 * m,), 0),
    ((2 * m, 3), 0),
    ((3, m), -1),
    ((2, m, 3), -2),
    ((2, 2 * m, 1, 2), 1),
    ((d, 2 * m // d, 2), (0, 1)),
    ((2, 3, 2 * m // d, d), (-2, -1)),
  ]


def some_n(m):
  """The values of n that take different paths: 1, between, m - 1, m."""
  return sorted({1, max(1, m // 3 if m % 2 else m // 2), max(1, m - 1), m})


@functools.cache
def every_n(m, axis, traced=True):
  """All of `some_n`, and a traced n, in one program."""

  def run(x, n):
    static = {k: nm_mask(x, NM(k, m), axis) for k in some_n(m)}
    return static, magnitude_mask(x, NM(1, m), axis, n=n) if traced else None

  return jax.jit(run)


@pytest.mark.parametrize("i, m", list(sizes()))
@given(data=st.data())
def test_mask_is_its_equation(i, m, data):
  dtype, (shape, axis) = FLOATS[i % 3], layouts(m)[i % 7]
  x = data.draw(scores(shape, dtype))
  n = data.draw(st.integers(1, m))
  static, traced = every_n(m, axis, traced=m <= 16 or i % 2 == 0)(x, n)  # compiling is slow
  rank = ranks(x, m, axis)
  for k, mask in static.items():
    same(mask, rank < k)
  if traced is not None:
    same(traced, ranks(magnitude(x), m, axis) < n)


@given(data=st.data(), n=st.sampled_from(some_n(20)))
def test_exactly_n_and_never_drops_a_larger_score(data, n):
  """The contract's two plain consequences, without the reference."""
  x = data.draw(scores((3, 40), jnp.float32))
  x = np.where(np.isnan(x), -np.inf, x).astype(np.float64)
  keep = np.asarray(every_n(20, 1)(x.astype(np.float32), n)[0][n]).reshape(-1, 20)
  x = x.reshape(keep.shape)
  assert (keep.sum(1) == n).all()
  largest_dropped = np.where(keep, -np.inf, x).max(1)
  assert (np.where(keep, x, np.inf).min(1) >= largest_dropped).all()


def test_reference_on_a_group_worked_by_hand():
  x = np.array([-0.0, math.nan, 0.0, 5e-324, -math.inf, math.inf, -1, math.inf])
  assert ranks(x, 8).tolist() == [3, 7, 4, 2, 6, 0, 5, 1]
  parent = np.array([1, 1, 1, 1, 0, 0, 1, 0], bool)
  assert ranks(x, 8, parent=parent).tolist() == [1, 4, 2, 0, 5, 6, 3, 7]


@pytest.mark.parametrize("dtype", BYTES, ids=name_of)
def test_order_of_every_pair_of_8_bit_floats(dtype):
  x = np.array([(a, b) for a in range(256) for b in range(256)], np.uint8).view(dtype)
  same(nm_mask(x, "1:2", axis=1), ranks(x, 2, 1) < 1)
  same(magnitude_mask(x, "1:2", axis=1), ranks(magnitude(x), 2, 1) < 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_order_of_all_neighbours(dtype):
  """Every 16-bit float; of 32 bits every exponent and sign with the edges of the fraction."""
  size = jnp.dtype(dtype).itemsize
  bits = np.arange(2**16, dtype=f"uint{8 * size}")
  if size == 4:
    bits = (bits[::8, None] << np.uint32(16)) + np.array([0, 1, 2, 2**19 - 1], np.uint32)
  x = bits.reshape(-1).view(dtype)
  with np.errstate(invalid="ignore"):
    x = x[np.argsort(x.astype(np.float64), kind="stable")]
  pairs = np.stack([np.r_[x[1:], x[:-1]], np.r_[x[:-1], x[1:]]], axis=1)
  same(nm_mask(pairs, "1:2", axis=1), ranks(pairs, 2, 1) < 1)
  same(magnitude_mask(pairs, "1:2", axis=1), ranks(magnitude(pairs), 2, 1) < 1)


def test_ties_zeros_subnormals_nan_by_example():
  def kept(values, pattern):
    return np.flatnonzero(nm_mask(jnp.array(values, jnp.float32), pattern)).tolist()

  assert kept([2, 2, 2, 2], "1:4") == [0]
  assert kept([2, 2, 2, 2], "3:4") == [0, 1, 2]
  assert kept([1, 2, 2, 2], "2:4") == [1, 2]
  assert kept([-0.0, 0.0, -0.0, 0.0], "2:4") == [0, 1]
  assert kept([0, 1e-45, 2e-45, 1e-40], "1:4") == [3]
  assert kept([0, 1e-45, 3e-45, -1e-45], "3:4") == [0, 1, 2]
  assert kept([math.nan, -math.inf, math.nan, -1], "2:4") == [1, 3]
  assert kept([math.nan, -math.nan, math.nan, -1], "2:4") == [0, 3]


THREE_WAYS = [(name_of(d), 8) for d in (*FLOATS, *BYTES)] + [(name_of(d), 48) for d in FLOATS]


@functools.cache
def three_ways(m):
  def run(x, n):
    every = some_n(m)
    of_scores = [nm_mask(jnp.abs(x), NM(k, m)) for k in every]
    static = [magnitude_mask(x, NM(k, m)) for k in every]
    traced = [magnitude_mask(x, NM(1, m), n=v) for v in n]
    return of_scores, static, traced

  return jax.jit(run)


@pytest.mark.parametrize("dtype, m", THREE_WAYS)
@given(data=st.data())
def test_magnitude_mask_is_the_mask_of_abs_static_or_traced(dtype, m, data):
  x = data.draw(scores((2 * m, 2), dtype))
  every = some_n(m)
  of_scores, static, traced = three_ways(m)(x, [jnp.int32(n) for n in every])
  rank = ranks(magnitude(x), m)
  for n, a, b, c in zip(every, of_scores, static, traced, strict=True):
    same(a, rank < n)
    same(b, rank < n)
    same(c, rank < n)


@pytest.mark.parametrize("kind", [np.int64, jnp.uint8, jnp.int16, jnp.int32], ids=name_of)
def test_n_may_be_any_integer_scalar(kind):
  x = np.random.default_rng(0).normal(size=(96, 2)).astype(np.float32)
  same(magnitude_mask(x, "1:8", n=kind(5)), ranks(abs(x), 8) < 5)


@pytest.mark.parametrize(
  "m, axis", [(4, 0), (4, 1), (4, 2), (4, -1), (4, -2), (4, -3), (20, 1), (20, -1)]
)
@given(data=st.data())
def test_any_axis_equals_transposing(m, axis, data):
  x = data.draw(scores((20, 20, 20), jnp.float32))
  n = data.draw(st.integers(1, m))
  static, traced = every_n(m, axis)(x, n)
  moved, moved_traced = every_n(m, 0)(np.moveaxis(x, axis, 0), n)
  same(traced, np.moveaxis(moved_traced, 0, axis))
  for k in some_n(m):
    same(static[k], np.moveaxis(moved[k], 0, axis))


@pytest.mark.parametrize("m", [65534, 65535, 65536])
def test_groups_longer_than_16_bits_count(m):
  x = np.random.default_rng(m).integers(0, 4, (m, 1)).astype(jnp.bfloat16)
  n = m // 2
  same(jax.jit(functools.partial(nm_mask, pattern=NM(n, m)))(x), ranks(x, m) < n)
  same(jax.jit(functools.partial(nm_mask, pattern=NM(5, m)))(x * 0), ranks(x * 0, m) < 5)


# The private paths: one selection, several algorithms, which may never differ by a bit.


@functools.cache
def paths(m, bits, name):
  """(path, n; None = traced) and the masks of keys (2, m, 3), as on platform `name`."""

  def run(keys, traced):
    def cut(kth, n):
      return selection.cut(
        keys, selection.from_end(keys.shape, 1), functools.partial(kth, n=n, axis=1)
      )

    found = {
      ("selected", None): selection.select(keys, traced, 1),
      ("bisection", None): cut(selection.kth_by_bisection, traced),
      ("first", 1): selection._one_extreme(keys, 1, largest=True),
      ("last", m - 1): ~selection._one_extreme(keys, 1, largest=False),
    }
    if m <= 32:
      found["ranks", None] = selection._ranks(keys, 1) < traced.astype(jnp.uint8)
      found["ranks at once", None] = selection._ranks_at_once(keys, 1) < traced.astype(jnp.uint8)
    for n in some_n(m)[:-1]:
      found["selected", n] = selection.select(keys, n, 1)
      found["selected, small", n] = selection.select(keys, n, 1, small=True)
      if m <= 32:
        found["network", n] = cut(selection.kth_by_network, n)
    labels.extend(found)
    return list(found.values())

  labels = []
  keys = jax.ShapeDtypeStruct((2, m, 3), jnp.uint16 if bits <= 16 else jnp.uint32)
  shapes = keys, jax.ShapeDtypeStruct((), jnp.int32)
  # `pinned` is a remainder on a CPU and nothing elsewhere, with no conditional in either.
  text = jax.jit(run).trace(*shapes).lower(lowering_platforms=(name,)).as_text()
  assert ("stablehlo.remainder" in text) == (name == "cpu") and "stablehlo.case" not in text
  labels.clear()
  with pytest.MonkeyPatch.context() as patch:
    if name != "cpu":
      patch.setattr(selection, "pinned", lambda x: x)
    return labels, jax.jit(lambda *args: run(*args)).lower(*shapes).compile()


PATHS = [(4, 32, "cpu"), (17, 31, "cpu"), (17, 31, "tpu"), (255, 32, "cpu"), (512, 16, "cpu")]
PATHS += [(3, 15, "tpu"), (8, 16, "cpu"), (32, 15, "cpu"), (128, 31, "cpu"), (254, 15, "cpu")]
PATHS += [(255, 32, "tpu")]


@pytest.mark.parametrize("m, bits, name", PATHS)
@given(data=st.data())
def test_all_algorithms_agree_bit_for_bit(m, bits, name, data):
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  # The largest key is that of a score of +inf; a magnitude needs one bit less.
  top = {15: 0x7F82, 16: 0xFF02, 31: 0x7F800002, 32: 0xFF000002}[bits]
  one = st.one_of(st.sampled_from([0, 1, 2, top - 1, top]), st.integers(0, top))
  few = np.array(data.draw(st.lists(one, min_size=1, max_size=6)), np.int64)
  near = rng.integers(0, data.draw(st.sampled_from([1, 600])), (2, m, 3))
  keys = np.minimum(few[rng.integers(len(few), size=near.shape)] + near, top)
  rank = ranks(keys, m, 1)
  labels, program = paths(m, bits, name)
  for traced in some_n(m):
    found = program(keys.astype(np.uint16 if bits <= 16 else np.uint32), jnp.int32(traced))
    for (path, n), mask in zip(labels, found, strict=True):
      n = traced if n is None else n
      np.testing.assert_array_equal(np.asarray(mask), rank < n, err_msg=f"{path}, n={n}")


# A ladder of patterns in one program.


@functools.cache
def ladder(pattern, axis, most):
  def run(x, d):
    return masks.ladder_mask(x, pattern, axis, doublings=d, most=most)

  return jax.jit(run)


@pytest.mark.parametrize(
  "pattern, axis, shape, most",
  [("1:4", 0, (32, 3), 2), ("3:8", -1, (2, 256), 5), ("2:3", (0, 1), (4, 12, 2), 4)],
)
@given(data=st.data())
def test_ladder_is_the_doubled_pattern(pattern, axis, shape, most, data):
  x = data.draw(scores(shape, jnp.float32))
  base = NM.parse(pattern)
  for d in range(most + 1):
    mask = ladder(pattern, axis, most)(x, jnp.int32(d))
    same(mask, ranks(magnitude(x), base.m << d, axis) < base.n << d)


# The parent: what it drops comes back only where too few are left.


@functools.cache
def with_parent(m):
  def run(x, parent, n):
    static = {k: magnitude_mask(x, NM(k, m), parent=parent) for k in some_n(m)}
    return static, magnitude_mask(x, NM(1, m), n=n, parent=parent)

  return jax.jit(run)


@pytest.mark.parametrize("m", [4, 20, 128])
@given(data=st.data())
def test_parent_goes_before_everything_else(m, data):
  x = data.draw(scores((2 * m, 3), jnp.float32))
  n = data.draw(st.integers(1, m))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  parent = rng.random(x.shape) < data.draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
  static, traced = with_parent(m)(x, parent, n)
  rank = ranks(magnitude(x), m, parent=parent)
  for k, mask in static.items():
    same(mask, rank < k)
  same(traced, rank < n)
  left = parent.reshape(2, m, 3).sum(1)
  kept = (np.asarray(traced) & parent).reshape(2, m, 3).sum(1)
  np.testing.assert_array_equal(kept, np.minimum(left, n))


# On a CPU short groups have one small program, whatever n is.


@pytest.mark.parametrize("m, axis", [(4, 0), (8, 0), (8, 1), (9, 0)])
def test_a_cpu_compares_in_groups_of_up_to_eight(m, axis):
  w, n, is_small = jnp.asarray(weights(2 * m, 2 * m)), jnp.int32(3), m <= 8 and axis == 0
  static = jax.jit(lambda w: magnitude_mask(w, NM(2, m), axis)).lower(w).as_text()
  traced = jax.jit(lambda w, n: magnitude_mask(w, NM(1, m), axis, n=n, settles=True)).lower(w, n)
  assert ("stablehlo.minimum" in static) == (not is_small or m == 4)  # a network
  assert ("stablehlo.case" in traced.as_text()) != is_small  # a way of its own for the last level
  for last, n in itertools.product((1, 2), range(1, m + 1)):
    found = magnitude_mask(w, NM(last, m), axis, n=jnp.int32(n), settles=True)
    same(found, ranks(abs(w), m, axis) < n)
    same(magnitude_mask(w, NM(n, m), axis), ranks(abs(w), m, axis) < n)


# Transforms. 4:16 is a network, a traced n of 40 is bisection, 1:4 an extreme.


def fixed_n(w):
  return nm_mask(w, "4:16")


def traced_n(w, n=7):
  return magnitude_mask(w, "1:40", n=jnp.asarray(n))


def extreme(w):
  return nm_mask(w, "1:4")


PLAIN = {f: jax.jit(f) for f in (fixed_n, traced_n, extreme)}
FUNCTIONS = pytest.mark.parametrize("mask", [fixed_n, traced_n, extreme])


def weights(*shape):
  return np.random.default_rng(0).normal(size=shape).round(1).astype(np.float32)


@FUNCTIONS
def test_eager_jit_and_numpy_inputs_agree(mask):
  w = weights(80, 3)
  same(PLAIN[mask](w), mask(jnp.asarray(w)))
  same(mask(w), mask(jnp.asarray(w)))


@FUNCTIONS
def test_vmap_over_any_axis(mask):
  w = weights(80, 3, 5)
  found = jax.jit(jax.vmap(mask, in_axes=2, out_axes=1))(w)
  same(found, np.stack([PLAIN[mask](w[:, :, i]) for i in range(5)], axis=1))


def test_vmap_over_n():
  w, levels = weights(80, 3), jnp.array([1, 7, 40])
  found = jax.jit(jax.vmap(traced_n, in_axes=(None, 0)))(w, levels)
  same(found, np.stack([ranks(abs(w), 40) < n for n in levels]))


@FUNCTIONS
def test_scan_over_layers(mask):
  w = weights(5, 80, 3)
  _, found = jax.jit(lambda w: jax.lax.scan(lambda c, x: (c, mask(x)), None, w))(w)
  same(found, np.stack([PLAIN[mask](x) for x in w]))


@FUNCTIONS
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_no_gradient_flows_through_the_choice(mask, wrap):
  w = jnp.asarray(weights(80, 3)).at[0, 0].set(jnp.nan).at[1, 0].set(jnp.inf)

  @wrap
  def loss(w):
    return jnp.sum(jnp.where(mask(w), 2 * w, 0)), jnp.sum(mask(w).astype(w.dtype))

  through, of_mask = jax.jit(jax.jacrev(loss))(w)
  np.testing.assert_array_equal(through, 2.0 * np.asarray(PLAIN[mask](w)))
  np.testing.assert_array_equal(of_mask, 0)


@FUNCTIONS
def test_forward_mode(mask):
  w = jnp.asarray(weights(80, 3))
  _, tangent = jax.jvp(lambda w: jnp.where(mask(w), w, 0), (w,), (jnp.ones_like(w),))
  np.testing.assert_array_equal(tangent, PLAIN[mask](w))


@pytest.mark.parametrize("m", [8, 40])
def test_one_compilation_serves_every_n(m):
  traces = []

  @jax.jit
  def run(w, n):
    traces.append(n)
    return magnitude_mask(w, NM(1, m), n=n)

  w = weights(80, 2)
  for n in range(1, m + 1):
    same(run(w, jnp.int32(n)), ranks(abs(w), m) < n)
  assert len(traces) == 1


def test_float64_where_it_is_enabled():
  x = np.random.default_rng(0).choice(
    [0.0, -0.0, 5e-324, -5e-324, 1e-310, 1.0, 1 + 2**-52, -1.0, math.inf, -math.inf, math.nan],
    size=(48, 20),
  )
  with jax.enable_x64(True):
    assert jnp.asarray(x).dtype == jnp.float64
    for m in (4, 48):
      static, traced = jax.jit(every_n(m, 0))(jnp.asarray(x), 3)
      for n, mask in static.items():
        same(mask, ranks(x, m) < n)
      same(traced, ranks(abs(x), m) < 3)


def test_float64_arrays_where_it_is_not_are_rounded_as_jax_rounds():
  x = np.random.default_rng(0).normal(size=(16, 3))
  same(nm_mask(x, "3:8"), ranks(x.astype(np.float32), 8) < 3)


def test_lists_and_empty_arrays():
  assert nm_mask([3.0, 1.0, 2.0, 2.0], "2:4").tolist() == [True, False, True, False]
  assert nm_mask(jnp.zeros((0, 3)), "2:4").shape == (0, 3)
  assert nm_mask(jnp.zeros((8, 0)), "3:8").shape == (8, 0)


# Bad input: the message has the value, the rule and the likely fix.


def refused(call, *words):
  with pytest.raises(ValueError) as error:
    call()
  for word in words:
    assert word in str(error.value)


BOTH = pytest.mark.parametrize("function", [nm_mask, magnitude_mask])


@BOTH
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_scores_must_be_real_floats(function, dtype):
  refused(
    lambda: function(jnp.zeros((8, 3), dtype), "1:4"),
    f"dtype {dtype} and shape (8, 3)",
    "real floating-point scores",
    ".astype(jnp.float32)",
    "jnp.abs",
  )


@BOTH
@pytest.mark.parametrize("axis, length", [(1, 12), (-2, 12), ((0, 1), 36)])
def test_axis_must_be_divisible(function, axis, length):
  refused(
    lambda: function(jnp.zeros((3, 12, 5)), "1:8", axis),
    f"axis {axis} of length {length} (shape (3, 12, 5)) into groups of 8",
    f"{length} % 8 = 4",
    "indivisible='skip' or 'pad'",
  )


@BOTH
@pytest.mark.parametrize("axis", [2, -3, (0, 2), (), "0", 1.0, True, None])
def test_axis_must_exist(function, axis):
  refused(
    lambda: function(jnp.zeros((8, 4)), "1:4", axis),
    f"axis={axis!r} does not name an axis of an array of shape (8, 4)",
    "an int in [-2, 1] or several adjacent ones, such as (0, 1)",
  )


@BOTH
@pytest.mark.parametrize("axis", [(0, 2), (1, 0), (0, 0), (0, -1), (2, 0)])
def test_axes_must_be_adjacent_and_ascending(function, axis):
  refused(
    lambda: function(jnp.zeros((4, 4, 4)), "1:4", axis),
    f"axis={axis!r}: several axes must be adjacent and ascending, such as (0, 1)",
    "Transpose the weight first",
  )


@BOTH
@pytest.mark.parametrize("pattern", ["1;8", "4:2", 8])
def test_pattern_must_be_one(function, pattern):
  refused(lambda: function(jnp.zeros((8, 4)), pattern), "kept")


def test_check_axis_normalises():
  assert masks.check_axis((2, 3, 4), -1) == (2,)
  assert masks.check_axis((2, 3, 4), [-3, 1]) == (0, 1)
  assert masks.check_axis((2, 3, 4), np.int64(1)) == (1,)


def test_doctests():
  failed, tried = doctest.testmod(making, extraglobs={"jnp": jnp, "np": np})
  assert tried and not failed


@pytest.mark.parametrize("n", [0, 5])
def test_a_static_n_outside_the_group_is_refused(n):
  with pytest.raises(ValueError, match=f"NM\\({n}, 4\\)"):
    masks.magnitude_mask(jnp.ones(8), "1:4", n=n)


@pytest.mark.parametrize("parent", [jnp.ones((4, 2), bool), jnp.ones(8)])
def test_a_parent_of_another_shape_or_dtype_is_refused(parent):
  with pytest.raises(ValueError, match="Pass a mask of the same weight"):
    masks.magnitude_mask(jnp.ones(8), "1:4", parent=parent)
