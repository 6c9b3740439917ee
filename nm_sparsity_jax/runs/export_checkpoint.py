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

import jax
import numpy as np

from nm_sparsity_jax.deploy import huggingface, safetensors_file, timm
from nm_sparsity_jax.deploy.names import Name
from nm_sparsity_jax.deploy.unstack_layers import apart
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, other_formats, verify_checkpoint
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training import apply
from nm_sparsity_jax.training.rules import Rules


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
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  feed_forward: str | None = None,
) -> Exported:
  """Writes the weights of a checkpoint in the names of another library, and proves them there.

      nms.runs.export("runs/final", "model.safetensors")  # images: timm's
      nms.runs.export("runs/final", "model")  # a T5: a folder of Hugging Face's

  Each sparse tensor that was written must be n:m along axis 1, the contracted one there.

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
  is_t5 = huggingface.is_t5([key.removeprefix("target/") for key in stored.leaves])
  if file.endswith(safetensors_file.SUFFIX) == is_t5:
    what = "a folder for a T5: it has config.json as well"
    end = f"a file that ends in {safetensors_file.SUFFIX}"
    raise ValueError(f"{file!r}: name {what if is_t5 else end}.")
  if stored.format == other_formats.HUGGING_FACE:
    raise ValueError(f"{stored.path!r} is a folder of Hugging Face's T5 already.")
  proof = None
  if stored.known_rules is not None or rules is not None:
    proof = verify_checkpoint.verify(stored, rules, axes)
    if not proof.ok:
      raise ValueError(f"{stored.path} is not n:m: export what `nm-sparsity finalize` writes.")
  return (_export_t5 if is_t5 else _export_images)(stored, file, proof, feed_forward)


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
    ValueError: the folder is refused by `deploy.huggingface.read`, or the output is there already.
  """
  folder = huggingface.Folder(path)
  config = dataclasses.replace(folder.config, scan_layers=scan_layers)
  params = {key: np.asarray(x, np.float32) for key, x in folder.arrays(config).items()}
  made = os.path.join(out, "checkpoint_0")
  arrays = {f"target/{key}": x for key, x in params.items()}
  checkpoint.write(made, arrays | {"state/step": np.asarray(np.int32(0))})
  return made


def _arrays(stored: Stored) -> dict[str, np.ndarray]:
  """Returns what is deployed: 'params/head/kernel', 'batch_stats/bn1/mean' -> array."""
  names = {"target/": "params/", "flax_mutables/batch_stats/": "batch_stats/"}
  return {
    ours + key.removeprefix(theirs): stored.array(stored.deployed(key))
    for key in stored.leaves
    for theirs, ours in names.items()
    if key.startswith(theirs)
  }


def _export_t5(
  stored: Stored, out: str, proof: verify_checkpoint.Proof | None, feed_forward: str | None
) -> Exported:
  """Writes a folder of Hugging Face's T5, and proves it."""
  arrays = {key.removeprefix("params/"): x for key, x in _arrays(stored).items()}
  config = huggingface.config_of({key: x.shape for key, x in arrays.items()}, stored.path)
  if feed_forward:
    activations = huggingface.activations_of(feed_forward, "feed_forward")
    config = dataclasses.replace(config, mlp_activations=activations)
  dtype = str(arrays["token_embedder/embedding"].dtype)
  tensors = huggingface.to_huggingface(arrays, config)
  huggingface.write_folder(out, tensors, huggingface.to_json(config, dtype))
  written = huggingface.Folder(out)
  axis = config.param_scan_axis
  report = proof and _prove(proof, written.tensors, huggingface.name_of, axis)
  return Exported(stored, out, len(tensors), report, written.json)


def _export_images(
  stored: Stored, out: str, proof: verify_checkpoint.Proof | None, _: str | None
) -> Exported:
  """Writes a file of timm's names, and proves it."""
  tensors = timm.to_timm(_arrays(stored))
  safetensors_file.write(out, tensors)
  written = safetensors_file.Opened(out).tensors
  report = proof and _prove(proof, written, lambda key: timm.name_of(f"params/{key}"))
  return Exported(stored, out, len(tensors), report)


def _prove(
  proof: verify_checkpoint.Proof,
  tensors: Mapping[str, Any],
  name_of: Callable[[str], Name],
  axis: int = 1,
) -> apply.Report:
  """Counts the groups of what was written; those of kernels lie along axis 1.

  Args:
    proof: of the checkpoint: the same places are looked at.
    tensors: what was written, by name.
    name_of: the library's.
    axis: of layers that a scan stacked, in a T5.
  """
  places = []
  for place in proof.report.places:
    recipe: Any = proof.rules.find(place.path)
    shaped = jax.ShapeDtypeStruct(place.shape, np.float32)
    for there in map(name_of, apart(place.path, shaped, axis)):
      label = there.name if there.third is None else f"{there.name}[{there.third} of 3]"
      regex = f"(?:{re.escape(label)})"
      alone = Rules({regex: recipe}, {regex: 1}, proof.rules.indivisible)
      places += apply.verify({label: there.rows(np.asarray(tensors[there.name]))}, alone).places
  return apply.Report(tuple(places), proof.report.skipped)
