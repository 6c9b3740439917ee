"""Packed weights: lossless on bits, small, and strict about what they take."""

import dataclasses
import doctest
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import NMPacked, array, check, pack, sizes, unpack
from nm_sparsity_jax.core.patterns import NM

FLOATS = (np.float32, ml_dtypes.bfloat16, np.float16)
PATTERNS = ["1:1", "2:4", "1:5", "7:16", "3:32", "1:128", "256:256"]


def weight(seed, shape, axis, pattern, dtype):
  """An n:m weight of any bits: NaN, inf, subnormals and both zeros. Returns it and its groups."""
  rng = np.random.default_rng(seed)
  groups, kind = Groups(shape, axis), np.dtype(dtype)
  groups = dataclasses.replace(groups, pad=-groups.length % pattern.m)
  w = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)
  split = groups.split(np.arange(w.size).reshape(shape) + 1, pattern)
  split = split.reshape(math.prod(split.shape[:-1]), pattern.m)
  order = rng.random(split.shape).argsort(1)
  drop = np.where(order >= rng.integers(0, pattern.n + 1, (len(split), 1)), split, 0)
  flat = w.reshape(-1).copy()
  at = drop[drop > 0] - 1
  flat[at] = np.where(rng.random(w.size) < 0.3, -0.0, 0.0).astype(kind)[at]
  return flat.reshape(shape), groups


def raw(x):
  return x.view(f"u{x.dtype.itemsize}")


def as_matrix(w, groups):
  """(depth, features) as `pack` reads it, by jax's own transposition."""
  axes = groups.axes
  rest = [a for a in groups.order if a not in axes]
  return w.transpose(*axes, *rest).reshape(groups.length, math.prod(w.shape[a] for a in rest))


@pytest.mark.parametrize("pattern", PATTERNS)
@given(
  seed=st.integers(0, 2**32 - 1),
  shape=st.sampled_from([(37, 5), (8, 1), (5, 7, 3), (4, 3, 6), (2, 3, 4, 5), (300, 2), (0, 3)]),
  kind=st.sampled_from(FLOATS),
  data=st.data(),
)
def test_unpack_gives_the_same_bits(pattern, seed, shape, kind, data):
  pattern = NM.parse(pattern)
  several = [(0, 1), (0, 2)] if len(shape) > 2 else []
  axis = data.draw(st.sampled_from([*range(len(shape)), *several]))
  w, groups = weight(seed, shape, axis, pattern, kind)
  packed = pack(w, pattern, groups)
  check(packed)
  due, got = raw(as_matrix(w, groups)).copy(), raw(unpack(packed))
  sign = 1 << (8 * w.dtype.itemsize - 1)
  assert (got == sign).sum() <= (due == sign).sum()  # a -0.0 may find no place
  due[due == sign], got[got == sign] = 0, 0
  np.testing.assert_array_equal(got, due)
  # The packing of what was unpacked is the same one.
  again = pack(unpack(packed), pattern)
  for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(again), strict=True):
    assert one.tobytes() == other.tobytes()


def test_indices_share_bytes_along_the_rows_low_bits_first():
  for bits in (2, 4, 8):
    indices = np.random.default_rng(bits).integers(0, 1 << bits, (19, 3), np.uint8)
    squeezed, per = array.squeeze(indices, bits), 8 // bits
    np.testing.assert_array_equal(array.spread(squeezed, 19, bits), indices)
    for row in range(19):
      here = squeezed[row // per] >> (row % per * bits) & ((1 << bits) - 1)
      np.testing.assert_array_equal(here, indices[row])


def test_minus_zero_comes_first_then_the_lowest_free_place():
  w = np.array([[0.0, 0.0, -0.0, 0.0]], np.float32).T
  assert pack(w, NM(2, 4)).indices.tolist() == [[0 | 2 << 2]]


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 4))
def test_int8_is_off_by_half_a_step_at_most(seed, columns):
  rng = np.random.default_rng(seed)
  w, _ = weight(seed, (24, columns), 0, NM(2, 8), np.float32)
  size = np.exp(rng.normal(0, 5, (1, columns)))
  w = np.where((w == 0) & ~np.isnan(w), 0, rng.normal(0, size, w.shape)).astype(np.float32)
  packed = pack(w, NM(2, 8), dtype=np.int8)
  check(packed)
  exact = pack(w, NM(2, 8))
  np.testing.assert_array_equal(packed.indices, exact.indices)  # what rounds to 0 keeps its place
  assert packed.values.min() >= -127 and packed.dtype == np.float32
  step = np.abs(w).max(0) / 127
  assert (np.abs(unpack(packed) - w) <= step * 0.5001).all()


