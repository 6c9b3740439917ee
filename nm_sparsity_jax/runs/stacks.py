"""Which arrays of a checkpoint are stacks of layers, as a scan over them makes.

Stored -> [config_of] -> the config of the network, as far as `unscanned` asks
       -> [axis_of]   -> the axis of the layers of one array
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax import unscanned
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.weights import huggingface

_TARGET = "target/"


def config_of(shapes: Mapping[str, tuple[int, ...]], path: str) -> Any:
  """Returns the config of a network that scans, as far as `unscanned.apart` asks; None without.

  Args:
    shapes: path of a parameter -> its shape.
    path: of the checkpoint, for errors.

  Raises:
    ValueError: it is of a T5 that T5X does not know.
  """
  if huggingface.is_t5(shapes) and any(key.startswith("encoder/encoder/") for key in shapes):
    return huggingface.config_of(shapes, path)
  if any(key.startswith("blocks/") for key in shapes):
    return ViTConfig(scan=True)
  return None


def axes_of(stored: Stored) -> dict[str, int]:
  """Returns key -> axis of the layers, of each kernel that a scan stacked; {} of other networks.

  Args:
    stored: the checkpoint.
  """
  shapes = {
    key.removeprefix(_TARGET): leaf.shape
    for key, leaf in stored.leaves.items()
    if key.startswith(_TARGET) and leaf.shape is not None
  }
  try:
    config = config_of(shapes, stored.path)
  except ValueError:  # of another network that looks alike: nothing is known of its layers
    return {}
  found = {
    path: unscanned.stacked(path, config) for path, shape in shapes.items() if len(shape) > 2
  }
  return {f"{_TARGET}{path}": hit[1] for path, hit in found.items() if hit and "{}" in hit[0]}
