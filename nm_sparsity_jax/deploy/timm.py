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
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.deploy.safetensors_file import Lazy
from nm_sparsity_jax.deploy.unstack_layers import apart, restacked
from nm_sparsity_jax.models.vit import ViTConfig

# What timm may store that follows from something else. None of it is read; of these, `to_timm`
# writes `num_batches_tracked`, as 0. The bias of k is 0 in a Swin V2.
DERIVED = (
  "relative_coords_table", "relative_position_index", "attn_mask", "k_bias", "num_batches_tracked",
)  # fmt: skip
# Family -> a name that only its state dict has.
FAMILIES = {
  "Swin V2": "layers.0.blocks.0.attn.logit_scale",
  "ResNet": "layer1.0.conv1.weight",
  "ViT": "pos_embed",
}
_SCAN = ViTConfig(scan=True)  # of our networks of images, only a ViT scans

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
    if self.parts == 1:
      return tensor
    each = len(tensor) // self.parts
    return tensor[self.part * each : (self.part + 1) * each]

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

  def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of timm's tensor, of that of our array."""
    rows = self.give(np.broadcast_to(np.int8(0), shape)).shape
    return (self.parts * rows[0], *rows[1:]) if self.parts > 1 else rows


def sources(keys: Collection[str]) -> dict[str, Source]:
  """Returns key -> where its array lies among timm's.

  Args:
    keys: such as 'params/blocks_0/attn/q/kernel' and 'batch_stats/bn1/mean', of a whole network.
  """
  return {key: _source(key, keys) for key in keys}


def _source(key: str, keys: Collection[str]) -> Source:
  *words, leaf = key.split("/")[1:]
  modules = [
    _MODULES.get(word) or re.sub(r"^(blocks|layers|layer\d+|cpb_mlp)_(\d+)$", r"\1.\2", word)
    for word in words
  ]
  if words[-2:-1] == ["attn"] and words[-1] in "qkv":
    attention, which = ".".join(modules[:-1]), words[-1]
    if leaf == "kernel":
      return Source(f"{attention}.qkv.weight", "qkv".index(which), 3, kernel=True)
    if key.replace(f"/{which}/bias", "/k/bias") in keys:
      return Source(f"{attention}.qkv.bias", "qkv".index(which), 3)
    return Source(f"{attention}.{which}_bias")  # of Swin V2, whose k has none
  return Source(".".join([*modules, _LEAVES.get(leaf, leaf)]), kernel=leaf == "kernel")


def keys_of(names: Iterable[str]) -> list[str]:
  """Returns the keys of our arrays that timm's names stand for; `sources` undoes it.

  >>> keys_of(["blocks.0.norm1.weight", "blocks.0.mlp.fc1.weight"])
  ['params/blocks_0/norm1/scale', 'params/blocks_0/mlp/fc1/kernel']
  """
  found = []
  for name in names:
    module, _, leaf = name.rpartition(".")
    if leaf in DERIVED:
      continue
    for ours, theirs in _MODULES.items():
      module = re.sub(rf"\b{re.escape(theirs)}$", ours, module)
    module = re.sub(r"\b(blocks|layers|layer\d+|cpb_mlp)\.(\d+)", r"\1_\2", module)
    collection = "batch_stats" if leaf.startswith("running_") else "params"
    if leaf == "weight":
      leaf = "scale" if re.search(r"(norm|bn)\d?$", module) else "kernel"
    if leaf in ("q_bias", "v_bias"):
      module, leaf = f"{module}.{leaf[0]}", "bias"
    modules = [module]
    if module.endswith(".qkv"):
      modules = [f"{module.removesuffix('qkv')}{which}" for which in "qkv"]
    leaf = leaf.removeprefix("running_")
    found += ["/".join(filter(None, (collection, *m.split("."), leaf))) for m in modules]
  return found


