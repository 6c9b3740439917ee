"""A weight without its zeros: the canonical layout, and the way there and back on bits.

    weight (depth, features), pattern -> [pack] -> NMPacked -> [unpack] -> the same bits

Everything here is numpy on bit patterns: no backend can flush a subnormal or merge two NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.patterns import NM

MOST = 256  # the longest group that an index of 8 bits reaches through
DTYPES = ("float32", "bfloat16", "float16", "int8")  # of values
_LEVELS = 127  # of int8, to either side: -128 has no partner and is not used


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("values", "indices", "scale"),
  meta_fields=("n", "m", "depth", "bits"),
)
@dataclasses.dataclass(frozen=True)
class NMPacked:
  """One n:m weight (depth, features) without its zeros: n values of every m along the depth.

  Row g * n + i of `values` is what the i-th kept entry of group g is, in each column; its place in
  the group is the same row of the indices, which ascend within a group. It is a pytree: jit takes
  it, and the numbers below are static.

  Attributes:
    values: [ceil(depth / m) * n, features], of float32, bfloat16, float16 or int8.
    indices: uint8, 8 / bits of them in a byte along the rows; see `squeeze`.
    scale: float32 [features] of int8 values, else None. The weight is value * scale.
    n: how many of a group are kept.
    m: the length of a group.
    depth: the length of the axis that a layer contracts, without padding.
    bits: of an index: 2, 4 or 8.
  """

  values: Any
  indices: Any
  scale: Any
  n: int
  m: int
  depth: int
  bits: int

  @property
  def pattern(self) -> NM:
    """Returns n:m."""
    return NM(self.n, self.m)

  @property
  def features(self) -> int:
    """Returns the number of columns."""
    return self.values.shape[-1]

  @property
  def groups(self) -> int:
    """Returns the number of groups in a column, a padded one included."""
    return -(-self.depth // self.m)

  @property
  def rows(self) -> int:
    """Returns the number of kept entries in a column."""
    return self.groups * self.n

  @property
  def shape(self) -> tuple[int, int]:
    """Returns the shape of the weight with its zeros."""
    return self.depth, self.features

  @property
  def dtype(self) -> np.dtype:
    """Returns the dtype of the weight with its zeros; that of int8 values is float32."""
    return np.dtype(np.float32) if self.scale is not None else np.dtype(self.values.dtype)

  @property
  def nbytes(self) -> int:
    """Returns how many bytes it takes; its leaves may be shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


