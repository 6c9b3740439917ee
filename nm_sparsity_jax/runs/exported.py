"""A checkpoint in the names of other libraries, and the proof that its tensors there are n:m.

images -> [export] -> F.safetensors of timm's names -> read back -> Report: groups along axis 1
T5     ->          -> a folder of Hugging Face's T5 ->                      of their tensors
                      a folder of Hugging Face's T5 -> [convert] -> OUT/checkpoint_0, for T5X
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import apply
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.runs import checkpoint, foreign, given, proof, writing
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.weights import huggingface, safetensors_file, timm
from nm_sparsity_jax.weights.safetensors_file import Lazy

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

  What was written is read back. Each tensor must have the bits that were written, and each sparse
  one must be n:m along axis 1, where what is contracted stands there.

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
  is_t5 = huggingface.is_t5(params)
  if file.endswith(safetensors_file.SUFFIX) == is_t5:
    what = "a folder for a T5: config.json lies beside its tensors"
    end = f"a file that ends in {safetensors_file.SUFFIX}"
    raise ValueError(f"{file!r}: name {what if is_t5 else end}.")
  if stored.format == foreign.HUGGING_FACE:
    raise ValueError(f"{stored.path!r} is a folder of Hugging Face's T5 already.")
  found = None
  if stored.told_rules is not None or rules is not None:
    found = proof.verify(stored, rules, axes)
    if not found.ok:
      raise ValueError(
        f"{stored.path} is not {'n:m' if not found.changed else 'what was written'}: export what "
        "`nm-sparsity finalize` writes."
      )
  if is_t5:
    return _to_folder(stored, file, found, feed_forward)
  return _to_file(stored, file, found)


def convert(path: str | os.PathLike, out: str | os.PathLike, scan_layers: bool = False) -> str:
  """Writes a folder of Hugging Face's T5 as a dense checkpoint that T5X restores.

      nms.runs.convert("t5-small", "start")  # 'start/checkpoint_0'

  One array of the folder is in memory at a time. All are float32, as T5X's parameters are.

  Args:
    path: of the folder.
    out: a folder, which gets checkpoint_0; that must be new.
    scan_layers: stack the layers along axis 1, for a network with scan_layers=True.

  Returns:
    The path of the checkpoint.

  Raises:
    ValueError: the folder is refused by `weights.huggingface.read`, or the output is there already.
  """
  folder = huggingface.Folder(path)
  config = dataclasses.replace(folder.config, scan_layers=scan_layers)
  made = os.path.join(out, "checkpoint_0")
  arrays: dict[str, writing.Makes | writing.Layers] = {
    "state/step": lambda: np.asarray(np.int32(0))
  }
  for key, source in huggingface.sources(config).items():
    layers = lambda source=source: map(_float32, source.layers(folder.tensors))
    if source.axis is None or len(source.ours) < 3:
      take = lambda source=source: _float32(source.take(folder.tensors))
      arrays[f"target/{key}"] = take
    else:
      arrays[f"target/{key}"] = writing.Layers(source.ours, "float32", source.axis, layers)
  writing.write(made, arrays)
  return made


def _float32(array: np.ndarray) -> np.ndarray:
  return array.astype(np.float32, copy=False)


def _to_folder(
  stored: Stored, out: str, found: proof.Proof | None, feed_forward: str | None
) -> Exported:
  """Writes a folder of Hugging Face's T5, one array in memory at a time, and reads it back."""
  keys = {
    key.removeprefix("target/"): stored.deployed(key)
    for key in stored.leaves
    if key.startswith("target/")
  }
  activations = None
  if feed_forward is not None:
    activations = huggingface.activations_of(feed_forward, "--feed-forward")
  arrays = _lazy(stored, keys, 1)
  shapes = {path: x.shape for path, x in arrays.items()}
  config = huggingface.config_of(shapes, stored.path, activations)
  table = huggingface.sources(config)
  for place in found.report.places if found else ():
    if not table[place.path].turned:
      raise ValueError(f"{place.path!r} is no kernel: its groups lie along no axis there.")
  tensors, sums = _noted(huggingface.to_tensors(arrays, config))
  dtype = str(arrays["token_embedder/embedding"].dtype)
  huggingface.write_folder(out, tensors, huggingface.to_json(config, dtype))
  folder = huggingface.Folder(out)
  _check_sums(out, folder.tensors, sums)
  report = None if found is None else report_of_folder(folder.tensors, found, table)
  return Exported(stored, out, len(sums), report, folder.json)


