"""What a run costs: FLOPs of training and of the finalized network, weights that are kept."""

from __future__ import annotations

import math
from typing import Any

from nm_sparsity_jax.analysis.plan import model
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.workloads.t5 import known_lengths
from nm_sparsity_jax.training import flops
from nm_sparsity_jax.training.sites import Assignment


def cost(
  found: Findings, network: Any, assignment: Assignment, params: Any
) -> dict[str, Any] | None:
  """Returns the part `cost`; None where the FLOPs of the network are unknown, which is noted.

  An evaluation or predictions have no FLOPs of training, and no FLOPs at all without lengths: a
  guess would say nothing of their examples.

  Args:
    found: of the run.
    network: the flax module, or the workload.
    assignment: where it is sparse.
    params: its parameters, as shapes.
  """
  own = isinstance(network, workloads.Workload)
  try:
    dense = model.cost_of(network, params, found.lengths)
  except Exception as e:  # of the network's own code
    found.notes.append(f"no FLOPs: the forward pass cannot be traced ({type(e).__name__}: {e})")
    return None
  places = assignment.places
  sparse = flops.inference(dense, places)
  known = found.batch_size or (getattr(network, "batch_size", None) if own else None)
  phases = [place.recipe.phases for place in places.values() if place.recipe.phases]
  steps = phases[0].total if phases else 0
  lengths = {} if own else known_lengths(found.lengths)
  lengths_known = found.config.get("TASK_FEATURE_LENGTHS") is not None
  once = {"dense": dense.flops, "sparse": sparse.flops}
  training = {
    "steps": steps,
    "batch_size": known or 1,
    "batch_known": known is not None,
    "dense": 3 * dense.flops * steps * (known or 1),
    "sparse": flops.training(dense, places, known or 1).flops if steps else 0,
  }
  return {
    "input_length": lengths.get("inputs"),
    "target_length": lengths.get("targets"),
    "lengths_known": lengths_known,
    "inference": once if own or lengths_known or found.trains else None,
    "training": training if found.trains else None,
    "parameters": {
      "dense": dense.params,
      "kept": sparse.params,
      "in_sparse_kernels": sum(math.prod(place.shape) for place in places.values()),
    },
  }