def test_int8_of_zeros_and_of_what_underflows():
  w = np.array([[0, 1e-38, 127, 2.5]] + [[0] * 4] * 3, np.float32)
  packed = pack(w, NM(1, 4), dtype=np.int8)
  assert packed.scale.tolist()[:3] == [1, 1, 1]
  assert packed.values.tolist() == [[0, 0, 127, 127]]
  half = np.array([[127, 0.5, 1.5, 2.5]], np.float32).T
  assert pack(half, NM(4, 4), dtype="int8").values[:, 0].tolist() == [127, 0, 2, 2]  # to even


def test_another_dtype_rounds_once():
  w, _ = weight(3, (16, 8), 0, NM(1, 4), np.float32)
  w = np.where(np.isfinite(w) & (np.abs(w) < 6e4) & (w != 0), w, 0).astype(np.float32)
  for kind in (ml_dtypes.bfloat16, np.float16):
    assert raw(unpack(pack(w, NM(1, 4), dtype=kind))).tolist() == raw(w.astype(kind)).tolist()


MATRIX = np.zeros((8, 3), np.float32)
BAD = MATRIX.copy()
BAD[4:7, 1] = 1e-40


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda: pack(BAD, NM(2, 4), name="wi"), r"'wi' is not 2:4 along axis 0: 3 .* at \(4, 1\)"),
    (lambda: pack(BAD.T, NM(2, 4), Groups((3, 8), 1)), r"begins at \(1, 4\)"),
    (lambda: pack(BAD.reshape(2, 4, 3), NM(2, 8), Groups((2, 4, 3), (0, 1))), r"at \(0, 0, 1\)"),
    (lambda: pack(MATRIX, NM(1, 257)), "at most 256"),
    (lambda: pack(MATRIX, NM(1, 4), dtype=np.int16), "packed as int16"),
    (lambda: pack(MATRIX + np.inf, NM(4, 4), dtype="int8"), "beyond the range of int8"),
    (lambda: pack(np.full((4, 1), 1e30, np.float32), NM(4, 4), dtype="float16"), "beyond the"),
  ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(call, said):
  with pytest.raises(ValueError, match=said):
    call()


GOOD = pack(np.eye(5, 3, dtype=np.float32), NM(1, 4))  # 2 groups, 3 rows of padding
INT8 = pack(np.eye(5, 3, dtype=np.float32), NM(1, 4), dtype=np.int8)
TWO = pack(np.eye(8, 3, dtype=np.float32), NM(2, 4))


@pytest.mark.parametrize(
  "packed, change, said",
  [
    (GOOD, {"values": GOOD.values + 1, "indices": GOOD.indices | 4}, "padded"),
    (INT8, {"scale": np.zeros(3, np.float32)}, "positive"),
    (TWO, {"indices": TWO.indices * 0}, "ascend"),
    (dataclasses.replace(TWO, m=3, depth=6), {"indices": TWO.indices | 0xCC}, "index of 3"),
  ],
)
def test_what_pack_cannot_have_made_is_refused(packed, change, said):
  with pytest.raises(ValueError, match=f"^'wi' is not a packed weight of .*{said}"):
    check(dataclasses.replace(packed, **change), "wi")


def test_it_is_a_pytree_whose_numbers_are_static():
  again = jax.jit(lambda p: jax.tree.map(lambda x: x, p))(INT8)
  assert isinstance(again, NMPacked) and jax.tree.structure(again) == jax.tree.structure(INT8)
  np.testing.assert_array_equal(unpack(again), unpack(INT8))


@pytest.mark.parametrize(
  "pattern, kind, due",  # bytes of a weight: values and indices, with m = 8 in 4 bits
  [("2:4", "float32", 2.125), ("1:8", "bfloat16", 0.3125), ("1:4", "int8", 0.3125 + 4 / 768)],
)
def test_bytes_of_a_weight(pattern, kind, due):
  w = np.zeros((768, 256), np.float32)
  found = sizes(pack(w, NM.parse(pattern), dtype=kind))
  assert found.total / w.size == due and found.ratio > 1


def test_docstrings():
  result = doctest.testmod(array, extraglobs={"np": np, "NM": NM})
  assert result.attempted and not result.failed
