"""A weight without its zeros: the canonical layout, and the way there and back on bits.

    weight, pattern, Groups -> [pack] -> NMPacked -> [unpack] -> (depth, features), the same bits

Everything here is numpy on bit patterns: no backend can flush a subnormal or merge two NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import bits as squeezing
from nm_sparsity_jax.core.packed.bits import MOST
from nm_sparsity_jax.core.patterns import NM

__all__ = ["MOST", "NMPacked", "Sizes", "check", "like", "pack", "sizes",
           "unpack"]  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16", "int8")  # of values
_LEVELS = 127  # of int8, to either side: -128 has no partner and is not used
_BLOCK = 1 << 20  # entries that are ranked at once: a few MB, however large a weight is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NMPacked:
  """One n:m weight (depth, features) without its zeros: n values of every m along the depth.

  Row g * n + i of `values` is what the i-th kept entry of group g is, in each column; its place in
  the group is the same row of the indices, which ascend within a group. It is a pytree: jit takes
  it, and the numbers below are static.

  Attributes:
    values: [ceil(depth / m) * n, features], of float32, bfloat16, float16 or int8.
    indices: uint8, 8 / bits of them in a byte along the rows; see `bits`.
    scale: float32 [features] of int8 values, else None. The weight is value * scale.
    n: how many of a group are kept.
    m: the length of a group.
    depth: the length of the axis that a layer contracts, without padding.
    bits: of an index: 2, 4 or 8.
  """

  values: Any
  indices: Any
  scale: Any
  n: int = dataclasses.field(metadata={"static": True})
  m: int = dataclasses.field(metadata={"static": True})
  depth: int = dataclasses.field(metadata={"static": True})
  bits: int = dataclasses.field(metadata={"static": True})

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


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Bytes of a packed weight, and of the same weight with its zeros.

  Attributes:
    values: bytes of values.
    indices: bytes of indices.
    scale: bytes of the scales, 0 without int8.
    dense: bytes of the weight with its zeros, in the dtype it unpacks to.
  """

  values: int
  indices: int
  scale: int
  dense: int

  @property
  def total(self) -> int:
    """Returns the bytes of the packed weight."""
    return self.values + self.indices + self.scale

  @property
  def ratio(self) -> float:
    """Returns how many times smaller the packed weight is."""
    return self.dense / max(self.total, 1)


def sizes(packed: NMPacked) -> Sizes:
  """Returns what a packed weight takes; its leaves may be shapes.

  >>> sizes(pack(np.zeros((8, 100), np.float32), NM(1, 4)))
  Sizes(values=800, indices=100, scale=0, dense=3200)
  """
  bytes_of = lambda x: 0 if x is None else math.prod(x.shape) * x.dtype.itemsize
  return Sizes(
    bytes_of(packed.values),
    bytes_of(packed.indices),
    bytes_of(packed.scale),
    dense=packed.depth * packed.features * packed.dtype.itemsize,
  )


def like(pattern: NM, groups: Groups, dtype: Any) -> NMPacked:
  """Returns what `pack` would, with shapes and dtypes in place of arrays.

  >>> like(NM(1, 4), Groups((8, 100), 0), np.float32).indices.shape
  (1, 100)

  Args:
    pattern: n:m.
    groups: where the groups of the weight lie.
    dtype: of the values.
  """
  bits = squeezing.width(pattern.m)
  rows = -(-groups.length // pattern.m) * pattern.n
  columns = math.prod(groups.shape) // max(groups.length, 1)
  array = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind)
  return NMPacked(
    array(np.dtype(dtype), rows, columns),
    array(np.dtype(np.uint8), squeezing.rows_of(rows, bits), columns),
    array(np.dtype(np.float32), columns) if np.dtype(dtype) == np.int8 else None,
    *(pattern.n, pattern.m, groups.length, bits),
  )


