"""What a run costs: FLOPs of training and of the finalized network, weights that are kept."""

from __future__ import annotations

from typing import Any

from nm_sparsity_jax import flops, roles
from nm_sparsity_jax.places import Assignment
from nm_sparsity_jax.plan import model, places
from nm_sparsity_jax.plan.findings import Findings


def cost(
  found: Findings, network: Any, assignment: Assignment, params: Any
) -> dict[str, Any] | None:
  """Returns the part `cost`; None where the FLOPs of the network are unknown, which is noted.

  Args:
    found: of the run.
    network: the flax module.
    assignment: where it is sparse.
    params: its parameters, as shapes.
  """
  shape = model.shape_of(network, found.lengths)
  sizes = places.sizes(params)
  if shape is None or flops.Cost(shape.ops()).params != sum(sizes.values()):
    found.notes.append("no FLOPs: they are known for encoder-decoders of T5's form alone")
    return None
  ops, kernels = {op.name for op in shape.ops()}, []
  for path, place in assignment.places.items():
    name = roles.op_of(path)
    if name is None or name not in ops:
      found.notes.append(f"no FLOPs: {path} has no counterpart in T5")
      return None
    kernel = flops.Kernel(op=name, params=sizes[path], axis=place.axis_size, recipe=place.recipe)
    kernels.append(kernel)
  batch = found.batch_size or 1
  priced = flops.price(shape, kernels, batch)
  return {
    "input_length": found.lengths["inputs"],
    "target_length": found.lengths["targets"],
    "lengths_known": found.config.is_set("TASK_FEATURE_LENGTHS"),
    "inference": {"dense": priced.inference_dense, "sparse": priced.inference_sparse},
    "training": {
      "steps": priced.steps,
      "batch_size": batch,
      "dense": priced.training_dense,
      "sparse": priced.training_sparse,
    },
    "parameters": {
      "dense": priced.params,
      "kept": priced.kept,
      "in_sparse_kernels": priced.sparse_params,
    },
  }
