"""A checkpoint in the names of other libraries, and the proof that its tensors there are n:m.

images -> [export] -> F.safetensors of timm's names -> read back -> Report: groups along axis 1
T5     ->          -> a folder of Hugging Face's T5 ->                      of their tensors
                      a folder of Hugging Face's T5 -> [convert] -> OUT/checkpoint_0, for T5X
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.deploy import huggingface, safetensors_file, timm
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
  is_t5 = huggingface.is_t5(params)
  if file.endswith(safetensors_file.SUFFIX) == is_t5:
    what = "a folder for a T5: config.json lies beside its tensors"
    end = f"a file that ends in {safetensors_file.SUFFIX}"
    raise ValueError(f"{file!r}: name {what if is_t5 else end}.")
  if stored.format == other_formats.HUGGING_FACE:
    raise ValueError(f"{stored.path!r} is a folder of Hugging Face's T5 already.")
  found = None
  if stored.known_rules is not None or rules is not None:
    found = verify_checkpoint.verify(stored, rules, axes)
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


def _to_folder(
  stored: Stored, out: str, found: verify_checkpoint.Proof | None, feed_forward: str | None
) -> Exported:
  """Writes a folder of Hugging Face's T5, and reads it back."""
  arrays = {key.removeprefix("params/"): x for key, x in _arrays(stored).items()}
  activations = None
  if feed_forward is not None:
    activations = huggingface.activations_of(feed_forward, "--feed-forward")
  shapes = {key: x.shape for key, x in arrays.items()}
  config = huggingface.config_of(shapes, stored.path, activations)
  table = huggingface.sources(config)
  for place in found.report.places if found else ():
    if not table[place.path].turned:
      raise ValueError(f"{place.path!r} is no kernel: its groups lie along no axis there.")
  tensors = huggingface.to_tensors(arrays, config)
  dtype = str(arrays["token_embedder/embedding"].dtype)
  huggingface.write_folder(out, tensors, huggingface.to_json(config, dtype))
  folder = huggingface.Folder(out)
  rows = lambda path: ((name, np.asarray(folder.tensors[name])) for name in table[path].names)
  return _written(stored, out, found, tensors, folder.tensors, rows, folder.json)


def _to_file(stored: Stored, out: str, found: verify_checkpoint.Proof | None) -> Exported:
  """Writes a file of timm's names, and reads it back."""
  tensors = timm.to_tensors(_arrays(stored))
  safetensors_file.write(out, tensors)
  written = safetensors_file.Opened(out).tensors
  table = timm.sources(timm.keys_of(written))

  def rows(path: str) -> Iterator[tuple[str, np.ndarray]]:
    single = re.escape(f"params/{path}").replace("params/blocks/", r"params/blocks_\d+/")
    for key, source in table.items():
      if re.fullmatch(single, key):
        name = source.name + (f"[{source.part} of {source.parts}]" if source.parts > 1 else "")
        yield name, source.rows(np.asarray(written[source.name]))

  return _written(stored, out, found, tensors, written, rows)


def _written(
  stored: Stored,
  out: str,
  found: verify_checkpoint.Proof | None,
  tensors: Mapping[str, np.ndarray],
  written: Mapping[str, Any],
  rows: Callable[[str], Iterable[tuple[str, np.ndarray]]],
  config: Mapping[str, Any] | None = None,
) -> Exported:
  """Compares what was read back, and proves the groups of each place, which lie along axis 1.

  Args:
    stored: the checkpoint.
    out: the file or folder.
    found: the proof of the checkpoint.
    tensors: what was written.
    written: what was read.
    rows: path of a parameter -> the name and rows of each tensor that holds its groups.
    config: of the folder.
  """
  for name, x in tensors.items():
    if np.asarray(written[name]).tobytes() != x.tobytes():
      raise ValueError(f"{out!r}: {name!r} is not what was written.")
  if found is None:
    return Exported(stored, out, len(tensors), None, config)
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    for name, array in rows(place.path):
      regex = re.escape(name)
      alone = Rules({f"(?:{regex})": recipe}, {regex: 1}, found.rules.indivisible)
      places += apply.verify({name: array}, alone).places
  report = apply.Report(tuple(places), found.report.skipped)
  return Exported(stored, out, len(tensors), report, config)
