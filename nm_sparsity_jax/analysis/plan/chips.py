"""What a TPU's compiler says of a run: does its step fit, and what does sparsity add.

    the run's model, optimizer and batch -> [its train step, dense and sparse, for chips that are
    not there] -> part `topology`

It is a compiler's account: it knows bytes, memory and collectives, and no time.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nm_sparsity_jax.analysis import compiled, topology
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.analysis.plan.model import Made, inputs
from nm_sparsity_jax.recipes import recipe
from nm_sparsity_jax.trainer.workloads.t5 import T5, tokens
from nm_sparsity_jax.training.rules import Rules

_TOO_LARGE = re.compile(r"\(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)")
Shapes = dict[str, jax.ShapeDtypeStruct]


def check(found: Findings, made: Made, name: str) -> dict[str, Any] | None:
  """Returns the part `topology`; notes an error where a step does not fit or is not known.

  Args:
    found: of the run.
    made: what its settings make.
    name: of the topology, such as 'v5e:4x4'.
  """
  if not found.trains or made.rules is None or found.config.program is None:
    found.errors.append(f"--topology {name}: name the files of a training run, with its rules")
    return None
  devices = topology.devices(name)
  lower = _local(found, devices) if found.config.local else _t5x(found, made, devices)
  dense = _account(lower(Rules({key: recipe("dense") for key in made.rules.places})))
  sparse = _account(lower(None))
  part = {"name": name, "chips": len(devices), "dense": dense, "sparse": sparse}
  for kind, row in (("dense", dense), ("sparse", sparse)):
    if row["needs"]:
      found.errors.append(
        f"{name}: the {kind} train step needs {row['needs']} of each chip, which has {row['has']}: "
        "take a larger topology, more NUM_PARTITIONS, more microbatches, or remat"
      )
  if not dense["needs"] and not sparse["needs"]:
    part["over_dense"] = {key: sparse[key] / dense[key] for key in ("bytes", "flops", "peak")}
  return part


def _account(lowered: Any) -> dict[str, Any]:
  """Compiles, and returns what the compiler says; 'needs' and 'has' where it does not fit."""
  start = time.monotonic()
  try:
    said = compiled.account(lowered.compile())._asdict()
    said["collectives"] = dict(said["collectives"])
  except jax.errors.JaxRuntimeError as e:
    if (large := _TOO_LARGE.search(str(e))) is None:
      raise
    return {"needs": f"{large[1]}iB", "has": f"{large[2]}iB"}
  return {**said, "seconds": time.monotonic() - start, "needs": None}


def _local(found: Findings, devices: Sequence[Any]) -> Callable[[Rules | None], Any]:
  """Returns rules -> the lowered train step of the local runner; None = the run's own rules."""
  from nm_sparsity_jax.trainer.step import Model

  with mock.patch.object(jax, "local_devices", lambda: devices):
    run = found.config.argument("run")

  def lower(rules: Rules | None) -> Any:
    given, parts = run.model, run.model.mesh.shape["model"]
    model = (
      given
      if rules is None
      else Model(workload=given.workload, rules=rules, num_partitions=parts, devices=devices)
    )
    state = model.state_like(run.optimizer)
    over_rows = NamedSharding(model.mesh, PartitionSpec("data"))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_rows)
    batch = {name: place(x) for name, x in _batch(found, run).items()}
    step = model.train_step(run.optimizer, jax.random.PRNGKey(0), state, run.microbatches)
    return step.lower(state, batch)

  return lower


def _batch(found: Findings, run: Any) -> Mapping[str, Any]:
  """Returns a batch of the local runner: of a workload's own the first, of a text task shapes."""
  workload = run.model.workload
  if not isinstance(workload, T5):
    return next(iter(workload.batches(0, 0)))
  is_packed = workload.data is not None and workload.data.pack
  return tokens(found.lengths, workload.batch_size, is_packed)


def _t5x(found: Findings, made: Made, devices: Sequence[Any]) -> Callable[[Rules | None], Any]:
  """Returns rules -> the lowered train step of T5X's trainer; None = the run's own rules."""
  from nm_sparsity_jax.integrations.t5x.ahead import Ahead

  if found.batch_size is None:
    raise ValueError("--topology needs BATCH_SIZE, the examples of a step")
  dataset = found.argument("train_dataset_cfg")
  batch = tokens(found.lengths, found.batch_size, bool(getattr(dataset, "pack", False)))
  if "encoder_input_tokens" not in inputs(made.model.module, found.lengths):
    batch = {name: x for name, x in batch.items() if name.startswith("decoder")}
  partitions = found.argument("num_partitions", "PjitPartitioner") or 1

  def lower(rules: Rules | None) -> Any:
    model = made.model if rules is None else made.model.with_rules(rules)
    return Ahead(model, devices, batch, partitions, found.microbatches()).train_step()

  return lower
