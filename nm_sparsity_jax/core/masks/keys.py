"""Scores as unsigned integers in the same order, which no backend flushes or reorders.

absent 0 < NaN 1 < -inf < ... < -0.0 = +0.0 < ... < inf
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ABSENT = 0  # not allowed to survive (the parent mask dropped it)
_NAN = 1  # survives only where a group has too few numbers


def _raw(x: jax.Array) -> tuple[jax.Array, int, int]:
  """Returns the bits of `x` as unsigned integers, their number, and the bits of +inf."""
  if x.dtype.itemsize == 1:  # 8-bit floats: every one of them is a float16 or bfloat16 too,
    x = x.astype(jnp.float32)  # but float32 holds them all as normal numbers.
  size = x.dtype.itemsize
  unsigned = np.dtype(f"uint{8 * size}")
  inf = np.asarray(np.inf, x.dtype).view(unsigned)
  return lax.bitcast_convert_type(x, unsigned), 8 * size, int(inf)


def magnitude_keys(x: jax.Array) -> jax.Array:
  """Returns |x| as integers >= 2 in the same order, NaN as 1.

  Integers, because some backends flush subnormals when they compare floats.
  """
  u, bits, inf = _raw(x)
  t = u.dtype.type
  u = u & t((1 << (bits - 1)) - 1)
  return jnp.where(u > t(inf), t(_NAN), u + t(2))


def score_keys(x: jax.Array) -> jax.Array:
  """Returns x as integers >= 2 in the same order (-0.0 = +0.0), NaN as 1."""
  u, bits, inf = _raw(x)
  t = u.dtype.type
  size = u & t((1 << (bits - 1)) - 1)
  ordered = jnp.where(u >> t(bits - 1) == t(1), t(inf) - size, t(inf) + size)
  return jnp.where(size > t(inf), t(_NAN), ordered + t(2))
