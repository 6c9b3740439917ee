"""What a run would do: when kernels become sparse, at which rate, and at what cost."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.analysis.plan.build import Plan
from nm_sparsity_jax.training import flops
from nm_sparsity_jax.training.sites import Assignment


def schedule(assignment: Assignment, offset: int = 0) -> list[dict[str, Any]]:
  """Returns the part `schedule`: what happens at which steps, of the run and global ones.

  Recipes that differ have a timeline each, and so have axes of lengths that differ in theirs.

  Args:
    assignment: what is sparse.
    offset: the global step before the first sparse one.
  """
  timelines: dict[tuple, list[Any]] = {}
  for site in assignment.sites.values():
    key = site.recipe, site.recipe.timeline(site.axis_size)
    timelines.setdefault(key, []).append(site)
  return [
    {
      "rules": list(dict.fromkeys(site.place for site in sites)),
      "axis_sizes": sorted({site.axis_size for site in sites}),
      "recipe": recipe.name,
      "pattern": recipe.pattern,
      **({"lambda": recipe.lam, "decoupled": recipe.decoupled} if recipe.lam else {}),
      "segments": [
        {
          "global_start": offset + s.start,
          "start": s.start,
          "stop": s.stop,
          "pattern": s.pattern,
          "first_D": s.decay_start,
          "last_D": float(recipe.decay(s.stop - 1)),
        }
        for s in segments
      ],
    }
    for (recipe, segments), sites in timelines.items()
  ]


def rate(plan: Plan) -> dict[str, Any] | None:
  """Returns the part `learning_rate`, its first, highest and last value; None where it is unknown.

  It warns where T5X's optimizer has a rate of its own.
  """
  config, steps, offset = plan.config, plan.config.get("SPARSE_STEPS"), 0
  if config.program != "train" or not steps:
    return None
  own = config.argument("learning_rate", "OPTIMIZER")
  if config.local:
    function = config.argument("learning_rate", "Run")
  elif isinstance(own, int | float):
    function = own
    plan.warnings.append(
      f"OPTIMIZER has a learning rate of its own, {own:g}: LEARNING_RATE, WARMUP_STEPS and "
      "LEARNING_RATE_FACTORS do nothing to it (but scale a decoupled term of SR-STE), and T5X's "
      "metric learning_rate shows another rate"
    )
  else:  # T5X counts global steps
    function = config.argument("learning_rate_fn", "SparseTrainer")
    offset = config.get("PRETRAINED_STEPS") or 0
  if function is None:
    return None
  at = np.arange(steps, dtype=np.int32)
  if callable(function):
    # T5X's and users' own, which trace: one call does.
    with jax.numpy_dtype_promotion("standard"):
      function = jax.vmap(function)(at + np.int32(offset))
  values = np.broadcast_to(np.asarray(function, np.float64), at.shape)
  if values.argmax() == len(at) - 1 > 0:
    plan.warnings.append(
      f"the learning rate rises until the last of {steps:,} steps: lower WARMUP_STEPS"
    )
  return {"first": values[0], "highest": values.max(), "last": values[-1]}


def cost(plan: Plan, assignment: Assignment) -> dict[str, Any] | None:
  """Returns the part `cost`; None where the FLOPs of the network are unknown, which is noted."""
  try:
    dense = plan.workload.cost()
  except Exception as e:  # of the network's own code
    plan.notes.append(f"no FLOPs: the forward pass cannot be traced ({type(e).__name__}: {e})")
    return None
  assert plan.rules is not None  # an assignment is of rules
  sparse = flops.inference(dense, plan.rules)
  batch = plan.config.get("BATCH_SIZE") or plan.workload.batch_size
  steps = next((p.recipe.phases.total for p in assignment.sites.values() if p.recipe.phases), 0)
  training = None
  if plan.trains and steps:
    training = {
      "steps": steps,
      "batch_size": batch,
      # A backward pass costs two forward passes.
      "dense": 3 * dense.flops * steps * batch,
      "sparse": flops.training(dense, plan.rules, batch).flops,
    }
  return {
    "lengths": getattr(plan.workload, "lengths", None),
    "inference": {"dense": dense.flops, "sparse": sparse.flops},
    "training": training,
    "parameters": {
      "dense": dense.params,
      "kept": sparse.params,
      "in_sparse_kernels": sum(math.prod(site.shape) for site in assignment.sites.values()),
    },
  }
