"""Which of the keys of a group are the n largest; the lower index wins a tie.

    keys [..., groups, m, ...], n -> [select] -> bool

Nothing is sorted, gathered or transposed: every pass is elementwise or reduces within a group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax.core.masks.once import computed_once

# Which selection is cheapest for which m; measured by benchmarks/masks.py.
# A min-max network: its program, and so its compilation, grows with m.
_MAX_M_FOR_NETWORK = 32  # no mutants: speed alone
# m comparisons per weight, for a traced n.
_MAX_M_FOR_RANKS = 16  # no mutants: speed alone


class KeepSpec(NamedTuple):
  """What to keep of each group, as far as it is known before the program runs.

  Attributes:
    m: the length of a group.
    n: how many to keep, None where it is traced.
    last: where n is traced, the n that holds longest. Such a program has a branch for it, which
      is cheaper: with n = 1 it is one maximum.
  """

  m: int
  n: int | None = None
  last: int | None = None


def in_groups(shape: tuple[int, ...], axes: tuple[int, ...], m: int) -> tuple[int, ...]:
  """Returns the shape in which `axes`, which are adjacent, are (groups, m); m is at axes[0] + 1."""
  length = math.prod(shape[a] for a in axes)
  return *shape[: axes[0]], length // m, m, *shape[axes[-1] + 1 :]


# How `select` finds the n largest:
#   n known   1 or m - 1              one extreme
#             else, m <= 32           network
#             else                    bisection
#   n traced  m <= 16                 ranks
#             else                    bisection
# n = m needs no branch: the n-th largest key is the smallest, and all are at or above it.


def select(keys: jax.Array, n: jax.Array | int, axis: int) -> jax.Array:
  """Returns the mask of the n largest keys along `axis`, which is one whole group.

  Args:
    keys: unsigned integers.
    n: how many to keep; it may be traced.
    axis: the axis of the groups.
  """
  m = keys.shape[axis]
  kth = functools.partial(kth_by_bisection, n=n, axis=axis)
  if isinstance(n, int):
    if n == 1:
      return _one_extreme(keys, axis, largest=True)
    if n == m - 1:  # no mutants: other ways find the same, slower
      return ~_one_extreme(keys, axis, largest=False)
    if m <= _MAX_M_FOR_NETWORK:  # no mutants: speed alone
      kth = functools.partial(kth_by_network, n=n, axis=axis)
  elif m <= _MAX_M_FOR_RANKS:  # no mutants: speed alone
    return _ranks(keys, axis) < n.astype(jnp.uint8)
  return _cut(keys, axis, kth)


def _one_extreme(keys: jax.Array, axis: int, *, largest: bool) -> jax.Array:
  """Marks one entry a group: the first of the largest, or the last of the smallest."""
  m = keys.shape[axis]
  best = _fold(keys, jnp.maximum if largest else jnp.minimum, axis)
  label = _iota(keys.shape, axis, jnp.uint32, m if largest else 1, -1 if largest else 1)
  hit = jnp.where(keys == best, label, jnp.uint32(0))
  return label == _fold(hit, jnp.maximum, axis)


def _ranks(keys: jax.Array, axis: int) -> jax.Array:
  """Counts the keys of a group that come before each key: larger, or equal with a lower index."""
  keys = computed_once(keys)
  index = _iota(keys.shape, axis, keys.dtype)
  rank = jnp.zeros(keys.shape, jnp.uint8)
  for j in range(keys.shape[axis]):
    rival = lax.slice_in_dim(keys, j, j + 1, axis=axis)
    wins_ties = (index > keys.dtype.type(j)).astype(keys.dtype)
    rank = rank + (rival + wins_ties > keys).astype(jnp.uint8)
  return rank


def _cut(keys: jax.Array, axis: int, kth: Callable) -> jax.Array:
  """Keeps the keys above the n-th largest, and the first ones among its equals.

  Each key gets a place. Above the n-th largest key it is `top`. For its equals it is `from_end`,
  their place counted from the end: m, m - 1, ..., 1. For the rest it is 0. Equals differ in it, so
  the n-th largest place is an exact cut.
  """
  m = keys.shape[axis]
  small = _count_dtype(m)
  from_end = _iota(keys.shape, axis, small, m, -1)
  threshold = kth(keys)
  place = jnp.where(keys == threshold, from_end, small(0))
  top = small(np.iinfo(small).max - 1)  # the very last one is `computed_once`'s
  place = computed_once(jnp.where(keys > threshold, top, place))
  return place >= kth(place)


def _count_dtype(m: int):
  """Returns the smallest unsigned dtype for 0 to m, `_cut`'s top and that of `computed_once`."""
  return np.min_scalar_type(m + 2).type


