"""Which values of an array are zero, and which are finite, by the bits of every dtype.

    numpy array -> [used, finite] -> bool array

The host decides, so no backend can flush a subnormal to zero. Formats of eight bits and less differ
in what their patterns mean: float8_e4m3fnuz has no -0.0 and puts NaN in its place, float8_e8m0fnu
has no zero at all.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

_WIDE = ("float16", "bfloat16", "float32", "float64")  # sign, exponent, mantissa; two zeros


def used(w: np.ndarray, name: str = "an array") -> np.ndarray:
  """Marks what is not zero: -0.0 is zero, NaN and subnormals are not.

  >>> used(np.array([0.0, -0.0, 1e-40, np.nan], np.float32)).tolist()
  [False, False, True, True]

  Args:
    w: real floats or integers.
    name: of the parameter, for the error.

  Raises:
    ValueError: the dtype is another one, and the error names it.
  """
  if w.dtype.name in _WIDE:
    w = w.astype(w.dtype.newbyteorder("="), copy=False)
    bits = w.view(f"u{w.dtype.itemsize}")
    return (bits << np.asarray(1, bits.dtype)) != 0
  if _is_small(w.dtype):
    return _table(w.dtype)[0][w.view(np.uint8)]
  if w.dtype.kind in "iu":
    return w != 0
  raise ValueError(f"{name!r} has dtype {w.dtype}: verify takes real floats and integers.")


def finite(w: np.ndarray) -> np.ndarray:
  """Marks what is neither infinite nor NaN, in arrays that `used` takes."""
  if _is_small(w.dtype):
    return _table(w.dtype)[1][w.view(np.uint8)]
  return np.isfinite(w)


def no_masks(dtype: Any) -> str:
  """Says why weights of a floating dtype cannot be masked; '' where they can.

  >>> no_masks(np.dtype("float8_e8m0fnu"))
  'it has no zero, so no weight of it can be pruned'
  """
  name = np.dtype(dtype).name
  if name == "float8_e8m0fnu":
    return "it has no zero, so no weight of it can be pruned"
  return "JAX computes nothing in it" if name.startswith("float6_") else ""


def _is_small(dtype: np.dtype) -> bool:
  """Returns whether a dtype is a number in one byte, or in a part of one."""
  is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
  return dtype.itemsize == 1 and bool(is_number)


@functools.cache
def _table(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
  """Returns (not zero, finite) of each of the 256 bytes that an element can be."""
  values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
  return values != 0, np.isfinite(values)
