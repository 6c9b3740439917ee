"""Hugging Face's T5 and T5X's parameter tree, there and back.

    params <-> [to_huggingface, from_huggingface] <-> Hugging Face's name -> numpy array
           <-> [read, write] <-> FOLDER/config.json, FOLDER/model.safetensors
    FOLDER -> [hold] -> our key -> shape, dtype -> array, when it is asked for

      T5ForConditionalGeneration.from_pretrained(FOLDER)

Nothing is computed, so weights come back bit for bit, and zeros of pruning are zeros there. Trees
are those of T5X and of `models.t5`, scanned or not. `huggingface_names` says what lies where.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util

from nm_sparsity_jax import unscanned
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.trees import flatten
from nm_sparsity_jax.weights import huggingface_config, huggingface_folder
from nm_sparsity_jax.weights.huggingface_folder import FLOATS, SHARD_BYTES, Folder
from nm_sparsity_jax.weights.huggingface_names import (
  COPIES,
  UNREAD,
  config_of,
  difference,
  sources,
)

# --- trees ------------------------------------------------------------------------------------


def to_huggingface(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the state dict of a T5's parameters: Hugging Face's name -> array.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_huggingface(params).items()},
                            strict=False)  # which has the embedding three times

  Args:
    params: of T5X's T5 or `models.t5`, finalized or dense, scanned or not.

  Raises:
    ValueError: they are of another network, or their layers differ in what they share there.
  """
  arrays = {key: np.asarray(x) for key, x in flatten(params)}
  config = config_of({key: x.shape for key, x in arrays.items()}, "the tree")
  return dict(_tensors(config, list(sources(config)), arrays.__getitem__))


def from_huggingface(tensors: Mapping[str, Any], config: T5Config) -> dict[str, Any]:
  """Returns parameters, of numpy arrays, of a state dict.

      params = from_huggingface({k: x.numpy() for k, x in model.state_dict().items()}, config)

  Args:
    tensors: Hugging Face's name -> array; copies of the embedding are not read.
    config: of the network that takes the parameters, scanned or not.

  Raises:
    ValueError: a name is missing or unknown, or a tensor has another shape: all in one error.
  """
  table = sources(config)
  wanted = {name: source.theirs for source in table.values() for name in source.names}
  beside = {*COPIES, *UNREAD} - set(wanted)
  found = {name: np.shape(x) for name, x in tensors.items() if name not in beside}
  if said := difference(wanted, found):
    raise ValueError(f"the state dict is of another network: of tensors, {said}.")
  flat = {key: s.take(lambda name: np.asarray(tensors[name])) for key, s in table.items()}
  return traverse_util.unflatten_dict(flat, sep="/")


# --- folders ----------------------------------------------------------------------------------


def read(path: str | os.PathLike, config: T5Config | None = None) -> dict[str, Any]:
  """Returns the parameters in a folder of Hugging Face's T5.

      params = read("t5-small", network.config)

  Args:
    path: of the folder, on a local disk.
    config: of the network, which must have the folder's sizes and choices; None = the folder's.

  Raises:
    ValueError: the folder is what `Folder` refuses, or of another network.
  """
  held = hold(path, config)
  return traverse_util.unflatten_dict({key: held.array(key) for key in held.leaves}, sep="/")


@dataclasses.dataclass(frozen=True)
class Held:
  """The arrays of a T5 that a folder holds.

  Attributes:
    config: of the network that they are for.
    leaves: key of T5X's tree -> shape, dtype as stored.
    array: key -> its values, in our layout, read now.
    axis: key -> the axis along which it stacks layers; None where it does not.
    layers: key -> one layer after the other, with all axes, read now.
  """

  config: T5Config
  leaves: Mapping[str, tuple[tuple[int, ...], str]]
  array: Callable[[str], np.ndarray]
  axis: Callable[[str], int | None]
  layers: Callable[[str], Iterator[np.ndarray]]


def hold(path: str | os.PathLike, config: T5Config | None = None) -> Held:
  """Reads config.json and the headers of a folder; arrays are read when you ask for them.

      hold("t5-small").array("encoder/layers_0/mlp/wi/kernel")

  Args:
    path: as in `read`.
    config: as in `read`.

  Raises:
    ValueError: as in `read`.
  """
  folder = Folder(path)
  if config is not None:
    huggingface_config.check_equal(folder.config, config, repr(folder.path))
  table = sources(config or folder.config)
  leaves = {key: (source.ours, folder.dtypes[source.names[0]]) for key, source in table.items()}
  return Held(
    config or folder.config,
    leaves,
    lambda key: table[key].take(folder.array),
    lambda key: table[key].axis,
    lambda key: table[key].layers(folder.array),
  )


def write(
  path: str | os.PathLike, params: Mapping[str, Any], config: T5Config, most: int = SHARD_BYTES
) -> None:
  """Writes a new folder of Hugging Face's T5.

      write("model", params, network.config)

  Args:
    path: of the folder, which must not be there.
    params: as in `to_huggingface`.
    config: of their network.
    most: bytes of one file of tensors; a larger model has several.
  """
  arrays = {key: np.asarray(x) for key, x in flatten(params)}
  shapes = {key: x.shape for key, x in arrays.items()}
  if said := difference({key: s.ours for key, s in sources(config).items()}, shapes):
    raise ValueError(f"the tree is not of the network of this config: {said}.")
  dtypes = {key: str(x.dtype) for key, x in arrays.items()}
  write_each(path, config, dtypes, arrays.__getitem__, most=most)


def write_each(
  path: str | os.PathLike,
  config: T5Config,
  dtypes: Mapping[str, str],
  array: Callable[[str], np.ndarray],
  json_values: Mapping[str, Any] | None = None,
  beside: Sequence[str | os.PathLike] = (),
  seen: Callable[[str, np.ndarray], Any] = lambda name, tensor: None,
  most: int = SHARD_BYTES,
) -> None:
  """Writes a new folder, with one array of ours in memory at a time.

  Args:
    path: of the folder, which must not be there.
    config: of the network; each key of `sources(config)` is asked for once.
    dtypes: key -> numpy's name of the dtype.
    array: key -> our array.
    json_values: of config.json; None = what the config tells.
    beside: more files, which are copied into it.
    seen: is told each of their names and tensors.
    most: bytes of one file of tensors.
  """
  table = sources(config)
  # The larger numbers first: then each tensor lies at a multiple of its own size.
  keys = sorted(table, key=lambda key: -_size(key, dtypes[key]))
  header = {name: (dtypes[key], table[key].theirs) for key in keys for name in table[key].names}
  if json_values is None:
    json_values = huggingface_config.to_json(config, dtypes[keys[0]])

  def values() -> Iterator[np.ndarray]:
    for name, tensor in _tensors(config, keys, array):
      seen(name, tensor)
      yield tensor
      del tensor  # or it would keep its array while the next one is read

  huggingface_folder.write(path, json_values, header, values(), beside, most)


def _size(key: str, dtype: str) -> int:
  if dtype not in FLOATS:
    raise ValueError(f"{key} is {dtype}, and weights are {', '.join(FLOATS)}.")
  return np.dtype(dtype).itemsize


def _tensors(
  config: T5Config, keys: Sequence[str], array: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields their names and tensors, which are views of our arrays."""
  table = sources(unscanned.without_scan(config))
  for key in keys:
    for own, one in unscanned.apart(key, array(key), config):
      yield table[own].names[0], table[own].give(one)
    del one  # or it would keep this array while the next one is read
