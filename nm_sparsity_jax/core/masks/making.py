"""The masks of a weight: scores or magnitudes, a pattern and an axis in, a mask out."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax.core.masks import primitive, selection
from nm_sparsity_jax.core.masks.keys import score_keys
from nm_sparsity_jax.core.masks.selection import KeepSpec
from nm_sparsity_jax.core.patterns import NM

Axis = int | Sequence[int]


def nm_mask(scores: jax.Array, pattern: NM | str, axis: Axis = 0) -> jax.Array:
  """Marks the `n` largest scores in each group of `m` along `axis`; of weights: `magnitude_mask`.

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
  scores, pattern = _floating(scores), NM.parse(pattern)
  return _score_mask(scores, pattern, _whole_groups(scores.shape, axis, pattern.m))


@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def _score_mask(scores, pattern, axes):
  grouped = selection.in_groups(scores.shape, axes, pattern.m)
  keys = score_keys(lax.stop_gradient(scores).reshape(grouped))
  return selection.select(keys, n=pattern.n, axis=axes[0] + 1).reshape(scores.shape)


def magnitude_mask(
  w: jax.Array,
  pattern: NM | str,
  axis: Axis = 0,
  *,
  n: jax.Array | int | None = None,
  parent: jax.Array | None = None,
  settles: bool = False,
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
    settles: a traced n is most often the pattern's own, as in the last level of a schedule, which
      then has a way of its own: 1:m is one maximum.

  Returns:
    bool, same shape as `w`, True = kept.

  >>> magnitude_mask(jnp.array([-3., 1., 2., 2.]), "1:4", n=jnp.int32(3)).tolist()
  [True, False, True, True]
  """
  pattern = NM.parse(pattern)
  if isinstance(n, int):
    pattern, n = NM(n, pattern.m), None
  w = _floating(w)
  if parent is not None and (parent.shape != w.shape or parent.dtype != jnp.bool_):
    raise ValueError(
      f"parent has shape {parent.shape} and dtype {parent.dtype}, but a mask of this weight has "
      f"shape {w.shape} and dtype bool. Pass a mask of the same weight."
    )
  axes = _whole_groups(w.shape, axis, pattern.m)
  if n is None:
    kept = KeepSpec(pattern.m, pattern.n)
  else:
    kept = KeepSpec(pattern.m, last=pattern.n if settles else None)
  return primitive.mask(w, kept, axes, n, parent)


def check_axis(shape: Sequence[int], axis: Axis, gaps: bool = False) -> tuple[int, ...]:
  """Normalises `axis` to a tuple of ascending, non-negative ints, adjacent unless `gaps`."""
  rank = len(shape)
  axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
  if not axes or not set(axes) <= set(range(-rank, rank)):
    raise ValueError(
      f"axis={axis!r} does not name an axis of an array of shape {tuple(shape)}: give an "
      f"int in [{-rank}, {rank - 1}] or several adjacent ones, such as (0, 1)."
    )
  axes = tuple([int(a) % rank for a in axes])
  steps = np.diff(axes)
  if np.any(steps < 1 if gaps else steps != 1):
    raise ValueError(
      f"axis={axis!r}: several axes must be adjacent and ascending, such as (0, 1); they are "
      "read as one axis of their joint length. Transpose the weight first."
    )
  return axes


def _floating(x):
  if not hasattr(x, "dtype"):
    x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      f"a mask needs real floating-point scores, got dtype {x.dtype} and shape {x.shape}: convert "
      "with .astype(jnp.float32), or pass jnp.abs of complex numbers."
    )
  return x


def _whole_groups(shape: tuple[int, ...], axis: Axis, m: int) -> tuple[int, ...]:
  axes = check_axis(shape, axis)
  length = math.prod(shape[a] for a in axes)
  if length % m:
    raise ValueError(
      f"cannot cut axis {axis} of length {length} (shape {tuple(shape)}) into groups of "
      f"{m}: {length} % {m} = {length % m}, and groups never straddle "
      "the axis. Choose a pattern whose m divides it, another axis, or a policy: "
      "Rules(..., indivisible='skip' or 'pad')."
    )
  return axes
