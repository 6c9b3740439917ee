"""Proof that a checkpoint's weights are n:m, and a checkpoint with exact zeros.

    path, rules -> [verify]   -> Proof: groups by place, ok
    path, out   -> [finalize] -> out/checkpoint_N with zeros, its Proof, what was removed

A checkpoint of a sparse run holds its rules; say those of any other one. `verify`
reads one array at a time, `finalize` holds the parameters. T5X is not needed.

>>> import tempfile, numpy as np
>>> from nm_sparsity_jax.runs import checkpoint
>>> run = tempfile.mkdtemp()
>>> w = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
>>> checkpoint.write(f"{run}/checkpoint_7", {"target/encoder/layers_0/mlp/wi/kernel": w})
>>> verify(run, {"ff": "2:4"}).ok
False
>>> made = finalize(run, f"{run}/final", {"ff": "2:4"})
>>> made.ok, [f"{r.path} lost {r.magnitude:.0%}" for r in made.removed]
(True, ['encoder/layers_0/mlp/wi/kernel lost 28%'])
>>> verify(f"{run}/final", {"ff": "2:4"}).ok
True
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, network_settings, other_formats
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training import apply, rules_text
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site


@dataclasses.dataclass(frozen=True)
class Proof:
  """What `verify` found in a checkpoint.

  Attributes:
    stored: the checkpoint.
    rules: the rules by which it was looked at.
    report: the findings, place by place.
  """

  stored: Stored
  rules: Rules
  report: apply.Report

  @property
  def ok(self) -> bool:
    """Returns whether no group has too many non-zero weights."""
    return self.report.ok

  def __str__(self) -> str:
    return str(self.report)

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    stored = self.stored
    return {
      "ok": self.ok,
      "checkpoint": stored.path,
      "format": stored.format,
      "step": stored.step,
      "sparse_step": stored.sparse_step,
      "rules": stored.rules if stored.rules is not None else rules_text.describe(self.rules),
      "places": [dataclasses.asdict(place) for place in self.report.places],
      "skipped": dict(self.report.skipped),
    }


@dataclasses.dataclass(frozen=True)
class Removed:
  """What one parameter lost.

  Attributes:
    path: the parameter.
    weights: share of weights that were not 0 and are now.
    magnitude: their share of the sum of |w|.
    squares: their share of the sum of w ** 2.
  """

  path: str
  weights: float
  magnitude: float
  squares: float


@dataclasses.dataclass(frozen=True)
class Finalized:
  """What `finalize` wrote.

  Attributes:
    source: the checkpoint that was read.
    proof: the proof of the checkpoint that was written, read back from the disk.
    removed: what each sparse parameter lost.
  """

  source: Stored
  proof: Proof
  removed: tuple[Removed, ...]

  @property
  def ok(self) -> bool:
    """Returns whether the written checkpoint is n:m."""
    return self.proof.ok

  @property
  def path(self) -> str:
    """Returns the folder of the written checkpoint."""
    return self.proof.stored.path

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    found = self.proof.as_dict()
    lost = {r.path: dataclasses.asdict(r) for r in self.removed}
    found["places"] = [place | lost[place["path"]] for place in found["places"]]
    average = {"average": True} if self.source.average else {}
    return {"from": self.source.path, **average, **found}


def verify(
  path: str | os.PathLike | Stored,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
) -> Proof:
  """Proves, group by group, that a checkpoint's weights are n:m along the contracted axis.

      print(nms.runs.verify("runs/sparse/checkpoint_1000"))

  A local run and one of Kauldron store the effective weights, which are n:m when the schedule is
  over. T5X stores dense weights, on which masks act, and so is the moving average of a run that
  keeps one, which is what is looked at then: `finalize` writes the zeros.

  Args:
    path: a checkpoint of a local run, of Kauldron or of T5X; a run's folder means its newest one.
    rules: `Rules`, or place -> pattern such as {'ff': '1:8'}; None takes the checkpoint's own.
    axes: path -> contracted axis, for kernels that a scan over layers has stacked.

  Raises:
    ValueError: there are no rules, other rules than the checkpoint's, or it cannot be read.
  """
  stored = checkpoint.opened(path)
  return _prove(stored, checkpoint_rules.rules_for(stored, rules, axes))


def finalize(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  early: bool = False,
) -> Finalized:
  """Writes a checkpoint with the exact zeros of `nms.finalize`, reads it back and proves it.

      made = nms.runs.finalize("runs/sparse", "runs/final")

  The new checkpoint holds parameters, step and sparse state, but no optimizer. It opens in T5X,
  with the sparse model or T5X's own. Where the run kept a moving average of its parameters, that
  is what is finalized.

  Args:
    path: as in `verify`.
    out: a folder, which gets checkpoint_<step>; that must be new. Of a folder of Hugging Face's T5
      it is the new folder itself.
    rules: as in `verify`.
    axes: as in `verify`.
    early: finalize though the schedule is not over and removed weights may still matter.

  Raises:
    ValueError: the schedule is not over, the output is there already, or what `verify` refuses.
  """
  stored = checkpoint.opened(path)
  if stored.packed is not None:
    raise ValueError(
      f"{stored.path!r} is a packed file, and finalized already: use it as it is, or `export` it."
    )
  rules = checkpoint_rules.rules_for(stored, rules, axes)
  assignment = checkpoint_rules.assign(stored, rules)
  if not early and stored.sparse_step is not None:
    if ahead := assignment.unfinished(stored.sparse_step):
      raise ValueError(
        f"{stored.path} is at sparse step {ahead}. Take a later checkpoint, or add early=True"
      )
  is_folder = stored.format == other_formats.HUGGING_FACE
  made = os.fspath(out) if is_folder else os.path.join(out, f"checkpoint_{stored.step or 0}")
  checkpoint.check_new(made)
  arrays = _kept(stored)
  removed = tuple(_make_zeros(arrays, assignment.places, rules, stored))
  if is_folder:
    other_formats.write_like(stored.path, made, arrays)
  else:
    settings = network_settings.read(stored.path)
    checkpoint.write(made, arrays, settings, checkpoint_rules.to_note(stored, rules))
  return Finalized(stored, _prove(checkpoint.read(made), rules), removed)


def _make_zeros(
  arrays: dict[str, np.ndarray], places: Mapping[str, Site], rules: Rules, stored: Stored
):
  """Replaces each sparse parameter by the finalized one, and yields what it lost."""
  params = nested({path: arrays[f"target/{path}"] for path in places})
  alone = checkpoint_rules.rules_of_places(places, rules.indivisible)
  step, masks = stored.sparse_step or 0, stored.masks() or None
  for path, w in flatten(apply.finalize(params, alone, step, masks, early=True)):
    before = arrays[f"target/{path}"]
    arrays[f"target/{path}"] = np.asarray(w)
    yield _removed(path, before, arrays[f"target/{path}"])


def _prove(stored: Stored, rules: Rules) -> Proof:
  assignment = checkpoint_rules.assign(stored, rules)
  if stored.packed is not None:
    stored.packed()  # its reader checks every entry, also of kernels that no rule names
  found = []
  for path, place in assignment.places.items():
    array = stored.array(stored.deployed(f"target/{path}"))
    alone = checkpoint_rules.rules_of_places({path: place}, rules.indivisible)
    found += apply.verify(nested({path: array}), alone).places
    del array  # or it would stay while the next one is read
  return Proof(stored, rules, apply.Report(tuple(found), assignment.skipped))


def _kept(stored: Stored) -> dict[str, np.ndarray]:
  """Returns what a finalized checkpoint holds, by key, before it has zeros.

  It has no optimizer: W, and moments of weights that are gone.
  """
  arrays = {"state/step": np.asarray(np.int32(0))}  # T5X wants one
  if stored.sparse_step is not None:  # as its sparse model wants to know where the run began
    start = np.int32((stored.step or 0) - stored.sparse_step)
    arrays["flax_mutables/nm_sparsity/start"] = np.asarray(start)
  for key in stored.leaves:
    if key.startswith(("target/", "flax_mutables/")) or key == "state/step":
      arrays[key] = stored.array(stored.deployed(key))
  return arrays


def _removed(path: str, before: np.ndarray, after: np.ndarray) -> Removed:
  with np.errstate(all="ignore"):  # inf and NaN: `verify` warns of them
    was = np.abs(before.astype(np.float64))
    lost = np.where(after == 0, was, 0.0)
    share = lambda part, whole: float(part / whole) if whole else 0.0
    return Removed(
      path,
      share((lost != 0).sum(), was.size),
      share(lost.sum(), was.sum()),
      share((lost**2).sum(), (was**2).sum()),
    )
