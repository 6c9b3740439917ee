"""A checkpoint in the names of other libraries, and the proof that its tensors there are n:m.

images -> [export] -> F.safetensors of timm's names -> read back -> Report: groups along axis 1
T5     ->          -> a folder of Hugging Face's T5 ->                      of their tensors
                      a folder of Hugging Face's T5 -> [convert] -> OUT/checkpoint_0, for T5X
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import apply
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.runs import checkpoint, foreign, given, proof
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.weights import (
  huggingface,
  huggingface_config,
  huggingface_folder,
  huggingface_names,
  safetensors_file,
  timm,
)

_COLLECTIONS = ("batch_stats",)  # beside the parameters


@dataclasses.dataclass(frozen=True)
class Exported:
  """What `export` wrote.

  Attributes:
    source: the checkpoint that was read.
    path: of the file or folder.
    tensors: how many it holds.
    report: what was found in it, in the other library's layout; None for a dense checkpoint.
    config: config.json of a folder; None for a file.
  """

  source: Stored
  path: str
  tensors: int
  report: apply.Report | None
  config: Mapping[str, Any] | None = None

  @property
  def ok(self) -> bool:
    """Returns whether the file is n:m; a dense one has nothing to prove."""
    return self.report is None or self.report.ok

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    places = self.report.places if self.report else ()
    return {
      "from": self.source.path,
      "file": self.path,
      "tensors": self.tensors,
      "ok": self.ok,
      "places": [dataclasses.asdict(place) for place in places],
    }


def export(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: given.Given = None,
  axes: Mapping[str, Any] | None = None,
  feed_forward: str | None = None,
) -> Exported:
  """Writes the weights of a checkpoint in the names of another library, and proves them there.

      nms.runs.export("runs/final", "model.safetensors")  # images: timm's
      nms.runs.export("runs/final", "model")  # a T5: a folder of Hugging Face's

  What was written is read back. Each sparse tensor must be n:m along axis 1, where what is
  contracted stands there.

  Args:
    path: a checkpoint of a ViT, Swin V2, ResNet or T5 of this package, or of T5X's T5; n:m, if
      it is sparse.
    out: the file, F.safetensors, or the folder, which must not be there.
    rules: as in `verify`, for a checkpoint that holds none and is sparse.
    axes: as in `verify`.
    feed_forward: of a T5, `feed_forward_proj` of config.json, which weights do not tell; None =
      'gated-gelu' where the MLP has two input projections, else 'relu'.

  Raises:
    ValueError: it is of another network, or sparse and not n:m; or the file cannot be.
  """
  file = os.fspath(out)
  safetensors_file.refuse_existing(file)
  stored = checkpoint.opened(path)
  params = [key.removeprefix("target/") for key in stored.leaves if key.startswith("target/")]
  is_t5 = huggingface_names.is_t5(params)
  if file.endswith(safetensors_file.SUFFIX) == is_t5:
    what = "a folder for a T5: config.json lies beside its tensors"
    end = f"a file that ends in {safetensors_file.SUFFIX}"
    raise ValueError(f"{file!r}: name {what if is_t5 else end}.")
  if stored.format == foreign.HUGGING_FACE:
    raise ValueError(f"{stored.path!r} is a folder of Hugging Face's T5 already.")
  found = None
  if stored.known_rules is not None or rules is not None:
    found = proof.verify(stored, rules, axes)
    if not found.ok:
      raise ValueError(f"{stored.path} is not n:m: export what `nm-sparsity finalize` writes.")
  if is_t5:
    return _to_folder(stored, file, found, feed_forward)
  return _to_file(stored, file, found)


def convert(path: str | os.PathLike, out: str | os.PathLike, scan_layers: bool = False) -> str:
  """Writes a folder of Hugging Face's T5 as a dense checkpoint that T5X restores.

      nms.runs.convert("t5-small", "start")  # 'start/checkpoint_0'

  All arrays are float32, as T5X's parameters are.

  Args:
    path: of the folder.
    out: a folder, which gets checkpoint_0; that must be new.
    scan_layers: stack the layers along axis 1, for a network with scan_layers=True.

  Returns:
    The path of the checkpoint.

  Raises:
    ValueError: the folder is refused by `weights.huggingface.read`, or the output is there already.
  """
  config = huggingface_folder.Folder(path).config
  config = dataclasses.replace(config, scan_layers=scan_layers)
  held = huggingface.hold(path, config)
  made = os.path.join(out, "checkpoint_0")
  arrays = {f"target/{key}": held.array(key).astype(np.float32, copy=False) for key in held.leaves}
  checkpoint.write(made, arrays | {"state/step": np.asarray(np.int32(0))})
  return made


def _to_folder(
  stored: Stored, out: str, found: proof.Proof | None, feed_forward: str | None
) -> Exported:
  """Writes a folder of Hugging Face's T5, one array in memory at a time, and reads it back."""
  key_of = lambda path: stored.deployed(f"target/{path}")
  shapes = {
    key.removeprefix("target/"): leaf.shape or ()
    for key, leaf in stored.leaves.items()
    if key.startswith("target/")
  }
  activations = None
  if feed_forward is not None:
    activations = huggingface_config.activations_of(feed_forward, "--feed-forward")
  config = huggingface_names.config_of(shapes, stored.path, activations)
  table = huggingface_names.sources(config)
  for place in found.report.places if found else ():
    if not table[place.path].turned:
      raise ValueError(f"{place.path!r} is no kernel: its groups lie along no axis there.")
  dtypes = {path: stored.leaves[key_of(path)].dtype or "float32" for path in shapes}
  huggingface.write_each(out, config, dtypes, lambda path: stored.array(key_of(path)))
  folder = huggingface_folder.Folder(out)
  report = None if found is None else report_of_folder(folder.array, found, table)
  return Exported(stored, out, len(folder.dtypes), report, folder.json)


