"""What a run costs: FLOPs of training and of the finalized network, weights that are kept."""

from __future__ import annotations

from typing import Any

from nm_sparsity_jax import flops, trees, workloads
from nm_sparsity_jax.places import Assignment
from nm_sparsity_jax.plan import model
from nm_sparsity_jax.plan.findings import Findings
from nm_sparsity_jax.workloads.t5 import known_lengths

_T5_ALONE = "they are known only for encoder-decoders like T5"


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
  own = type(network).__name__ if isinstance(network, workloads.Workload) else ""
  shape = model.shape_of(network, found.lengths)
  sizes = trees.sizes(params)
  if shape is None or flops.Cost(shape.ops()).params != sum(sizes.values()):
    whose = f"{own}.shape does not tell them" if own else _T5_ALONE
    found.notes.append(f"no FLOPs: {whose}")
    return None
  kernels, lost = flops.kernels(shape, assignment.places, sizes)
  if lost:
    found.notes.append(f"no FLOPs: {lost} has no counterpart in {own or 'T5'}")
    return None
  known = found.batch_size or (getattr(network, "batch_size", None) if own else None)
  priced = flops.price(shape, kernels, known or 1)
  lengths = {} if own else known_lengths(found.lengths)
  lengths_known = found.config.get("TASK_FEATURE_LENGTHS") is not None
  once = {"dense": priced.inference_dense, "sparse": priced.inference_sparse}
  training = {
    "steps": priced.steps,
    "batch_size": known or 1,
    "batch_known": known is not None,
    "dense": priced.training_dense,
    "sparse": priced.training_sparse,
  }
  return {
    "input_length": lengths.get("inputs"),
    "target_length": lengths.get("targets"),
    "lengths_known": lengths_known,
    "inference": once if own or lengths_known or found.trains else None,
    "training": training if found.trains else None,
    "parameters": {
      "dense": priced.params,
      "kept": priced.kept,
      "in_sparse_kernels": priced.sparse_params,
    },
  }
