"""The train step: T5X's gradients and T5X's update, with what sparsity needs between them.

batch -> gradients -> [+ SR-STE's term, once] -> T5X's update -> [step + 1, stored masks]
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from clu import asynclib
from flax.core import freeze
from t5x import losses, optimizers, trainer, utils

from nm_sparsity_jax.integrations.t5x import measure
from nm_sparsity_jax.integrations.t5x.models import COLLECTION, UNKNOWN, SparseModel
from nm_sparsity_jax.integrations.t5x.restore import refuse_relative
from nm_sparsity_jax.runs import checkpoint_rules
from nm_sparsity_jax.training import transform
from nm_sparsity_jax.training.stored import init_state, update_state


class SparseTrainer(trainer.Trainer):
  """T5X's trainer; its train step also adds SR-STE's term, counts, and refreshes stored masks.

  The sparse step goes up by the updates that the optimizer applied: its own count after less
  its count before (0 while `optax.apply_if_finite` skips one), or 1 where it keeps none, as
  Adafactor. So it starts at 0 whatever the global step and whatever count an optimizer state
  brought along.

  Args:
    model: of this package.
    train_state: as of T5X's trainer; `t5x.eval` gives none.
    partitioner: as of T5X's trainer.
    summary_dir: as of T5X's trainer.
    train_state_axes: as of T5X's trainer.
    pretrained_steps: the global step at which the sparse run starts, to be checked; None = any.
    metrics_every: after every so many sparse steps `measure` takes what `metrics.summary` names,
      which is written under that step; None or 0 = never. The train step stays the same program.
    metrics_per_place: also for each sparse kernel.
    train_steps: the global step at which T5X ends the run, to be checked; None = any.
    train_steps_relative: T5X's TRAIN_STEPS_RELATIVE, which is refused.
    **kwargs: as of T5X's trainer.
  """

  def __init__(
    self,
    *,
    model,
    train_state,
    partitioner,
    summary_dir,
    train_state_axes,
    pretrained_steps: int | None = None,
    metrics_every: int | None = None,
    metrics_per_place: bool = False,
    train_steps: int | None = None,
    train_steps_relative: int | None = None,
    **kwargs,
  ):
    self.metrics_every, self.metrics_per_place = metrics_every, metrics_per_place
    self._samples: list[measure.Sample] = []  # those that are not written yet
    self._writes = asynclib.Pool(thread_name_prefix="Samples", max_workers=1)
    if not isinstance(model, SparseModel):
      raise ValueError(
        f"SparseTrainer got a {type(model).__name__}, which has no rules: MODEL = "
        "@t5x_adapter.SparseEncoderDecoderModel() or SparseDecoderOnlyModel()."
      )
    if train_steps_relative:
      raise ValueError(
        f"TRAIN_STEPS_RELATIVE={train_steps_relative}: T5X adds it to the restored step, so each "
        "restart adds a whole run. Leave it out; the run ends at PRETRAINED_STEPS + SPARSE_STEPS."
      )
    if train_state is not None:
      refuse_relative("MODEL_DIR", summary_dir)
      start = _checked_start(model, train_state, pretrained_steps, train_steps)
      if _is_new(train_state):
        train_state = _started(model, train_state, train_state_axes, partitioner, start)
    if train_state_axes is not None:
      model.know_shardings(partitioner.mesh, train_state_axes.params)
    super().__init__(
      model=model,
      train_state=train_state,
      partitioner=partitioner,
      summary_dir=summary_dir,
      train_state_axes=train_state_axes,
      **kwargs,
    )

  @functools.cached_property
  def _partitioned_train_step(self):
    def train_step(train_state, batch):
      return sparse_train_step(
        self._model,
        train_state,
        batch,
        learning_rate=self._learning_rate_fn(train_state.step),
        dropout_rng=self._get_step_rng(train_state.step),
        num_microbatches=self._num_microbatches,
        weight_metrics_computer=self._weight_metrics_computer,
        data_partition_spec=self._partitioner.data_partition_spec,
      )

    step = self._partitioner.partition(
      train_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),
    )
    return measure.beside(step, self, self._samples) if self.metrics_every else step

  def train(self, batch_iter, num_steps, start_step=None):
    """Trains as T5X's trainer does, then writes the samples of these steps in the background."""
    done = super().train(batch_iter, num_steps, start_step)
    if samples := self._samples.copy():
      self._samples.clear()
      self._writes(measure.write)(samples, self.train_metrics_manager.write_scalars)
    return done

  def close(self):
    """Writes what is left, and stops T5X's threads."""
    try:
      self._writes.close()
    finally:
      super().close()