def _lazy(stored: Stored, keys: Mapping[str, str], kept: int) -> dict[str, Lazy]:
  """Returns path -> array of a checkpoint; the last ones stay in memory.

  Tensors of other libraries are of one layer, or join arrays. So an array is asked for several
  times, one time after the other.
  """
  array = functools.lru_cache(kept)(stored.array)
  found = {}
  for path, key in keys.items():
    shape, dtype = stored.leaves[key].shape, stored.leaves[key].dtype
    if shape is None or dtype is None:
      raise ValueError(f"{stored.path!r} cannot be exported: {key} has no shape.")
    found[path] = Lazy(shape, np.dtype(dtype), lambda key=key: array(key))
  return found


def _noted(tensors: Mapping[str, Lazy]) -> tuple[dict[str, Lazy], dict[str, str]]:
  """Returns the tensors, and what gets the hash of each one that is made."""
  sums: dict[str, str] = {}

  def make(name: str) -> np.ndarray:
    array = np.asarray(tensors[name])
    sums[name] = writing.sha256(array)
    return array

  noted = {
    name: Lazy(x.shape, x.dtype, lambda name=name: make(name)) for name, x in tensors.items()
  }
  return noted, sums


def _check_sums(out: str, tensors: Mapping[str, Lazy], sums: Mapping[str, str]) -> None:
  for name, wanted in sums.items():
    if writing.sha256(np.asarray(tensors[name])) != wanted:
      raise ValueError(f"{out!r}: {name!r} is not what was written.")


def report_of_folder(
  tensors: Mapping[str, Lazy], found: proof.Proof, table: Mapping[str, huggingface.Source]
) -> apply.Report:
  """Proves the groups of each place on Hugging Face's tensors, where they lie along axis 1.

  Args:
    tensors: of the folder.
    found: of the checkpoint.
    table: of its network.
  """
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    for name in table[place.path].names:
      places += _proven(name, np.asarray(tensors[name]), recipe, found.rules)
  return apply.Report(tuple(places), found.report.skipped)


def _proven(name: str, array: np.ndarray, recipe: Any, rules: Rules) -> tuple[Any, ...]:
  """Returns what is found of one tensor whose groups lie along axis 1."""
  regex = re.escape(name)
  alone = Rules({f"(?:{regex})": recipe}, {regex: 1}, rules.indivisible)
  return apply.verify({name: array}, alone).places


def _to_file(stored: Stored, out: str, found: proof.Proof | None) -> Exported:
  """Writes a file of timm's names, one array in memory at a time, and reads it back."""
  # q, k and v are one tensor there.
  tensors, sums = _noted(timm.to_tensors(_lazy(stored, keys(stored), 3)))
  safetensors_file.write(out, tensors)
  written = safetensors_file.Opened(out).tensors
  _check_sums(out, written, sums)
  report = None if found is None else report_of_file(written, found)
  return Exported(stored, out, len(written), report)


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


def report_of_file(tensors: Mapping[str, Lazy], found: proof.Proof) -> apply.Report:
  """Proves the groups of each place on timm's tensors, where they lie along axis 1.

  Args:
    tensors: of the file.
    found: of the checkpoint.
  """
  table = timm.sources(timm.keys_of(tensors))
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    single = re.escape(f"params/{place.path}").replace("params/blocks/", r"params/blocks_\d+/")
    for key, source in table.items():
      if not re.fullmatch(single, key):
        continue
      name = source.name + (f"[{source.part} of {source.parts}]" if source.parts > 1 else "")
      places += _proven(name, source.rows(np.asarray(tensors[source.name])), recipe, found.rules)
  return apply.Report(tuple(places), found.report.skipped)
