"""A T5X run on any devices, such as chips that are not there: its shapes and its trainer.

model, devices, shapes of a batch -> [T5X's partitioner, train state, trainer] -> jax.stages.Lowered
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

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
    model: T5X's own, or what `sparse` returns.
    devices: such as those of `topology.devices`.
    batch: name -> shape and dtype of a batch.
    partitions: devices that share each weight; the others share the batch.
    microbatches: parts of the batch in a train step.

  Attributes:
    state: T5X's train state, as shapes.
    axes: how it is partitioned.
    partitioner: T5X's.
    trainer: ours for a model with rules, else T5X's.
  """

  def __init__(
    self,
    model: Any,
    devices: Sequence[Any],
    batch: Mapping[str, jax.ShapeDtypeStruct],
    partitions: int = 1,
    microbatches: int | None = None,
  ):
    self._batch = dict(batch)
    mesh = Mesh(np.reshape(devices, (-1, partitions)), ("data", "model"))
    # T5X makes a mesh of this machine's devices.
    with mock.patch.object(partitioning, "default_mesh", lambda *_, **__: mesh):
      self.partitioner = partitioning.PjitPartitioner(num_partitions=partitions)
      self._mesh = self.partitioner.mesh  # T5X caches it
    start = utils.TrainStateInitializer(
      optimizer_def=model.optimizer_def,
      init_fn=model.get_initial_variables,
      input_shapes={name: x.shape for name, x in batch.items()},
      input_types={name: x.dtype for name, x in batch.items()},
      partitioner=self.partitioner,
    )
    self.state, self.axes = start.global_train_state_shape, start.train_state_axes
    cls = SparseTrainer if isinstance(model, SparseModel) else trainer.Trainer
    self.trainer = cls(
      model=model,
      train_state=None,
      partitioner=self.partitioner,
      eval_names=[],
      summary_dir=None,
      train_state_axes=self.axes,
      rng=jax.random.PRNGKey(0),
      learning_rate_fn=lambda step: jnp.float32(1e-3),  # any: nothing is run
      num_microbatches=microbatches if microbatches and microbatches > 1 else None,
    )

  def train_step(self) -> jax.stages.Lowered:
    """Returns the train step."""
    return self.lower(self.trainer._partitioned_train_step)

  def lower(self, program: Any) -> jax.stages.Lowered:
    """Returns a program of (train state, batch), lowered and not compiled."""
    with self._mesh:
      return program.lower(self.state, self._batch)
