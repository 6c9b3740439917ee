"""timm's names for the trees of `models.vit`, `models.swin` and `models.resnet`, there and back.

{"params", "batch_stats"} <-> [to_timm, from_timm] <-> timm's name -> array
                          <-> [write, read]        <-> F.safetensors
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import Lazy
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import names, safetensors_file
from nm_sparsity_jax.deploy.names import Name

# What timm may store that follows from something else. None of it is read; of these, `to_timm`
# writes `num_batches_tracked`, as 0. The bias of k is 0 in a Swin V2.
# `relative_coords_table` shows the window of a Swin V2; without it no parameter does.
DERIVED = (
  "relative_coords_table", "relative_position_index", "attn_mask", "k_bias", "num_batches_tracked",
)  # fmt: skip
# A name that only the state dict of a ViT has, of a Swin V2, and of a ResNet.
_FAMILIES = ("pos_embed", "layers.0.blocks.0.attn.logit_scale", "layer1.0.conv1.weight")
_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
_MODULES = {"downsample_conv": "downsample.0", "downsample_bn": "downsample.1"}
_NUMBERED = r"(blocks|layers|layer\d+|cpb_mlp)"  # modules with a number that is a word there


def name_of(key: str) -> Name:
  """Returns what an array of a network without a scan is in timm.

  >>> name_of("params/blocks_1/attn/k/kernel")
  Name(name='blocks.1.attn.qkv.weight', transposed=True, third=1)

  Args:
    key: such as 'params/head/kernel' and 'batch_stats/bn1/mean'.
  """
  *words, leaf = key.split("/")[1:]
  modules = [_MODULES.get(w) or re.sub(rf"^{_NUMBERED}_(\d+)$", r"\1.\2", w) for w in words]
  if words[-2:-1] == ["attn"] and words[-1] in "qkv":
    attention, which = ".".join(modules[:-1]), words[-1]
    if leaf == "bias" and words[0].startswith("layers_"):  # of Swin V2, where k has none
      return Name(f"{attention}.{which}_bias")
    return Name(f"{attention}.qkv.{_LEAVES.get(leaf, leaf)}", leaf == "kernel", "qkv".index(which))
  return Name(".".join([*modules, _LEAVES.get(leaf, leaf)]), leaf == "kernel")


def keys_of(tensors: Iterable[str]) -> list[str]:
  """Returns the keys of our arrays that timm's names stand for; `name_of` undoes it.

  >>> keys_of(["blocks.0.norm1.weight", "blocks.0.mlp.fc1.weight"])
  ['params/blocks_0/norm1/scale', 'params/blocks_0/mlp/fc1/kernel']
  """
  found = []
  for name in tensors:
    module, _, leaf = name.rpartition(".")
    for ours, theirs in _MODULES.items():
      module = re.sub(rf"\b{re.escape(theirs)}$", ours, module)
    module = re.sub(rf"\b{_NUMBERED}\.(\d+)", r"\1_\2", module)
    collection = "batch_stats" if leaf.startswith("running_") else "params"
    if leaf == "weight":  # torch calls both so
      leaf = "scale" if re.search(r"(norm|bn)\d?$", module) else "kernel"
    if leaf in ("q_bias", "v_bias"):
      module, leaf = f"{module}.{leaf[0]}", "bias"
    modules = [module]
    # One tensor there is three arrays here.
    if module.endswith(".qkv"):
      modules = [f"{module.removesuffix('qkv')}{which}" for which in "qkv"]
    leaf = leaf.removeprefix("running_")
    found += ["/".join(filter(None, (collection, *m.split("."), leaf))) for m in modules]
  return found


def _check_family(tensors: Iterable[str], what: str) -> None:
  if not {*_FAMILIES} & {*tensors}:
    known = ", ".join(_FAMILIES)
    raise ValueError(f"{what} is not of timm's ViT, Swin V2 or ResNet: it has none of {known}.")


# --- there and back -------------------------------------------------------------------------------


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns 'params/...' and 'batch_stats/...' -> leaf."""
  return {k: x for k, x in flatten(variables) if k.startswith(("params/", "batch_stats/"))}


def to_timm(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns timm's state dict of a network's variables: name -> array, zeros of pruning included.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_timm(variables).items()})

  Args:
    variables: 'params', and 'batch_stats' of a ResNet; other collections hold no weights.

  Raises:
    ValueError: they are not of a ViT, Swin V2 or ResNet of this package.
  """
  found = names.to_tensors(_flat(variables), name_of)
  _check_family(found, "the tree")
  # torch's strict `load_state_dict` asks for the count, which only a momentum of None reads.
  for name in [name for name in found if name.endswith(".running_var")]:
    found[name.replace("running_var", "num_batches_tracked")] = np.zeros((), np.int64)
  return found


def from_tensors(
  tensors: Mapping[str, Any], what: str, like: Mapping[str, Any] | None = None
) -> dict[str, Lazy]:
  """Returns our key -> array, which is read when it is asked for.

  Args:
    tensors: timm's name -> array, or `Lazy`.
    what: says in an error what was looked at, such as the path of a file.
    like: as in `from_timm`.
  """
  # Not the unknown ones: a name that nobody knows is a weight that would be lost.
  own = {name: x for name, x in tensors.items() if name.rpartition(".")[2] not in DERIVED}
  if like is not None:
    shapes = {key: tuple(x.shape) for key, x in _flat(like).items()}
  else:
    _check_family(own, what)
    # The shapes of the file, turned as `name_of` says; no tensor is read.
    empty = {name: np.broadcast_to(np.int8(0), x.shape) for name, x in own.items()}
    found = {key: name_of(key) for key in keys_of(own)}
    shapes = {key: there.ours(empty[there.name]).shape for key, there in found.items()}
  return names.from_tensors(own, name_of, shapes, f"{what} is of another network")


def from_timm(
  tensors: Mapping[str, Any],
  like: Mapping[str, Any] | None = None,
  what: str = "the state dict",
) -> dict[str, Any]:
  """Returns variables, of numpy arrays, of timm's state dict.

      variables = from_timm(tensors, jax.eval_shape(network.init, key, images))

  Args:
    tensors: timm's name -> array.
    like: the network's variables, or their shapes; None = whatever network the names are of.
    what: says in an error what was looked at.

  Returns:
    'params', and 'batch_stats' of a ResNet; with `like`, stacked and in dtypes as there.

  Raises:
    ValueError: a name is unknown or missing, or a tensor is of another size, classes or image size.
  """
  # The network's, since a file may hold half floats.
  dtypes = {key: x.dtype for key, x in _flat(like or {}).items()}
  made = from_tensors(tensors, what, like)
  return nested({key: np.asarray(x, dtypes.get(key)) for key, x in made.items()})


def read(path: str | os.PathLike, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Returns the variables in a safetensors file of timm's names.

      variables = read("model.safetensors", jax.eval_shape(network.init, key, images))

  Args:
    path: of the file.
    like: as in `from_timm`.

  Raises:
    ValueError: it is pickled, damaged, or what `from_timm` refuses.
  """
  return from_timm(safetensors_file.read(path)[0], like, repr(os.fspath(path)))


def write(path: str | os.PathLike, variables: Mapping[str, Any]) -> None:
  """Writes a new safetensors file of timm's names.

      write("model.safetensors", variables)

  Args:
    path: of the file, which must not be there.
    variables: as in `to_timm`.
  """
  safetensors_file.write(path, to_timm(variables))
