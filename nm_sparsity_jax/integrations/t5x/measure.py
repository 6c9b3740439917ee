"""Metrics of sampled steps, as separate programs beside the train step.

    a sampled step:   (train state, batch) -> [before] -> masks, Var(|g|)
                      (train state, batch) -> [the train step, as at every other step] -> new state
                      (new state, masks, Var(|g|)) -> [after] -> `Sample` -> [write] -> TensorBoard
    any other step:   the train step alone

The train step is the same program with metrics and without, so they change no bit of training.
The two others are compiled at the first sampled step. The gradient that they measure is computed
anew, by the same model from the same batch, dropout key and microbatches.

T5X writes the mean over many steps under the last of them. A sample is of one step, so it is kept
beside T5X's metrics and written under its own.
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import struct, traverse_util
from flax.core import unfreeze
from t5x import adafactor, trainer, utils

from nm_sparsity_jax.training import layers, metrics


@struct.dataclass
class Sample:
  """The metrics of one step, on the device.

  Attributes:
    step: T5X's global step after the update.
    is_applied: whether the optimizer applied the update; else there is nothing to write.
    values: name -> float32 scalar.
  """

  step: jax.Array
  is_applied: jax.Array
  values: dict[str, jax.Array]


def write(samples: Sequence[Sample], write_scalars: Callable[[int, dict[str, float]], None]):
  """Writes each sample under its own step; waits until the device has made it.

  Args:
    samples: to be written.
    write_scalars: (step, name -> value), as of T5X's `MetricsManager`.
  """
  for sample in samples:
    local: Sample = jax.tree.map(utils.get_local_data, sample)
    if local.is_applied:
      # n and m are 0 where the kernels of a rule have different patterns.
      is_pattern = lambda name: name.startswith(("nm/n/", "nm/m/"))
      found = {k: float(x) for k, x in local.values.items() if x or not is_pattern(k)}
      write_scalars(int(local.step), found)


def sparse_step(train_state) -> Any:
  """Returns the sparse step of a train state, an int32 scalar on the device."""
  return train_state.flax_mutables[layers.COLLECTION]["step"]


class SampledStep:
  """T5X's train step with metrics beside it; T5X calls and compiles it as any other.

  A step is sampled if the sparse step after it is a multiple of `every`. The host counts the steps,
  since reading the sparse step would wait for the device. It reads the step of a train state that
  it did not see made, and where its own count says that a step may be sampled: an optimizer may
  skip updates (`optax.apply_if_finite`), so the count can only be ahead.

  Args:
    plain: (train state, batch) -> (new train state, metrics): jitted, lowered or compiled.
    before: (train state, batch) -> what the update hides.
    after: (new train state, what `before` returned) -> `Sample`.
    every: steps from one sample to the next.
    taken: gets each `Sample`.
  """

  def __init__(
    self, plain: Any, before: Callable, after: Callable, every: int, taken: list[Sample]
  ):
    self.plain, self.before, self.after, self.taken = plain, before, after, taken
    self._every = every
    self._count = 0
    self._last: Any = None  # the sparse step, on the device, of the last train state seen

  def __call__(self, train_state, batch):
    is_due = self._is_due(train_state)
    seen = self.before(train_state, batch) if is_due else None
    new, found = self.plain(train_state, batch)
    if is_due:
      self.taken.append(self.after(new, seen))
    self._count += 1
    # Read again after a sampled step: if it skipped its update, the next one is sampled.
    self._last = None if is_due else sparse_step(new)
    return new, found

  def _is_due(self, train_state) -> bool:
    step = sparse_step(train_state)
    if step is not self._last or (self._count + 1) % self._every == 0:
      self._count = int(utils.get_local_data(step))
    return (self._count + 1) % self._every == 0

  def lower(self, *args, **kwargs):
    """Lowers the train step alone."""
    return self._with(self.plain.lower(*args, **kwargs))

  def compile(self, *args, **kwargs):
    """Compiles the train step alone, once it is lowered."""
    return self._with(self.plain.compile(*args, **kwargs))

  def _with(self, plain):
    made = copy.copy(self)
    made.plain = plain
    return made


def beside(step: Callable, trainer: Any, taken: list[Sample]) -> SampledStep:
  """Returns a train step with metrics beside it.

      nm/density, nm/density_target, nm/D    of the new weights at the new step
      nm/n/<rule>, nm/m/<rule>               the pattern, where all kernels of the rule share it
      nm/flip_rate/{all,kept}                from the masks before the update to those after
      nm/grad_abs_var/{all,kept}             of the step's gradient without SR-STE's term
      nm/second_moment_var/{all,kept}        of Adam's v, this gradient included
      nm/second_moment_var_factored/...      in its place under Adafactor: of the row times column
                                             estimate that it divides by

  All but flips and gradients can be had again from a checkpoint of that step. Where the optimizer
  keeps no second moment there is no name for it.

  Args:
    step: the partitioned train step.
    trainer: `SparseTrainer`; gradients are taken by its model, its keys and its microbatches.
    taken: gets each sample.
  """
  model, axes = trainer._model, trainer._train_state_axes
  partition, batch_spec = trainer._partitioner.partition, trainer._partitioner.data_partition_spec
  per_place = trainer.metrics_per_place
  by_path = traverse_util.flatten_dict(unfreeze(axes.params), sep="/")
  sparse = model.stored_rules.assign(model.made).places
  seen_axes = metrics.Before({path: by_path[path] for path in sparse}, None), None  # type: ignore

  def before(train_state, batch):
    key, parts = trainer._get_step_rng(train_state.step), trainer._num_microbatches
    return look_before(model, train_state, batch, key, parts, per_place, batch_spec)

  def after(train_state, seen):
    return look_after(model, train_state, seen, per_place)

  return SampledStep(
    step,
    partition(before, in_axis_resources=(axes, batch_spec), out_axis_resources=seen_axes),
    partition(after, in_axis_resources=(axes, seen_axes), out_axis_resources=None),
    trainer.metrics_every,
    taken,
  )


def look_before(
  model, train_state, batch, dropout_rng, num_microbatches=None, per_place=False, *spec
):
  """Returns (`metrics.Before` of a step, the sparse step).

  Args:
    model: of this package.
    train_state: before the update.
    batch: of the step.
    dropout_rng: of the step.
    num_microbatches: of the step.
    per_place: also each sparse kernel.
    *spec: how the batch is partitioned; none = T5X's default.
  """
  params = train_state.params
  now, state = model.read(train_state.flax_mutables)
  grads, _, _ = trainer.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, *spec
  )
  seen = metrics.before(params, model.stored_rules, now, state, grads, per_place=per_place)
  return seen, sparse_step(train_state)


def look_after(model, train_state, seen, per_place=False) -> Sample:
  """Returns the metrics of a step.

  Args:
    model: of this package.
    train_state: after the update.
    seen: what `look_before` returned.
    per_place: also each sparse kernel.
  """
  params, rules = train_state.params, model.stored_rules
  now, state = model.read(train_state.flax_mutables)
  moments = second_moments(model.optimizer_def, train_state, rules)
  before, was = seen
  found = metrics.summary(params, rules, now, state, None, moments, before, per_place=per_place)
  # The sum is a copy: the step itself is donated to the next train step.
  return Sample(train_state.step + 0, sparse_step(train_state) > was, found)


def second_moments(optimizer_def, train_state, rules) -> Any:
  """Returns second moments for `metrics.summary`: an optax state, or T5X's Adafactor rebuilt."""
  states = train_state.param_states
  if not isinstance(optimizer_def, adafactor.Adafactor):
    return states
  kept = traverse_util.flatten_dict(unfreeze(states), sep="/")
  places = rules.assign(train_state.params).places
  dims = {path: factored_dims(optimizer_def, path, p.shape) for path, p in places.items()}
  nu = {path: estimate(kept[path], d) for path, d in dims.items()}
  return metrics.SecondMoments(nu, [path for path, factored in dims.items() if factored])


def factored_dims(optimizer_def, path, shape):
  """Returns (axes of the rows, axes of the columns) by which Adafactor factors, or None."""
  settings = optimizer_def.hyper_params
  rule = settings.factor_map[path] if settings.factor_map else adafactor.HEURISTIC_RULE
  rule = rule if settings.factored else None
  dims = optimizer_def._parse_rule(rule, shape, path)[1]
  return optimizer_def._factored_dims(shape) if dims is adafactor.HEURISTIC_RULE else dims


def estimate(kept, dims):
  """Returns v as Adafactor divides by it: whole, or the outer product of its means."""
  return metrics.adafactor_estimate(kept.v_row, kept.v_col, *dims) if dims else kept.v
