"""A tree whose layers a scan stacked, as the tree of the same network without a scan, and back.

    params, config -> [unstacked] -> params with an array for each layer, config that does not scan
    key, array     -> [apart]     -> key of a layer -> its array, a view
    layers         -> [restacked] -> what a network with a scan takes

A layer's slice of a stack would be a copy at each call of a network. Packed kernels, and the files
of other libraries, have one array for each layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy.safetensors_file import Lazy
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.models.vit import ViTConfig


def unstacked(params: Any, config: Any) -> tuple[dict[str, Any], Any]:
  """Returns the tree and the config of the same network without a scan over its layers.

      tree, config = unstacked(params, network.config)

  Kernels have two axes then. Nothing is computed.

  Args:
    params: of a T5 or a ViT of this package, or their shapes; scanned or not.
    config: of the network, a `T5Config` or `ViTConfig`; of another network, its tree is as it was.

  Raises:
    ValueError: layers differ in what the network without a scan has once.
  """
  made: dict[str, Any] = {}
  for key, x in flatten(params):
    made |= apart(key, x, config)
  return nested(made), without_scan(config)


def without_scan(config: Any) -> Any:
  """Returns the config of the same network without a scan over its layers.

  >>> without_scan(ViTConfig(scan=True)).scan
  False
  """
  scans = {T5Config: "scan_layers", ViTConfig: "scan"}.get(type(config))
  return dataclasses.replace(config, **{scans: False}) if scans else config


def apart(key: str, array: Any, config: Any) -> dict[str, Any]:
  """Returns the arrays, views, that one array is without a scan over layers: key -> array.

  >>> list(apart("blocks/fc1/kernel", np.ones((2, 8, 32)), ViTConfig(scan=True)))
  ['blocks_0/fc1/kernel', 'blocks_1/fc1/kernel']

  Args:
    key: its path among the parameters.
    array: its values, or their shape.
    config: as in `unstacked`.

  Raises:
    ValueError: as in `unstacked`.
  """
  found = _stacked(key, config)
  if found is None:
    return {key: array}
  name, axis = found
  own = _joined(name, (*array.shape[:axis], *array.shape[axis + 1 :]))
  if isinstance(array, jax.ShapeDtypeStruct):
    layer = jax.ShapeDtypeStruct(own, array.dtype)
    return {name.format(i): layer for i in range(array.shape[axis])}
  layers = np.moveaxis(np.asarray(array), axis, 0)
  if "{}" not in name:  # a T5 without a scan has this once
    if (layers != layers[:1]).any():
      raise ValueError(
        f"the layers differ in {key!r}: T5X learns a table of relative positions for each layer "
        "where it scans over them. Without a scan a T5 has one table of relative positions for all "
        "layers, and so has Hugging Face's: train with scan_layers=False."
      )
    layers = layers[:1]
  return {name.format(i): layer.reshape(own) for i, layer in enumerate(layers)}


def restacked(
  layers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], config: Any
) -> dict[str, Lazy]:
  """Returns the arrays of a network, which may scan, of those of one that does not.

  Args:
    layers: key without a scan -> array, or `Lazy`.
    shapes: key of the network -> shape.
    config: of the network.
  """
  return {key: _restacked(key, layers, shape, config) for key, shape in shapes.items()}


def _restacked(key: str, layers: Mapping[str, Any], shape: tuple[int, ...], config: Any) -> Lazy:
  found = _stacked(key, config)
  if found is None:
    return Lazy(shape, layers[key].dtype, lambda: np.asarray(layers[key]))
  name, axis = found
  names = [name.format(i) for i in range(shape[axis])]
  if len(dtypes := {str(layers[one].dtype) for one in names}) > 1:
    raise ValueError(f"{names[0]!r} and the same of other layers are {sorted(dtypes)}.")
  own = (*shape[:axis], *shape[axis + 1 :])

  def make() -> np.ndarray:
    return np.stack([np.asarray(layers[one]).reshape(own) for one in names], axis)

  return Lazy(shape, layers[names[0]].dtype, make)


def _stacked(key: str, config: Any) -> tuple[str, int] | None:
  """Returns (key of a layer, with {} for its number; axis of the layers), None where it is none."""
  if isinstance(config, T5Config) and config.scan_layers:
    if hit := re.fullmatch(r"(encoder|decoder)/\1/(.+)", key):
      layer = "" if hit[2].startswith("relpos_bias/") else "layers_{}/"
      return f"{hit[1]}/{layer}{hit[2]}", config.param_scan_axis
  is_stack = key.startswith(("blocks/", "params/blocks/"))
  if isinstance(config, ViTConfig) and config.scan and is_stack:
    return key.replace("blocks/", "blocks_{}/", 1), 0
  return None


def _joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a layer's array; attention kernels have heads and head_dim as one axis."""
  if len(shape) != 3 or not name.endswith("/kernel"):
    return shape
  joined = 2 if name.endswith("/out/kernel") else 1
  return math.prod(shape[:joined]), math.prod(shape[joined:])
