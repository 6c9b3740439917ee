"""Which weights survive: scores in, boolean masks out. True means kept.

    params + step -> recipe -> [mask] -> effective weight -> layer -> loss

Pure functions of arrays; steps, schedules, Flax and T5X live downstream. Nothing is
sorted, gathered or transposed. Every pass is elementwise or reduces within a group, so
any axis of any rank works, and a sharded array needs no communication as long as each
shard holds whole groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax import dtypes
from nm_sparsity_jax.patterns import NM

Axis = int | Sequence[int]

# Which selection is cheapest for which m; measured by benchmarks/masks.py.
_MAX_M_FOR_NETWORK = 32  # a min-max network: its program, and so its compilation, grows with m
_MAX_M_FOR_RANKS = 16  # m comparisons per weight, for a traced n

# Keys order the scores as unsigned integers; two values below every finite score:
_ABSENT = 0  # not allowed to survive (the parent mask dropped it)
_NAN = 1  # survives only where a group has too few numbers


def nm_mask(scores: jax.Array, pattern: NM | str, axis: Axis = 0) -> jax.Array:
  """Marks the `n` largest scores in each group of `m` along `axis`.

  With G(i) the group of i and s the scores,

      mask[i] = #{j in G(i) : s[j] > s[i], or s[j] = s[i] and j < i} < n.

  Every group has exactly n True entries. Between equals the lower index survives; -0.0
  equals +0.0; subnormals are not flushed to zero; NaN is lower than every number, -inf
  included.

  Args:
    scores: float array [..., K, ...], usually |weight|. Take them from the stored
      parameter before any cast: rounding first makes ties and changes survivors.
    pattern: what to keep, an `NM` or "n:m".
    axis: the axis of length K, a multiple of m. For a matmul kernel (in, out) the
      contracted one, 0. Several adjacent axes, such as (0, 1), count as one.

  Returns:
    bool, same shape as `scores`, True = kept.

  >>> nm_mask(jnp.array([3., 1., 2., 2.]), NM(2, 4)).tolist()
  [True, False, True, False]
  """
  return _nm_mask(_floating(scores), NM.parse(pattern), _hashable(axis))


# Compiled once for each pattern, axis and shape, also outside jit; inlined inside.
_compiled = functools.partial(jax.jit, inline=True)


@functools.partial(_compiled, static_argnums=(1, 2))
def _nm_mask(scores, pattern, axis):
  select = functools.partial(_select, n=pattern.n)
  return _on_groups(scores, pattern.m, axis, _score_keys, select)


def magnitude_mask(
  w: jax.Array,
  pattern: NM | str,
  axis: Axis = 0,
  *,
  n: jax.Array | int | None = None,
  parent: jax.Array | None = None,
) -> jax.Array:
  """Marks the `n` largest |w| in each group: `nm_mask(abs(w), ...)`, and a little more.

  Args:
    w: float array [..., K, ...].
    pattern: what to keep; its n is replaced by `n` where that is given.
    axis: as in `nm_mask`.
    n: how many to keep, a traced integer scalar in [1, m]: one compilation then serves
      every level of a schedule that changes n only.
    parent: bool, shape of `w`. Weights outside it survive only where the parent keeps
      fewer than n of a group.

  Returns:
    bool, same shape as `w`, True = kept.

  >>> magnitude_mask(jnp.array([-3., 1., 2., 2.]), "1:4", n=jnp.int32(3)).tolist()
  [True, False, True, True]
  """
  pattern = NM.parse(pattern)
  if n is None or isinstance(n, int):
    pattern, n = pattern if n is None else NM(n, pattern.m), None
  w = _floating(w)
  if parent is not None and (parent.shape != w.shape or parent.dtype != jnp.bool_):
    raise ValueError(
      f"parent has shape {parent.shape} and dtype {parent.dtype}, but a mask of this weight has "
      f"shape {w.shape} and dtype bool. Pass a mask of the same weight."
    )
  return _magnitude_mask(w, n, parent, pattern, _hashable(axis))


@functools.partial(_compiled, static_argnums=(3, 4))
def _magnitude_mask(w, n, parent, pattern, axis):
  select = functools.partial(_select, n=pattern.n if n is None else n)
  return _on_groups(w, pattern.m, axis, _magnitude_keys, select, parent)


def ladder_mask(
  w: jax.Array, pattern: NM | str, axis: Axis = 0, *, doublings: jax.Array, most: int
) -> jax.Array:
  """The magnitude mask of 2^d*n : 2^d*m with a traced d: one program for all those patterns.

  Weights are counted in groups of m, and a longer group adds up the counts of its 2^d short ones.

  Args:
    w: float array [..., K, ...], K a multiple of 2^most * m.
    pattern: n:m, the pattern at d = 0.
    axis: as in `nm_mask`.
    doublings: d, a traced integer scalar in [0, most].
    most: the largest d.

  Returns:
    bool, same shape as `w`, True = kept.

  >>> w = jnp.array([4., 3., 2., 1.])
  >>> [ladder_mask(w, "1:2", doublings=jnp.int32(d), most=1).tolist() for d in (0, 1)]
  [[True, False, True, False], [True, True, False, False]]
  """
  doublings = jnp.asarray(doublings, jnp.int32)
  return _ladder_mask(_floating(w), doublings, NM.parse(pattern), _hashable(axis), most)


@functools.partial(_compiled, static_argnums=(2, 3, 4))
def _ladder_mask(w, doublings, pattern, axis, most):
  n = jnp.int32(pattern.n) << doublings

  def select(keys, axis):
    long = keys.shape[axis]
    shape = (*keys.shape[:axis], 1 << most, pattern.m, *keys.shape[axis + 1 :])
    count_in = functools.partial(_count_in_ladder, axis=axis + 1, doublings=doublings)
    kth = functools.partial(_kth_by_bisection, n=n, axis=axis + 1, size=long, count_in=count_in)
    from_end = _from_end(keys.shape, axis).reshape(shape)
    return _cut(keys.reshape(shape), from_end, kth).reshape(keys.shape)

  return _on_groups(w, pattern.m << most, axis, _magnitude_keys, select)


def check_axis(shape: Sequence[int], axis: Axis, gaps: bool = False) -> tuple[int, ...]:
  """Normalises `axis` to a tuple of ascending, non-negative ints, adjacent unless `gaps`."""
  rank = len(shape)
  axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
  bad = [a for a in axes if isinstance(a, bool) or not isinstance(a, (int, np.integer))]
  if not axes or bad or any(not -rank <= a < rank for a in axes):
    raise ValueError(
      f"axis={axis!r} does not name an axis of an array of shape {tuple(shape)}: give an "
      f"int in [{-rank}, {rank - 1}] or several adjacent ones, such as (0, 1)."
    )
  axes = tuple(int(a) % rank for a in axes)
  if any(b <= a or (b > a + 1 and not gaps) for a, b in zip(axes, axes[1:], strict=False)):
    raise ValueError(
      f"axis={axis!r}: several axes must be adjacent and ascending, such as (0, 1); they are "
      "read as one axis of their joint length. Transpose the weight first."
    )
  return axes


def _floating(x):
  """x as an array, refused where it has no order of real numbers."""
  if not hasattr(x, "dtype"):
    x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      f"a mask needs real floating-point scores, got dtype {x.dtype} and shape {x.shape}. "
      "Integers: convert with .astype(jnp.float32). Complex numbers: pass jnp.abs of them."
    )
  if why := dtypes.no_masks(x.dtype):
    raise ValueError(
      f"a mask of dtype {x.dtype} and shape {x.shape} cannot be made: {why}. Convert the weight "
      "with .astype(jnp.float32)."
    )
  return x


def _hashable(axis: Axis) -> Axis:
  return tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else axis


def _on_groups(x, m, axis, to_keys, select, parent=None):
  """Views `axis` as (groups, m), selects, and restores the shape."""
  axes = check_axis(x.shape, axis)
  length = int(np.prod([x.shape[a] for a in axes]))
  if length % m:
    raise ValueError(
      f"cannot cut axis {axis} of length {length} (shape {tuple(x.shape)}) into groups of "
      f"{m}: {length} % {m} = {length % m}, and groups never straddle "
      "the axis. Choose a pattern whose m divides it, another axis, or a policy: "
      "Rules(..., indivisible='skip' or 'pad')."
    )
  shape = x.shape
  grouped = (*shape[: axes[0]], length // m, m, *shape[axes[-1] + 1 :])
  keys = to_keys(lax.stop_gradient(x).reshape(grouped))
  if parent is not None:
    keys = jnp.where(parent.reshape(grouped), keys, keys.dtype.type(_ABSENT))
  return select(keys, axis=axes[0] + 1).reshape(shape)


def _raw(x: jax.Array) -> tuple[jax.Array, int, int]:
  """The bits of `x` as unsigned integers, their number, and the bits of +inf."""
  if x.dtype.itemsize == 1:  # 8-bit floats: every one of them is a float16 or bfloat16 too,
    x = x.astype(jnp.float32)  # but float32 holds them all as normal numbers.
  size = x.dtype.itemsize
  unsigned = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[size]
  inf = np.asarray(np.inf, x.dtype).view(np.dtype(f"uint{8 * size}"))
  return lax.bitcast_convert_type(x, unsigned), 8 * size, int(inf)


def _magnitude_keys(x: jax.Array) -> jax.Array:
  """|x| as integers >= 2 in the same order, NaN as 1.

  Integers, because comparing floats flushes subnormals on some backends.
  """
  u, bits, inf = _raw(x)
  t = u.dtype.type
  u = u & t((1 << (bits - 1)) - 1)
  return jnp.where(u > t(inf), t(_NAN), u + t(2))


def _score_keys(x: jax.Array) -> jax.Array:
  """x as integers >= 2 in the same order (-0.0 = +0.0), NaN as 1."""
  u, bits, inf = _raw(x)
  t = u.dtype.type
  size = u & t((1 << (bits - 1)) - 1)
  ordered = jnp.where(u >> t(bits - 1) == t(1), t(inf) - size, t(inf) + size)
  return jnp.where(size > t(inf), t(_NAN), ordered + t(2))


def _select(keys: jax.Array, n: jax.Array | int, axis: int) -> jax.Array:
  """The mask of the n largest keys along `axis`, which is one whole group."""
  m = keys.shape[axis]
  kth = functools.partial(_kth_by_bisection, n=n, axis=axis)
  if isinstance(n, int):
    if n == m:
      return jnp.ones(keys.shape, bool)
    if n == 1:
      return _one_extreme(keys, axis, largest=True)
    if n == m - 1:
      return ~_one_extreme(keys, axis, largest=False)
    if m <= _MAX_M_FOR_NETWORK:
      kth = functools.partial(_kth_by_network, n=n, axis=axis)
  elif m <= _MAX_M_FOR_RANKS:
    return _ranks(keys, axis) < n.astype(jnp.uint8)
  return _cut(keys, _from_end(keys.shape, axis), kth)


def _one_extreme(keys: jax.Array, axis: int, *, largest: bool) -> jax.Array:
  """Marks one entry a group: the first of the largest, or the last of the smallest."""
  m = keys.shape[axis]
  best = _fold(keys, jnp.maximum if largest else jnp.minimum, axis)
  label = _iota(keys.shape, axis, jnp.uint32, m if largest else 1, -1 if largest else 1)
  hit = jnp.where(keys == best, label, jnp.uint32(0))
  return label == _fold(hit, jnp.maximum, axis)


def _ranks(keys: jax.Array, axis: int) -> jax.Array:
  """How many of its group come before each key: larger, or equal with a lower index."""
  keys = pinned(keys)
  index = _iota(keys.shape, axis, keys.dtype)
  rank = jnp.zeros(keys.shape, jnp.uint8)
  for j in range(keys.shape[axis]):
    rival = lax.slice_in_dim(keys, j, j + 1, axis=axis)
    wins_ties = (index > keys.dtype.type(j)).astype(keys.dtype)
    rank = rank + (rival + wins_ties > keys).astype(jnp.uint8)
  return rank


def _cut(keys: jax.Array, from_end: jax.Array, kth: Callable) -> jax.Array:
  """Keeps what is above the n-th largest key, and of its equals the first ones.

  Keys above become one high place, equals their place counted from the end, the rest 0: all
  places that matter differ, so the n-th largest place is an exact cut.
  """
  small = from_end.dtype.type
  threshold = kth(keys)
  place = jnp.where(keys == threshold, from_end, small(0))
  top = small(np.iinfo(small).max - 1)  # the very last one is `pinned`'s
  place = pinned(jnp.where(keys > threshold, top, place))
  return place >= kth(place)


def _from_end(shape, axis: int) -> jax.Array:
  """m, m - 1, ..., 1 along `axis`, in the fewest bits."""
  m = shape[axis]
  return _iota(shape, axis, _count_dtype(m), m, -1)


def _count_dtype(m: int):
  """Unsigned integers up to m and two more."""
  return jnp.uint8 if m < 254 else jnp.uint16 if m < 65534 else jnp.uint32


def _kth_by_network(keys: jax.Array, n: int, axis: int) -> jax.Array:
  """The n-th largest key of each group, by a min-max network pruned to that one output.

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
  return pinned(rows[target])


