"""A file of a network whose sparse kernels are packed.

    variables, rules -> [write] -> F.safetensors
    F.safetensors -> [Opened] -> name -> NMPacked, or array, when it is asked for
                  -> [read]   -> {"params", ...}: what network.apply takes, after `prepare`

It is a safetensors file. A packed kernel NAME is two or three tensors of it: NAME.nm_values,
NAME.nm_indices and, of int8, NAME.nm_scale, in the canonical layout of `packed`. Its metadata have
one entry, "nm_sparsity_jax", which is JSON:

    version  1
    rules    the text of the rules
    packed   {NAME: {"n", "m", "axis", "shape", "dtype"}}
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import NMPacked, check, like, pack, unpack
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import inference_tree, safetensors_file
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules

_ENTRY, _VERSION = "nm_sparsity_jax", 1
_PARAMS = "params/"
_PARTS = ("values", "indices", "scale")  # fields of NMPacked, and tensors NAME.nm_values, ...


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

  @classmethod
  def of(cls, pattern: NM, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Kernel:
    """Returns the kernel whose last group is completed by zeros."""
    groups = Groups(shape, axes[0] if len(axes) == 1 else axes)
    padded = dataclasses.replace(groups, pad=-groups.length % pattern.m)
    return cls(pattern, padded, dtype)

  @property
  def like(self) -> NMPacked:
    """Returns the packed kernel, with shapes in place of arrays."""
    return like(self.pattern, self.groups, self.dtype)

  @property
  def is_matrix(self) -> bool:
    """Returns whether a layer takes it packed: it is (in, out), with groups along axis 0."""
    return len(self.groups.shape) == 2 and self.groups.axes == (0,)

  @property
  def json(self) -> dict[str, Any]:
    """Returns what the metadata say of it."""
    return {
      "n": self.pattern.n,
      "m": self.pattern.m,
      "axis": list(self.groups.axes),
      "shape": list(self.groups.shape),
      "dtype": self.dtype,
    }

  def with_zeros(self, packed: NMPacked) -> np.ndarray:
    """Returns the weight with its zeros, in its own shape.

    Args:
      packed: the kernel, with arrays.
    """
    axes, shape = self.groups.axes, self.groups.shape
    order = (*axes, *(a for a in self.groups.order if a not in axes))
    return unpack(packed).reshape([shape[a] for a in order]).transpose(np.argsort(order))


def write(
  path: str | os.PathLike, variables: Mapping[str, Any], rules: Rules, dtype: str | None = None
) -> inference_tree.Report:
  """Writes a new packed file of a network: all of it, or nothing.

      print(write("F.safetensors", {"params": params}, rules))

  Args:
    path: of the file, which must not be there.
    variables: 'params', n:m and not scanned (`unstack_layers.unstacked`); and other collections.
    rules: of the tree 'params'.
    dtype: as in `inference_tree.decide`.

  Returns:
    What was packed, what was not, and why.

  Raises:
    ValueError: a kernel is not n:m, or nothing is to be packed.
  """
  arrays = {name: np.asarray(x) for name, x in flatten(variables)}
  decision = inference_tree.decide(variables["params"], rules, dtype)
  if not decision.packed:
    raise ValueError(f"nothing would be packed: {dict(decision.dense)}")
  tensors, kernels = dict(arrays), {}
  for key, place in decision.packed.items():
    name, kind = f"{_PARAMS}{key}", decision.dtypes[key]
    packed = pack(tensors.pop(name), place.pattern, place.groups, kind, key)
    tensors |= {full: getattr(packed, part) for part, full in _parts(name, packed).items()}
    # Recipes may pad for a longer group than the last one, which is the one that is kept.
    kernels[name] = Kernel.of(place.pattern, place.shape, place.axes, kind).json
  header = {"version": _VERSION, "rules": rules_text.describe(rules), "packed": kernels}
  safetensors_file.write(path, tensors, {_ENTRY: json.dumps(header)})
  state = dict.fromkeys((name for name in arrays if not name.startswith(_PARAMS)), "no parameter")
  whole = dataclasses.replace(decision, dense={**decision.dense, **state})
  return inference_tree.report(whole, {name.removeprefix(_PARAMS): x for name, x in arrays.items()})


def is_packed(opened: safetensors_file.Opened) -> bool:
  """Returns whether an opened file is a packed file, of any version."""
  return _ENTRY in opened.metadata


class Opened:
  """A packed file whose header was read.

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
    ValueError: it is not a packed file of this version, or damaged.
  """

  def __init__(self, path: str | os.PathLike):
    file = safetensors_file.Opened(path)
    self.path, self._tensors = file.path, file.tensors
    if not is_packed(file):
      raise ValueError(f"{self.path!r} is not a packed file, which `nm-sparsity pack` writes.")
    try:
      header = json.loads(file.metadata[_ENTRY])
      if header["version"] != _VERSION:
        raise ValueError(f"its version is {header['version']}, and this package reads {_VERSION}")
      self.rules = header["rules"]
      self.kernels = {name: _kernel(values) for name, values in header["packed"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      why = f"{type(e).__name__}: {first_line(e)}"
      raise ValueError(f"the header of {self.path!r} is damaged ({why}): pack again.") from e
    parts = {x for name, kernel in self.kernels.items() for x in _parts(name, kernel.like).values()}
    self.leaves = {
      name: (x.shape, x.dtype.name) for name, x in file.tensors.items() if name not in parts
    }
    for name, kernel in self.kernels.items():
      self.leaves[name] = kernel.groups.shape, kernel.like.dtype.name

  def packed(self, name: str) -> NMPacked:
    """Reads a packed kernel, and refuses what `pack` cannot have made.

    The C++ kernels trust shapes and indices, so this is the place that looks at them.

    Args:
      name: of `kernels`.

    Raises:
      ValueError: a shape, an index, a bit of padding or a scale is wrong.
    """
    wanted = self.kernels[name].like
    found = {}
    for part, full in _parts(name, wanted).items():
      if full not in self._tensors:
        raise ValueError(f"{self.path!r} is damaged: {full!r} is missing.")
      found[part] = np.asarray(self._tensors[full])
      due = getattr(wanted, part)
      if (found[part].shape, found[part].dtype) != (due.shape, due.dtype):
        raise ValueError(f"{self.path!r} is damaged: {full!r} must be {due.dtype} {due.shape}.")
    made = dataclasses.replace(wanted, **found)
    check(made, f"{self.path}: {name.removeprefix(_PARAMS)}")
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
    if kernel is None:
      return np.asarray(self._tensors[name])
    return kernel.with_zeros(self.packed(name))


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Returns the variables in a packed file: packed kernels where a layer takes them, and arrays.

      variables = read("F.safetensors")
      params = nms.inference_tree.prepare(variables["params"], rows=1)

  Args:
    path: of the file.

  Raises:
    ValueError: as in `Opened`, or `Opened.packed`.
  """
  opened = Opened(path)
  return nested({name: opened.leaf(name) for name in opened.leaves})


def _kernel(values: Mapping[str, Any]) -> Kernel:
  if values["dtype"] not in inference_tree.VALUES:
    raise ValueError(f"dtype {values['dtype']!r}")
  pattern = NM(values["n"], values["m"])
  return Kernel.of(pattern, tuple(values["shape"]), tuple(values["axis"]), values["dtype"])


def _parts(name: str, packed: NMPacked) -> dict[str, str]:
  """Returns field of NMPacked -> name of its tensor; only int8 has a scale."""
  return {part: f"{name}.nm_{part}" for part in _PARTS if getattr(packed, part) is not None}
