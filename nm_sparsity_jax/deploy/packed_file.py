"""A file of a network whose sparse kernels are packed.

    variables, rules -> [write] -> F.safetensors
    F.safetensors -> [Opened] -> name -> NMPacked, or array, when it is asked for
                  -> [read]   -> {"params", ...}: what network.apply takes, after `deployed.prepare`

It is a safetensors file. A packed kernel NAME is two or three tensors of it: NAME.nm_values,
NAME.nm_indices and, of int8, NAME.nm_scale, in the canonical layout of `packed`. Its metadata have
one entry, "nm_sparsity_jax", which is JSON:

    version  1
    rules    the text of the rules
    packed   {NAME: {"n", "m", "axis", "shape", "dtype", "index_bits", "pad"}}
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import MOST, NMPacked, check, like, pack, unpack
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import inference_tree, safetensors_file
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules

_ENTRY, _VERSION = "nm_sparsity_jax", 1
_PARAMS = "params/"
_PARTS = ("nm_values", "nm_indices", "nm_scale")
_RESERVED = "nm_sparsity"  # the collection of a run's own state


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

  @property
  def json(self) -> dict[str, Any]:
    """Returns what the metadata say of it."""
    return {
      "n": self.pattern.n,
      "m": self.pattern.m,
      "axis": list(self.groups.axes),
      "shape": list(self.groups.shape),
      "dtype": self.dtype,
      "index_bits": self.like.bits,
      "pad": self.groups.pad,
    }

  def with_zeros(self, packed: NMPacked) -> np.ndarray:
    """Returns the weight with its zeros, in its own shape.

    Args:
      packed: the kernel, with arrays.
    """
    axes, shape = self.groups.axes, self.groups.shape
    order = (*axes, *(a for a in self.groups.order if a not in axes))
    return unpack(packed).reshape([shape[a] for a in order]).transpose(np.argsort(order))


# --- writing --------------------------------------------------------------------------------------


def write(
  path: str | os.PathLike, variables: Mapping[str, Any], rules: Rules, dtype: str | None = None
) -> inference_tree.Report:
  """Writes a new packed file of a network: all of it, or nothing.

      print(write("F.safetensors", {"params": params}, rules))

  Args:
    path: of the file, which must not be there.
    variables: 'params', n:m and not scanned (`unscanned.unstacked`); and other collections.
    rules: of the tree 'params'.
    dtype: as in `deployed.decide`.

  Returns:
    What was packed, what was not, and why.

  Raises:
    ValueError: a kernel is not n:m, nothing is to be packed, or a name cannot be kept.
  """
  arrays = {name: np.asarray(x) for name, x in flatten(variables)}
  if parts := [name for name in arrays if _is_part(name)]:
    raise ValueError(
      f"{parts[0]!r} ends like a part of a packed kernel ({', '.join(_PARTS)}): rename it."
    )
  _check_names(arrays)
  params = {p.removeprefix(_PARAMS): x for p, x in arrays.items() if p.startswith(_PARAMS)}
  decision = inference_tree.decide(params, rules, dtype)
  if not decision.packed:
    named = [path for path in decision.dense if rules.match(path)] or list(decision.dense)
    why = f"{named[0]!r}: {decision.dense[named[0]]}" if named else "there are no parameters"
    raise ValueError(f"nothing would be packed ({why}).")
  text = rules_text.describe(rules)
  rules_text.pack(text)  # refuses what no checkpoint could keep
  tensors, told, lost = dict(arrays), {}, {}
  for key, place in decision.packed.items():
    name, w = f"{_PARAMS}{key}", tensors.pop(f"{_PARAMS}{key}")
    # Recipes may pad for a longer group than the last one, which is the one that is kept.
    groups = dataclasses.replace(place.groups, pad=-place.groups.length % place.pattern.m)
    kernel = Kernel(place.pattern, groups, decision.dtypes[key])
    tensors |= _parts(name, pack(w, place.pattern, place.groups, kernel.dtype, key))
    told[name] = kernel.json
  metadata = {"version": _VERSION, "rules": text, "packed": told}
  safetensors_file.write(path, tensors, {_ENTRY: json.dumps(metadata)})
  beside = dict.fromkeys((name for name in arrays if not name.startswith(_PARAMS)), "no parameter")
  whole = dataclasses.replace(decision, dense={**decision.dense, **beside})
  own = {name.removeprefix(_PARAMS): x for name, x in arrays.items()}
  return inference_tree.report(whole, own, lost)


# --- reading --------------------------------------------------------------------------------------


def is_packed(opened: safetensors_file.Opened) -> bool:
  """Returns whether an opened file is a packed file, of any version."""
  return _ENTRY in opened.metadata


class Opened:
  """A packed file whose header was read and checked.

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
      raise ValueError(
        f"{self.path!r} is not a packed file, which `nm-sparsity pack` writes: its metadata have "
        f"no {_ENTRY}."
      )
    try:
      told = json.loads(file.metadata[_ENTRY])
      if told["version"] != _VERSION:
        raise ValueError(
          f"it is of version {told['version']!r:.40}, and this package reads {_VERSION}: update "
          "the package, or pack the checkpoint again"
        )
      self.rules = str(told["rules"])
      self.kernels = {name: _kernel(name, values) for name, values in told["packed"].items()}
      dense = _dense(file.tensors, self.kernels)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
      why = first_line(e).rstrip(".")
      raise ValueError(f"{self.path!r} is not a packed file, or damaged ({why}).") from e
    self.leaves = {name: (x.shape, x.dtype.name) for name, x in dense.items()}
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
    found = {full: np.asarray(self._tensors[full]) for full in _parts(name, wanted)}
    made = dataclasses.replace(wanted, **{_field(full): x for full, x in found.items()})
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


