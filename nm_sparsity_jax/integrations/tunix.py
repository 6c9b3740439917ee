"""Tunix: a hook that logs what the masks do. Training itself needs `nms.sparse` alone.

trainer = PeftTrainer(model, nms.sparse(optax.adamw(1e-5), rules), config)
trainer.with_training_hooks(Metrics())
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx
from tunix.sft import hooks

from nm_sparsity_jax.training import metrics, rules_text
from nm_sparsity_jax.training.transform import SparseState, dense_params, states


class Metrics(hooks.TrainingHooks):
  """Logs with Tunix' own metrics, for TensorBoard and others, what `nms.metrics.summary` tells.

  The names are `nm/density`, `nm/D`, `nm/n/<rule>`, `nm/m/<rule>`, `nm/flip_rate/all`, `/kept` and
  others. Flips are those since the last log. A run without `nms.sparse` logs nothing.

  Args:
    every: steps between two logs.
  """

  def __init__(self, every: int = 100):
    self.every = every

  def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
    """Logs the metrics of the weights that the step has made."""
    if train_step % self.every:
      return
    opt_state = nnx.as_pure(train_ctx.optimizer.opt_state)
    for state in states(opt_state, SparseState):
      rules = rules_text.parse(rules_text.unpack(np.asarray(state.rules)))
      dense = dense_params(nnx.state(train_ctx.model, nnx.Param), opt_state)
      now = dense, rules, state.count, state.masks
      for name, value in metrics.summary(*now, seen=self._seen).items():
        train_ctx.metrics_logger.log("", name, float(value), "train", int(state.count))
      self._seen = metrics.before(*now)

  def on_train_start(self, train_ctx: Any) -> None:
    """Forgets the masks of another run."""
    self._seen = None

  # Tunix asks for all of its hooks.
  def _nothing(self, *_: Any) -> None: ...

  on_train_end = on_train_step_start = _nothing
  on_eval_step_start = on_eval_step_end = _nothing
