"""timm's names and layouts, and ours: which array lies where.

    our keys -> [sources] -> key -> Source: timm's name, which part of it, the order of its axes
    timm's names -> [keys_of] -> the keys of such a network

>>> import numpy as np
>>> Source("head.weight", kernel=True).take(np.zeros((3, 2))).shape
(2, 3)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
_MODULES = {"downsample_conv": "downsample.0", "downsample_bn": "downsample.1"}


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

  def take(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our array, a view of timm's tensor."""
    rows = self.rows(tensor)
    return rows.transpose(_ours(rows.ndim)) if self.kernel else rows

  def rows(self, tensor: np.ndarray) -> np.ndarray:
    """Returns the part of timm's tensor, in timm's layout."""
    if self.parts == 1:
      return tensor
    each = len(tensor) // self.parts
    return tensor[self.part * each : (self.part + 1) * each]

  def give(self, array: np.ndarray) -> np.ndarray:
    """Returns timm's rows of our array, a view."""
    return array.transpose(np.argsort(_ours(array.ndim))) if self.kernel else array

  def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of our array where timm's tensor has `shape`."""
    if self.parts > 1:
      shape = (shape[0] // self.parts, *shape[1:])
    return tuple(shape[i] for i in _ours(len(shape))) if self.kernel else tuple(shape)


def _ours(ndim: int) -> tuple[int, ...]:
  """Returns the axes of timm's kernel in our order; of what is no kernel, as they are."""
  return {2: (1, 0), 4: (2, 3, 1, 0)}.get(ndim, tuple(range(ndim)))


def sources(keys: Collection[str]) -> dict[str, Source]:
  """Returns key -> where its array lies among timm's.

  Args:
    keys: such as 'params/blocks_0/attn/q/kernel' and 'batch_stats/bn1/mean', of a whole network.
  """
  return {key: _source(key, keys) for key in keys}


def _source(key: str, keys: Collection[str]) -> Source:
  *words, leaf = key.split("/")[1:]
  is_kernel = leaf == "kernel"
  if words[-2:-1] == ["attn"] and words[-1] in "qkv":
    attention, which = ".".join(map(_module, words[:-1])), words[-1]
    if is_kernel:
      return Source(f"{attention}.qkv.weight", "qkv".index(which), 3, kernel=True)
    if key.replace(f"/{which}/bias", "/k/bias") in keys:
      return Source(f"{attention}.qkv.bias", "qkv".index(which), 3)
    return Source(f"{attention}.{which}_bias")  # of Swin V2, whose k has none
  name = ".".join([*map(_module, words), _LEAVES.get(leaf, leaf)])
  return Source(name, kernel=is_kernel)


def _module(word: str) -> str:
  return _MODULES.get(word) or re.sub(r"^(blocks|layers|layer\d+|cpb_mlp)_(\d+)$", r"\1.\2", word)


# --- which keys a network has -------------------------------------------------------------------


def keys_of(names: Iterable[str], what: str) -> tuple[str, ...]:
  """Returns our keys of the network whose state dict has these names: all that it must have.

  Args:
    names: timm's.
    what: says in an error what was looked at.
  """
  names = list(names)
  return _FAMILIES[family_of(names, what)](names)


def family_of(names: Iterable[str], what: str) -> str:
  """Returns 'ViT', 'Swin V2' or 'ResNet', the family that a state dict is of.

  Args:
    names: timm's.
    what: says in an error what was looked at.
  """
  names = set(names)
  for family, telling in TELLING.items():
    if telling in names:
      return family
  raise ValueError(
    f"{what} is not of a ViT, a Swin V2 or a ResNet of timm's: it has no "
    f"{', no '.join(map(repr, TELLING.values()))}."
  )


# Family -> a name that only its state dict has.
TELLING = {
  "Swin V2": "layers.0.blocks.0.attn.logit_scale",
  "ResNet": "layer1.0.conv1.weight",
  "ViT": "pos_embed",
}
_OF_MLP = ("mlp/fc1/kernel", "mlp/fc1/bias", "mlp/fc2/kernel", "mlp/fc2/bias")
_OF_NORMS = ("norm1/scale", "norm1/bias", "norm2/scale", "norm2/bias")
_OF_PROJ = ("attn/proj/kernel", "attn/proj/bias")


def _params(*paths: str) -> tuple[str, ...]:
  return tuple(f"params/{path}" for path in paths)


def _count(names: Collection[str], regex: str) -> int:
  """Returns how many different numbers stand in the group of a regex."""
  return len({found[1] for name in names if (found := re.match(regex, name))})


def _vit_keys(names: Collection[str]) -> tuple[str, ...]:
  paths = ["pos_embed", "patch_embed/proj/kernel", "patch_embed/proj/bias"]
  norm = "norm" if "cls_token" in names else "fc_norm"
  paths += ["cls_token"] if "cls_token" in names else []
  paths += [f"{norm}/scale", f"{norm}/bias", "head/kernel", "head/bias"]
  of_qkv = [f"attn/{x}/{leaf}" for x in "qkv" for leaf in ("kernel", "bias")]
  for i in range(_count(names, r"blocks\.(\d+)\.")):
    paths += [f"blocks_{i}/{path}" for path in (*of_qkv, *_OF_PROJ, *_OF_MLP, *_OF_NORMS)]
  return _params(*paths)


def _swin_keys(names: Collection[str]) -> tuple[str, ...]:
  paths = [f"patch_embed/{x}" for x in ("proj/kernel", "proj/bias", "norm/scale", "norm/bias")]
  paths += ["norm/scale", "norm/bias", "head/fc/kernel", "head/fc/bias"]
  own = ["logit_scale", "cpb_mlp_0/kernel", "cpb_mlp_0/bias", "cpb_mlp_2/kernel"]
  own += ["q/kernel", "q/bias", "k/kernel", "v/kernel", "v/bias"]
  of_block = [f"attn/{path}" for path in own] + [*_OF_PROJ, *_OF_MLP, *_OF_NORMS]
  for stage in range(_count(names, r"layers\.(\d+)\.")):
    if stage:
      of_merge = ("reduction/kernel", "norm/scale", "norm/bias")
      paths += [f"layers_{stage}/downsample/{path}" for path in of_merge]
    for i in range(_count(names, rf"layers\.{stage}\.blocks\.(\d+)\.")):
      paths += [f"layers_{stage}/blocks_{i}/{path}" for path in of_block]
  return _params(*paths)


def _resnet_keys(names: Collection[str]) -> tuple[str, ...]:
  convs, norms = ["conv1"], ["bn1"]
  for stage in range(1, 1 + _count(names, r"layer(\d+)\.")):
    for i in range(_count(names, rf"layer{stage}\.(\d+)\.")):
      convs += [f"layer{stage}_{i}/conv{j}" for j in (1, 2, 3)]
      norms += [f"layer{stage}_{i}/bn{j}" for j in (1, 2, 3)]
    if any(name.startswith(f"layer{stage}.0.downsample.") for name in names):
      convs.append(f"layer{stage}_0/downsample_conv")
      norms.append(f"layer{stage}_0/downsample_bn")
  paths = [f"{conv}/kernel" for conv in convs] + ["fc/kernel", "fc/bias"]
  paths += [f"{norm}/{leaf}" for norm in norms for leaf in ("scale", "bias")]
  averages = (f"batch_stats/{norm}/{leaf}" for norm in norms for leaf in ("mean", "var"))
  return (*_params(*paths), *averages)


_FAMILIES: Mapping[str, Callable[[Collection[str]], tuple[str, ...]]] = {
  "ViT": _vit_keys, "Swin V2": _swin_keys, "ResNet": _resnet_keys,
}  # fmt: skip
