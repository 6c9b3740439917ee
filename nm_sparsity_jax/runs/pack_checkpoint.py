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

import jax

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import inference_tree, packed_file, safetensors_file
from nm_sparsity_jax.deploy.unstack_layers import apart, apart_all, scan_axis
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training.rules import Rules


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
      "packed": {path: dataclasses.asdict(kernel) for path, kernel in report.packed.items()},
      "dense": dict(report.dense),
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
  stacked_rules = checkpoint_rules.rules_for(stored, rules, axes)
  variables = _variables(stored)
  shapes = {key: x.shape for key, x in flatten(variables["params"])}
  axis = scan_axis(shapes)
  params = nested(apart_all(dict(flatten(variables["params"])), axis))
  layer_rules = _unstacked_rules(stacked_rules, shapes, axis)
  report = packed_file.write(file, {**variables, "params": params}, layer_rules, dtype)
  packed_file.read(file)  # the reader checks every entry
  return Written(stored, file, os.path.getsize(file), report)


def _variables(stored: Stored) -> dict[str, Any]:
  """Returns what is deployed: the parameters, and the state of the network."""
  found = {}
  for key in stored.leaves:
    collection, _, path = key.removeprefix("flax_mutables/").partition("/")
    if collection == "target" or key.startswith("flax_mutables/") and collection != "nm_sparsity":
      name = "params" if collection == "target" else collection
      found[f"{name}/{path}"] = stored.array(stored.deployed(key))
  return nested(found)


def _unstacked_rules(rules: Rules, shapes: Mapping[str, tuple[int, ...]], axis: int) -> Rules:
  """Returns the rules of a network without a scan that mean the same.

  They are the same ones, but where a regex names a stack alone: then they name what they found. A
  kernel of a layer has two axes and contracts the first one, whatever the axis of its stack is.
  """
  shaped = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
  layers = {path: list(apart(path, x, axis)) for path, x in shaped.items()}
  matches = {path: hit for path in shapes if (hit := rules.match(path))}
  axes = rules.axes
  if any(layers[path] != [path] for path in matches):
    assigned = rules.assign(nested(shaped)).places
    alone = {path: place for path, place in assigned.items() if layers[path] == [path]}
    axes = {re.escape(path): place.axis for path, place in alone.items()}
  if all(rules.match(layer) == at for path, at in matches.items() for layer in layers[path]):
    return Rules(rules.places, axes, rules.indivisible, rules.roles)
  number = lambda layer: re.sub(r"_0/", r"_\\d+/", re.escape(layer), count=1)
  table = {
    re.escape(path) if layers[path] == [path] else number(layers[path][0]): rules.places[place]
    for path, place in matches.items()
  }
  return Rules(table, axes, rules.indivisible, rules.roles)
