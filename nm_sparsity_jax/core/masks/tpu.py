"""The mask of a weight on a TPU: one Pallas kernel reads the weight once and writes its mask.

    W [.., K, ..] -> view (front, K, rest) -> blocks in VMEM -> keys -> kept -> int8, 0 or 1

XLA on a TPU writes keys, bests and labels of a group to memory and reads them again, up to fifteen
times. Here they stay on the chip. A block holds whole groups, so blocks need nothing of each other.
Everything is int32 inside, for a TPU computes in 32 bits. The mask is the one that `selection`
makes, bit for bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nm_sparsity_jax.core.masks.keys import ABSENT
from nm_sparsity_jax.core.masks.selection import KeepSpec

# Ranks shift the block twice for each of m - 1 rivals; a search counts 31 + log2(m) times.
_MAX_M_FOR_RANKS = 8  # no mutants: speed alone
# Weights of a block, where groups are short enough.
_BLOCK = 1 << 17  # no mutants: speed alone
# Of a block along the groups: VMEM holds 128 of them, and what comes of them. Groups that fill no
# whole registers of 8 rows are spread over more.
_LONGEST, _LONGEST_SPREAD, _ROWS = 2048, 1024, 8
_LANES, _PACKED = 128, 32  # a tile of bytes
_DTYPES = ("float32", "bfloat16")


def serves(w: Any, kept: KeepSpec, axes: tuple[int, ...]) -> bool:
  """Returns whether the kernel serves a weight; XLA's way serves the others.

  A block holds whole groups and whole tiles. Groups of 75 fill whole tiles of 32 once in 2,400
  weights. VMEM has no room for so long a block.

  Args:
    w: an array, or its shape and dtype.
    kept: what to keep.
    axes: the axes of the groups.
  """
  view = _View.of(w.shape, axes)
  longest = _LONGEST_SPREAD if kept.m % _ROWS > 0 and kept.m > _ROWS else _LONGEST
  return str(w.dtype) in _DTYPES and view.block(kept.m)[view.last] <= longest


def mask(
  w: jax.Array,
  n: jax.Array,
  parent: jax.Array | None = None,
  *,
  kept: KeepSpec,
  axes: tuple[int, ...],
  interpret: bool = False,
) -> jax.Array:
  """Returns the magnitude mask of a weight, by one pass over it.

  Args:
    w: an array that `serves` accepts.
    n: how many to keep, an int32 scalar.
    parent: bool, shape of `w`, or None; see `masks.magnitude_mask`.
    kept: what to keep.
    axes: the axes of the groups, adjacent and ascending.
    interpret: run the kernel without a TPU.

  Returns:
    bool, shape of `w`, True = kept.
  """
  view = _View.of(w.shape, axes)
  block = view.block(kept.m)
  arrays = [w] if parent is None else [w, parent.astype(jnp.int8)]
  arrays = [x.transpose(view.order).reshape(view.shape) for x in arrays]
  like = jax.eval_shape(lambda x: x.astype(jnp.int8), arrays[0])  # varies by device as w does
  spec = pl.BlockSpec((None, *block), lambda i, j, k, _: (i, j, k))
  with jax.enable_x64(False):  # else Python's numbers are of 64 bits, which a TPU does not take
    out = pl.pallas_call(
      functools.partial(_kernel, kept, view.last),
      out_shape=like,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(view.shape[0], *map(pl.cdiv, view.shape[1:], block)),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
      ),
      interpret=interpret,
      name="nm_mask",
    )(n[None], *arrays)
  return out.reshape([w.shape[a] for a in view.order]).transpose(np.argsort(view.order)) != 0


class _View(NamedTuple):
  """How the kernel sees a weight: in the order in which a TPU keeps it, so nothing moves.

  A TPU keeps the last two axes of its order in tiles of 8 by 128. It puts first what would fill
  these badly, such as the layers of (K, layers, rest), or the heads of (K, heads, 64).

  Attributes:
    order: the transposition before the reshape.
    shape: (front, K, rest), or (1, front, K) if `last`.
    last: whether the groups lie along the last axis.
  """

  order: tuple[int, ...]
  shape: tuple[int, int, int]
  last: bool

  @classmethod
  def of(cls, shape: tuple[int, ...], axes: tuple[int, ...]) -> _View:
    after = range(axes[-1] + 1, len(shape))
    k, rest = math.prod(shape[a] for a in axes), shape[-1] if after else 1
    last = rest == 1 or (rest % _LANES > 0 and k % _LANES == 0)
    ends = (*axes,) if last else (*axes, len(shape) - 1)
    order = (*(a for a in range(len(shape)) if a not in ends), *ends)
    front = math.prod(shape) // (k if last else k * rest)
    return cls(order, (1, front, k) if last else (front, k, rest), last)

  def block(self, group: int) -> tuple[int, int]:
    """Returns the shape of a block: whole groups, and whole tiles where the array has more."""
    _, rows, columns = self.shape
    if self.last:
      wide = min(columns, _up(512, math.lcm(group, _LANES)))
      high = max(_PACKED, _BLOCK // wide // _PACKED * _PACKED)  # no mutants: speed alone
      return min(rows, high), wide
    high = min(rows, _up(256, math.lcm(group, _PACKED)))
    wide = max(_LANES, _BLOCK // high // _LANES * _LANES)  # no mutants: speed alone
    return high, min(columns, wide)


def _up(size: int, unit: int) -> int:
  return -(-size // unit) * unit


def _kernel(kept: KeepSpec, last: bool, scalars, w, *refs):
  """Writes the mask of one block; the groups lie along its first axis, or the second if `last`."""
  keys, out = _keys(w[...]), refs[-1]
  if len(refs) == 2:
    keys = jnp.where(refs[0][...].astype(jnp.int32) != 0, keys, ABSENT)

  def write(kept):
    out[...] = _of_block(keys, kept, last, scalars[0]).astype(jnp.int8)

  if kept.last is None:
    write(kept)
    return
  settled = scalars[0] == kept.last
  pl.when(settled)(lambda: write(KeepSpec(kept.m, kept.last)))
  pl.when(jnp.logical_not(settled))(lambda: write(KeepSpec(kept.m)))


def _of_block(keys: jax.Array, kept: KeepSpec, last: bool, n) -> jax.Array:
  # int32, 0 or 1: a v4 writes no booleans as bytes.
  n = n if kept.n is None else kept.n
  if kept.m <= _MAX_M_FOR_RANKS and kept.n != 1:
    # The sign of a difference, not a comparison: a v4 cannot write booleans of ranks as bytes.
    return lax.shift_right_logical(_ranks(keys, kept.m, int(last)) - n, 31)
  keys = keys.T if last else keys
  groups = keys.reshape(keys.shape[0] // kept.m, kept.m, *keys.shape[1:])
  chosen = _chosen(groups, kept, n).astype(jnp.int32).reshape(keys.shape)
  return chosen.T if last else chosen


def _keys(w: jax.Array) -> jax.Array:
  # The order of `keys.magnitude_keys`, in the 32 bits that a TPU computes in.
  if w.dtype == jnp.bfloat16:
    bits, inf = lax.bitcast_convert_type(w, jnp.int16).astype(jnp.int32) & 0x7FFF, 0x7F80
  else:
    bits, inf = lax.bitcast_convert_type(w, jnp.int32) & 0x7FFFFFFF, 0x7F800000
  return jnp.where(bits > inf, 1, bits + 2)


def _chosen(keys: jax.Array, kept: KeepSpec, n) -> jax.Array:
  """Returns which keys [groups, m, ...] are among the n largest of their group."""
  m = kept.m
  index = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
  if kept.n == 1:
    best = jnp.max(keys, axis=1, keepdims=True)
    return index == jnp.min(jnp.where(keys == best, index, m), axis=1, keepdims=True)
  return _searched(keys, n, m - index)


def _ranks(keys: jax.Array, m: int, axis: int) -> jax.Array:
  """Counts the keys of a group that come before each key: larger, or equal with a lower index."""
  size = keys.shape[axis]
  index = lax.broadcasted_iota(jnp.int32, keys.shape, axis) % m
  rank = jnp.zeros(keys.shape, jnp.int32)
  for j in range(1, m):
    later = index + j < m
    rival = jnp.where(later, pltpu.roll(keys, size - j, axis), pltpu.roll(keys, m - j, axis))
    rank += ((rival > keys) | ((rival == keys) & ~later)).astype(jnp.int32)
  return rank


def _searched(keys: jax.Array, n: jax.Array | int, place: jax.Array) -> jax.Array:
  """Keeps the keys above the n-th largest, and the first ones among its equals.

  Args:
    keys: below 2^31.
    n: how many to keep of a group.
    place: m, m - 1, ..., 1 along it.
  """
  threshold = _nth_largest(keys, n, bits=31)
  bits = keys.shape[1].bit_length()
  place = jnp.where(keys == threshold, place, 0)
  place = jnp.where(keys > threshold, (1 << bits) - 1, place)
  return place >= _nth_largest(place, n, bits)


def _nth_largest(keys: jax.Array, n: jax.Array | int, bits: int) -> jax.Array:
  """Returns the n-th largest key of each group, found bit by bit from the highest."""

  def next_bit(i, found):
    candidate = found | (1 << (bits - 1 - i))
    hits = jnp.sum((keys >= candidate).astype(jnp.int32), axis=1, keepdims=True)
    return jnp.where(hits >= n, candidate, found)

  return lax.fori_loop(0, bits, next_bit, jnp.zeros_like(keys[:, :1]))