def like(pattern: NM, shape: tuple[int, ...], dtype: Any) -> NMPacked:
  """Returns what `pack` would, with shapes and dtypes in place of arrays.

  >>> like(NM(1, 4), (8, 100), np.float32).nbytes
  900

  Args:
    pattern: n:m.
    shape: of the weight, (depth, features).
    dtype: of the values.
  """
  bits, (depth, columns) = width(pattern.m), shape
  rows = -(-depth // pattern.m) * pattern.n
  array = lambda kind, *shape: jax.ShapeDtypeStruct(shape, np.dtype(kind))
  return NMPacked(
    array(dtype, rows, columns),
    array(np.uint8, -(-rows * bits // 8), columns),
    array(np.float32, columns) if np.dtype(dtype) == np.int8 else None,
    pattern.n,
    pattern.m,
    depth,
    bits,
  )


def pack(w: Any, pattern: NM | str, dtype: Any = None, name: str = "the weight") -> NMPacked:
  """Returns an n:m weight without its zeros, as numpy arrays. Nothing that is not zero is lost.

  -0.0 is zero and 1e-40 is not. A group with fewer than n entries that are not zero keeps zeros as
  well, those of sign minus first. A -0.0 that finds no place becomes +0.0.

  >>> packed = pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))
  >>> packed.values.tolist(), packed.indices.tolist()
  ([[5.0, 3.0]], [[1, 0]])

  Args:
    w: what `finalize` returned for one parameter (depth, features): float32, bfloat16 or float16.
      Its groups lie along axis 0, and the last one is padded.
    pattern: n:m, or its text.
    dtype: of the values; int8 rounds, with one scale for each column. None: that of w.
    name: of the parameter, for errors.

  Raises:
    ValueError: a group has more than n entries that are not zero, or a value does not fit `dtype`.
  """
  w, pattern = np.asarray(w), NM.parse(pattern)
  kind = np.dtype(w.dtype if dtype is None else dtype)
  if w.dtype.name not in DTYPES[:3] or kind.name not in DTYPES:
    raise ValueError(
      f"{name!r} of {w.dtype} cannot be packed as {kind}: take a weight of "
      f"{', '.join(DTYPES[:3])}, and values of these or int8."
    )
  bits, (depth, columns) = width(pattern.m), w.shape
  padded = np.pad(w, ((0, -depth % pattern.m), (0, 0)))
  split = padded.reshape(len(padded) // pattern.m, pattern.m, columns)
  # By the bits: a signalling NaN would warn, and a library may have numpy flush subnormals.
  raw = split.view(f"u{w.dtype.itemsize}")
  used = (raw << np.asarray(1, raw.dtype)) != 0
  count = used.sum(1)
  for group, column in np.argwhere(count > pattern.n)[:1]:
    raise ValueError(
      f"{name!r} is not {pattern} along axis 0: {count[group, column]} of the {pattern.m} entries "
      f"of the group that begins at ({group * pattern.m}, {column}) are not zero. "
      "Finalize it first (nms.finalize), or take the pattern that it has."
    )
  # What is not zero comes first, then -0.0, then the lowest index.
  last = (~used).astype(np.uint8) + (raw == 0)
  places = np.sort(np.argsort(last, axis=1, kind="stable")[:, : pattern.n], axis=1)
  rows = len(split) * pattern.n, columns
  values, scale = _cast(np.take_along_axis(split, places, axis=1).reshape(rows), kind, name)
  indices = squeeze(places.astype(np.uint8).reshape(rows), bits)
  return NMPacked(values, indices, scale, pattern.n, pattern.m, depth, bits)


def unpack(packed: NMPacked) -> np.ndarray:
  """Returns the weight (depth, features) with its zeros; that of int8 values is float32.

  >>> unpack(pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))).tolist()
  [[0.0, 3.0], [5.0, 0.0]]
  """
  values = np.asarray(packed.values)
  by_group = (packed.groups, packed.n, packed.features)
  places = spread(np.asarray(packed.indices), packed.rows, packed.bits).reshape(by_group)
  full = np.zeros((packed.groups, packed.m, packed.features), values.dtype)
  np.put_along_axis(full, places.astype(np.intp), values.reshape(by_group), 1)
  w = full.reshape(packed.groups * packed.m, packed.features)[: packed.depth]
  if packed.scale is None:
    return w
  with np.errstate(over="ignore"):  # of the largest float32, rounded up: inf
    return w.astype(np.float32) * np.asarray(packed.scale)


def check(packed: NMPacked, name: str = "the weight") -> None:
  """Refuses entries that `pack` cannot have made: the C++ kernels trust them.

  Args:
    packed: with arrays.
    name: of the parameter, for errors.

  Raises:
    ValueError: a shape, a dtype, an index, a value of padding or a scale is wrong.
  """
  form = lambda x: (x.shape, x.dtype)
  due = like(packed.pattern, packed.shape, packed.values.dtype)
  if jax.tree.map(form, packed) != jax.tree.map(form, due):
    raise ValueError(
      f"{name!r}: values, indices and scale do not fit {packed.pattern} of depth {packed.depth}"
    )
  values = np.asarray(packed.values).reshape(packed.groups, packed.n, packed.features)
  places = spread(np.asarray(packed.indices), packed.rows, packed.bits).reshape(values.shape)
  in_last = packed.depth - (packed.groups - 1) * packed.m
  padding = values[-1:][places[-1:] >= in_last].tobytes()  # +0 alone has no bits
  scale = np.ones(1) if packed.scale is None else np.asarray(packed.scale)
  wrong = {
    f"an index of {places.max(initial=0)} in a group of {packed.m}": (places >= packed.m).any(),
    "a group whose indices do not ascend": (places[:, 1:] <= places[:, :-1]).any(),
    "a value other than +0 where the last group is padded": any(padding),
    "a scale that is not a positive, finite number": not (np.isfinite(scale) & (scale > 0)).all(),
  }
  if found := [what for what, is_wrong in wrong.items() if is_wrong]:
    raise ValueError(f"{name!r} is not a packed weight of {packed.pattern}: it has {found[0]}.")


def _cast(values: np.ndarray, kind: np.dtype, name: str) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns values of another dtype, and the scale of each column of int8 ones."""
  scale = None
  with np.errstate(over="ignore", invalid="ignore"):
    if kind != np.int8:
      cast = values.astype(kind)
      lost = np.isfinite(values) & ~np.isfinite(cast)
    else:
      wide = values.astype(np.float64)
      scale = (np.abs(wide).max(0, initial=0) / _LEVELS).astype(np.float32)
      # A backend may flush a subnormal scale to 0, so such a column counts as zeros.
      usable = scale >= np.finfo(np.float32).tiny
      scale = np.where(usable, scale, np.float32(1))
      cast = np.rint(np.where(usable, wide, 0) / scale.astype(np.float64))
      cast = np.clip(cast, -_LEVELS, _LEVELS).astype(np.int8)
      lost = ~np.isfinite(wide)
  if lost.any():
    raise ValueError(f"{name!r} has values beyond the range of {kind}: keep {values.dtype}.")
  return cast, scale


# --- indices of 2, 4 or 8 bits, several to a byte -------------------------------------------------


def width(m: int) -> int:
  """Returns how many bits an index into a group of m takes.

  >>> [width(m) for m in (4, 5, 16, 17, 256)]
  [2, 4, 4, 8, 8]
  """
  if m > MOST:
    raise ValueError(
      f"a group of {m} entries cannot be packed: an index has at most 8 bits, so m is at most "
      f"{MOST}. Keep such a weight dense."
    )
  return 2 if m <= 4 else 4 if m <= 16 else 8


def squeeze(indices: np.ndarray, bits: int) -> np.ndarray:
  """Returns uint8 indices [rows, columns] with 8 / bits of them in a byte.

  Indices of one column share a byte, low bits first. So a byte holds the same rows for every
  column, and a kernel spreads a row of bytes by one shift. Bits that no row uses are 0.

  >>> squeeze(np.array([[1], [2], [3]], np.uint8), 4).tolist()
  [[33], [3]]
  """
  squeezed = np.zeros((-(-len(indices) * bits // 8), indices.shape[1]), np.uint8)
  for i in range(8 // bits):
    share = indices[i :: 8 // bits]
    squeezed[: len(share)] |= share << np.uint8(i * bits)
  return squeezed


def spread(squeezed: Any, rows: int, bits: int) -> Any:
  """Undoes `squeeze`, in numpy, or in jax inside jit: returns uint8 indices [rows, columns]."""
  if bits == 8:
    return squeezed
  shifts = (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))[None, :, None]
  found = (squeezed[:, None, :] >> shifts) & np.uint8((1 << bits) - 1)
  whole, columns = squeezed.shape
  return found.reshape(whole * (8 // bits), columns)[:rows]
