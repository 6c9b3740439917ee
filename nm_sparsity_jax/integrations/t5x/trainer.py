"""The train step: T5X's gradients and T5X's update, with what sparsity needs between them.

batch -> gradients -> [+ SR-STE's term, once] -> T5X's update -> [- that term where it is decoupled]
-> [step + 1, stored masks]
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from flax.core import freeze
from t5x import losses, optimizers, trainer, utils

from nm_sparsity_jax.integrations.t5x import measure
from nm_sparsity_jax.integrations.t5x.models import COLLECTION, UNKNOWN
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
    model: what `sparse` returns.
    train_state: as of T5X's trainer; `t5x.eval` gives none.
    partitioner: as of T5X's trainer.
    train_state_axes: as of T5X's trainer.
    pretrained_steps: the global step at which the sparse run starts, to be checked; None = any.
    metrics_every: after every so many sparse steps `measure` takes what `metrics.summary` names,
      which is written under that step; None or 0 = never. The train step stays the same program.
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
    train_state_axes,
    pretrained_steps: int | None = None,
    metrics_every: int | None = None,
    train_steps: int | None = None,
    train_steps_relative: int | None = None,
    **kwargs,
  ):
    self.metrics_every = metrics_every
    if train_state is not None:
      # A checkpoint of this run knows where the run began; a new run begins at T5X's global step.
      start = int(utils.get_local_data(train_state.flax_mutables[COLLECTION]["start"]))
      if is_new := start == UNKNOWN:
        start = int(utils.get_local_data(train_state.step))
      checkpoint_rules.check_steps(
        model.rules, start, pretrained_steps, train_steps, train_steps_relative
      )
      offset = getattr(getattr(model.optimizer_def, "hyper_params", None), "step_offset", start)
      if offset != start:
        warnings.warn(
          f"Adafactor has step_offset={offset}, but its moments start at step {start}: name the "
          "model file before the run file.",
          stacklevel=2,
        )
      if is_new:
        train_state = _begin(model, train_state, train_state_axes, partitioner, start)
    if train_state_axes is not None:  # before T5X traces the step
      model.know_shardings(partitioner.mesh, train_state_axes.params)
    super().__init__(
      model=model,
      train_state=train_state,
      partitioner=partitioner,
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

    return self._partitioner.partition(
      train_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),  # as T5X: one train state on the device, not two
    )

  @functools.cached_property
  def measuring(self):
    """Returns the two programs that measure a sampled step."""
    return measure.programs(self)

  def train(self, batch_iter, num_steps, start_step=None):
    """Trains as T5X's trainer does; measures every `metrics_every` steps, and writes samples."""
    if not (every := self.metrics_every):
      return super().train(batch_iter, num_steps, start_step)
    compiled = self._compiled_train_step
    plain = compiled or self._partitioned_train_step
    before, after = self.measuring
    # The steps are counted here: to read one from the device would wait for it.
    mine = int(utils.get_local_data(self.train_state.flax_mutables[COLLECTION]["step"]))
    step = int(utils.get_local_data(self.train_state.step))
    samples = {}

    def sampled(train_state, batch):
      nonlocal mine, step
      mine, step = mine + 1, step + 1
      if mine % every:  # by far the most steps
        return plain(train_state, batch)
      seen = before(train_state, batch)  # the step takes the memory of its train state
      new, found = plain(train_state, batch)
      samples[step] = after(new, seen)
      return new, found

    self._compiled_train_step = sampled  # T5X prefers it to the step that is not compiled yet
    try:
      done = super().train(batch_iter, num_steps, start_step)
    finally:
      self._compiled_train_step = compiled
    # After the steps, since writing waits until the device has made the samples. Each has a step of
    # its own: T5X itself would write the mean of many steps under the last of them.
    for at, values in samples.items():
      scalars = {name: float(utils.get_local_data(x)) for name, x in values.items()}
      self.train_metrics_manager.write_scalars(at, scalars)
    return done


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
    model: what `sparse` returns.
    train_state: before the step.
    batch: of the step.
    learning_rate: of the step.
    dropout_rng: of the step.
    num_microbatches: parts of the batch, one after the other; None = 1.
    weight_metrics_computer: T5X's, or None.
    **accumulate: as of T5X's `accumulate_grads_microbatched`.
  """
  model = model.counted()
  rules, params = model.stored_rules, train_state.params
  step, state = model.read(train_state.flax_mutables)
  # Of all microbatches, at the effective weights of this step.
  grads, found, flax_mutables = trainer.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, **accumulate
  )
  full = grads
  if any(recipe.lam and not recipe.decoupled for recipe in rules.places.values()):
    # Here and not in the loss: a term in the loss would be added once per microbatch.
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
  # An optimizer may have skipped the update, as for gradients that are not finite.
  applied = _applied(model.optimizer_def, train_state, new)
  rate = learning_rate * applied
  decayed = transform.add_sr_ste(new.params, params, rules, step, state, -rate, decoupled=True)
  new, step = new.replace_params(decayed), step + applied
  # Without the term: snip scores |g * W|.
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

  def one(part):  # the sum of its weights over its factor
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


def _begin(model, train_state, axes, partitioner, start):
  """Returns the train state of a new run with its start, and with masks of its weights.

  The masks that it has were made from initial weights; its weights may be restored ones.
  """

  def renew(params, mine):
    state = init_state(params, model.stored_rules)
    return freeze(model.collect(mine["step"], jnp.int32(start), state))

  mine_axes = axes.flax_mutables[COLLECTION]
  # Partitioned, so that each device makes the masks of its shard of the weights.
  made = partitioner.partition(
    renew, in_axis_resources=(axes.params, mine_axes), out_axis_resources=mine_axes
  )(train_state.params, train_state.flax_mutables[COLLECTION])
  mutables = train_state.flax_mutables.copy({COLLECTION: made})
  return train_state.replace_flax_mutables(mutables)
