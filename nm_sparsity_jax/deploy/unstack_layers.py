"""A tree whose layers a scan stacked, as the tree of the same network without a scan.

    params, config -> [unstacked] -> params with an array for each layer, config that does not scan
    key, array     -> [apart]     -> (key, array) of each layer, one array at a time

A layer's slice of a stack would be a copy at each call of a network. Packed kernels, and the files
of other libraries, have one array for each layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
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
    if isinstance(x, jax.ShapeDtypeStruct):
      parts = shapes_apart(key, x.shape, config).items()
      made |= {own: jax.ShapeDtypeStruct(shape, x.dtype) for own, shape in parts}
    else:
      made |= apart(key, x, config)
  return nested(made), without_scan(config)


def without_scan(config: Any) -> Any:
  """Returns the config of the same network without a scan over its layers.

  >>> without_scan(ViTConfig(scan=True)).scan
  False
  """
  scans = {T5Config: "scan_layers", ViTConfig: "scan"}.get(type(config))
  return dataclasses.replace(config, **{scans: False}) if scans else config


def shapes_apart(key: str, shape: tuple[int, ...], config: Any) -> dict[str, tuple[int, ...]]:
  """Returns the keys and shapes that `apart` gives of an array.

  >>> shapes_apart("blocks/mlp/fc1/kernel", (2, 8, 32), ViTConfig(scan=True))
  {'blocks_0/mlp/fc1/kernel': (8, 32), 'blocks_1/mlp/fc1/kernel': (8, 32)}
  """
  found = stacked(key, config)
  if found is None:
    return {key: tuple(shape)}
  name, axis = found
  own = _joined(name, (*shape[:axis], *shape[axis + 1 :]))
  return {name.format(i): own for i in range(shape[axis])}


def apart(key: str, array: Any, config: Any) -> Iterator[tuple[str, Any]]:
  """Yields the keys and arrays, views, that one array is without a scan over layers.

  Args:
    key: its path among the parameters.
    array: its values.
    config: as in `unstacked`.

  Raises:
    ValueError: as in `unstacked`.
  """
  found = stacked(key, config)
  if found is None:
    yield key, array
    return
  name, axis = found
  layers = np.moveaxis(np.asarray(array), axis, 0)
  if "{}" not in name:
    if any(not np.array_equal(layers[0], other) for other in layers[1:]):
      raise ValueError(
        f"the layers differ in {key!r}: T5X learns a table of relative positions for each layer "
        "where it scans over them. Without a scan a T5 has one table of relative positions for all "
        "layers, and so has Hugging Face's: train with scan_layers=False."
      )
    layers = layers[:1]
  for i, layer in enumerate(layers):
    yield name.format(i), layer.reshape(_joined(name, layer.shape))


def stacked(key: str, config: Any) -> tuple[str, int] | None:
  """Returns (key of a layer, with {} for its number; axis of the layers), None where it is none.

  >>> stacked("blocks/mlp/fc1/kernel", ViTConfig(scan=True))
  ('blocks_{}/mlp/fc1/kernel', 0)

  Args:
    key: its path among the parameters.
    config: as in `unstacked`.
  """
  if isinstance(config, T5Config) and config.scan_layers:
    if hit := re.fullmatch(r"(encoder|decoder)/\1/(.+)", key):
      layer = "" if hit[2].startswith("relpos_bias/") else "layers_{}/"
      return f"{hit[1]}/{layer}{hit[2]}", config.param_scan_axis
  if isinstance(config, ViTConfig) and config.scan and key.startswith("blocks/"):
    return key.replace("blocks/", "blocks_{}/", 1), 0
  return None


def _joined(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a layer's array; attention kernels have heads and head_dim as one axis."""
  if len(shape) != 3 or not name.endswith("/kernel"):
    return shape
  joined = 2 if name.endswith("/out/kernel") else 1
  return math.prod(shape[:joined]), math.prod(shape[joined:])
