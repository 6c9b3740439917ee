"""A packed file in place of a checkpoint: the model that runs on it, and its variables.

Stored of a packed file, Model, evaluation -> [load] -> Model without rules and without a scan,
                                                        variables on the devices, prepared
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import jax
from flax.errors import ScopeParamShapeError

from nm_sparsity_jax.core.packed import NMPacked
from nm_sparsity_jax.core.text import first_line, listed
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import inference_tree, unstack_layers
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.trainer.step import Model
from nm_sparsity_jax.trainer.workloads import Workload


def load(
  path: str, variables: dict[str, Any], model: Model, evaluation: Any, memory: bool = False
) -> tuple[Model, dict[str, Any]]:
  """Returns the model that runs on the variables of a packed file, and these on its devices.

  Args:
    path: of the file.
    variables: 'params', some of them packed, and the workload's state.
    model: of the same network, scanned or not.
    evaluation: tells how many rows a layer sees at once.
    memory: keep kernels packed also where a dense product is faster.

  Raises:
    ValueError: the file is of another network, or devices are to share weights.
  """
  if (parts := model.mesh.shape["model"]) > 1:
    raise ValueError(
      f"NUM_PARTITIONS={parts}: devices do not share packed kernels, and {path!r} holds some. Set "
      "NUM_PARTITIONS=1, or evaluate the finalized checkpoint."
    )
  made = model_of(path, variables, model)
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
  made = Model(without_scan(model.workload), devices=model.mesh.devices.flatten().tolist())
  wanted = _shapes({"params": made.shapes, **made.collections})
  if said := difference(wanted, _shapes(variables), ("in the file", "in the model")):
    raise ValueError(
      f"{path!r} is of another network: {said}: choose its model file "
      "(--gin_file=gin_configs/models/...)."
    )
  return made


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
  """Explains flax's error of a layer that takes arrays alone.

  Args:
    path: of the file.
  """
  try:
    yield
  except ScopeParamShapeError as e:
    raise ValueError(
      f"{path!r} holds packed kernels, and a layer of this network takes arrays alone: write "
      "nms.layers.Dense for flax's Dense, and ask nms.layers.packed_kernel in a layer of your own "
      f"({first_line(e)})."
    ) from e


def without_scan(workload: Workload) -> Workload:
  """Returns the workload of the same network without a scan over its layers."""
  config = workload.network_config
  plain = unstack_layers.without_scan(config)
  if plain == config:
    return workload
  made: Any = copy.copy(workload)
  made.network = made.network.clone(config=plain)
  made.network_config = plain
  return made


def summary(held: Any, prepared: Any) -> str:
  """Returns which patterns a packed file holds, and how many kernels stay packed.

  Args:
    held: the variables of the file.
    prepared: what `load` made of them.
  """
  kernels, kept = _kernels(held), len(_kernels(prepared))
  patterns = sorted({str(x.pattern) for x in kernels})
  found = f"packed, {listed(patterns) or 'nothing'}; {kept} of {len(kernels)} kernels stay packed"
  if kept == len(kernels):
    return found
  return (
    f"{found}; the others get their zeros back, since a dense product is faster (--memory keeps "
    "all packed)"
  )


def _kernels(tree: Any) -> list[NMPacked]:
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NMPacked))
  return [x for x in leaves if isinstance(x, NMPacked)]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = flatten(tree, lambda x: isinstance(x, NMPacked))
  return {path.removeprefix("params/"): tuple(x.shape) for path, x in leaves}
