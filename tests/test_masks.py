"""The mask contract against its equation in exact numbers: any n:m, axis, dtype, transform.

The reference sorts float64s, which hold every narrower float exactly, by (dropped by the parent,
NaN, -value, index). Scores come from few values, so that ties are common.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.masks import magnitude_mask, nm_mask
from nm_sparsity_jax.core.patterns import NM

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
DTYPES = (*FLOATS, jnp.float8_e4m3fn, jnp.float8_e5m2)
# 254, 255 and 256, as 65534 ... below, are where counts outgrow an integer type.
SIZES = (1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 253, 254, 256, 640)


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
def program(m, axis):
  """Masks of each kind in one program; n of those by name is traced."""
  last = 1 if m < 3 else 1 + m % 2  # the n that holds longest has a way of its own

  def run(x, parent, n):
    big = lambda k, **options: magnitude_mask(x, NM(k, m), axis, **options)
    static = {k: (nm_mask(x, NM(k, m), axis), big(k, parent=parent)) for k in some_n(m)}
    return static, big(1, n=n), big(last, n=n, settles=True), big(1, n=n, parent=parent)

  return jax.jit(run)


def check(x, m, axis, n, parent):
  static, traced, settled, traced_with_parent = program(m, axis)(x, parent, n)
  by_size, of_parent = ranks(magnitude(x), m, axis), ranks(magnitude(x), m, axis, parent)
  for k, (of_scores, with_parent) in static.items():
    same(of_scores, ranks(x, m, axis) < k)
    same(with_parent, of_parent < k)
  same(traced, by_size < n)
  same(settled, by_size < n)
  same(traced_with_parent, of_parent < n)


@pytest.mark.parametrize("i, m", list(enumerate(SIZES)))
@given(data=st.data())
def test_masks_are_their_equation(i, m, data):
  """What a parent drops comes back only where too few are left."""
  dtype, (shape, axis) = DTYPES[i % 5], layouts(m)[i % 7]
  x, n = data.draw(scores(shape, dtype)), data.draw(st.integers(1, m))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  parent = rng.random(shape) < data.draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
  check(x, m, axis, n, parent)


def test_float64_where_it_is_enabled():
  values = np.array(special(np.float64), np.uint64).view(np.float64)
  x = np.random.default_rng(0).choice(values, size=(48, 20))
  with jax.enable_x64(True):
    assert jnp.asarray(x).dtype == jnp.float64
    for m in (4, 48):
      check(jnp.asarray(x), m, 0, 3, x > 0)


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


@pytest.mark.parametrize(
  "values, pattern, kept",
  [
    ([-0.0, 0.0, -0.0, 0.0], "2:4", [0, 1]),
    ([0, 1e-45, 2e-45, 1e-40], "1:4", [3]),
    ([math.nan, -math.nan, math.nan, -1], "2:4", [0, 3]),
  ],
)
def test_ties_zeros_subnormals_nan_by_example(values, pattern, kept):
  assert np.flatnonzero(nm_mask(jnp.array(values, jnp.float32), pattern)).tolist() == kept


@pytest.mark.parametrize("m", [65533, 65534])
def test_groups_longer_than_16_bits_count(m):
  x = np.random.default_rng(m).integers(0, 4, (m, 1)).astype(jnp.bfloat16)
  same(jax.jit(functools.partial(nm_mask, pattern=NM(m // 2, m)))(x), ranks(x, m) < m // 2)


@pytest.mark.parametrize("name", ["cpu", "tpu"])
def test_only_a_cpu_pins_by_a_remainder(name):
  lowered = jax.jit(masks.pinned).trace(jnp.uint32(1)).lower(lowering_platforms=(name,))
  assert ("stablehlo.remainder" in lowered.as_text()) == (name == "cpu")


def test_vmap_over_n():
  w, levels = np.random.default_rng(0).normal(size=(80, 3)), jnp.array([1, 7, 40])
  by_n = jax.vmap(lambda n: magnitude_mask(w.astype(np.float32), "1:40", n=n))
  same(jax.jit(by_n)(levels), np.stack([ranks(abs(w), 40) < n for n in levels]))


@pytest.mark.parametrize("pattern, options", [("4:16", {}), ("1:40", {"n": 7})])
def test_no_gradient_flows_through_the_choice(pattern, options):
  """By a network, and by bisection for a traced n."""
  options = jax.tree.map(jnp.int32, options)
  w = jax.random.normal(jax.random.key(0), (80, 3)).at[:2, 0].set(jnp.array([jnp.nan, jnp.inf]))
  mask = lambda w: magnitude_mask(w, pattern, **options)

  @jax.checkpoint
  def loss(w):
    return jnp.sum(jnp.where(mask(w), 2 * w, 0)), jnp.sum(mask(w).astype(w.dtype))

  through, of_mask = jax.jit(jax.jacrev(loss))(w)
  np.testing.assert_array_equal(through, 2.0 * np.asarray(mask(w)))
  np.testing.assert_array_equal(of_mask, 0)


def test_lists_and_empty_arrays():
  assert nm_mask([3.0, 1.0, 2.0, 2.0], "2:4").tolist() == [True, False, True, False]
  assert nm_mask(jnp.zeros((0, 3)), "2:4").shape == (0, 3)


W = jnp.zeros((4, 12, 5))


@pytest.mark.parametrize(
  "call, word",
  [
    (lambda: nm_mask(W.astype(int), "1:4"), "real floating"),
    (lambda: magnitude_mask(W.astype(jnp.complex64), "1:4"), "jnp.abs"),
    (lambda: nm_mask(W, "1:8", 1), "12 % 8 = 4"),
    (lambda: magnitude_mask(W, "1:5", (0, 1)), "length 48"),
    (lambda: magnitude_mask(W, "1:4", 3), "does not name an axis"),
    (lambda: nm_mask(W, "1:4", "0"), "does not name an axis"),
    (lambda: nm_mask(W, "1:4", (0, 2)), "adjacent"),
    (lambda: magnitude_mask(W, "1:4", n=5), "5:4"),
    (lambda: magnitude_mask(W, "1:4", parent=jnp.ones((4, 12), bool)), "parent"),
  ],
)
def test_wrong_arguments_are_named(call, word):
  with pytest.raises(ValueError, match=word):
    call()
