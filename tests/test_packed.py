"""Packed weights: lossless on bits, small, and strict about what they take."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core.packed import check, like, pack, unpack
from nm_sparsity_jax.core.patterns import NM

FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16)


def weight(seed, shape, pattern, dtype):
  """An n:m weight of any bits along axis 0: NaN, inf, subnormals and both zeros."""
  rng, kind, (depth, columns) = np.random.default_rng(seed), np.dtype(dtype), shape
  w = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)
  order = rng.random((-(-depth // pattern.m), pattern.m, columns)).argsort(1)
  drop = order >= rng.integers(0, pattern.n + 1, (len(order), 1, columns))
  zeros = np.where(rng.random(shape) < 0.3, -0.0, 0.0).astype(kind)
  return np.where(drop.reshape(-1, columns)[:depth], zeros, w)


def normal(seed, shape, pattern, dtype=np.float32):
  """An n:m weight along axis 0 of numbers as in a network."""
  w = weight(seed, shape, NM.parse(pattern), dtype)
  return np.where(w == 0, w, np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def bits_of(x):
  """The bits, where the sign of a zero does not count: a -0.0 may find no place."""
  raw = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").copy()
  raw[raw == 1 << (8 * x.dtype.itemsize - 1)] = 0
  return raw


@pytest.mark.parametrize("pattern", ["2:4", "1:5", "7:16", "256:256"])
@given(
  seed=st.integers(0, 2**32 - 1),
  shape=st.sampled_from([(37, 5), (8, 1), (300, 2), (0, 3)]),
  kind=st.sampled_from(FLOATS),
)
def test_unpack_gives_the_same_bits(pattern, seed, shape, kind):
  pattern = NM.parse(pattern)
  w = weight(seed, shape, pattern, kind)
  packed = pack(w, pattern)
  check(packed)
  np.testing.assert_array_equal(bits_of(unpack(packed)), bits_of(w))
  again, form = pack(unpack(packed), pattern), like(pattern, shape, kind)
  assert jax.tree.structure(form) == jax.tree.structure(packed) and form.nbytes == packed.nbytes
  for one, other, due in zip(*map(jax.tree.leaves, (again, packed, form)), strict=True):
    assert one.dtype == other.dtype == due.dtype and one.shape == due.shape
    assert one.tobytes() == other.tobytes()


def test_minus_zero_comes_first_then_the_lowest_free_place():
  w = np.array([[0.0, 0.0, -0.0, 0.0]], np.float32).T
  assert pack(w, NM(2, 4)).indices.tolist() == [[0 | 2 << 2]]


def test_int8_is_off_by_half_a_step_at_most():
  size = np.exp(np.random.default_rng(0).normal(0, 5, (1, 40))).astype(np.float32)
  w = normal(0, (24, 40), "2:8") * size
  packed = pack(w, NM(2, 8), dtype=np.int8)
  check(packed)
  # What rounds to 0 keeps its place.
  np.testing.assert_array_equal(packed.indices, pack(w, NM(2, 8)).indices)
  assert packed.values.min() >= -127 and packed.dtype == np.float32
  step = np.abs(w).max(0) / 127
  assert (np.abs(unpack(packed) - w) <= step * 0.5001).all()


def test_int8_of_zeros_and_of_what_underflows():
  w = np.array([[0, 1e-38, 127, 2.5]] + [[0] * 4] * 3, np.float32)
  packed = pack(w, NM(1, 4), dtype=np.int8)
  assert packed.scale.tolist()[:3] == [1, 1, 1]
  assert packed.values.tolist() == [[0, 0, 127, 127]]


MATRIX = np.zeros((8, 3), np.float32)
BAD = MATRIX.copy()
BAD[4:7, 1] = 1e-40
IDENTITY = np.eye(5, 3, dtype=np.float32)
GOOD = pack(IDENTITY, NM(1, 4))  # 2 groups, 3 rows of padding
INT8 = pack(IDENTITY, NM(1, 4), dtype=np.int8)
TWO = pack(np.eye(8, 3, dtype=np.float32), NM(2, 4))


def changed(packed, **fields):
  return lambda: check(dataclasses.replace(packed, **fields), "wi")


@pytest.mark.parametrize(
  "call, word",
  [
    (lambda: pack(BAD, NM(2, 4), name="wi"), r"'wi' is not 2:4 along axis 0: 3 .* at \(4, 1\)"),
    (lambda: pack(MATRIX, NM(1, 257)), "at most 256"),
    (lambda: pack(MATRIX + 1e30, NM(4, 4), dtype="float16"), "beyond the"),
    (changed(GOOD, values=GOOD.values + 1, indices=GOOD.indices | 4), "'wi' .* padded"),
    (changed(INT8, scale=np.zeros(3, np.float32)), "positive"),
    (changed(TWO, indices=TWO.indices * 0), "ascend"),
    (changed(TWO, m=3, depth=6, indices=TWO.indices | 0xCC), "index of 3"),
  ],
)
def test_what_does_not_fit_is_named(call, word):
  with pytest.raises(ValueError, match=word):
    call()
