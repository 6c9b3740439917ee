"""A checkpoint in timm's names, and the proof that its tensors there are n:m.

path -> [export] -> F.safetensors -> read back -> Report: groups along axis 1 of timm's tensors
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import apply
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.runs import checkpoint, proof
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.trees import nested
from nm_sparsity_jax.weights import safetensors_file, timm

_COLLECTIONS = ("batch_stats",)  # beside the parameters


@dataclasses.dataclass(frozen=True)
class Exported:
  """What `export` wrote.

  Attributes:
    source: the checkpoint that was read.
    path: of the file.
    tensors: how many it holds.
    report: what was found in the file, in timm's layout; None for a dense checkpoint.
  """

  source: Stored
  path: str
  tensors: int
  report: apply.Report | None

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
  rules: proof.Given = None,
  axes: Mapping[str, Any] | None = None,
) -> Exported:
  """Writes the weights of a checkpoint as a safetensors file of timm's names, and proves it.

      nms.runs.export("runs/final", "model.safetensors")

  The file is read back. Each tensor must have the bits that were written, and each sparse one must
  be n:m along axis 1, where the contracted channels stand there.

  Args:
    path: a checkpoint of a ViT, Swin V2 or ResNet of this package; finalized, if it is sparse.
    out: the file, F.safetensors, which must not be there.
    rules: as in `verify`, for a checkpoint that holds none and is sparse.
    axes: as in `verify`.

  Raises:
    ValueError: it is of another network, or sparse and not finalized; or the file cannot be.
  """
  file = os.fspath(out)
  if not file.endswith(safetensors_file.SUFFIX):
    raise ValueError(f"{file!r}: name a file that ends in {safetensors_file.SUFFIX}.")
  safetensors_file.refuse_existing(file)
  stored = checkpoint.opened(path)
  found = None
  if stored.rules is not None or rules is not None:
    found = proof.verify(stored, rules, axes)
    if not found.ok:
      raise ValueError(
        f"{stored.path} is not {'n:m' if not found.changed else 'what was written'}: export what "
        "`nm-sparsity finalize` writes."
      )
  tensors = timm.to_timm(_variables(stored))
  safetensors_file.write(file, tensors)
  opened = safetensors_file.Opened(file)
  for name, x in tensors.items():
    if (back := opened.array(name)).dtype != x.dtype or back.tobytes() != x.tobytes():
      raise ValueError(f"{file!r}: {name!r} is not what was written.")
  report = None if found is None else _report(opened, found)
  return Exported(stored, file, len(tensors), report)


def _variables(stored: Stored) -> dict[str, Any]:
  """Returns what is deployed of a checkpoint: parameters and averages of batch statistics."""
  arrays: dict[str, np.ndarray] = {}
  for key in stored.leaves:
    for above, collection in (
      ("target", "params"), *((f"flax_mutables/{name}", name) for name in _COLLECTIONS)
    ):  # fmt: skip
      if key.startswith(f"{above}/"):
        arrays[collection + key.removeprefix(above)] = stored.array(stored.deployed(key))
  return nested(arrays)


def _report(opened: safetensors_file.Opened, found: proof.Proof) -> apply.Report:
  """Proves the groups of each place on timm's tensors, where they lie along axis 1."""
  table = timm.sources(timm.keys_of(opened.shapes, repr(opened.path)))
  places = []
  for place in found.report.places:
    recipe: Any = found.rules.find(place.path)
    single = re.escape(f"params/{place.path}").replace("params/blocks/", r"params/blocks_\d+/")
    for key, source in table.items():
      if not re.fullmatch(single, key):
        continue
      name = source.name + (f"[{source.part} of {source.parts}]" if source.parts > 1 else "")
      regex = re.escape(name)
      rules = Rules({f"(?:{regex})": recipe}, {regex: 1}, found.rules.indivisible)
      rows = source.rows(opened.array(source.name))
      places += apply.verify({name: rows}, rules).places
  return apply.Report(tuple(places), found.report.skipped)
