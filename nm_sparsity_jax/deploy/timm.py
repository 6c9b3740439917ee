"""timm's names for the trees of `models.vit`, `models.swin` and `models.resnet`, there and back.

    {"params", "batch_stats"} <-> [to_timm, from_timm] <-> timm's name -> numpy array
                              <-> [write, read]        <-> F.safetensors
    key -> array <-> [to_tensors, from_tensors] <-> timm's name -> tensor

Nothing is computed, so weights come back bit for bit. Kernels are (in, out) and HWIO here, and
(out, in) and (out, in, h, w) there: groups of m lie along axis 0 and -2 here, and along 1 there.
q, k and v are one tensor there. Blocks that a scan stacked are single ones there.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.deploy.safetensors_file import Lazy

# What timm may store beside parameters, and what it follows from. None of it is read; of these,
# `to_timm` writes `num_batches_tracked`, as 0.
DERIVED = {
  "relative_coords_table": "the window",
  "relative_position_index": "the window",
  "attn_mask": "the window and the image size",
  "k_bias": "nothing: it is 0",
  "num_batches_tracked": "the steps of a run: it counts them, and no sum depends on it",
}
# Family -> a name that only its state dict has.
FAMILIES = {
  "Swin V2": "layers.0.blocks.0.attn.logit_scale",
  "ResNet": "layer1.0.conv1.weight",
  "ViT": "pos_embed",
}
_STACK = "params/blocks/"  # of a ViT that scans; its layers lie along axis 0

# --- the table of names ---------------------------------------------------------------------------

_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
_MODULES = {"downsample_conv": "downsample.0", "downsample_bn": "downsample.1"}
_OURS = {2: (1, 0), 4: (2, 3, 1, 0)}  # axes of timm's kernel in our order


@dataclasses.dataclass(frozen=True)
class Source:
  """Where one of our arrays lies among timm's.

  Attributes:
    name: timm's.
    part: its number among the parts, equal and along axis 0, of that tensor.
    parts: how many.
    kernel: whether its axes are in another order.
  """

  name: str
  part: int = 0
  parts: int = 1
  kernel: bool = False

  def rows(self, tensor: Any) -> np.ndarray:
    """Returns the part of timm's tensor, in timm's layout; a view."""
    each = len(tensor) // self.parts if self.parts > 1 else None
    return tensor if each is None else tensor[self.part * each : (self.part + 1) * each]

  def take(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our array, a view of timm's tensor.

    >>> Source("head.weight", kernel=True).take(np.zeros((3, 2))).shape
    (2, 3)
    """
    rows = self.rows(tensor)
    return rows.transpose(_OURS[rows.ndim]) if self.kernel and rows.ndim in _OURS else rows

  def give(self, array: np.ndarray) -> np.ndarray:
    """Returns timm's rows of our array, a view."""
    if not self.kernel or array.ndim not in _OURS:
      return array
    return array.transpose(np.argsort(_OURS[array.ndim]))

  def theirs(self, shape: tuple[int, ...] | None, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of timm's tensor, of that of our array; of any array, the tensor's own."""
    if shape is None:
      return tensors[self.name].shape if self.name in tensors else ()
    theirs = self.give(np.broadcast_to(np.int8(0), shape)).shape
    return (self.parts * theirs[0], *theirs[1:]) if self.parts > 1 else theirs


def sources(keys: Collection[str]) -> dict[str, Source]:
  """Returns key -> where its array lies among timm's.

  Args:
    keys: such as 'params/blocks_0/attn/q/kernel' and 'batch_stats/bn1/mean', of a whole network.
  """
  return {key: _source(key, keys) for key in keys}


def _source(key: str, keys: Collection[str]) -> Source:
  *words, leaf = key.split("/")[1:]
  module = lambda word: (
    _MODULES.get(word) or re.sub(r"^(blocks|layers|layer\d+|cpb_mlp)_(\d+)$", r"\1.\2", word)
  )
  if words[-2:-1] == ["attn"] and words[-1] in "qkv":
    attention, which = ".".join(map(module, words[:-1])), words[-1]
    if leaf == "kernel":
      return Source(f"{attention}.qkv.weight", "qkv".index(which), 3, kernel=True)
    if key.replace(f"/{which}/bias", "/k/bias") in keys:
      return Source(f"{attention}.qkv.bias", "qkv".index(which), 3)
    return Source(f"{attention}.{which}_bias")  # of Swin V2, whose k has none
  name = ".".join([*map(module, words), _LEAVES.get(leaf, leaf)])
  return Source(name, kernel=leaf == "kernel")


def keys_of(names: Iterable[str]) -> list[str]:
  """Returns the keys of our arrays that timm's names stand for; `sources` undoes it.

  >>> keys_of(["blocks.0.norm1.weight", "blocks.0.mlp.fc1.weight"])
  ['params/blocks_0/norm1/scale', 'params/blocks_0/mlp/fc1/kernel']
  """
  found = []
  for name in names:
    module, _, leaf = name.rpartition(".")
    for ours, theirs in _MODULES.items():
      module = re.sub(rf"\b{re.escape(theirs)}$", ours, module)
    module = re.sub(r"\b(blocks|layers|layer\d+|cpb_mlp)\.(\d+)", r"\1_\2", module)
    collection = "batch_stats" if leaf.startswith("running_") else "params"
    if leaf == "weight":
      leaf = "scale" if re.search(r"(norm|bn)\d?$", module) else "kernel"
    if leaf in DERIVED:
      continue
    if leaf in ("q_bias", "v_bias"):
      module, leaf = f"{module}.{leaf[0]}", "bias"
    modules = [module]
    if module.endswith(".qkv"):
      modules = [f"{module.removesuffix('qkv')}{which}" for which in "qkv"]
    found += [
      "/".join(filter(None, (collection, *m.split("."), leaf.removeprefix("running_"))))
      for m in modules
    ]
  return found


def family_of(names: Iterable[str], what: str) -> str:
  """Returns 'ViT', 'Swin V2' or 'ResNet', the family that a state dict is of.

  Args:
    names: timm's.
    what: says in an error what was looked at.
  """
  names = set(names)
  for family, telling in FAMILIES.items():
    if telling in names:
      return family
  raise ValueError(
    f"{what} is not of a ViT, a Swin V2 or a ResNet of timm's: it has no "
    f"{', no '.join(map(repr, FAMILIES.values()))}."
  )


# --- there and back -------------------------------------------------------------------------------


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns timm's name -> tensor.

  Args:
    arrays: key such as 'params/head/kernel' -> array; of a whole network.

  Raises:
    ValueError: they are not of a ViT, Swin V2 or ResNet.
  """
  single: dict[str, np.ndarray] = {}
  for key, x in arrays.items():
    layers = x if key.startswith(_STACK) else [x]
    single |= dict(zip(_single(key, x.shape), layers, strict=True))
  parts: dict[str, dict[int, np.ndarray]] = {}
  for key, source in sources(single).items():
    parts.setdefault(source.name, {})[source.part] = source.give(np.asarray(single[key]))
  family_of(parts, f"the tree of {len(single)} arrays")
  found = {
    name: np.concatenate([x for _, x in sorted(own.items())]) if len(own) > 1 else own[0]
    for name, own in parts.items()
  }
  for name in [name for name in found if name.endswith(".running_var")]:
    found[name.replace("running_var", "num_batches_tracked")] = np.zeros((), np.int64)
  return found


def from_tensors(
  tensors: Mapping[str, Any], what: str, like: Mapping[str, Any] | None = None, config: Any = None
) -> dict[str, Lazy]:
  """Returns our key -> array, which is made when it is asked for.

  Args:
    tensors: timm's name -> array, or `Lazy`. Biases of k are read.
    what: says in an error what was looked at, such as the path of a file.
    like: as in `from_timm`.
    config: as in `from_timm`.
  """
  family = family_of(tensors, what)
  own = {name: x for name, x in tensors.items() if name.rpartition(".")[2] not in DERIVED}
  shapes = _flat(like) if like is not None else dict.fromkeys(keys_of(own))
  parts = {k: {k: None} if x is None else _single(k, x.shape) for k, x in shapes.items()}
  single = {part: shape for several in parts.values() for part, shape in several.items()}
  table = sources(single)
  if (ours := family_of([x.name for x in table.values()], "the network")) != family:
    raise ValueError(f"{what} is of a {family}, and the network is a {ours}.")
  wanted = {x.name: x.theirs(single[part], own) for part, x in table.items()}
  if said := difference(wanted, {name: x.shape for name, x in own.items()}):
    raise ValueError(
      f"{what} is of another network: {said}. Give the network its sizes, classes (CLASSES) and "
      "image_size."
    )
  _check_derived(tensors, config, what)
  return {
    key: _lazy(key, [table[part] for part in several], own, shapes[key], what)
    for key, several in parts.items()
  }


def _lazy(
  key: str, places: Sequence[Source], tensors: Mapping[str, Any], leaf: Any, what: str
) -> Lazy:
  """Returns our array, of the tensors that its layers lie in; `leaf` is the network's."""
  x = tensors[places[0].name]
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"{what}: {key!r} is {x.dtype}, and weights are floating.")
  if leaf is not None and x.dtype.itemsize > np.dtype(leaf.dtype).itemsize:
    raise ValueError(f"{what}: {key!r} is {x.dtype}, and the network takes {leaf.dtype}.")
  is_stack = key.startswith(_STACK)

  def make() -> np.ndarray:
    arrays = [place.take(np.asarray(tensors[place.name])) for place in places]
    return np.stack(arrays) if is_stack else np.array(arrays[0], order="C")

  shape = places[0].take(np.broadcast_to(np.int8(0), x.shape)).shape
  return Lazy((len(places), *shape) if is_stack else shape, x.dtype, make)


