"""A packed file as a checkpoint: the model that runs on it, and its variables.

Stored of a packed file, Model, evaluation -> [load] -> Model without rules and without a scan,
                                                        variables on the devices, prepared
"""

from __future__ import annotations

import copy
from typing import Any

import jax

from nm_sparsity_jax.core.packed import NMPacked
from nm_sparsity_jax.core.text import listed
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import inference_tree, unstack_layers
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.trainer.step import Model


def load(
  path: str, variables: dict[str, Any], model: Model, evaluation: Any, memory: bool = False
) -> tuple[Model, dict[str, Any]]:
  """Returns the model that runs on the variables of a packed file, and these on its devices.

  Args:
    path: of the file.
    variables: 'params', some of them packed, and the workload's state.
    model: of the same network, scanned or not.
    evaluation: says how many rows a layer sees at once.
    memory: keep kernels packed also where a dense product is faster.

  Raises:
    ValueError: the file is of another network, or devices are to share weights.
  """
  if (parts := model.mesh.shape["model"]) > 1:
    raise ValueError(
      f"NUM_PARTITIONS={parts}: devices do not share the packed kernels of {path!r}. Set "
      "NUM_PARTITIONS=1, or evaluate the finalized checkpoint."
    )
  made = model_of(path, variables, model)
  # Only a T5's evaluation has rows, lengths and beams of its own.
  batch = getattr(evaluation, "batch_size", None) or made.workload.batch_size
  lengths, beams = getattr(evaluation, "lengths", None) or {}, getattr(evaluation, "num_decodes", 1)
  config = made.workload.network_config
  rows = inference_tree.rows_of(config, batch, lengths.get("inputs", 1), beams)
  ready = {**variables, "params": inference_tree.prepare(variables["params"], rows, memory=memory)}
  return made, jax.device_put(ready, made.replicated)


def model_of(path: str, variables: dict[str, Any], model: Model) -> Model:
  """Returns the model that runs on the variables of a packed file: without rules and a scan.

  Args:
    path: of the file.
    variables: 'params', some of them packed, and the workload's state.
    model: of the same network, scanned or not.

  Raises:
    ValueError: the file is of another network.
  """
  workload: Any = copy.copy(model.workload)
  plain = unstack_layers.without_scan(workload.network_config)
  if plain != workload.network_config:  # a kernel of a scan is one stack, which no file packs
    workload.network = workload.network.clone(config=plain)
    workload.network_config = plain
  # Without rules: the file holds the effective weights, and a mask of zeros would change nothing.
  made = Model(workload, devices=model.mesh.devices.flatten().tolist())
  wanted = _shapes({"params": made.shapes, **made.collections})
  if said := difference(wanted, _shapes(variables)):
    raise ValueError(
      f"{path!r} is of another network: {said}: choose its model file "
      "(--gin_file=gin_configs/models/...)."
    )
  return made


def summary(held: Any, prepared: Any) -> str:
  """Returns which patterns a packed file holds, and how many kernels stay packed.

  Args:
    held: the variables of the file.
    prepared: what `load` made of them.
  """
  is_packed = lambda x: isinstance(x, NMPacked)
  kernels, kept = (
    [x for x in jax.tree.leaves(tree, is_leaf=is_packed) if is_packed(x)]
    for tree in (held, prepared)
  )
  patterns = listed(sorted({str(x.pattern) for x in kernels})) or "nothing"
  return f"packed, {patterns}; {len(kept)} of {len(kernels)} kernels stay packed"


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = flatten(tree, lambda x: isinstance(x, NMPacked))
  return {path.removeprefix("params/"): tuple(x.shape) for path, x in leaves}