def _kernel(name: str, told: Mapping[str, Any]) -> Kernel:
  n, m, axes, shape = (told[key] for key in ("n", "m", "axis", "shape"))
  if any(type(x) is not int or x < 0 for x in (n, m, *axes, *shape)):
    raise ValueError(f"{name!r} has a size that is not a whole number")
  if not 0 < n < m <= MOST:
    raise ValueError(f"{name!r} is {n}:{m}, and must be n:m with 0 < n < m <= {MOST}")
  if not axes or axes != sorted(set(axes)) or axes[-1] >= len(shape):
    raise ValueError(f"{name!r} has groups along {axes} of the shape {shape}")
  if told["dtype"] not in inference_tree.VALUES:
    raise ValueError(f"{name!r} has values of {str(told['dtype'])[:40]!r}")
  axis = axes[0] if len(axes) == 1 else tuple(axes)
  groups = Groups(tuple(shape), axis, 0)
  kernel = Kernel(NM(n, m), dataclasses.replace(groups, pad=-groups.length % m), told["dtype"])
  wanted = kernel.json
  for key in (*wanted, *told):
    if told.get(key) != wanted.get(key):
      raise ValueError(f"{key} of {name!r} is {told.get(key)!r}, and must be {wanted.get(key)!r}")
  return kernel


def _dense(tensors: Mapping[str, Any], kernels: Mapping[str, Kernel]) -> dict[str, Any]:
  """Returns the tensors that are not packed; refuses parts that are missing, strange or left."""
  left = dict(tensors)
  for name, kernel in kernels.items():
    for full, want in _parts(name, kernel.like).items():
      found = left.pop(full, None)
      if found is None or (found.shape, found.dtype) != (want.shape, want.dtype):
        said = "missing" if found is None else f"{found.dtype} {found.shape}"
        raise ValueError(f"{full!r} is {said}, and must be {want.dtype} {want.shape}")
  for name in left:
    if _is_part(name):
      raise ValueError(f"{name!r} is a part of no packed kernel")
    if name in kernels:
      raise ValueError(f"{name!r} is packed and not packed")
  _check_names({**left, **kernels})
  return left


def _check_names(names: Collection[str]) -> None:
  """Refuses names that make no tree."""
  for name in names:
    words = name.split("/")
    is_inside = any("/".join(words[:i]) in names for i in range(1, len(words)))
    if len(words) < 2 or not all(words) or words[0] == _RESERVED or is_inside:
      raise ValueError(f"{name!r} is not a path of a tree, such as {_PARAMS}head/kernel")


def _is_part(name: str) -> bool:
  return name.rpartition(".")[2] in _PARTS


def _parts(name: str, packed: NMPacked) -> dict[str, Any]:
  """Returns name of a tensor -> the array or shape of each part of a packed kernel."""
  names = [f"{name}.{part}" for part in _PARTS]
  return {full: x for full in names if (x := getattr(packed, _field(full))) is not None}


def _field(name: str) -> str:
  """Returns the field of NMPacked that a tensor is.

  >>> _field("params/head/kernel.nm_values")
  'values'
  """
  return name.rpartition(".nm_")[2]
