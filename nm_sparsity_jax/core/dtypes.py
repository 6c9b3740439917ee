"""Which values of a numpy array are zero, and which are finite, in every dtype of real numbers.

The host compares, since a backend may flush subnormals to zero. Formats of eight bits and less
differ: float8_e4m3fnuz has no -0.0 and puts NaN in its place, float8_e8m0fnu has no zero at all.
"""

from __future__ import annotations

import numpy as np


def used(w: np.ndarray) -> np.ndarray:
  """Marks what is not zero: -0.0 is zero, NaN and subnormals are not.

  >>> used(np.array([0.0, -0.0, 1e-40, np.nan], np.float32)).tolist()
  [False, False, True, True]
  """
  with np.errstate(invalid="ignore"):  # a signalling NaN
    return w != 0


def finite(w: np.ndarray) -> np.ndarray:
  """Marks what is neither infinite nor NaN, in arrays that `used` takes."""
  # numpy's isfinite knows no integers of four bits; float32 holds all of one byte.
  with np.errstate(invalid="ignore"):
    return np.isfinite(w.astype(np.float32) if w.dtype.itemsize == 1 else w)