def _batcher(m: int) -> list[tuple[int, int]]:
  """The comparators of the odd-even merge sort of m keys, in order."""
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


def _kth_by_bisection(
  keys: jax.Array,
  n: jax.Array | int,
  axis: int,
  size: int | None = None,
  count_in: Callable | None = None,
) -> jax.Array:
  """The n-th largest key of each group, found bit by bit; n may be traced.

  Eight bits make a digit, which needs one byte a key: among the keys that share all digits
  found so far it is bisected, counting in each pass the digits at or above a candidate.

  Args:
    keys: unsigned integers.
    n: how many to keep.
    axis: a group, or a part of one (see `ladder_mask`).
    size: the length of a group, where `axis` is a part of one.
    count_in: hits -> how many in the group, `axis` of length 1; None adds up along `axis`.
  """
  unsigned = keys.dtype.type
  count = _count_dtype(size or keys.shape[axis])
  count_in = count_in or functools.partial(_fold, combine=jnp.add, axis=axis)
  # Zeros made from the keys, so that they are sharded (or vary by device) as the keys are.
  zeros = functools.partial(jnp.zeros_like, lax.slice_in_dim(keys, 0, 1, axis=axis))
  need = zeros(count) + jnp.asarray(n).astype(count)

  def bisect(digit, need):
    def next_bit(found):
      bit, low, above = found
      candidate = low | bit
      hits = count_in((digit >= candidate).astype(count))
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