def kth_by_network(keys: jax.Array, n: int, axis: int) -> jax.Array:
  """Returns the n-th largest key of each group, by a min-max network pruned to that one output.

  Batcher, "Sorting networks and their applications", AFIPS 1968 (odd-even merge sort).
  """
  m = keys.shape[axis]
  target = m - n  # in ascending order
  wanted, plan = {target}, []
  for a, b in reversed(_batcher(m)):
    if a in wanted or b in wanted:
      plan.append((a, b, a in wanted, b in wanted))
      wanted |= {a, b}
  rows = [lax.slice_in_dim(keys, j, j + 1, axis=axis) for j in range(m)]
  for a, b, low, high in reversed(plan):
    x, y = rows[a], rows[b]
    if low:
      rows[a] = jnp.minimum(x, y)
    if high:
      rows[b] = jnp.maximum(x, y)
  return computed_once(rows[target])


def _batcher(m: int) -> list[tuple[int, int]]:
  """Returns the comparators of the odd-even merge sort of m keys, in order."""
  pairs = []
  p = 1
  while p < m:
    k = p
    while k:
      for j in range(k % p, m - k, 2 * k):
        for i in range(j, j + min(k, m - j - k)):
          if i // (2 * p) == (i + k) // (2 * p):
            pairs.append((i, i + k))
      k //= 2
    p *= 2
  return pairs


def kth_by_bisection(keys: jax.Array, n: jax.Array | int, axis: int) -> jax.Array:
  """Returns the n-th largest key of each group, found bit by bit; n may be traced.

  Eight bits are a digit, so a pass reads one byte a key. Each digit is bisected, among the keys
  that share all digits found before it: a pass counts how many digits reach a candidate.

  Args:
    keys: unsigned integers.
    n: how many to keep.
    axis: the axis of the groups.
  """
  unsigned = keys.dtype.type
  count = _count_dtype(keys.shape[axis])
  # Zeros made from the keys, so that they are sharded (or vary by device) as the keys are.
  zeros = functools.partial(jnp.zeros_like, lax.slice_in_dim(keys, 0, 1, axis=axis))
  need = zeros(count) + jnp.asarray(n).astype(count)

  def bisect(digit, need):
    def next_bit(found):
      bit, low, above = found
      candidate = low | bit
      hits = _fold((digit >= candidate).astype(count), jnp.add, axis)
      enough = hits >= need
      low, above = jnp.where(enough, candidate, low), jnp.where(enough, above, hits)
      return bit >> jnp.uint8(1), low, above

    start = jnp.uint8(128), zeros(jnp.uint8), zeros(count)
    return lax.while_loop(lambda found: found[0] > 0, next_bit, start)[1:]

  def next_digit(found):
    shift, prefix, need = found
    at = shift.astype(keys.dtype)
    rest = (keys ^ prefix) >> at  # below 256 just where all earlier digits agree
    digit = jnp.where(rest < unsigned(256), rest, unsigned(0)).astype(jnp.uint8)
    low, above = bisect(digit, need)
    return shift - 8, prefix | (low.astype(keys.dtype) << at), need - above

  if keys.dtype.itemsize == 1:
    return bisect(keys, need)[0]
  start = jnp.int32(8 * (keys.dtype.itemsize - 1)), zeros(keys.dtype), need
  return lax.while_loop(lambda found: found[0] >= 0, next_digit, start)[1]


def _fold(x: jax.Array, combine: Callable, axis: int) -> jax.Array:
  """Reduces `axis` to length 1: by eights, then the rest in two halves.

  One long reduction reads a column with the stride of a row, which wastes the cache: up to 4x
  slower on a CPU when a row is a large power of two. Eight rows at a time stream. The halves keep
  XLA from merging the two reductions into the long one again.
  """
  m = x.shape[axis]
  if combine is jnp.add:
    whole = functools.partial(jnp.sum, dtype=x.dtype)
  else:
    whole = jnp.max if combine is jnp.maximum else jnp.min
  by = next(d for d in range(8, 0, -1) if m % d == 0)
  if m <= 16 or by == 1:
    return whole(x, axis=axis, keepdims=True)
  parts = whole(x.reshape(*x.shape[:axis], m // by, by, *x.shape[axis + 1 :]), axis=axis + 1)
  half = m // by // 2
  halves = [lax.slice_in_dim(parts, *ends, axis=axis) for ends in ((0, half), (half, m // by))]
  return combine(*(whole(x, axis=axis, keepdims=True) for x in halves))


def _iota(shape, axis: int, dtype, first: int = 0, step: int = 1) -> jax.Array:
  """Returns first, first + step, ... along `axis`, the same along all others."""
  values = np.arange(shape[axis]) * step + first
  return lax.broadcast_in_dim(jnp.asarray(values, dtype), shape, (axis,))
