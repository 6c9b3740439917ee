"""Proof that a checkpoint's weights are n:m, and a checkpoint with exact zeros.

    path, rules -> [verify]   -> Proof: groups by place, ok
    path, out   -> [finalize] -> out/checkpoint_N with zeros, its Proof, what was removed

>>> import tempfile, numpy as np
>>> from nm_sparsity_jax.runs import checkpoint
>>> run = tempfile.mkdtemp()
>>> w = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
>>> checkpoint.write(f"{run}/checkpoint_7", {"target/encoder/layers_0/mlp/wi/kernel": w})
>>> verify(run, {"ff": "2:4"}).ok
False
>>> made = finalize(run, f"{run}/final", {"ff": "2:4"})
>>> made.ok, made.removed
(True, {'encoder/layers_0/mlp/wi/kernel': 0.2777777777777778})
>>> verify(f"{run}/final").ok
True
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import refuse_existing
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training import apply, rules_text
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass(frozen=True)
class Proof:
  """What was found in a checkpoint.

  Attributes:
    stored: the checkpoint; of `finalize` and `export` the one that was written, read back.
    rules: the rules by which it was looked at.
    report: the findings, place by place.
    removed: of `finalize`: sparse parameter -> the share that it lost of its sum of |w|.
  """

  stored: Stored
  rules: Rules
  report: apply.Report
  removed: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def ok(self) -> bool:
    """Returns whether no group has too many non-zero weights."""
    return self.report.ok

  def __str__(self) -> str:
    shares = sorted(self.removed.values())
    removed = f"removed {shares[0]:.2%} to {shares[-1]:.2%} of the sum of |w|\n" if shares else ""
    return f"{removed}{self.report}"

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    stored = self.stored
    return {
      "ok": self.ok,
      "checkpoint": stored.path,
      "format": stored.format,
      "step": stored.step,
      "sparse_step": stored.sparse_step,
      "rules": rules_text.describe(self.rules),
      "sites": [dataclasses.asdict(site) for site in self.report.sites],
      "skipped": dict(self.report.skipped),
      "removed": dict(self.removed),
    }


def verify(
  path: str | os.PathLike,
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
  stored = checkpoint.read(path)
  rules = checkpoint_rules.rules_for(stored, rules, axes)
  # One array is in memory at a time: they are read where they are counted.
  return Proof(stored, rules, apply.verify(checkpoint_rules.parameters(stored), rules))


def finalize(
  path: str | os.PathLike,
  out: str | os.PathLike,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  early: bool = False,
) -> Proof:
  """Writes a checkpoint with the exact zeros of `nms.finalize`, reads it back and proves it.

      made = nms.runs.finalize("runs/sparse", "runs/final")

  The new checkpoint holds parameters, step and sparse state, but no optimizer. It opens in T5X,
  with the sparse model or T5X's own. Where the run kept a moving average of its parameters, that
  is what is finalized.

  Args:
    path: as in `verify`.
    out: a folder, which gets checkpoint_<step>; that must be new.
    rules: as in `verify`.
    axes: as in `verify`.
    early: finalize though the schedule is not over and removed weights may still matter.

  Raises:
    ValueError: the schedule is not over, the output is there already, or what `verify` refuses.
  """
  stored = checkpoint.read(path)
  rules = checkpoint_rules.rules_for(stored, rules, axes)
  assignment = rules.assign(checkpoint_rules.parameters(stored))
  # Before D is 0 the weights that go are still in use.
  if not early and stored.sparse_step is not None:
    if ahead := assignment.unfinished(stored.sparse_step):
      raise ValueError(
        f"{stored.path} is at sparse step {ahead}. Take a later checkpoint, or add early=True "
        "(--early)"
      )
  made = os.path.join(out, f"checkpoint_{stored.step or 0}")
  refuse_existing(made)
  arrays: dict[str, Any] = {"state/step": np.asarray(np.int32(0))}  # T5X wants one
  if stored.sparse_step is not None:  # as its sparse model wants to know where the run began
    arrays["flax_mutables/nm_sparsity/start"] = np.asarray(np.int32(stored.start or 0))
  # All but the optimizer.
  for key in stored.leaves:
    if key.startswith(("target/", "flax_mutables/")) or key == "state/step":
      arrays[key] = stored.array(key)
  params = {k.removeprefix("target/"): x for k, x in arrays.items() if k.startswith("target/")}
  step = stored.sparse_step or 0
  zeros = apply.finalize(nested(params), rules, step, stored.masks() or None, early=True)
  removed = {}
  for path, w in flatten(zeros):
    kept = arrays[f"target/{path}"] = np.asarray(w)
    if path in assignment.sites:
      # In float64, since a float32 sum of many weights loses digits.
      before = np.abs(params.pop(path).astype(np.float64))
      with np.errstate(all="ignore"):  # inf and NaN: the proof names them
        removed[path] = float(before[kept == 0].sum() / (before.sum() or 1))
      if assignment.sites[path].recipe.keeps == "scale":  # else the sparse model scales once more
        arrays[f"flax_mutables/nm_sparsity/scale/{path}"] = np.ones((), np.float32)
  # The rules of a run lie in flax_mutables already.
  noted = rules_text.describe(rules) if stored.sparse_step is None else None
  checkpoint.write(made, arrays, checkpoint.network_settings(stored.path), noted)
  return dataclasses.replace(verify(made, rules), removed=removed)
