"""A tree whose layers a scan stacked, as the tree of the same network without a scan, and back.

params, config -> [unstacked] -> params with an array for each layer, config that does not scan
key, array     -> [apart]     -> key of a layer -> its array, a view
layers         -> [restacked] -> what a network with a scan takes
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
    config: of the network, a `T5Config` or `ViTConfig`; the tree of any other network is returned.

  Raises:
    ValueError: layers differ in what the network without a scan has once.
  """
  plain = without_scan(config)
  if plain == config:
    return params, config
  axis = getattr(config, "param_scan_axis", 0)
  return nested(apart_all(dict(flatten(params)), axis)), plain


def without_scan(config: Any) -> Any:
  """Returns the config of the same network without a scan over its layers.

  >>> without_scan(ViTConfig(scan=True)).scan
  False
  """
  scans = {T5Config: "scan_layers", ViTConfig: "scan"}.get(type(config))
  return dataclasses.replace(config, **{scans: False}) if scans else config


def scan_axis(shapes: Mapping[str, tuple[int, ...]]) -> int:
  """Returns along which axis a T5's layers are stacked; 1, T5X's own, where none are.

  >>> norm, table = "encoder/encoder/pre_mlp_layer_norm/scale", "token_embedder/embedding"
  >>> scan_axis({table: (32, 8), norm: (6, 8)}), scan_axis({table: (32, 8), norm: (8, 6)})
  (0, 1)
  """
  norm = shapes.get("encoder/encoder/pre_mlp_layer_norm/scale")
  return 0 if norm and norm[0] != shapes["token_embedder/embedding"][1] else 1


def apart_all(arrays: Mapping[str, Any], axis: int) -> dict[str, Any]:
  """Returns `apart` of every array."""
  return {k: x for key, array in arrays.items() for k, x in apart(key, array, axis).items()}


def apart(key: str, array: Any, axis: int = 1) -> dict[str, Any]:
  """Returns the arrays, views, that one array is without a scan over layers: key -> array.

  >>> list(apart("blocks/fc1/kernel", np.ones((2, 8, 32))))
  ['blocks_0/fc1/kernel', 'blocks_1/fc1/kernel']

  Args:
    key: its path among the parameters.
    array: its values, or their shape.
    axis: of the layers in a T5, its `param_scan_axis`; a ViT has them on axis 0.

  Raises:
    ValueError: as in `unstacked`.
  """
  found = _stacked(key, axis)
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
  layers: Mapping[str, Lazy], shapes: Mapping[str, tuple[int, ...]], axis: int = 1
) -> dict[str, Lazy]:
  """Returns the arrays of a network, which may scan, of those of one that does not.

  Args:
    layers: key without a scan -> array.
    shapes: key of the network -> shape.
    axis: as in `apart`.
  """
  return {key: _restacked(key, layers, shape, axis) for key, shape in shapes.items()}


def _restacked(key: str, layers: Mapping[str, Lazy], shape: tuple[int, ...], axis: int) -> Lazy:
  found = _stacked(key, axis)
  if found is None:
    return layers[key]
  name, axis = found
  own = (*shape[:axis], *shape[axis + 1 :])
  stack = [layers[name.format(i)] for i in range(shape[axis])]
  make = lambda: np.stack([np.asarray(x).reshape(own) for x in stack], axis)
  return Lazy(shape, stack[0].dtype, make)


def _stacked(key: str, axis: int) -> tuple[str, int] | None:
  """Returns (key of a layer, with {} for its number; axis of the layers), None where it is none.

  Keys alone show it: a network without a scan has numbers in their place.
  """
  if hit := re.fullmatch(r"(encoder|decoder)/\1/(.+)", key):
    layer = "" if hit[2].startswith("relpos_bias/") else "layers_{}/"
    return f"{hit[1]}/{layer}{hit[2]}", axis
  if key.startswith(("blocks/", "params/blocks/")):
    return key.replace("blocks/", "blocks_{}/", 1), 0
  return None


def _joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a layer's array; attention kernels have heads and head_dim as one axis."""
  if len(shape) != 3 or not name.endswith("/kernel"):
    return shape
  joined = 2 if name.endswith("/out/kernel") else 1
  return math.prod(shape[:joined]), math.prod(shape[joined:])
