"""What a run would do: which kernels become sparse, when, at which rate, and at what cost."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.analysis.plan.build import Built
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.core.trees import alike, group
from nm_sparsity_jax.trainer.workloads.t5 import known_lengths
from nm_sparsity_jax.training import flops, roles
from nm_sparsity_jax.training.sites import Assignment


def kernels(assignment: Assignment) -> dict[str, Any]:
  """Returns the part `kernels`: what is sparse, what is skipped and why, what no rule names."""
  facts = {
    path: (p.key, p.shape, p.axis, str(p.pattern), p.count, p.recipe.name, p.remarks)
    for path, p in assignment.places.items()
  }
  fields = "rule", "shape", "axis", "pattern", "groups", "recipe", "remarks"
  dense = [path for path in assignment.dense if path.endswith("kernel")]
  return {
    "sparse": [
      {**_entry(name, of), "role": _role(of), **dict(zip(fields, fact, strict=True))}
      for name, of, fact in alike(facts)
    ],
    "skipped": [{**_entry(name, of), "why": why} for name, of, why in alike(assignment.skipped)],
    "dense": [_entry(*named) for named in group(dense, words=True)],
    "other_dense": len(assignment.dense) - len(dense),
  }


def _entry(name: str, paths: Sequence[str]) -> dict[str, Any]:
  return {"path": name, "count": len(paths), "paths": paths}


def _role(paths: Sequence[str]) -> str | None:
  return ",".join(sorted({role for path in paths if (role := roles.role_of(path))})) or None


# --- when -----------------------------------------------------------------------------------------


def schedule(found: Findings, assignment: Assignment) -> list[dict[str, Any]]:
  """Returns the part `schedule`: sparse steps beside global ones.

  Recipes that differ have a timeline each, and so have axes of lengths that differ in theirs.

  Args:
    found: gets a warning for a run that ends with D > 0.
    assignment: where it is sparse.
  """
  timelines: dict[tuple, dict[str, set[int]]] = {}  # -> rule -> lengths of its axes
  for place in assignment.places.values():
    key = place.recipe, place.recipe.timeline(place.axis_size)
    timelines.setdefault(key, {}).setdefault(place.key, set()).add(place.axis_size)
  recipes = [recipe for recipe, _ in timelines]
  offset = found.number("PRETRAINED_STEPS") or 0
  parts = []
  for (recipe, segments), of in timelines.items():
    if segments[-1].decay_stop > 0:
      found.warnings.append(
        f"{', '.join(of)}: the run ends with D = {segments[-1].decay_stop:.3g}, so weights are "
        "n:m only after nms.finalize; set FINETUNE_STEPS to train them as n:m"
      )
    parts.append({
      "rules": list(of),
      "axis_sizes": sorted(set().union(*of.values())) if recipes.count(recipe) > 1 else None,
      "recipe": recipe.name,
      "pattern": recipe.pattern,
      "gradient": recipe.gradient_mode,
      "keeps_mask": recipe.stateful,
      "segments": [_segment(segment, recipe.phases, offset) for segment in segments],
    })  # fmt: skip
  return parts


def _segment(segment: Any, phases: Any, offset: int) -> dict[str, Any]:
  steps = {"t5x_start": segment.start + offset, "t5x_stop": segment.stop + offset}
  # A segment ends where pattern or D changes, which is not where a phase ends.
  begins = {"dense": 0, "sparsify": phases.dense, "fine-tune": phases.finetune_start}
  ends = phases.dense, phases.finetune_start, phases.total
  met = [
    name if begin <= segment.start else f"{name} from {begin:,}"
    for (name, begin), end in zip(begins.items(), ends, strict=True)
    if max(begin, segment.start) < min(end, segment.stop)
  ]
  return {**vars(segment), **steps, "phase": ", ".join(met)}


# --- lambda and the learning rate -----------------------------------------------------------------


def loss(found: Findings, built: Built) -> dict[str, Any]:
  """Returns the part `loss`: lambda beside the mean loss, and beside the loss of T5X."""
  places = built.rules.places.items() if built.rules else ()
  part = {
    "lambda": {key: recipe.lam for key, recipe in places if recipe.lam},
    "mean_over": getattr(built.workload, "weight", None),
  }
  if built.model is None:
    return part
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  factor = built.model._loss_normalizing_factor
  parts = found.config.argument("num_microbatches", "SparseTrainer") or 1
  batch = built.workload.batch(found.lengths, found.number("BATCH_SIZE") or 1)
  # Padding carries no weight, so a batch without any has the largest loss.
  full = {name: np.ones(x.shape, x.dtype) for name, x in batch.items()}
  scale = float(t5x_adapter.loss_scale(factor, full, parts))
  return part | {
    "factor": factor,
    "microbatches": parts,
    "t5x_over_mean_at_most": scale,
    "lambda_in_t5x_at_most": {key: lam * scale for key, lam in part["lambda"].items()},
  }


_POINTS = 256  # of the learning rate


def rate(found: Findings) -> dict[str, Any] | None:
  """Returns the part `learning_rate`, its first, highest and last value; None where it is unknown.

  Args:
    found: of the run; gets a warning where the run ends in its warm-up, and where T5X's optimizer
      has a rate of its own.
  """
  config, steps = found.config, found.number("SPARSE_STEPS")
  if config.program != "train" or not steps:
    return None
  function, offset = config.argument_of("OPTIMIZER", "learning_rate"), 0
  if isinstance(function, int | float) and not config.local:
    found.warnings.append(
      f"OPTIMIZER has a learning rate of its own, {function:g}: LEARNING_RATE, WARMUP_STEPS and "
      "LEARNING_RATE_FACTORS do nothing, and T5X's metric learning_rate shows another rate"
    )
  if function is None and config.local:
    function = config.argument("learning_rate", "Run")
  elif function is None:  # T5X counts global steps
    function = config.argument("learning_rate_fn", "SparseTrainer")
    offset = found.number("PRETRAINED_STEPS") or 0
  if function is None:
    return None
  # A few points tell how the rate begins, peaks and ends; T5X's functions trace, so one call does.
  at = np.unique(np.linspace(0, steps - 1, _POINTS).round().astype(np.int32))
  if callable(function):
    with jax.numpy_dtype_promotion("standard"):  # T5X's and users' own
      function = jax.vmap(function)(at + np.int32(offset))
  values = np.broadcast_to(np.asarray(function, np.float64), at.shape)
  warmup = found.number("WARMUP_STEPS") or 0
  if "warmup" in str(config.get("LEARNING_RATE_FACTORS")) and steps <= warmup:
    found.warnings.append(
      f"the run has SPARSE_STEPS={steps:,}, and the learning rate warms up for WARMUP_STEPS="
      f"{warmup:,}: it ends at {values[-1]:.3g}. Lower WARMUP_STEPS"
    )
  return {"first": values[0], "highest": values.max(), "last": values[-1]}


# --- cost -----------------------------------------------------------------------------------------


def cost(found: Findings, built: Built, assignment: Assignment) -> dict[str, Any] | None:
  """Returns the part `cost`; None where the FLOPs of the network are unknown, which is noted."""
  try:
    dense = built.workload.cost(found.lengths)
  except Exception as e:  # of the network's own code
    found.notes.append(f"no FLOPs: the forward pass cannot be traced ({type(e).__name__}: {e})")
    return None
  places = assignment.places
  sparse = flops.inference(dense, places)
  batch = found.number("BATCH_SIZE") or getattr(built.workload, "batch_size", None) or 1
  steps = next((p.recipe.phases.total for p in places.values() if p.recipe.phases), 0)
  training = {
    "steps": steps,
    "batch_size": batch,
    "dense": 3 * dense.flops * steps * batch,
    "sparse": flops.training(dense, places, batch).flops if steps else 0,
  }
  return {
    "lengths": known_lengths(found.lengths) if built.has_tokens else None,
    "inference": {"dense": dense.flops, "sparse": sparse.flops},
    "training": training if found.trains and steps else None,
    "parameters": {
      "dense": dense.params,
      "kept": sparse.params,
      "in_sparse_kernels": sum(math.prod(place.shape) for place in places.values()),
    },
  }