def _count_in_ladder(hits: jax.Array, axis: int, doublings: jax.Array) -> jax.Array:
  """Hits in groups of 2^doublings parts: `axis` is a part, `axis - 1` counts the parts."""
  counts = sums = _fold(hits, jnp.add, axis)
  parts = counts.shape[axis - 1]
  for d in range(1, parts.bit_length()):
    pairs = sums.reshape(*sums.shape[: axis - 1], parts >> d, 2, *sums.shape[axis:])
    first, second = (lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
    sums = pinned(first + second)
    spread = (*sums.shape[:axis], 1 << d, *sums.shape[axis:])
    others = tuple(a for a in range(len(spread)) if a != axis)
    total = lax.broadcast_in_dim(sums, spread, others).reshape(counts.shape)
    counts = jnp.where(doublings >= d, total, counts)
  return counts


def _fold(x: jax.Array, combine: Callable, axis: int) -> jax.Array:
  """Reduces `axis` to length 1: by eights, then the rest in two halves.

  One long reduction reads a column with the stride of a row, which wastes the cache (up to 4x
  slower on a CPU when a row is a large power of two); eight rows at a time stream. The halves
  keep XLA from merging the two reductions into the long one again.
  """
  m = x.shape[axis]
  add = functools.partial(jnp.sum, dtype=x.dtype)
  whole = add if combine is jnp.add else jnp.max if combine is jnp.maximum else jnp.min
  by = next(d for d in range(8, 0, -1) if m % d == 0)
  if m <= 16 or by == 1:
    return whole(x, axis=axis, keepdims=True)
  parts = whole(x.reshape(*x.shape[:axis], m // by, by, *x.shape[axis + 1 :]), axis=axis + 1)
  half = m // by // 2
  halves = [lax.slice_in_dim(parts, *ends, axis=axis) for ends in ((0, half), (half, m // by))]
  return combine(*(whole(x, axis=axis, keepdims=True) for x in halves))


def pinned(x: jax.Array) -> jax.Array:
  """x itself, but XLA on a CPU computes it once instead of once for every use.

  Elementwise work is fused into each consumer and computed again there, m times where the
  consumer broadcasts a group's value over the group. An integer remainder counts as too
  expensive for that, and one by a value that no key reaches changes nothing.
  (An optimization_barrier is dropped on CPU.)
  """
  never = x.dtype.type(np.iinfo(x.dtype).max)
  return lax.platform_dependent(x, cpu=lambda x: lax.rem(x, never), default=lambda x: x)


def _iota(shape, axis: int, dtype, first: int = 0, step: int = 1) -> jax.Array:
  """first, first + step, ... along `axis`, broadcast to `shape`."""
  values = np.arange(shape[axis]) * step + first
  return lax.broadcast_in_dim(jnp.asarray(values, dtype), shape, (axis,))
