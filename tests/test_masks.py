"""The mask contract against its equation in exact numbers: any n:m, axis, dtype, transform.

Scores come from few values, so that ties are common. The kernel for TPUs runs without one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_arrays import magnitude, ranks

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.masks import magnitude_mask, nm_mask, tpu
from nm_sparsity_jax.core.masks.selection import KeepSpec
from nm_sparsity_jax.core.patterns import NM

FLOATS = ("float32", "bfloat16", "float16")
SHORT = (
  "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e5m2", "float8_e4m3fn",
  "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz",
)  # fmt: skip
# 254, 255 and 256, as 65534 ... below, are where counts outgrow an integer type.
SIZES = (1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 253, 254, 256, 640)


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


def same(mask, expected):
  assert mask.dtype == bool
  np.testing.assert_array_equal(np.asarray(mask), expected)


def layouts(m):
  """Shapes and axes: ranks 2 to 4, the axis anywhere, two axes as one, scanned dimensions."""
  d = next((d for d in range(2, m) if m % d == 0), 1)
  return [
    ((2 * m, 3), 0),
    ((3, m), -1),
    ((2, m, 3), -2),
    ((2, 2 * m, 1, 2), 1),
    ((d, 2 * m // d, 2), (0, 1)),
    ((2, 3, 2 * m // d, d), (-2, -1)),
  ]


@functools.cache
def program(m, axis):
  """Masks of each kind in one program: {n: (of scores, of sizes below a parent)}, n traced."""
  last = 1 if m < 3 else 1 + m % 2  # the n that holds longest has a way of its own

  def run(x, parent, n):
    big = lambda k, **options: magnitude_mask(x, NM(k, m), axis, **options)
    # 1, between, m - 1 and m take different paths.
    known = sorted({1, max(1, m // 3 if m % 2 else m // 2), max(1, m - 1), m})
    static = {k: (nm_mask(x, NM(k, m), axis), big(k, parent=parent)) for k in known}
    traced = [big(1, n=n), big(last, n=n, settles=True)]
    below = [big(1, n=n, parent=parent)]
    axes = masks.check_axis(x.shape, axis)
    if tpu.serves(x, KeepSpec(m), axes):
      kernel = functools.partial(tpu.mask, x, axes=axes, interpret=True)
      traced += [kernel(n, None, kept=kept) for kept in (KeepSpec(m), KeepSpec(m, last=last))]
      of = lambda k: kernel(jnp.int32(k), parent, kept=KeepSpec(m, k))
      static |= {k: (*found, of(k)) for k, found in static.items()}
    return static, traced, below

  return jax.jit(run)


def check(x, m, axis, n, parent):
  static, traced, below = program(m, axis)(x, parent, jnp.int32(n))
  by_size, of_parent = ranks(magnitude(x), m, axis), ranks(magnitude(x), m, axis, parent)
  for k, (of_scores, *with_parent) in static.items():
    same(of_scores, ranks(x, m, axis) < k)
    for mask in with_parent:
      same(mask, of_parent < k)
  for mask in traced:
    same(mask, by_size < n)
  for mask in below:
    same(mask, of_parent < n)


@pytest.mark.parametrize("i, m", list(enumerate(SIZES)))
@given(data=st.data())
def test_masks_are_their_equation(i, m, data):
  """What a parent drops comes back only where too few are left."""
  dtype, (shape, axis) = FLOATS[i % 3], layouts(m)[i % 6]
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


@pytest.mark.parametrize("dtype", FLOATS + SHORT)
def test_order_of_all_neighbours(dtype):
  """Every float of 16 bits and less; of 32 bits every exponent and sign with edge fractions."""
  size = jnp.dtype(dtype).itemsize
  bits = np.arange(1 << jnp.finfo(dtype).bits if size < 4 else 2**16, dtype=f"uint{8 * size}")
  if size == 4:
    bits = (bits[::8, None] << np.uint32(16)) + np.array([0, 1, 2, 2**19 - 1], np.uint32)
  x = bits.reshape(-1).view(dtype)
  with np.errstate(invalid="ignore"):
    x = x[np.argsort(x.astype(np.float64), kind="stable")]
  pairs = np.stack([np.r_[x[1:], x[:-1]], np.r_[x[:-1], x[1:]]], axis=1)
  same(nm_mask(pairs, "1:2", axis=1), ranks(pairs, 2, 1) < 1)
  # The neighbours of a size are those of its float, and its negative.
  pairs = np.concatenate([pairs, np.stack([x, x[::-1]], axis=1)])
  same(magnitude_mask(pairs, "1:2", axis=1), ranks(magnitude(pairs), 2, 1) < 1)


def test_groups_longer_than_16_bits_count():
  m = 65534
  x = np.random.default_rng(m).integers(0, 4, (m, 1)).astype(jnp.bfloat16)
  same(jax.jit(functools.partial(nm_mask, pattern=NM(m // 2, m)))(x), ranks(x, m) < m // 2)


@pytest.mark.parametrize("name", ["cpu", "tpu"])
def test_only_a_cpu_computes_once_by_a_remainder(name):
  lowered = jax.jit(masks.computed_once).trace(jnp.uint32(1)).lower(lowering_platforms=(name,))
  assert ("stablehlo.remainder" in lowered.as_text()) == (name == "cpu")


@pytest.mark.parametrize("axes", [(2, None, 1), (None, None, 0), (None, 0, None)])
def test_vmap_over_anything_and_without_jit(axes):
  rng = np.random.default_rng(0)
  shape = 3, 80, 2
  every = rng.normal(size=shape).astype(np.float32), np.array([1, 7, 40]), rng.random(shape) < 0.5
  mask = lambda w, n, parent: magnitude_mask(w, "1:40", n=n, parent=parent)
  args = [x[0] if a is None else np.moveaxis(x, 0, a) for x, a in zip(every, axes, strict=True)]
  used = [[x[i * (a is not None)] for x, a in zip(every, axes, strict=True)] for i in range(3)]
  want = [ranks(abs(w), 40, 0, parent) < n for w, n, parent in used]
  same(jax.jit(jax.vmap(mask, axes))(*args), want)
  with jax.disable_jit():
    same(mask(*used[1]), want[1])


def test_no_gradient_flows_through_the_choice():
  w = jax.random.normal(jax.random.key(0), (80, 3)).at[:2, 0].set(jnp.array([jnp.nan, jnp.inf]))
  mask = lambda w: magnitude_mask(w, "1:40", n=jnp.int32(7))

  @jax.checkpoint
  def loss(w):
    return jnp.sum(jnp.where(mask(w), 2 * w, 0)), jnp.sum(mask(w).astype(w.dtype))

  through, of_mask = jax.jit(jax.jacrev(loss))(w)
  np.testing.assert_array_equal(through, 2.0 * np.asarray(mask(w)))
  np.testing.assert_array_equal(of_mask, 0)


W = jnp.zeros((4, 12, 5))


@pytest.mark.parametrize(
  "call, word",
  [
    (lambda: nm_mask(W.astype(int), "1:4"), "real floating"),
    (lambda: nm_mask(W, "1:8", 1), "12 % 8 = 4"),
    (lambda: magnitude_mask(W, "1:5", (0, 1)), "length 48"),
    (lambda: nm_mask(W, "1:4", (0, 2)), "adjacent"),
    (lambda: magnitude_mask(W, "1:4", n=5), "5:4"),
    (lambda: magnitude_mask(W, "1:4", parent=jnp.ones((4, 12), bool)), "parent"),
  ],
)
def test_wrong_arguments_are_named(call, word):
  with pytest.raises(ValueError, match=word):
    call()
