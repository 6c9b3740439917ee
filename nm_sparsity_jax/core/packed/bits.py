"""Indices of 2, 4 or 8 bits, several to a byte.

    indices [rows, columns] -> [squeeze] -> bytes [ceil(rows * bits / 8), columns] -> [spread]

Indices of one column share a byte, low bits first. So a byte holds the same rows for every column,
and a kernel spreads a row of bytes by one shift. Bits that no row uses are 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MOST = 256  # the longest group that an index of 8 bits reaches through


def width(m: int) -> int:
  """Returns how many bits an index into a group of m takes.

  >>> [width(m) for m in (4, 5, 16, 17, 256)]
  [2, 4, 4, 8, 8]

  Raises:
    ValueError: m is larger than 256.
  """
  if m > MOST:
    raise ValueError(
      f"a group of {m} entries cannot be packed: an index has at most 8 bits, so m is at most "
      f"{MOST}. Keep such a weight dense."
    )
  return 2 if m <= 4 else 4 if m <= 16 else 8


def rows_of(rows: int, bits: int) -> int:
  """Returns how many rows of bytes hold `rows` rows of indices.

  >>> rows_of(5, 2)
  2
  """
  return -(-rows * bits // 8)


def squeeze(indices: np.ndarray, bits: int) -> np.ndarray:
  """Returns uint8 indices [rows, columns] with 8 / bits of them in a byte.

  >>> squeeze(np.array([[1], [2], [3]], np.uint8), 4).tolist()
  [[33], [3]]
  """
  per = 8 // bits
  squeezed = np.zeros((rows_of(len(indices), bits), indices.shape[1]), np.uint8)
  for i in range(per):
    share = indices[i::per]
    squeezed[: len(share)] |= share << np.uint8(i * bits)
  return squeezed


def spread(squeezed: Any, rows: int, bits: int, xp: Any = np) -> Any:
  """Undoes `squeeze`: returns uint8 indices [rows, columns].

  Args:
    squeezed: bytes, of numpy or jax.
    rows: how many rows of indices there are.
    bits: of an index.
    xp: `numpy`, or `jax.numpy` inside jit.
  """
  if bits == 8:
    return squeezed
  shifts = (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))[None, :, None]
  found = (squeezed[:, None, :] >> xp.asarray(shifts)) & xp.uint8((1 << bits) - 1)
  whole, columns = squeezed.shape
  return found.reshape(whole * (8 // bits), columns)[:rows]
