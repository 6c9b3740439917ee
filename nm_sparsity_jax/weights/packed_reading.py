"""What a packed file holds: its header, checked, and its kernels when they are asked for.

    F.safetensors -> [Opened] -> name -> NMPacked, or array, when it is asked for
                  -> [read]   -> {"params", ...}: what network.apply takes, after `deployed.prepare`

`packed_file` says what the format is. No text of a file picks code, and nothing that this version
does not know is passed over.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax import deployed
from nm_sparsity_jax.groups import Groups
from nm_sparsity_jax.packed import MOST, NMPacked, like, unpack
from nm_sparsity_jax.packed.array import wrong
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.text import first_line
from nm_sparsity_jax.trees import nested
from nm_sparsity_jax.weights import safetensors_file
from nm_sparsity_jax.weights.safetensors_header import Text

FORMAT = "nm_sparsity_jax/"
VERSION = "1"
PARAMS = "params"
PARTS = ("nm_values", "nm_indices", "nm_scale")
_KEYS = ("format", "rules", "packed")
_RESERVED = "nm_sparsity"  # the collection of a run's own state
_MOST_WEIGHTS = 1 << 48  # of one kernel


@dataclasses.dataclass(frozen=True)
class Kernel:
  """What a file says of a packed kernel.

  Attributes:
    pattern: n:m.
    groups: where the groups lie in the weight with its zeros; its shape.
    dtype: of the values.
  """

  pattern: NM
  groups: Groups
  dtype: str

  @property
  def like(self) -> NMPacked:
    """Returns the packed kernel, with shapes in place of arrays."""
    return like(self.pattern, self.groups, self.dtype)

  @property
  def is_matrix(self) -> bool:
    """Returns whether a layer takes it packed: it is (in, out), with groups along axis 0."""
    return len(self.groups.shape) == 2 and self.groups.axes == (0,)

  def with_zeros(self, packed: NMPacked) -> np.ndarray:
    """Returns the weight with its zeros, in its own shape.

    Args:
      packed: the kernel, with arrays.
    """
    axes, shape = self.groups.axes, self.groups.shape
    order = (*axes, *(a for a in self.groups.order if a not in axes))
    return unpack(packed).reshape([shape[a] for a in order]).transpose(np.argsort(order))


def is_packed(opened: safetensors_file.Opened) -> bool:
  """Returns whether an opened file is a packed file, of any version."""
  return opened.metadata.get("format", "").startswith(FORMAT)


class Opened:
  """A packed file whose header was read and checked; it is closed.

      opened = Opened("F.safetensors")
      opened.leaf("params/encoder/layers_0/mlp/wi/kernel")  # an NMPacked

  Args:
    path: of the file, on a local disk.

  Attributes:
    path: as given.
    rules: the text of the rules.
    kernels: name -> what is known of a packed kernel.
    leaves: name -> shape and dtype with its zeros, of all.

  Raises:
    ValueError: it is not a packed file of version 1, or damaged.
  """

  def __init__(self, path: str | os.PathLike):
    self._file = safetensors_file.Opened(path)
    self.path = self._file.path
    _check_format(self._file)
    try:
      self.rules, self.kernels = _read_metadata(self._file.metadata)
      dense = _check_tensors(self._file, self.kernels)
    except ValueError as e:
      why = first_line(e).rstrip(".")
      raise ValueError(
        f"{self.path!r} is not a packed file of version {VERSION}, or damaged ({why})."
      ) from e
    self.leaves: dict[str, tuple[tuple[int, ...], str]] = {
      name: (self._file.shapes[name], self._file.dtypes[name]) for name in dense
    }
    for name, kernel in self.kernels.items():
      self.leaves[name] = kernel.groups.shape, kernel.like.dtype.name

  def packed(self, name: str) -> NMPacked:
    """Reads a packed kernel, and refuses what `pack` cannot have made.

    Args:
      name: of `kernels`.

    Raises:
      ValueError: an index, a bit of padding or a scale is wrong.
    """
    wanted = self.kernels[name].like
    found = {part: self._file.array(full) for part, full, _ in parts(name, wanted)}
    made = dataclasses.replace(wanted, **found)
    if said := wrong(made):
      short = name.removeprefix(f"{PARAMS}/")
      raise ValueError(f"{self.path!r} is damaged: {short!r} {said}: copy it again, or pack again.")
    return made

  def leaf(self, name: str) -> NMPacked | np.ndarray:
    """Reads what a network takes at a name: a packed matrix, or an array.

    Args:
      name: of `leaves`.
    """
    kernel = self.kernels.get(name)
    return self.packed(name) if kernel is not None and kernel.is_matrix else self.array(name)

  def array(self, name: str) -> np.ndarray:
    """Reads an array with its zeros, in its own shape.

    Args:
      name: of `leaves`.
    """
    kernel = self.kernels.get(name)
    return self._file.array(name) if kernel is None else kernel.with_zeros(self.packed(name))


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the variables in a packed file: packed kernels where a layer takes them, and arrays.

      variables = read("F.safetensors")
      params = nms.deployed.prepare(variables["params"], rows=1)

  Args:
    path: of the file.

  Raises:
    ValueError: as in `Opened`, or `Opened.packed`.
  """
  opened = Opened(path)
  return nested({name: opened.leaf(name) for name in opened.leaves})