def sparse_train_step(
  model,
  train_state,
  batch,
  learning_rate,
  dropout_rng,
  num_microbatches=None,
  weight_metrics_computer=None,
  **accumulate,
):
  """Returns (new train state, metrics): T5X's step with what this package adds to it.

  Args:
    model: of this package.
    train_state: before the step.
    batch: of the step.
    learning_rate: of the step.
    dropout_rng: of the step.
    num_microbatches: parts of the batch, one after the other; None = 1.
    weight_metrics_computer: T5X's, or None.
    **accumulate: as of T5X's `accumulate_grads_microbatched`.
  """
  rules, params = model.stored_rules, train_state.params
  step, state = model.read(train_state.flax_mutables)
  grads, found, flax_mutables = trainer.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, **accumulate
  )
  full = grads
  if any(recipe.lam for recipe in rules.places.values()):
    scale = loss_scale(model._loss_normalizing_factor, batch, num_microbatches)
    full = transform.add_sr_ste(grads, params, rules, step, state, scale)
  new, found = trainer.apply_grads(
    train_state,
    full,
    found,
    learning_rate,
    weight_metrics_computer,
    other_state_variables={"flax_mutables": flax_mutables},
  )
  step = step + _applied(model.optimizer_def, train_state, new)
  state = update_state(state, new.params, rules, step, grads, grads_at=params)
  return new.replace_flax_mutables(model.write(new.flax_mutables, step, state)), found


def loss_scale(loss_normalizing_factor, batch, num_microbatches: int | None = None) -> jax.Array:
  """Returns T5X's loss over the mean loss per target: what lambda is multiplied by.

  T5X's loss is sum(w * l) / F with weights w and a factor F, so it is sum(w) / F times the weighted
  mean of l. With F = None that is the number of target tokens. T5X sums the losses of
  microbatches; those that make a factor of their own from their tokens are added one by one.

  Args:
    loss_normalizing_factor: F, or T5X's name of a rule for it.
    batch: the whole batch.
    num_microbatches: parts that T5X cuts it into.
  """
  is_fixed = loss_normalizing_factor is None or isinstance(loss_normalizing_factor, int | float)
  parts = 1 if is_fixed else max(num_microbatches or 1, 1)
  size = len(batch["decoder_target_tokens"]) // parts

  def one(part):
    factor, weights = losses.get_loss_normalizing_factor_and_weights(loss_normalizing_factor, part)
    targets = part["decoder_target_tokens"].size if weights is None else jnp.sum(weights)
    return jnp.float32(targets) / jnp.float32(1 if factor is None else factor)

  slices = [{k: v[i * size : (i + 1) * size] for k, v in batch.items()} for i in range(parts)]
  return jnp.sum(jnp.stack([one(part) for part in slices]))


def _applied(optimizer_def, before, after):
  """Returns how many updates the optimizer applied between two train states: 1, or 0."""
  if isinstance(optimizer_def, optimizers.OptaxWrapper):
    try:
      return transform.step_count(after.param_states) - transform.step_count(before.param_states)
    except ValueError:  # a chain without a count
      pass
  return jnp.int32(1)


def _is_new(train_state) -> bool:
  """Returns whether no step of the sparse run was done yet."""
  return int(utils.get_local_data(train_state.flax_mutables[COLLECTION]["start"])) == UNKNOWN


def _checked_start(model, train_state, pretrained_steps, train_steps) -> int:
  """Returns the global step at which the sparse run starts; refuses what does not fit to it."""
  model.check(train_state)
  refuse_in_chain(train_state)
  kept = train_state.flax_mutables[COLLECTION]["start"]
  start = int(utils.get_local_data(train_state.step if _is_new(train_state) else kept))
  checkpoint_rules.check_steps(model.rules, start, pretrained_steps, train_steps)
  offset = getattr(getattr(model.optimizer_def, "hyper_params", None), "step_offset", start)
  if offset != start and jax.process_index() == 0:
    print(
      f"warning: Adafactor has step_offset={offset}, but its moments start at step {start}: name "
      "the model file before the run file, or adafactor.Adafactor.step_offset = %PRETRAINED_STEPS",
      flush=True,
    )
  return start


def _started(model, train_state, axes, partitioner, start):
  """Returns a new run's train state with masks of its weights.

  The masks that it has were made from initial weights; its weights may be restored ones.
  """

  def renew(params, mine):
    state = init_state(params, model.stored_rules)
    return freeze(model.collect(mine["step"], jnp.int32(start), state))

  mine_axes = axes.flax_mutables[COLLECTION]
  made = partitioner.partition(
    renew, in_axis_resources=(axes.params, mine_axes), out_axis_resources=mine_axes
  )(train_state.params, train_state.flax_mutables[COLLECTION])
  mutables = train_state.flax_mutables.copy({COLLECTION: made})
  return train_state.replace_flax_mutables(mutables)


def refuse_in_chain(train_state) -> None:
  """Refuses an optimizer with `optax.MultiSteps`, under which steps are not updates.

  Args:
    train_state: T5X's, of arrays or of shapes.
  """
  if transform.states(train_state.param_states, optax.MultiStepsState):
    raise ValueError(
      "the optimizer holds optax.MultiSteps, under which T5X's steps are not updates: TRAIN_STEPS "
      "would end the run in the middle of its schedule. Take it out and set "
      "t5x_adapter.SparseTrainer.num_microbatches, which accumulates gradients within a step."
    )
