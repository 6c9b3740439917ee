"""Our arrays among the tensors of a PyTorch library: names, layouts, and where two trees differ.

    key -> array <-> [to_tensors, from_tensors] <-> their name -> tensor

A library is one function, key -> `Name`. Nothing is computed, so weights come back bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import Lazy


@dataclasses.dataclass(frozen=True)
class Name:
  """What one of our arrays is called there, and how it lies there.

  Kernels are (in, out) and (h, w, in, out) here, and (out, in) and (out, in, h, w) there. So groups
  of m lie along axis 0 or -2 here, and along axis 1 there.

  Attributes:
    name: of the tensor.
    transposed: whether it is such a kernel.
    third: 0, 1 or 2 where the tensor is q, k and v, one below the other; else None.
  """

  name: str
  transposed: bool = False
  third: int | None = None

  def ours(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our array, a view of their tensor.

    >>> Name("head.weight", transposed=True).ours(np.zeros((3, 2))).shape
    (2, 3)
    """
    rows = tensor if self.third is None else np.split(tensor, 3)[self.third]
    return np.moveaxis(rows, (0, 1), (-1, -2)) if self.transposed else rows

  def theirs(self, array: np.ndarray) -> np.ndarray:
    """Returns the rows of their tensor, a view of our array."""
    return np.moveaxis(array, (-1, -2), (0, 1)) if self.transposed else array


def to_tensors(arrays: Mapping[str, Any], name_of: Callable[[str], Name]) -> dict[str, np.ndarray]:
  """Returns their name -> tensor.

  Args:
    arrays: our key -> array, of a network without a scan.
    name_of: the library's.
  """
  # Sorted by thirds, since a tree has k before q; other tensors are alone, in any order.
  rows: dict[str, list[np.ndarray]] = {}
  named = [(name_of(key), x) for key, x in arrays.items()]
  for there, x in sorted(named, key=lambda pair: pair[0].third or 0):
    rows.setdefault(there.name, []).append(there.theirs(np.asarray(x)))
  return {name: x[0] if len(x) == 1 else np.concatenate(x) for name, x in rows.items()}


def from_tensors(
  tensors: Mapping[str, Any],
  name_of: Callable[[str], Name],
  shapes: Mapping[str, tuple[int, ...]],
  what: str,
) -> dict[str, Lazy]:
  """Returns our key -> array, which is read each time it is asked for.

  Args:
    tensors: their name -> array, or `Lazy`.
    name_of: the library's.
    shapes: our key -> shape, of the network without a scan that takes the arrays.
    what: the beginning of an error.

  Raises:
    ValueError: a name is missing or unknown, or a tensor has another shape: all in one error.
  """
  # Bytes in place of floats: the layouts themselves say what the shapes become.
  like = {key: np.broadcast_to(np.int8(0), shape) for key, shape in shapes.items()}
  wanted = {name: x.shape for name, x in to_tensors(like, name_of).items()}
  if said := difference(wanted, {name: x.shape for name, x in tensors.items()}):
    raise ValueError(f"{what}: {said}.")

  def lazy(key: str) -> Lazy:
    there = name_of(key)
    tensor = tensors[there.name]
    # A copy in our order: a view would keep all of q, k and v alive, and hold the file's layout.
    make = lambda: np.array(there.ours(np.asarray(tensor)), order="C")
    return Lazy(shapes[key], np.dtype(tensor.dtype), make)

  return {key: lazy(key) for key in shapes}


def difference(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Any]) -> str:
  """Says in one clause all that is missing, unknown and of another shape; '' where nothing is.

  >>> difference({"a.0.w": (2,), "a.1.w": (2,), "b": (3,)}, {"b": (4,)})
  '2 of 3 missing (a.0.w, a.1.w), 1 of another shape (b is (4,) there and (3,) here)'

  Args:
    wanted: name -> shape, of all that must be there.
    found: name -> shape, of all that is.
  """
  said = []
  if missing := [name for name in wanted if name not in found]:
    said.append(f"{len(missing)} of {len(wanted)} missing ({_some(missing)})")
  if unknown := [name for name in found if name not in wanted]:
    said.append(f"{len(unknown)} unknown ({_some(unknown)})")
  if other := [n for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]:
    name = other[0]
    example = f"{name} is {tuple(found[name])} there and {tuple(wanted[name])} here"
    said.append(f"{len(other)} of another shape ({example})")
  return ", ".join(said)


def _some(names: Sequence[str]) -> str:
  return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
