"""What a TPU's compiler says of a run: does its step fit, and what does sparsity add.

the run's model, optimizer and batch -> [its train step, dense and sparse, for chips that are
not there] -> part `topology`
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from nm_sparsity_jax.analysis import compiled, topology
from nm_sparsity_jax.analysis.plan.build import Plan
from nm_sparsity_jax.recipes import recipe
from nm_sparsity_jax.training.rules import Rules

_TOO_LARGE = re.compile(r"\(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)")


def check(plan: Plan, name: str) -> dict[str, Any]:
  """Returns the part `topology`; raises where a step does not fit or is not known.

  Args:
    plan: of the run.
    name: of the topology, such as 'v5e:4x4'.
  """
  has_batch = plan.config.get("BATCH_SIZE") is not None
  if plan.rules is None or plan.config.program != "train" or not has_batch:
    raise ValueError(
      f"--topology {name}: name the files of a training run, with its rules and BATCH_SIZE"
    )
  devices = topology.devices(name)
  lower = _local if plan.config.local else _t5x
  part: dict[str, Any] = {"name": name, "chips": len(devices)}
  # The dense step has the same shapes and shardings, so the difference is sparsity's.
  places = {key: recipe("dense") for key in plan.rules.places}
  dense = Rules(places, optional=plan.rules.optional)
  for kind, rules in (("dense", dense), ("sparse", None)):
    try:
      part[kind] = compiled.account(lower(plan, devices, rules).compile())._asdict()
    except jax.errors.JaxRuntimeError as e:  # a page of text
      if (large := _TOO_LARGE.search(str(e))) is None:
        raise
      raise ValueError(
        f"{name}: the {kind} train step needs {large[1]}iB of each chip, which has {large[2]}iB: "
        "take a larger topology, more NUM_PARTITIONS, more microbatches, or remat"
      ) from e
  ratio = lambda key: part["sparse"][key] / part["dense"][key]
  return part | {"over_dense": {key: ratio(key) for key in ("bytes", "flops", "peak")}}


def _local(plan: Plan, devices: Sequence[Any], rules: Rules | None) -> Any:
  """Returns the lowered train step of the local runner; None = with the run's own rules."""
  from nm_sparsity_jax.trainer.step import Model

  run, workload = plan.run, plan.workload
  model = Model(
    workload=workload,
    rules=run.model.rules if rules is None else rules,
    num_partitions=plan.partitions,
    devices=devices,
    ema_decay=run.model.ema_decay,
  )
  model.check_batch(workload.batch_size, run.microbatches)
  rows = lambda x: (workload.batch_size, *x.shape[1:])
  batch = {  # shapes are enough: no task is read
    name: jax.ShapeDtypeStruct(rows(x), x.dtype, sharding=model.over_rows)
    for name, x in workload.example().items()
  }
  state = model.state_like(run.optimizer)
  key = jax.random.PRNGKey(0)
  step = model.train_step(run.optimizer, key, run.microbatches, run.learning_rate)
  return step.lower(state, batch)


def _t5x(plan: Plan, devices: Sequence[Any], rules: Rules | None) -> Any:
  """Returns the lowered train step of T5X's trainer; None = with the run's own rules."""
  model = plan.model if rules is None else plan.model.with_rules(rules)
  return plan.t5x_programs(model, devices).train_step()
