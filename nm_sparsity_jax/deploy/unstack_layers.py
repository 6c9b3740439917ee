"""The tree of a network that scans its layers, as that of the same one without a scan, and back.

params, config -> [unstacked] -> params with an array for each layer, config that does not scan
key, array     -> [apart]     -> key of a layer -> its array, a view
key, layers    -> [restacked] -> its array, as a network with a scan takes it
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.files import Lazy
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.models.t5 import T5Config


def unstacked(params: Any, config: Any) -> tuple[dict[str, Any], Any]:
  """Returns the tree and the config of the same network without a scan over its layers.

      tree, config = unstacked(params, network.config)

  Kernels have two axes then. Nothing is computed.

  Args:
    params: of a T5, or their shapes; scanned or not.
    config: of the network; the tree of any other than a T5 that scans is returned as it is.

  Raises:
    ValueError: layers differ in what the network without a scan has once.
  """
  plain = without_scan(config)
  if plain is config:
    return params, config
  return nested(apart_all(dict(flatten(params)))), plain


def without_scan(config: Any) -> Any:
  """Returns the config of the same network without a scan over its layers.

  >>> without_scan(T5Config.preset("t5_1_1", "small", scan_layers=True)).scan_layers
  False
  """
  scans = isinstance(config, T5Config) and config.scan_layers
  return dataclasses.replace(config, scan_layers=False) if scans else config


def apart_all(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `apart` of every array."""
  return {k: x for key, array in arrays.items() for k, x in apart(key, array).items()}


def apart(key: str, array: Any) -> dict[str, Any]:
  """Returns the arrays, views, that one array is without a scan over layers: key -> array.

  >>> list(apart("encoder/encoder/mlp/wi/kernel", np.ones((8, 2, 32))))
  ['encoder/layers_0/mlp/wi/kernel', 'encoder/layers_1/mlp/wi/kernel']

  Args:
    key: its path among the parameters.
    array: its values, or their shape.

  Raises:
    ValueError: as in `unstacked`.
  """
  if (name := _stacked(key)) is None:
    return {key: array}
  first, depth, *rest = array.shape  # T5X's scan stacks along axis 1
  own = _joined(name, (first, *rest))
  if isinstance(array, jax.ShapeDtypeStruct):
    layer = jax.ShapeDtypeStruct(own, array.dtype)
    return {name.format(i): layer for i in range(depth)}
  # Views: a layer's slice of a stack would be a copy, and 11B parameters exist once.
  layers = np.asarray(array).swapaxes(0, 1)
  if "{}" not in name:  # a T5 without a scan has this once
    if (layers != layers[:1]).any():
      raise ValueError(
        f"the layers differ in {key!r}: T5X learns a table of relative positions for each layer "
        "where it scans over them. Without a scan a T5 has one table of relative positions for all "
        "layers, and so has Hugging Face's: train with scan_layers=False."
      )
    layers = layers[:1]
  return {name.format(i): layer.reshape(own) for i, layer in enumerate(layers)}


def restacked(key: str, layers: Mapping[str, Lazy], shape: tuple[int, ...]) -> Lazy:
  """Returns an array of a network, which may scan, of those of one that does not.

  Args:
    key: its path among the parameters.
    layers: key without a scan -> array.
    shape: of the array; layers are stacked along axis 1.
  """
  if (name := _stacked(key)) is None:
    return layers[key]
  first, depth, *rest = shape
  stack = [layers[name.format(i)] for i in range(depth)]
  make = lambda: np.stack([np.asarray(x).reshape(first, *rest) for x in stack], axis=1)
  return Lazy(shape, stack[0].dtype, make)


def _stacked(key: str) -> str | None:
  """Returns the key of a layer of a stack, with {} for its number; None where it is no stack."""
  hit = re.fullmatch(r"(encoder|decoder)/\1/(.+)", key)
  if hit is None:
    return None
  layer = "" if hit[2].startswith("relpos_bias/") else "layers_{}/"
  return f"{hit[1]}/{layer}{hit[2]}"


def _joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  # T5X keeps heads and head_dim apart in the attention kernels of a scan, and joins them elsewhere.
  if len(shape) != 3:
    return shape
  joined = 2 if name.endswith("/out/kernel") else 1
  return math.prod(shape[:joined]), math.prod(shape[joined:])
