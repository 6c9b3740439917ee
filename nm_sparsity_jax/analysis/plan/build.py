"""The run, made as its program makes it: workload or network, rules, and shapes of all arrays."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.workloads.t5 import T5, tokens
from nm_sparsity_jax.training import flops
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass(frozen=True)
class Built:
  """What a run is made of; None where it has no such part, or the part could not be made.

  Attributes:
    workload: of the run; for a network of T5X's interface a `Network`.
    rules: what is sparse; the axes of scanned kernels are known.
    variables: what the workload's `init` returns, as shapes.
    run: the `Run` of the local runner.
    partitions: devices that share each of its weights.
    model: T5X's model.
    state: T5X's train state, as shapes.
  """

  workload: Any = None
  rules: Rules | None = None
  variables: Mapping[str, Any] | None = None
  run: Any = None
  partitions: int = 1
  model: Any = None
  state: Any = None

  @property
  def params(self) -> Any:
    """Returns the parameters, as shapes."""
    return None if self.variables is None else self.variables["params"]

  @property
  def has_tokens(self) -> bool:
    """Returns whether an example is made of tokens, whose number settings say."""
    return isinstance(self.workload, Network | T5)


class Network:
  """A network of T5X's interface, as far as a plan asks a workload.

  Args:
    module: with or without an encoder.
  """

  weight = "tokens"

  def __init__(self, module: Any):
    self.module, self.network_config = module, module.config
    takes = inspect.signature(type(module).__call__).parameters
    self.has_encoder = "encoder_input_tokens" in takes

  def batch(
    self, lengths: Mapping[str, int] | None, rows: int = 1, packed: bool = False
  ) -> dict[str, Any]:
    """Returns the shapes of a batch."""
    named = tokens(lengths, rows, packed).items()
    return {name: x for name, x in named if self.has_encoder or name.startswith("decoder")}

  def _inputs(self, lengths: Mapping[str, int] | None) -> dict[str, Any]:
    batch = self.batch(lengths)
    return {name: x for name, x in batch.items() if name != "decoder_loss_weights"}

  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns parameters and their logical axes."""
    inputs = {name: jnp.zeros(x.shape, x.dtype) for name, x in self._inputs(None).items()}
    return self.module.init({"params": rng, "dropout": rng}, **inputs, enable_dropout=False)

  def cost(self, lengths: Mapping[str, int] | None) -> flops.Cost:
    """Returns the dense forward FLOPs of one example."""
    params = jax.eval_shape(self.init, jax.random.PRNGKey(0))["params"]
    apply = lambda params, inputs: self.module.apply(
      {"params": params}, **inputs, enable_dropout=False
    )
    return flops.forward(apply, params, self._inputs(lengths))


def build(found: Findings) -> Built:
  """Makes the run; where that fails, its parts one by one, so that each says what is wrong."""
  config = found.config
  if config.program is not None:
    # Its constructors are the run's own checks.
    whole = found.attempt("the run", _local if config.local else _t5x, found)
    if whole is not None:
      return whole
  has = lambda *names: any(map(config.is_set, names))
  rules = found.attempt("RULES", config.value, "RULES") if has("RULES") else None
  network = None
  if has("WORKLOAD", "NETWORK", "MODEL"):
    network = found.attempt("the network", network_of, config)
  if network is None:
    return Built(rules=rules)
  workload = _workload(network)
  variables = found.attempt("the network", _variables, workload)
  if rules is not None and (variables or {}).get("params_axes"):
    rules = rules.with_logical_axes(variables["params_axes"])
  return Built(workload, rules, variables)


def _local(found: Findings) -> Built:
  """Makes the run of the local runner, or the model of its evaluation."""
  from nm_sparsity_jax.trainer.step import WrongDevices

  config = found.config
  partitions = config.argument("num_partitions", "Model") or 1
  part = "run" if config.program == "train" else "model"
  try:
    made = config.argument(part)
  except WrongDevices:
    found.notes.append("NUM_PARTITIONS is not checked: this command sees one CPU")
    config.put("NUM_PARTITIONS", 1)  # shapes do not depend on it
    made = config.argument(part)
  run, model = (made, made.model) if part == "run" else (None, made)
  variables = {"params": model.shapes, **model.collections}
  return Built(model.workload, model.rules, variables, run, partitions)


def _t5x(found: Findings) -> Built:
  """Makes T5X's model and its train state."""
  model = found.config.argument("model")
  state = ahead(found, model).state
  rules = getattr(model, "stored_rules", None)
  return Built(Network(model.module), rules, {"params": state.params}, model=model, state=state)


def ahead(found: Findings, model: Any, devices: Sequence[Any] | None = None) -> Any:
  """Returns the programs of a T5X run that trains a model.

  Args:
    found: of the run.
    model: T5X's.
    devices: that need not be there; None = one of this machine.
  """
  from nm_sparsity_jax.integrations.t5x.ahead import Ahead

  argument, rows = found.config.argument, found.number("BATCH_SIZE") or 1
  packed = bool(getattr(argument("train_dataset_cfg"), "pack", False))
  batch = Network(model.module).batch(found.lengths, rows, packed)
  partitions = 1 if devices is None else argument("num_partitions", "PjitPartitioner") or 1
  parts = argument("num_microbatches", "SparseTrainer")
  return Ahead(model, devices or jax.local_devices()[:1], batch, partitions, parts)


def network_of(config: gin_files.Config) -> Any:
  """Returns what a run trains: the workload that WORKLOAD names, else a network.

  T5X's own model files have no NETWORK: there it is what MODEL is made of, which can be made before
  all that the optimizer needs is set.

  Args:
    config: the settings of the run.
  """
  if config.is_set("WORKLOAD"):
    return config.value("WORKLOAD")
  is_set = config.is_set("NETWORK")
  network = config.value("NETWORK") if is_set else config.argument_of("MODEL", "module")
  if not hasattr(network, "init"):
    raise ValueError(f"NETWORK={network!r} is not a flax module: name a model file")
  if hasattr(getattr(network, "config", None), "image_size"):  # no run file names its workload
    from nm_sparsity_jax.trainer.workloads import vision

    return vision.Images(network, None)
  return network


def shapes(network: Any) -> tuple[Any, Any]:
  """Returns the parameters of a dense network and their logical axes, as shapes.

  Args:
    network: a flax module of T5X's interface, or a workload.

  Returns:
    The parameters; their logical axes, None where the network names none.
  """
  found = _variables(_workload(network))
  return found["params"], found.get("params_axes")


def _workload(network: Any) -> Any:
  return network if isinstance(network, workloads.Workload) else Network(network)


def _variables(workload: Any) -> Mapping[str, Any]:
  return jax.eval_shape(workload.init, jax.random.PRNGKey(0))