def _check_derived(tensors: Mapping[str, Any], config: Any, what: str) -> None:
  """Refuses a bias of k, and another window or image size, where derived tensors tell of one."""
  for name, x in tensors.items():
    if name.endswith(".k_bias") and np.any(np.asarray(x)):
      raise ValueError(f"{what}: {name!r} is not 0, and k has no bias in this network.")
  for name, x in tensors.items() if hasattr(config, "window") else ():
    stage = re.match(r"layers\.(\d+)\.blocks\.\d+\.(?:attn\.)?(\w+)$", name)
    if stage is None or stage[2] not in ("relative_coords_table", "attn_mask"):
      continue
    side = config.sides[int(stage[1])]
    window = min(config.window, side)
    if stage[2] == "relative_coords_table":
      own, theirs = ("window", window), (x.shape[1] + 1) // 2
    else:
      own, theirs = ("image_size: its number of windows", (side // window) ** 2), x.shape[0]
    if theirs != own[1]:
      raise ValueError(
        f"{what}: {name!r} is of {theirs}, and the network has {own[1]}: set its {own[0]}."
      )


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns 'params/...' and 'batch_stats/...' -> leaf."""
  return dict(flatten({k: variables[k] for k in ("params", "batch_stats") if k in variables}))


def _single(key: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...] | None]:
  """Returns key -> shape of each block's array that one array holds, in the order of blocks."""
  if not key.startswith(_STACK):
    return {key: shape}
  return {f"params/blocks_{i}/{key.removeprefix(_STACK)}": shape[1:] for i in range(shape[0])}


def to_timm(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns timm's state dict of a network's variables: name -> array, zeros of pruning included.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_timm(variables).items()})

  Args:
    variables: 'params', and 'batch_stats' of a ResNet; other collections hold no weights.

  Raises:
    ValueError: they are not of a ViT, Swin V2 or ResNet of this package.
  """
  return to_tensors(_flat(variables))


def from_timm(
  tensors: Mapping[str, Any],
  like: Mapping[str, Any] | None = None,
  config: Any = None,
  what: str = "the state dict",
) -> dict[str, Any]:
  """Returns variables, of numpy arrays, of timm's state dict.

      variables = from_timm(tensors, jax.eval_shape(network.init, key, images), network.config)

  Args:
    tensors: timm's name -> array.
    like: the network's variables, or their shapes; None = whatever network the names are of.
    config: of the network; a Swin V2 of another window or image size is then refused, where the
      tensors tell. Its parameters do not.
    what: says in an error what was looked at.

  Returns:
    'params', and 'batch_stats' of a ResNet; with `like`, stacked and in dtypes as there.

  Raises:
    ValueError: a name is unknown or missing, or a tensor is of another size, classes or image size.
  """
  wanted = {} if like is None else _flat(like)
  made = from_tensors(tensors, what, like, config)
  return nested({k: np.asarray(x, wanted[k].dtype if k in wanted else None)
                 for k, x in made.items()})  # fmt: skip


def read(
  path: str | os.PathLike, like: Mapping[str, Any] | None = None, config: Any = None
) -> dict[str, Any]:
  """Returns the variables in a safetensors file of timm's names.

      variables = read("model.safetensors", jax.eval_shape(network.init, key, images))

  Args:
    path: of the file.
    like: as in `from_timm`.
    config: as in `from_timm`.

  Raises:
    ValueError: it is pickled, damaged, or what `from_timm` refuses.
  """
  return from_timm(safetensors_file.Opened(path).tensors, like, config, repr(os.fspath(path)))


def write(path: str | os.PathLike, variables: Mapping[str, Any]) -> None:
  """Writes a new safetensors file of timm's names.

      write("model.safetensors", variables)

  Args:
    path: of the file, which must not be there.
    variables: as in `to_timm`.
  """
  safetensors_file.write(path, to_tensors(_flat(variables)))
