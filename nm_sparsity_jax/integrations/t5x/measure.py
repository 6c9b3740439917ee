"""Metrics of sampled steps, as separate programs around the train step.

    a sampled step:   (train state, batch) -> [before] -> masks, Var(|g|)
                      (train state, batch) -> [the train step, as at every other step] -> new state
                      (new state, masks, Var(|g|)) -> [after] -> name -> value -> TensorBoard
    any other step:   the train step alone

The gradient that they measure is computed anew, by the same model from the same batch, dropout key
and microbatches, so metrics change no bit of training.
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

from flax import traverse_util
from flax.core import unfreeze
from t5x import optimizers, trainer

from nm_sparsity_jax.training import metrics


def programs(run: Any) -> tuple[Any, Any]:
  """Returns the two programs that measure a train step: one before it, one after it.

      nm/density, nm/density_target, nm/D    of the new weights at the new step
      nm/n/<rule>, nm/m/<rule>               the pattern; 0 where kernels of the rule differ
      nm/flip_rate/{all,kept}                from the masks before the update to those after
      nm/grad_abs_var/{all,kept}             of the step's gradient without SR-STE's term
      nm/second_moment_var/{all,kept}        of the v of optax's optimizers, this gradient included

  All but flips and gradients can be had again from a checkpoint of that step. T5X's Adafactor keeps
  factors of v in a form of its own, so it has no name for it.

  Args:
    run: `SparseTrainer`; gradients are taken by its model, its keys and its microbatches.
  """
  model, axes = run._model.counted(), run._train_state_axes
  partition, batch_spec = run._partitioner.partition, run._partitioner.data_partition_spec
  rules = model.stored_rules
  by_path = traverse_util.flatten_dict(unfreeze(axes.params), sep="/")
  # Each device keeps the masks of its shard from the one program to the other.
  masks_spec = {path: by_path[path] for path in rules.assign(model.made).sites}
  seen_spec = metrics.Before(masks_spec, None)  # type: ignore

  def before(train_state, batch):
    grads, _, _ = trainer.accumulate_grads_microbatched(
      model, train_state, batch, run._get_step_rng(train_state.step), run._num_microbatches,
      batch_spec,
    )  # fmt: skip
    step, state = model.read(train_state.flax_mutables)
    return metrics.before(train_state.params, rules, step, state, grads)

  def after(train_state, seen):
    params, (step, state) = train_state.params, model.read(train_state.flax_mutables)
    # `metrics` finds second moments in optax states alone.
    is_optax = isinstance(model.optimizer_def, optimizers.OptaxWrapper)
    moments = metrics.second_moments(train_state.param_states, params) if is_optax else None
    return metrics.summary(params, rules, step, state, moments, seen)

  return (
    partition(before, in_axis_resources=(axes, batch_spec), out_axis_resources=seen_spec),
    partition(after, in_axis_resources=(axes, seen_spec), out_axis_resources=None),
  )