def report_of_folder(
  array: Callable[[str], np.ndarray],
  found: proof.Proof,
  table: Mapping[str, huggingface_names.Source],
) -> apply.Report:
  """Proves the groups of each place on Hugging Face's tensors, where they lie along axis 1.

  Args:
    array: their name -> tensor.
    found: of the checkpoint.
    table: of its network.
  """
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    for name in table[place.path].names:
      places += _proven(name, array(name), recipe, found.rules)
  return apply.Report(tuple(places), found.report.skipped)


def _proven(name: str, array: np.ndarray, recipe: Any, rules: Rules) -> tuple[Any, ...]:
  """Returns what is found of one tensor whose groups lie along axis 1."""
  regex = re.escape(name)
  alone = Rules({f"(?:{regex})": recipe}, {regex: 1}, rules.indivisible)
  return apply.verify({name: array}, alone).places


def _to_file(stored: Stored, out: str, found: proof.Proof | None) -> Exported:
  """Writes a file of timm's names, one array in memory at a time, and reads it back."""
  names = keys(stored)
  leaves = {}
  for name, key in names.items():
    shape, dtype = stored.leaves[key].shape, stored.leaves[key].dtype
    if shape is None or dtype is None:
      raise ValueError(f"{stored.path!r} is not of a network of images: {key} has no shape.")
    leaves[name] = shape, dtype
  timm.write_each(out, leaves, lambda name: stored.array(names[name]))
  opened = safetensors_file.Opened(out)
  table = timm.sources(timm.keys_of(opened.shapes, repr(opened.path)))
  report = None if found is None else report_of_file(opened.array, found, table)
  return Exported(stored, out, len(opened.shapes), report)


def keys(stored: Stored) -> dict[str, str]:
  """Returns our key -> that of the checkpoint, of parameters and averages of batch statistics.

  Args:
    stored: the checkpoint.
  """
  found: dict[str, str] = {}
  for key in stored.leaves:
    for above, collection in (
      ("target", "params"), *((f"flax_mutables/{name}", name) for name in _COLLECTIONS)
    ):  # fmt: skip
      if key.startswith(f"{above}/"):
        found[collection + key.removeprefix(above)] = stored.deployed(key)
  return found


def report_of_file(
  array: Callable[[str], np.ndarray], found: proof.Proof, table: Mapping[str, timm.Source]
) -> apply.Report:
  """Proves the groups of each place on timm's tensors, where they lie along axis 1.

  Args:
    array: timm's name -> tensor.
    found: of the checkpoint.
    table: of its network.
  """
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    single = re.escape(f"params/{place.path}").replace("params/blocks/", r"params/blocks_\d+/")
    for key, source in table.items():
      if not re.fullmatch(single, key):
        continue
      name = source.name + (f"[{source.part} of {source.parts}]" if source.parts > 1 else "")
      places += _proven(name, source.rows(array(source.name)), recipe, found.rules)
  return apply.Report(tuple(places), found.report.skipped)
