"""Makes a run of gin settings, as shapes, and notes what is wrong with it."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass
class Plan:
  """One run: its settings, its parts, and what is wrong with it. A part that is None was not made.

  Attributes:
    config: the gin files and overrides.
    errors: what stands in the way of the run.
    warnings: what you probably do not mean.
    notes: what you should know.
    workload: what the run trains; of a network of T5X a `T5` without data.
    rules: what is sparse; the axes of scanned kernels are known.
    variables: what the workload's `init` returns, as shapes.
    settings: arguments of `Run`, as bound.
    run: the `Run` of the local runner.
    model: the `Model` of the local runner, or T5X's.
    partitions: devices that share each weight.
    state: T5X's train state, as shapes.
  """

  config: gin_files.Config
  errors: list[str] = dataclasses.field(default_factory=list)
  warnings: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  workload: Any = None
  rules: Rules | None = None
  variables: Mapping[str, Any] | None = None
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  run: Any = None
  model: Any = None
  partitions: int = 1
  state: Any = None

  @property
  def params(self) -> Any:
    """Returns the parameters, as shapes."""
    return None if self.variables is None else self.variables["params"]

  @property
  def trains(self) -> bool:
    """Returns True unless the run file is of an evaluation or of predictions."""
    return self.config.program in (None, "train")

  def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args); notes an error and returns None where it fails."""
    try:
      return function(*args)
    except gin_files.Unset:  # the configuration asks for it already
      return None
    except Exception as e:
      text = gin_files.message(e)
      # The whole run fails where a part of it does, with the same words.
      if text not in self.errors:
        self.errors.append(text)
      return None

  def build(self) -> None:
    """Makes the run; where that fails, its parts one by one, so that each says what is wrong."""
    # 1. The whole run; its constructors are the run's own checks.
    if self.config.program is not None:
      self.attempt(self._local if self.config.local else self._t5x)
    # 2. What that left out, part by part; all of it where there is no run file.
    if self.rules is None:
      self.rules = self.attempt(self.config.value, "RULES")
    if self.workload is None:
      self.workload = self.attempt(workload_of, self.config)
    if self.workload is not None and self.variables is None:
      self.variables = self.attempt(jax.eval_shape, self.workload.init, jax.random.PRNGKey(0))
      # A scan over layers moves the contracted axis; the network says where.
      if self.rules is not None and (axes := (self.variables or {}).get("params_axes")):
        self.rules = self.rules.with_logical_axes(axes)

  def _local(self) -> None:
    """Makes the run of the local runner, or the model of its evaluation."""
    config = self.config
    self.settings = config.settings("Run")  # as the run has them
    self.partitions = config.argument("num_partitions", "Model") or 1
    if self.partitions > 1:  # shapes do not depend on it
      self.notes.append("NUM_PARTITIONS is not checked: this command sees one CPU")
      config.put("NUM_PARTITIONS", 1)
    if config.program == "train":
      self.run = config.argument("run")
    model = config.argument("model") if self.run is None else self.run.model
    self.model, self.workload, self.rules = model, model.workload, model.rules
    self.variables = {"params": model.shapes, **model.collections}

  def _t5x(self) -> None:
    """Makes T5X's model and its train state."""
    # Here, since a plan of a local run must do without T5X.
    from nm_sparsity_jax.integrations.t5x import SparseTrainer

    model = self.config.argument("model")
    self.workload = T5(model.module, lengths=self.config.get("TASK_FEATURE_LENGTHS"))
    self.state = self.t5x_programs(model).state
    self.variables = {"params": self.state.params}
    self.model = model
    # A model class of T5X's own has none; `build` then asks for RULES.
    self.rules = getattr(model, "stored_rules", None)
    if self.rules is None and self.config.is_set("RULES"):
      raise ValueError(
        f"the run's model is a {type(model).__name__}, which trains dense: T5X's run file comes "
        "after nm_sparsity_jax's. Name it before that, or leave it out."
      )
    trainer = self.config.argument("trainer_cls")
    if self.rules is not None and trainer and not issubclass(trainer, SparseTrainer):
      raise ValueError(
        f"train.trainer_cls is {trainer.__name__}, which counts no sparse steps: bind "
        "@t5x_adapter.SparseTrainer."
      )

  def batch(self) -> dict[str, Any]:
    """Returns the shapes of a training batch of T5X."""
    packed = bool(getattr(self.config.argument("train_dataset_cfg"), "pack", False))
    return self.workload.tokens(self.config.get("BATCH_SIZE") or 1, packed)

  def t5x_programs(self, model: Any, devices: Sequence[Any] | None = None) -> Any:
    """Returns the programs of a T5X run that trains a model.

    Args:
      model: T5X's.
      devices: that need not be there; None = one of this machine.
    """
    from nm_sparsity_jax.integrations.t5x.ahead import Ahead

    # One device stands for all of this machine, since shapes do not depend on how many there are.
    argument = self.config.argument
    partitions = 1 if devices is None else argument("num_partitions", "PjitPartitioner") or 1
    microbatches = argument("num_microbatches", "SparseTrainer")
    return Ahead(model, devices or jax.local_devices()[:1], self.batch(), partitions, microbatches)


def workload_of(config: gin_files.Config) -> Any:
  """Returns what a run trains; without data where no run file names its workload.

  T5X's own model files have no NETWORK: there it is what MODEL is made of, which can be made before
  all that the optimizer needs is set.
  """
  if config.is_set("WORKLOAD"):
    return config.value("WORKLOAD")
  if config.is_set("NETWORK"):
    network = config.value("NETWORK")
  elif config.is_set("MODEL"):
    network = config.argument("module", "MODEL")
  else:
    return None
  if hasattr(network.config, "image_size"):
    from nm_sparsity_jax.trainer.workloads import vision

    return vision.Images(network, None)
  return T5(network, lengths=config.get("TASK_FEATURE_LENGTHS"))