def pack(
  w: Any,
  pattern: NM | str,
  groups: Groups | None = None,
  dtype: Any = None,
  name: str = "the weight",
) -> NMPacked:
  """Returns an n:m weight without its zeros, as numpy arrays. Nothing that is not zero is lost.

  -0.0 is zero and 1e-40 is not. A group with fewer than n entries that are not zero keeps zeros as
  well, those of sign minus first. A -0.0 that finds no place becomes +0.0.

  >>> packed = pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))
  >>> packed.values.tolist(), packed.indices.tolist()
  ([[5.0, 3.0]], [[1, 0]])

  Args:
    w: what `finalize` returned for one parameter: float32, bfloat16 or float16.
    pattern: n:m, or its text.
    groups: where the groups of w lie, as its place in the rules has them; the others of its axes
      become columns, in their order. None: along axis 0, the last group padded.
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
  bits = squeezing.width(pattern.m)
  groups = _groups(w, pattern, groups)
  cut = _cut(w, pattern, groups)
  values = np.empty((cut.shape[0] * pattern.n, cut.shape[2]), w.dtype)
  places = np.empty(values.shape, np.uint8)
  for first, block in _blocks(cut):
    count = _classes(block)[0].sum(1)
    if (count > pattern.n).any():
      group, column = np.unravel_index(int(np.argmax(count > pattern.n)), count.shape)
      numbered = _cut(np.arange(w.size).reshape(w.shape), pattern, groups)
      start = np.unravel_index(numbered[first + group, 0, column], w.shape)
      raise ValueError(
        f"{name!r} is not {pattern} along axis {groups.axis}: {count[group, column]} of the "
        f"{pattern.m} entries of the group that begins at {tuple(map(int, start))} are not zero. "
        "Finalize it first (nms.finalize), or take the pattern that it has."
      )
    at = _kept(block, pattern)
    rows = slice(first * pattern.n, (first + len(block)) * pattern.n)
    places[rows] = at.reshape(values[rows].shape)
    values[rows] = np.take_along_axis(block, at, axis=1).reshape(values[rows].shape)
  values, scale = _cast(values, kind, name)
  return NMPacked(
    values, squeezing.squeeze(places, bits), scale, pattern.n, pattern.m, groups.length, bits
  )


def unpack(packed: NMPacked) -> np.ndarray:
  """Returns the weight (depth, features) with its zeros; that of int8 values is float32.

  >>> unpack(pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))).tolist()
  [[0.0, 3.0], [5.0, 0.0]]
  """
  values = np.asarray(packed.values)
  places = squeezing.spread(np.asarray(packed.indices), packed.rows, packed.bits)
  by_group = (packed.groups, packed.n, packed.features)
  full = np.zeros((packed.groups, packed.m, packed.features), values.dtype)
  np.put_along_axis(full, places.reshape(by_group).astype(np.intp), values.reshape(by_group), 1)
  w = full.reshape(packed.groups * packed.m, packed.features)[: packed.depth]
  if packed.scale is None:
    return w
  with np.errstate(over="ignore"):  # of the largest float32, rounded up: inf
    return w.astype(np.float32) * np.asarray(packed.scale)


def check(packed: NMPacked, name: str = "the weight") -> None:
  """Refuses a packed weight that `pack` cannot have made.

  Args:
    packed: with arrays, not shapes.
    name: of the parameter, for errors.

  Raises:
    ValueError: a shape, an index, a value of padding or a scale is wrong.
  """
  kind = packed.values.dtype.name
  width = squeezing.width(packed.m)
  bits = packed.bits if packed.bits in (width, 8) else width
  form = lambda x: None if x is None else (x.dtype.name, tuple(x.shape))
  found = packed.bits, form(packed.values), form(packed.indices), form(packed.scale)
  due = (
    bits,
    (kind if kind in DTYPES else "float32", (packed.rows, packed.features)),
    ("uint8", (squeezing.rows_of(packed.rows, bits), packed.features)),
    ("float32", (packed.features,)) if kind == "int8" else None,
  )
  if found != due:
    said = f"has bits, values, indices and scale of {found}, not {due}"
  else:
    said = _wrong_entries(packed)
  if said:
    raise ValueError(f"{name!r} is not a packed weight of {packed.pattern}: it {said}.")


# --- inside ---------------------------------------------------------------------------------------


def _groups(w: np.ndarray, pattern: NM, groups: Groups | None) -> Groups:
  """Returns where the groups lie, and refuses what is not whole groups of w."""
  if groups is None:
    groups = Groups(w.shape, 0, -w.shape[0] % pattern.m) if w.ndim else Groups((), 0)
  if groups.shape != w.shape or groups.size % pattern.m:
    raise ValueError(
      f"groups of {pattern} over {groups.size} entries of shape {groups.shape} do not fit a weight "
      f"of shape {w.shape}: take the groups of its own place in the rules."
    )
  # Padded for a longer level of its recipe, it may end in groups that are padding alone.
  return dataclasses.replace(groups, pad=-groups.length % pattern.m)


def _cut(w: np.ndarray, pattern: NM, groups: Groups) -> np.ndarray:
  split = groups.split(w, pattern)  # groups come last; their numbers stand where the axis was
  at = groups.order.index(groups.axes[0])
  by_number = np.moveaxis(split, (at, -1), (0, 1))
  columns = math.prod(by_number.shape[2:])
  return by_number.reshape(*by_number.shape[:2], columns)


def _blocks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
  # Ranks and float64 copies are made of some rows at a time, so that a large weight stays one copy.
  step = max(1, _BLOCK // max(x[:1].size, 1))
  for first in range(0, len(x), step):
    yield first, x[first : first + step]


def _classes(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # (not zero, -0.0) by the bits: a signalling NaN would warn, and a library may flush subnormals.
  raw = block.view(f"u{block.dtype.itemsize}")
  used = (raw << np.asarray(1, raw.dtype)) != 0
  return used, ~used & (raw != 0)


def _kept(block: np.ndarray, pattern: NM) -> np.ndarray:
  """Returns the ascending places [groups, n, columns] that are kept."""
  used, minus = _classes(block)
  order = np.arange(pattern.m, dtype=np.uint16)[:, None]
  rank = order + pattern.m * (2 - 2 * used.astype(np.uint16) - minus)
  if pattern.n == 1:
    best = rank.min(1, keepdims=True)
  else:
    best = np.partition(rank, pattern.n - 1, axis=1)[:, : pattern.n]
  return np.sort(best % pattern.m, axis=1).astype(np.intp)


def _cast(values: np.ndarray, kind: np.dtype, name: str) -> tuple[np.ndarray, np.ndarray | None]:
  if kind == np.int8:
    return _rounded(values, name)
  if kind == values.dtype:
    return values, None
  with np.errstate(over="ignore", invalid="ignore"):
    cast = values.astype(kind)
    lost = np.isfinite(values) & ~np.isfinite(cast)
  if lost.any():
    raise ValueError(f"{name!r} has values beyond the range of {kind}: keep {values.dtype}.")
  return cast, None


def _rounded(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns int8 values, rounded in float64, and the scale of each column."""
  most = np.zeros(values.shape[1], np.float64)
  for _, part in _blocks(values):
    np.maximum(most, np.abs(part.astype(np.float64)).max(0, initial=0), out=most)  # keeps NaN
  if not np.isfinite(most).all():
    raise ValueError(f"{name!r} has inf or NaN, which int8 cannot hold: keep {values.dtype}.")
  scale = (most / _LEVELS).astype(np.float32)
  # A backend may flush a subnormal scale to 0, so such a column counts as zeros.
  usable = scale >= np.finfo(np.float32).tiny
  scale = np.where(usable, scale, np.float32(1))
  rounded = np.empty(values.shape, np.int8)
  for first, part in _blocks(values):
    exact = np.where(usable, part.astype(np.float64), 0) / scale.astype(np.float64)
    rounded[first : first + len(part)] = np.clip(np.rint(exact), -_LEVELS, _LEVELS)
  return rounded, scale


def _wrong_entries(packed: NMPacked) -> str:
  """Says what is wrong with entries whose shapes are right; '' for nothing."""
  values = np.asarray(packed.values).reshape(packed.groups, packed.n, packed.features)
  places = squeezing.spread(np.asarray(packed.indices), packed.rows, packed.bits)
  places = places.reshape(values.shape)
  if (places >= packed.m).any():
    return f"has an index of {int(places.max())} in a group of {packed.m}"
  if (places[:, 1:] <= places[:, :-1]).any():
    return "has a group whose indices do not ascend"
  in_last = packed.depth - (packed.groups - 1) * packed.m
  if values[-1:][places[-1:] >= in_last].tobytes().strip(b"\0"):
    return "has a value other than +0 where the last group is padded"
  scale = np.ones(1) if packed.scale is None else np.asarray(packed.scale)
  if not (np.isfinite(scale) & (scale > 0)).all():
    return "has a scale that is not a positive, finite number"
  return ""