# --- what a file tells of itself ------------------------------------------------------------------


def _check_format(opened: safetensors_file.Opened) -> None:
  if not is_packed(opened):
    raise ValueError(
      f"{opened.path!r} is not a packed file: its metadata have no format {FORMAT}{VERSION}, which "
      "`nm-sparsity pack` writes."
    )
  if (version := opened.metadata["format"].removeprefix(FORMAT)) != VERSION:
    raise ValueError(
      f"{opened.path!r} is a packed file of version {version[:40]!r}, and this package reads "
      f"version {VERSION}: update the package, or pack the checkpoint again."
    )


def _read_metadata(metadata: Mapping[str, str]) -> tuple[str, dict[str, Kernel]]:
  """Returns the text of the rules, and name -> kernel."""
  if set(metadata) != set(_KEYS):
    other = sorted(set(metadata) ^ set(_KEYS))[0]
    raise ValueError(f"its metadata have {other!r}, or lack it: they are {', '.join(_KEYS)}")
  here = Text(metadata["packed"], "its metadata")
  kernels = {name: _kernel(here, name) for name in here.keys()}
  here.end()
  return metadata["rules"], kernels


def _kernel(here: Text, name: str) -> Kernel:
  """Reads what is told of one kernel."""
  found: dict[str, Any] = {}
  for key in here.keys():
    lists = key in ("axis", "shape")
    found[key] = here.string() if key == "dtype" else here.numbers() if lists else here.number()
  if set(found) != {"n", "m", "axis", "shape", "dtype", "index_bits", "pad"}:
    raise ValueError(f"{name!r} is told with the keys {', '.join(sorted(found))[:100]}")
  n, m, axes, shape = found["n"], found["m"], found["axis"], found["shape"]
  if not 0 < n < m <= MOST:
    raise ValueError(f"{name!r} is {n}:{m}, and must be n:m with 0 < n < m <= {MOST}")
  ascend = all(a < b for a, b in zip(axes, axes[1:], strict=False))
  if not axes or not ascend or axes[-1] >= len(shape):
    raise ValueError(f"{name!r} has groups along {axes} of the shape {shape}")
  if math.prod(x for x in shape if x) >= _MOST_WEIGHTS:
    raise ValueError(f"{name!r} has the shape {shape}")
  if found["pad"] != -math.prod(shape[a] for a in axes) % m:
    raise ValueError(f"{name!r} of {n}:{m} and shape {shape} is padded by {found['pad']}")
  if found["dtype"] not in deployed.VALUES:
    raise ValueError(f"{name!r} has values of {found['dtype'][:40]!r}")
  axis = axes[0] if len(axes) == 1 else tuple(axes)
  kernel = Kernel(NM(n, m), Groups(tuple(shape), axis, found["pad"]), found["dtype"])
  if found["index_bits"] != kernel.like.bits:
    raise ValueError(
      f"{name!r} has indices of {found['index_bits']} bits, and {kernel.like.bits} at m = {m}"
    )
  return kernel


def _check_tensors(file: safetensors_file.Opened, kernels: Mapping[str, Kernel]) -> list[str]:
  """Returns the names of what is not packed; refuses parts that are missing, strange or left."""
  left = dict(file.shapes)
  for name, kernel in kernels.items():
    for _, full, shape in parts(name, kernel.like):
      found = (left.pop(full, None), file.dtypes.get(full))
      wanted = (tuple(shape.shape), np.dtype(shape.dtype).name)
      if found != wanted:
        said = "missing" if found[0] is None else f"{found[1]} {found[0]}"
        raise ValueError(f"{full!r} is {said}, and must be {wanted[1]} {wanted[0]}")
  for name in left:
    if is_part(name):
      raise ValueError(f"{name!r} is a part of no packed kernel")
  check_names([*left, *kernels])
  return list(left)


# --- names, as they are read and written ----------------------------------------------------------


def check_names(names: Sequence[str]) -> None:
  """Refuses names that make no tree.

  Args:
    names: of all that a file holds, packed or not.
  """
  known = set(names)
  for name in names:
    words = name.split("/")
    above = {"/".join(words[:i]) for i in range(1, len(words))}
    if len(words) < 2 or not all(words) or words[0] == _RESERVED or known & above:
      raise ValueError(f"{name!r} is not a path of a tree, such as {PARAMS}/head/kernel")
  if len(known) != len(names):
    raise ValueError("a name is packed and not packed")


def is_part(name: str) -> bool:
  """Returns whether a name is that of a packed kernel's tensor, by how it ends.

  Args:
    name: of a tensor.
  """
  return name.rpartition(".")[2] in PARTS


def parts(name: str, packed: NMPacked) -> Iterator[tuple[str, str, Any]]:
  """Yields field of NMPacked, name of its tensor, and what the field holds.

  Args:
    name: of the kernel.
    packed: it, with arrays or shapes.
  """
  for part in PARTS:
    field = part.removeprefix("nm_")
    if (held := getattr(packed, field)) is not None:
      yield field, f"{name}.{part}", held