def check_family(names: Collection[str], what: str) -> None:
  """Refuses a state dict that is not of a ViT, a Swin V2 or a ResNet."""
  if not {*FAMILIES.values()} & {*names}:
    known = ", ".join(f"a {family} has {name!r}" for family, name in FAMILIES.items())
    raise ValueError(f"{what} is not of a ViT, a Swin V2 or a ResNet of timm's ({known}).")


# --- there and back -------------------------------------------------------------------------------


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns timm's name -> tensor.

  Args:
    arrays: key such as 'params/head/kernel' -> array; of a whole network.

  Raises:
    ValueError: they are not of a ViT, Swin V2 or ResNet.
  """
  layers = {k: x for key, array in arrays.items() for k, x in apart(key, array, _SCAN).items()}
  parts: dict[str, dict[int, np.ndarray]] = {}
  for key, source in sources(layers).items():
    parts.setdefault(source.name, {})[source.part] = source.give(np.asarray(layers[key]))
  check_family(parts, f"the tree of {len(layers)} arrays")
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
    tensors: timm's name -> array, or `Lazy`.
    what: says in an error what was looked at, such as the path of a file.
    like: as in `from_timm`.
    config: as in `from_timm`.
  """
  check_family(tensors, what)
  own = {name: x for name, x in tensors.items() if name.rpartition(".")[2] not in DERIVED}
  if like is None:
    table = sources(keys_of(own))
    return {key: _lazy(source, own[source.name], what) for key, source in table.items()}
  shapes = {key: tuple(x.shape) for key, x in _flat(like).items()}
  layers: dict[str, Any] = {}
  for key, shape in shapes.items():
    layers |= apart(key, jax.ShapeDtypeStruct(shape, jnp.float32), _SCAN)
  table = sources(layers)
  wanted = {source.name: source.shape_there(layers[key].shape) for key, source in table.items()}
  if said := difference(wanted, {name: x.shape for name, x in own.items()}):
    raise ValueError(
      f"{what} is of another network: {said}. Give the network its sizes, classes (CLASSES) and "
      "image_size."
    )
  _check_window(tensors, config, what)
  made = {key: _lazy(source, own[source.name], what) for key, source in table.items()}
  return restacked(made, shapes, _SCAN)


def _lazy(source: Source, tensor: Any, what: str) -> Lazy:
  if not jnp.issubdtype(tensor.dtype, jnp.floating):
    raise ValueError(f"{what}: {source.name!r} is {tensor.dtype}, and weights are floating.")
  shape = source.take(np.broadcast_to(np.int8(0), tensor.shape)).shape
  make = lambda: np.array(source.take(np.asarray(tensor)), order="C")
  return Lazy(shape, np.dtype(tensor.dtype), make)


def _check_window(tensors: Mapping[str, Any], config: Any, what: str) -> None:
  """Refuses a Swin V2 of another window, where a derived tensor tells of one: parameters do not."""
  for name, x in tensors.items() if hasattr(config, "window") else ():
    if stage := re.fullmatch(r"layers\.(\d+)\.blocks\.\d+\.attn\.relative_coords_table", name):
      here = min(config.window, config.sides[int(stage[1])])
      there = (x.shape[1] + 1) // 2
      if there != here:
        raise ValueError(
          f"{what}: {name!r} is of a window of {there}, and the network has {here}: set its window."
        )


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns 'params/...' and 'batch_stats/...' -> leaf."""
  return dict(flatten({k: variables[k] for k in ("params", "batch_stats") if k in variables}))


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
    config: of the network; a Swin V2 of another window is then refused, where the tensors tell.
    what: says in an error what was looked at.

  Returns:
    'params', and 'batch_stats' of a ResNet; with `like`, stacked and in dtypes as there.

  Raises:
    ValueError: a name is unknown or missing, or a tensor is of another size, classes or image size.
  """
  made = from_tensors(tensors, what, like, config)
  if like is None:
    return nested({key: np.asarray(x) for key, x in made.items()})
  return nested({key: np.asarray(made[key], x.dtype) for key, x in _flat(like).items()})


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
