"""The masks of a weight: scores or magnitudes, a pattern and an axis in, a mask out."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax import dtypes
from nm_sparsity_jax.masks import selection
from nm_sparsity_jax.masks.keys import ABSENT, magnitude_keys, score_keys
from nm_sparsity_jax.patterns import NM

Axis = int | Sequence[int]

# Compiled once for each pattern, axis and shape, also outside jit; inlined inside.
_compiled = functools.partial(jax.jit, inline=True)


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


@functools.partial(_compiled, static_argnums=(1, 2))
def _nm_mask(scores, pattern, axis):
  select = functools.partial(selection.select, n=pattern.n)
  return _on_groups(scores, pattern.m, axis, score_keys, select)


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
  select = functools.partial(selection.select, n=pattern.n if n is None else n)
  return _on_groups(w, pattern.m, axis, magnitude_keys, select, parent)


def ladder_mask(
  w: jax.Array, pattern: NM | str, axis: Axis = 0, *, doublings: jax.Array, most: int
) -> jax.Array:
  """Returns the magnitude mask of 2^d*n : 2^d*m for a traced d: one program serves all d.

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
    shape = (*keys.shape[:axis], 1 << most, pattern.m, *keys.shape[axis + 1 :])
    count_in = functools.partial(selection.count_in_ladder, axis=axis + 1, doublings=doublings)
    kth = functools.partial(
      selection.kth_by_bisection, n=n, axis=axis + 1, size=keys.shape[axis], count_in=count_in
    )
    from_end = selection.from_end(keys.shape, axis).reshape(shape)
    cut = selection.cut_at_once if from_end.dtype == jnp.uint8 else selection.cut
    return cut(keys.reshape(shape), from_end, kth).reshape(keys.shape)

  return _on_groups(w, pattern.m << most, axis, magnitude_keys, select)


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
  """Returns x as an array; refuses dtypes without an order of real numbers."""
  if not hasattr(x, "dtype"):
    x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      f"a mask needs real floating-point scores, got dtype {x.dtype} and shape {x.shape}. "
      "Integers: convert with .astype(jnp.float32). Complex numbers: pass jnp.abs of them."
    )
  if why := dtypes.no_masks(x.dtype):
    raise ValueError(
      f"no mask can be made for dtype {x.dtype} and shape {x.shape}: {why}. Convert the weight "
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
    keys = jnp.where(parent.reshape(grouped), keys, keys.dtype.type(ABSENT))
  return select(keys, axis=axes[0] + 1).reshape(shape)
