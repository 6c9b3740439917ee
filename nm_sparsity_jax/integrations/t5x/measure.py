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

import dataclasses
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
    values: name -> float32 scalar.
    counts: name -> False where there is nothing to write.
  """

  step: jax.Array
  values: dict[str, jax.Array]
  counts: dict[str, jax.Array]


def write(samples: Sequence[Sample], write_scalars: Callable[[int, dict[str, float]], None]):
  """Writes each sample under its own step; waits until the device has made it.

  Args:
    samples: to be written.
    write_scalars: (step, name -> value), as of T5X's `MetricsManager`.
  """
  for sample in samples:
    local: Sample = jax.tree.map(utils.get_local_data, sample)
    found = {name: float(x) for name, x in local.values.items() if local.counts[name]}
    if found:
      write_scalars(int(local.step), found)


class Clock:
  """Knows on the host which steps are sampled.

  It counts the steps that it sees, and reads the sparse step from the device where it must: of a
  train state that it did not see made, and where its own count says that a step may be sampled.
  An optimizer may skip updates (`optax.apply_if_finite`), so the count can only be ahead.

  Args:
    every: a step is sampled if the sparse step after it is a multiple of this.
  """

  def __init__(self, every: int):
    self._every = every
    self._count = 0
    self._last: Any = None  # the sparse step, on the device, of the last train state seen

  def is_due(self, train_state) -> bool:
    """Returns whether the step from this train state is sampled."""
    step = sparse_step(train_state)
    if step is not self._last or self._would_be():
      self._count = int(utils.get_local_data(step))
    return self._would_be()

  def passed(self, train_state, was_due: bool) -> None:
    """Notes the train state that the step made."""
    self._count += 1
    # Read again after a sampled step: if it skipped its update, the next one is sampled.
    self._last = None if was_due else sparse_step(train_state)

  def _would_be(self):
    return (self._count + 1) % self._every == 0


def sparse_step(train_state) -> Any:
  """Returns the sparse step of a train state, an int32 scalar on the device."""
  return train_state.flax_mutables[layers.COLLECTION]["step"]


@dataclasses.dataclass(frozen=True)
class SampledStep:
  """T5X's train step with metrics beside it; T5X calls and compiles it as any other.

  Attributes:
    plain: (train state, batch) -> (new train state, metrics): jitted, lowered or compiled.
    before: (train state, batch) -> what the update hides.
    after: (new train state, what `before` returned) -> `Sample`.
    clock: says which steps are sampled.
    taken: gets each `Sample`.
  """

  plain: Any
  before: Callable
  after: Callable
  clock: Clock
  taken: list[Sample]

  def __call__(self, train_state, batch):
    is_due = self.clock.is_due(train_state)
    seen = self.before(train_state, batch) if is_due else None
    new, found = self.plain(train_state, batch)
    if is_due:
      self.taken.append(self.after(new, seen))
    self.clock.passed(new, is_due)
    return new, found

  def lower(self, *args, **kwargs):
    """Lowers the train step alone."""
    return dataclasses.replace(self, plain=self.plain.lower(*args, **kwargs))

  def compile(self, *args, **kwargs):
    """Compiles the train step alone, once it is lowered."""
    return dataclasses.replace(self, plain=self.plain.compile(*args, **kwargs))

  def __getattr__(self, name):  # such as cost_analysis, of what was compiled
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(self.plain, name)


def beside(
  step: Callable,
  every: int,
  model,
  axes,
  partitioner,
  step_rng,
  num_microbatches,
  per_place: bool,
  taken: list[Sample],
) -> SampledStep:
  """Returns a train step with metrics beside it.

      nm/density, nm/density_target, nm/D    of the new weights at the new step
      nm/n/<rule>, nm/m/<rule>               the pattern, where all places of the rule share it
      nm/flip_rate/{all,kept}                from the masks before the update to those after
      nm/grad_abs_var/{all,kept}             of the step's gradient without SR-STE's term
      nm/second_moment_var/{all,kept}        of Adam's v, this gradient included
      nm/second_moment_var_factored/...      in its place under Adafactor: of the row times column
                                             estimate that it divides by

  All but flips and gradients can be had again from a checkpoint of that step. Where the optimizer
  keeps no second moment there is no name for it.

  Args:
    step: the partitioned train step.
    every: it is sampled where the new sparse step is a multiple of this.
    model: of this package.
    axes: mesh axes of the train state.
    partitioner: T5X's.
    step_rng: global step -> key of dropout, as the train step's.
    num_microbatches: as of the train step.
    per_place: also `<name>/<path>` for each sparse kernel.
    taken: gets each sample.
  """
  batch_spec = partitioner.data_partition_spec
  by_path = traverse_util.flatten_dict(unfreeze(axes.params), sep="/")
  places = model.stored_rules.assign(model.made).places
  seen_axes = metrics.Before({path: by_path[path] for path in places}, None), None  # type: ignore

  def before(train_state, batch):
    key = step_rng(train_state.step)
    return look_before(model, train_state, batch, key, num_microbatches, per_place, batch_spec)

  return SampledStep(
    plain=step,
    before=partitioner.partition(
      before, in_axis_resources=(axes, batch_spec), out_axis_resources=seen_axes
    ),
    after=partitioner.partition(
      lambda train_state, seen: look_after(model, train_state, seen, per_place),
      in_axis_resources=(axes, seen_axes),
      out_axis_resources=None,
    ),
    clock=Clock(every),
    taken=taken,
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
  now, state = model.read(params, train_state.flax_mutables)
  grads, _, _ = trainer.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, *spec
  )
  seen = metrics.before(params, model.stored_rules, now, state, grads, per_place=per_place)
  return seen, sparse_step(train_state)


def look_after(model, train_state, seen, per_place=False) -> Sample:
  """Returns the metrics of a step; none of them counts where its update was skipped.

  Args:
    model: of this package.
    train_state: after the update.
    seen: what `look_before` returned.
    per_place: also each sparse kernel.
  """
  params, rules = train_state.params, model.stored_rules
  now, state = model.read(params, train_state.flax_mutables)
  moments = second_moments(model.optimizer_def, train_state, rules)
  masks, was = seen
  found = metrics.after(params, rules, now, state, masks, moments, per_place=per_place)
  is_applied = sparse_step(train_state) > was

  def counts(name, value):
    # A rule without one pattern for all of its places has none to write.
    return is_applied & (value != 0) if name.startswith(("nm/n/", "nm/m/")) else is_applied

  # The sum is a copy: the step itself is given away to the next train step.
  step = train_state.step + 0
  return Sample(step, found, {name: counts(name, value) for name, value in found.items()})


def second_moments(optimizer_def, train_state, rules) -> Any:
  """Returns second moments for `metrics.after`: an optax state, or T5X's Adafactor rebuilt."""
  states = train_state.param_states
  if not isinstance(optimizer_def, adafactor.Adafactor):
    return states
  kept = traverse_util.flatten_dict(unfreeze(states), sep="/")
  places = rules.assign(train_state.params).places
  dims = {path: factored_dims(optimizer_def, path, p.shape) for path, p in places.items()}
  nu = {path: estimate(kept[path], d) for path, d in dims.items()}
  return metrics.SecondMoments(nu, any(dims.values()))


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
