"""A checkpoint as a packed file: what is deployed, without the zeros.

checkpoint, its rules -> [pack] -> F.safetensors -> read back -> Written: bytes, what stayed dense

Layers that a scan stacked are taken apart: networks with packed kernels do not scan. Their rules
are those of the layers then.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import (
  huggingface,
  inference_tree,
  packed_file,
  safetensors_file,
  unstack_layers,
)
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training.rules import Rules

_TARGET, _STATE = "target/", "flax_mutables/"
_RUNS_OWN = "nm_sparsity"


@dataclasses.dataclass(frozen=True)
class Written:
  """What `pack` wrote.

  Attributes:
    source: the checkpoint that was read.
    path: of the file.
    bytes: of the file, its header included.
    report: bytes of each kernel, before and after, and what was not packed, with the reason.
  """

  source: Stored
  path: str
  bytes: int
  report: inference_tree.Report

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    report = self.report
    return {
      "from": self.source.path,
      "file": self.path,
      "bytes": self.bytes,
      "bytes_of_weights": report.total,
      "bytes_with_zeros": report.zeros,
      "packed": {
        path: {
          "pattern": report.patterns[path],
          "weights": report.weights[path],
          "bytes": found.total,
          "bytes_with_zeros": found.dense,
        }
        for path, found in report.sizes.items()
      },
      "dense": dict(report.dense),
      "lost_signs_of_zeros": dict(report.lost),
    }


def pack(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  dtype: str | None = None,
) -> Written:
  """Writes the weights of a checkpoint that are n:m without their zeros, and reads them back.

      print(nms.runs.pack("runs/final", "model.safetensors").report)

  Args:
    path: a checkpoint of any network that is n:m, a folder of Hugging Face's T5, or a file of
      timm's names.
    out: the file, F.safetensors, which must not be there.
    rules: as in `verify`.
    axes: as in `verify`.
    dtype: of packed values: 'float32', 'bfloat16', 'float16' or 'int8', which rounds with one scale
      for each column. None: as stored. What is not packed keeps its dtype.

  Raises:
    ValueError: a kernel is not n:m, nothing is to be packed, or the file cannot be written.
  """
  file = os.fspath(out)
  if not file.endswith(safetensors_file.SUFFIX):
    raise ValueError(f"{file!r}: name a file that ends in {safetensors_file.SUFFIX}.")
  safetensors_file.refuse_existing(file)
  stored = checkpoint.opened(path)
  if stored.packed is not None:
    raise ValueError(
      f"{stored.path!r} is a packed file already: pack the checkpoint that it was made of."
    )
  given_rules = checkpoint_rules.rules_for(stored, rules, axes)
  variables = _variables(stored)
  shapes = {key: x.shape for key, x in flatten(variables["params"])}
  config = _config(shapes, stored.path)
  made = _rules_apart(given_rules, shapes, config)
  params, _ = unstack_layers.unstacked(variables["params"], config)
  report = packed_file.write(file, {**variables, "params": params}, made, dtype)
  opened = packed_file.Opened(file)
  for name in opened.kernels:  # the reader checks every entry
    opened.packed(name)
  return Written(stored, file, os.path.getsize(file), report)


def _variables(stored: Stored) -> dict[str, Any]:
  """Returns what is deployed: the parameters, and the state of the network."""
  found = {}
  for key in stored.leaves:
    if key.startswith(_TARGET):
      found[f"params/{key.removeprefix(_TARGET)}"] = stored.array(stored.deployed(key))
    elif key.startswith(_STATE) and not key.startswith(f"{_STATE}{_RUNS_OWN}/"):
      found[key.removeprefix(_STATE)] = stored.array(stored.deployed(key))
  tree = nested(found)
  if "params" not in tree:
    raise ValueError(f"{stored.path} has no parameters: no arrays under 'target'")
  return tree


def _config(shapes: Mapping[str, tuple[int, ...]], path: str) -> Any:
  """Returns the config of a network that scans, as far as `unscanned` asks; None without a scan."""
  if huggingface.is_t5(shapes) and any(key.startswith("encoder/encoder/") for key in shapes):
    return huggingface.config_of(shapes, path)
  if any(key.startswith("blocks/") for key in shapes):
    return ViTConfig(scan=True)
  return None


def _rules_apart(rules: Rules, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Rules:
  """Returns the rules of a network without a scan that mean the same; without a scan, the same.

  A regex of the rules may name a stack alone. Then the regex of its layers stands in its place.
  """
  apart = unstack_layers.shapes_apart
  single = {path: list(apart(path, shape, config)) for path, shape in shapes.items()}
  stacked = {key: layers for key, layers in single.items() if layers != [key]}
  if not stacked:
    return rules
  found = {path: hit for path in shapes if (hit := rules.match(path))}
  table = dict(rules.places)
  for path, (key, recipe) in found.items():
    layers = stacked.get(path, [path])
    if any((rules.match(layer) or ("",))[0] != key for layer in layers):
      table[re.sub(r"_0/", r"_\\d+/", re.escape(layers[0]), count=1)] = recipe
      table.pop(key, None)
  for path, (key, recipe) in found.items():  # named by a regex that is gone now
    if path not in stacked and key not in table:
      table[re.escape(path)] = recipe
  # A kernel of a layer has two axes and contracts the first one, whatever was told of the stack.
  axes = {re.escape(path): _axis(rules, path) for path in found if path not in stacked}
  told = {regex: axis for regex, axis in axes.items() if axis is not None}
  return Rules(table, told, rules.indivisible, rules.roles)


def _axis(rules: Rules, path: str) -> Any:
  """Returns what `axes` of the rules say of a path, None where they do not."""
  return next((axis for regex, axis in rules.axes.items() if re.fullmatch(regex, path)), None)
