"""The programs of a T5X run for devices that are not there, lowered and not compiled.

model, devices, shapes of a batch -> [T5X's partitioner and trainer] -> jax.stages.Lowered
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from t5x import partitioning, trainer, utils

from nm_sparsity_jax.integrations.t5x.models import SparseModel
from nm_sparsity_jax.integrations.t5x.trainer import SparseTrainer


class Ahead:
  """A T5X run on given devices.

      step = Ahead(model, devices, batch, partitions=8).train_step().compile()

  Args:
    model: T5X's own, or one of this package.
    devices: such as those of `topology.devices`.
    batch: name -> shape and dtype of a batch.
    partitions: devices that share each weight; the others share the batch.
    microbatches: parts of the batch in a train step.
  """

  def __init__(
    self,
    model: Any,
    devices: Sequence[Any],
    batch: Mapping[str, jax.ShapeDtypeStruct],
    partitions: int = 1,
    microbatches: int | None = None,
  ):
    self.model, self.batch, self.microbatches = model, dict(batch), microbatches
    mesh = Mesh(np.reshape(devices, (-1, partitions)), ("data", "model"))
    # T5X makes a mesh of this machine's devices.
    with mock.patch.object(partitioning, "default_mesh", lambda *_, **__: mesh):
      self.partitioner = partitioning.PjitPartitioner(num_partitions=partitions)
      self.mesh = self.partitioner.mesh
    start = utils.TrainStateInitializer(
      optimizer_def=model.optimizer_def,
      init_fn=model.get_initial_variables,
      input_shapes={name: x.shape for name, x in batch.items()},
      input_types={name: x.dtype for name, x in batch.items()},
      partitioner=self.partitioner,
    )
    self.state, self.axes = start.global_train_state_shape, start.train_state_axes

  @functools.cached_property
  def trainer(self) -> trainer.Trainer:
    """Returns the trainer: ours for a model with rules, else T5X's."""
    cls = SparseTrainer if isinstance(self.model, SparseModel) else trainer.Trainer
    parts = self.microbatches
    return cls(
      model=self.model,
      train_state=None,
      partitioner=self.partitioner,
      eval_names=[],
      summary_dir=None,
      train_state_axes=self.axes,
      rng=jax.random.PRNGKey(0),
      learning_rate_fn=lambda step: jnp.float32(1e-3),
      num_microbatches=parts if parts and parts > 1 else None,
    )

  def train_step(self) -> jax.stages.Lowered:
    """Returns the train step."""
    return self._lower(self.trainer._partitioned_train_step)

  def eval_step(self) -> jax.stages.Lowered:
    """Returns the step of an evaluation."""
    return self._lower(self.trainer._partitioned_eval_step)

  def decoding(self) -> jax.stages.Lowered:
    """Returns the decoding of a batch, as T5X's inference does it."""
    specs = self.partitioner.data_partition_spec

    def run(state, batch):
      mutables = {"flax_mutables": state.flax_mutables} if state.flax_mutables else {}
      return self.model.predict_batch(state.params, batch, **mutables)

    program = self.partitioner.partition(
      run, in_axis_resources=(self.axes, specs), out_axis_resources=specs
    )
    self.trainer  # noqa: B018  (tells the model how devices share its weights)
    return self._lower(program)

  def _lower(self, program):
    with self.mesh:
      return program.lower(self.state, self.batch)
