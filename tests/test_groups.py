"""Axis, padding and order of the groups of one weight, against plain numpy."""

import math

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reference_arrays import ranks

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.patterns import NM


@st.composite
def places(draw):
  """(groups, pattern) of a small weight of any rank, its grouped axes anywhere."""
  shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
  axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
  m = draw(st.integers(1, 5))
  pad = -math.prod(shape[a] for a in axes) % m + m * draw(st.integers(0, 1))
  one = len(axes) == 1 and draw(st.booleans())
  axis = draw(st.sampled_from([axes[0], axes[0] - len(shape)])) if one else axes
  return Groups(shape, axis, pad), NM(draw(st.integers(1, m)), m)


def rows_of(groups, m, x):
  """Every group as a row, by the definition; padding is 0.

  The other axes count first to last, and the groups of one of their positions follow one another.
  """
  axes = groups.axes
  others = [a for a in range(x.ndim) if a not in axes]
  rows = x.transpose(*others, *axes).reshape(-1, math.prod(x.shape[a] for a in axes))
  return np.pad(rows, ((0, 0), (0, groups.pad))).reshape(-1, m)


@given(places(), st.integers(0, 2**32 - 1))
def test_groups_and_their_masks_are_the_definition(place, seed):
  groups, pattern = place
  x = np.random.default_rng(seed).integers(-2, 3, groups.shape).astype(np.float32)
  rows = rows_of(groups, pattern.m, x)
  got = groups.split(x, pattern)
  assert got.shape[-1] == pattern.m and groups.count(pattern) == len(rows)
  np.testing.assert_array_equal(got.reshape(-1, pattern.m), rows)
  at = rows_of(groups, pattern.m, 1 + np.arange(x.size).reshape(x.shape)) - 1  # -1 is padding
  for i in np.flatnonzero(at[:, 0] >= 0):
    assert groups.start(i, pattern) == np.unravel_index(at[i, 0], x.shape)
  want = np.zeros(x.shape, bool)
  want.flat[at[(ranks(abs(rows), pattern.m, 1) < pattern.n) & (at >= 0)]] = True
  np.testing.assert_array_equal(groups.magnitude_mask(jnp.asarray(x), pattern), want)
