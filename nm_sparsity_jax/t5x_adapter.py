"""T5X: models and a trainer that carry the sparse step, the masks and the rules in `flax_mutables`.

    params + flax_mutables/nm_sparsity -> [model: W~ of that step] -> loss, decode, score
    gradients -> [trainer: + SR-STE's term, once] -> T5X's update -> [step + 1, masks] -> checkpoint

T5X saves, restores, shards and hands out `flax_mutables` in train, eval and infer alike, so a
checkpoint knows itself:

    nm_sparsity/step               int32 scalar, updates that the sparse run has applied
    nm_sparsity/start              int32 scalar, the global step before the first of them
    nm_sparsity/rules              uint8[4096], the text of the rules, deflated and padded
    nm_sparsity/mask, score, seen  what `apply.init_state` keeps, sharded as the parameters

The one module that imports T5X. It needs no change there.
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import tensorflow as tf
from absl import logging
from clu import metrics as clu_metrics
from clu.data import dataset_iterator
from etils import epath
from flax import struct, traverse_util
from flax.core import freeze, unfreeze
from flax.linen import partitioning
from t5x import adafactor, losses, models, optimizers, state_utils, trainer, utils

from nm_sparsity_jax import apply, configure, layers, metrics, optim
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.trees import flatten

COLLECTION = layers.COLLECTION
UNKNOWN = -1  # the start of a run that has not begun

# T5X shards an optax state by a table of known types; ours hold a replicated count.
optimizers.OptaxStatePartitionRules._RULES.update(
  {
    optim.CountStepsState: lambda state, axes: optim.CountStepsState(count=None),  # type: ignore
    optim.SrSteState: lambda state, axes: optim.SrSteState(count=None),  # type: ignore
  }
)


class _SparseModel(models.BaseTransformerModel):
  """What both models share; stands before T5X's class in the bases.

  `module` is always the dense network. Where it can have sparse layers (its config has a field
  `rules`), the loss runs them, so that masks live in the layer's own scan and remat; prediction
  and scoring make the effective parameters once a batch. Every other network gets effective
  parameters throughout.
  """

  def __init__(self, *args, rules: Rules | None = None, **kwargs):
    super().__init__(*args, **kwargs)
    config: Any = getattr(self.module, "config", None)
    self._sparse_layers = hasattr(config, "rules")
    inner = config.rules if self._sparse_layers else None
    if rules is not None and inner is not None and rules != inner:
      raise ValueError(
        f"the model and its network have different rules: {configure.describe(rules)!r} and "
        f"{configure.describe(inner)!r}. Give them to the model only."
      )
    rules = inner if rules is None else rules
    if rules is None:
      raise ValueError(
        f"{type(self).__name__} needs rules=, what is sparse and how: nms.Rules, or in gin "
        "rules = @configure.rules(). For a dense run take T5X's own model, or RECIPE = 'dense'."
      )
    if inner is not None:
      self.module = self.module.clone(config=dataclasses.replace(config, rules=None))
    self.rules = rules
    self._text = configure.pack(configure.describe(rules))
    self._made: Mapping[str, Any] = {}
    # Known from get_initial_variables on, which T5X calls first: shapes and dtypes, the axes of
    # stacked kernels, and the variables that sparse layers read.
    self.stored_rules = rules
    self._layer_variables: Mapping[str, Any] = {}

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """T5X's, and the collection `nm_sparsity` at step 0."""
    variables = super().get_initial_variables(rng, input_shapes, input_types)
    variables = unfreeze(variables)
    params, axes = variables["params"], variables.get("params_axes")
    self.stored_rules = self.rules.with_logical_axes(axes) if axes else self.rules
    self._made = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flatten(params)}
    if self._sparse_layers:
      told = copy.copy(self)
      told.module = self._with_layers()
      init = super(_SparseModel, told).get_initial_variables
      shapes = jax.eval_shape(lambda: init(jax.random.PRNGKey(0), input_shapes, input_types))
      self._layer_variables = {k: v for k, v in shapes.items() if k == COLLECTION}
    state = apply.init_state(params, self.stored_rules)
    mine = self._collect(jnp.int32(0), jnp.int32(UNKNOWN), state)
    variables[COLLECTION] = mine
    if axes:
      variables[f"{COLLECTION}_axes"] = _axes_like(mine, axes)
    return freeze(variables)

  def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
    """The loss at the step that `flax_mutables` holds."""
    step, state = self.read(params, flax_mutables)
    if not self._sparse_layers:
      params = apply.sparsify(params, self.stored_rules, step, state)
      loss, metrics = super().loss_fn(params, batch, dropout_rng)
    else:
      told = copy.copy(self)
      known = layers.with_step(self._layer_variables, step, state) if self._layer_variables else {}
      told.module = _Told(self._with_layers(), known)
      loss, metrics = super(_SparseModel, told).loss_fn(params, batch, dropout_rng)
    return loss, (metrics, flax_mutables)

  def eval_fn(self, params, batch, flax_mutables=None):
    """The loss without dropout."""
    loss, (metrics, _) = self.loss_fn(params, batch, None, flax_mutables)
    return loss, metrics

  def predict_batch(self, params, batch, rng=None, *, flax_mutables=None):
    """Decodes with the effective weights of the step in `flax_mutables`."""
    return self.predict_batch_with_aux(params, batch, rng, flax_mutables=flax_mutables)[0]

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None, **kwargs):
    """The same, with scores."""
    params = self.effective(params, flax_mutables)
    return super().predict_batch_with_aux(params, batch, rng, **kwargs)

  def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
    """Log likelihoods, of the effective weights of the step in `flax_mutables`."""
    return super().score_batch(self.effective(params, flax_mutables), batch, return_intermediates)

  def effective(self, params, flax_mutables):
    """Parameters for the dense network at the step that `flax_mutables` holds."""
    return apply.sparsify(params, self.stored_rules, *self.read(params, flax_mutables))

  def read(self, params, flax_mutables) -> tuple[jax.Array, apply.State]:
    """The step and the stored masks in `flax_mutables`.

    Under jit, where no value can be looked at, foreign rules give step -1: every loss is NaN then.
    """
    mine = (flax_mutables or {}).get(COLLECTION)
    if mine is None:
      raise ValueError(
        f"no {COLLECTION!r} in flax_mutables, so the sparse step is unknown. T5X passes it from a "
        "train state of this model; called by hand, pass flax_mutables=train_state.flax_mutables."
      )
    arrays = dict(flatten(params))
    for path in self.stored_rules.assign(params).places:
      is_now, made = arrays[path].dtype, self._made.get(path)
      if made is not None and is_now != made.dtype:
        raise ValueError(
          f"{path!r} was restored as {is_now}, but masks are taken from {made.dtype}: "
          "rounding changes which weights survive. Set RestoreCheckpointConfig.dtype = 'float32' "
          "(T5X's infer.gin says 'bfloat16')."
        )
    stored = mine["rules"]
    if not isinstance(stored, jax.core.Tracer):
      self._refuse_other_rules(stored)
    step = jnp.where(jnp.all(stored == jnp.asarray(self._text)), mine["step"], jnp.int32(-1))
    kept = {k: v for k, v in mine.items() if k not in ("step", "start", "rules")}
    return step, {"step": mine["step"], **kept} if kept else {}

  def write(self, flax_mutables, step, state):
    """`flax_mutables` with a new step and new masks."""
    start = flax_mutables[COLLECTION]["start"]
    return flax_mutables.copy({COLLECTION: freeze(self._collect(step, start, state))})

  def check(self, train_state) -> None:
    """Refuses a restored train state that this model did not make, and names both."""
    for path, x in flatten(train_state.params):
      made = self._made.get(path)
      if made is not None and x.shape != made.shape:
        raise ValueError(
          f"{path!r} was restored with the shape {x.shape}, but the network has {made.shape}: the "
          "checkpoint is of a model of another size. Take the model file that it was trained with."
        )
    self.read(train_state.params, train_state.flax_mutables)

  def _collect(self, step, start, state):
    kept = {k: v for k, v in state.items() if k != "step"}
    return {"step": step, "start": start, "rules": jnp.asarray(self._text), **unfreeze(kept)}

  def _refuse_other_rules(self, stored):
    stored = np.asarray(utils.get_local_data(stored))
    if not np.array_equal(stored, self._text):
      raise ValueError(
        f"the checkpoint was trained with the rules\n{configure.unpack(stored)}\nbut this run "
        f"has\n{configure.unpack(self._text)}\nGo on with the former; for a new run with the "
        "latter, take another MODEL_DIR and name the checkpoint as INITIAL_CHECKPOINT_PATH."
      )

  def _with_layers(self):
    """The network with its own sparse layers."""
    return self.module.clone(config=dataclasses.replace(self.module.config, rules=self.rules))


@dataclasses.dataclass(frozen=True)
class _Told:
  """A module whose `apply` knows more variables than its caller."""

  module: Any
  variables: Mapping[str, Any]

  def apply(self, variables, *args, **kwargs):
    return self.module.apply({**variables, **self.variables}, *args, **kwargs)


class SparseEncoderDecoderModel(_SparseModel, models.EncoderDecoderModel):
  """T5X's encoder-decoder model with sparse weights; one argument more, `rules`.

  Args:
    rules: what is sparse, and how.
    **kwargs: as of T5X's model.
  """


class SparseDecoderOnlyModel(_SparseModel, models.DecoderOnlyModel):
  """T5X's decoder-only model with sparse weights; one argument more, `rules`.

  Args:
    rules: what is sparse, and how.
    **kwargs: as of T5X's model.
  """


class SparseTrainer(trainer.Trainer):
  """T5X's trainer; its train step also adds SR-STE's term, counts, and refreshes stored masks.

  The sparse step goes up by the updates that the optimizer applied: its own count after less
  its count before (0 while `optax.MultiSteps` gathers), or 1 where it keeps none, as Adafactor.
  So it starts at 0 whatever the global step and whatever count an optimizer state brought along.

  Args:
    pretrained_steps: the global step at which the sparse run starts, to be checked; None = any.
    metrics_every: after every so many sparse steps `measure` adds what `metrics.summary` names to
      T5X's own metrics; None or 0 = never.
    metrics_per_place: also for each sparse kernel.
    **kwargs: as of T5X's trainer.
  """

  def __init__(
    self,
    model,
    train_state,
    partitioner,
    eval_names,
    summary_dir,
    train_state_axes,
    rng,
    learning_rate_fn,
    num_microbatches,
    weight_metrics_computer=None,
    pretrained_steps: int | None = None,
    metrics_every: int | None = None,
    metrics_per_place: bool = False,
  ):
    if metrics_every and metrics_every < 0:
      raise ValueError(f"metrics_every={metrics_every}: a number of steps, or None for never.")
    self._metrics = {"metrics_every": metrics_every, "metrics_per_place": metrics_per_place}
    if not isinstance(model, _SparseModel):
      raise ValueError(
        f"SparseTrainer got a {type(model).__name__}, which has no rules: MODEL = "
        "@t5x_adapter.SparseEncoderDecoderModel() or SparseDecoderOnlyModel()."
      )
    if train_state is not None:  # t5x.eval gives none yet
      train_state = _begin(model, train_state, train_state_axes, partitioner, pretrained_steps)
    super().__init__(
      model=model,
      train_state=train_state,
      partitioner=partitioner,
      eval_names=eval_names,
      summary_dir=summary_dir,
      train_state_axes=train_state_axes,
      rng=rng,
      learning_rate_fn=learning_rate_fn,
      num_microbatches=num_microbatches,
      weight_metrics_computer=weight_metrics_computer,
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
        **self._metrics,
        data_partition_spec=self._partitioner.data_partition_spec,
      )

    return self._partitioner.partition(
      train_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),
    )


def sparse_train_step(
  model,
  train_state,
  batch,
  learning_rate,
  dropout_rng,
  num_microbatches=None,
  weight_metrics_computer=None,
  metrics_every=None,
  metrics_per_place=False,
  **accumulate,
):
  """One step: T5X's gradients and T5X's update, with the three things of this package between."""
  rules, params = model.stored_rules, train_state.params
  step, state = model.read(params, train_state.flax_mutables)
  grads, found, flax_mutables = trainer.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, **accumulate
  )
  if metrics_every:
    is_due = (step + 1) % metrics_every == 0
    seen, grads = _look(is_due, params, rules, step, state, grads, metrics_per_place)
  full = grads
  if any(recipe.lam for recipe in rules.places.values()):
    scale = loss_scale(model._loss_normalizing_factor, batch, num_microbatches)
    full = optim.add_sr_ste(grads, params, rules, step, state, scale)
  new, found = trainer.apply_grads(
    train_state,
    full,
    found,
    learning_rate,
    weight_metrics_computer,
    other_state_variables={"flax_mutables": flax_mutables},
  )
  applied = _applied(model.optimizer_def, train_state, new)
  step = step + applied
  state = apply.update_state(state, new.params, rules, step, grads, grads_at=params)
  if metrics_every:
    is_due &= applied > 0
    found |= measure(is_due, model, new, step, state, *seen, per_place=metrics_per_place)
    found = _Written(found)
  return new.replace_flax_mutables(model.write(new.flax_mutables, step, state)), found


@struct.dataclass
class Sampled(clu_metrics.Metric):
  """The mean over the sampled steps of a summary; `_Written` leaves it out where there was none."""

  total: jax.Array
  count: jax.Array

  def merge(self, other):
    return type(self)(self.total + other.total, self.count + other.count)

  def compute(self):
    return self.total / self.count


@jax.tree_util.register_pytree_node_class
class _Written(dict):
  """Metrics of which `items`, what T5X writes, has only those that were sampled."""

  def items(self):
    unsampled = lambda v: isinstance(v, Sampled) and not v.count
    return [(k, v) for k, v in super().items() if not unsampled(v)]

  def tree_flatten(self):
    names = tuple(sorted(self))
    return [self[k] for k in names], names

  @classmethod
  def tree_unflatten(cls, names, values):
    return cls(zip(names, values, strict=True))


def _look(is_due, params, rules, step, state, grads, per_place):
  """What only the weights before the update can tell: (masks, variances of gradients), gradients.

  What it leaves is one bool per sparse weight. The gradients come back as they were, but only
  after the look: so the update reuses the memory of the weights, else XLA would copy them first.
  """

  def look():
    named = metrics.summary(params, rules, step, state, grads, per_place=per_place)
    variances = {k: v for k, v in named.items() if k.startswith("nm/grad")}
    return metrics.masks_of(params, rules, step, state), variances

  seen = _if(is_due, look)
  # 1: no variance is negative, but XLA does not know. (Not every backend keeps a barrier.)
  one = jnp.where(seen[1]["nm/grad_abs_var/all"] < 0, 2.0, 1.0)
  return seen, jax.tree.map(lambda g: g * one.astype(g.dtype), grads)


def measure(is_due, model, train_state, step, state, masks_before, variances, *, per_place=False):
  """Metrics of a new train state, and of the step that led to it: name -> `Sampled`.

      nm/density, nm/density_target, nm/D    of the new weights at the new step
      nm/n/<rule>, nm/m/<rule>               the pattern, where all places of the rule share it
      nm/flip_rate/{all,kept}                from the masks before the update to those after
      nm/grad_abs_var/{all,kept}             of the step's gradient without SR-STE's term
      nm/second_moment_var/{all,kept}        of Adam's v, this gradient included
      nm/second_moment_var_factored/...      in its place under Adafactor: of the row times column
                                             estimate that it divides by

  All but flips and gradients can be had again from a checkpoint of that step. Where the optimizer
  keeps no second moment there is no name for it. With `per_place` also `<name>/<path>`.
  """
  rules = model.stored_rules
  places = rules.assign(train_state.params).places
  kind, moments = _second_moments(model.optimizer_def, train_state.param_states, places)

  def look():
    params, v = train_state.params, moments()
    named = metrics.summary(params, rules, step, state, None, v, masks_before, per_place=per_place)
    named = {k.replace("second_moment_var", kind): v for k, v in {**named, **variances}.items()}
    out = {k: Sampled(v, jnp.int32(1)) for k, v in named.items()}
    for rule, (pattern, shared) in metrics.rule_patterns(params, rules, step).items():
      for name, x in pattern._asdict().items():
        out[f"nm/{name}/{rule}"] = Sampled(x.astype(jnp.float32), shared.astype(jnp.int32))
    return out

  return _if(is_due, look)


def _if(is_due, function):
  """What the function returns, or zeros."""
  shapes = jax.eval_shape(function)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.cond(is_due, function, zeros)


class _Moments(NamedTuple):
  """An optimizer state as `metrics.second_moments` reads it."""

  nu: Mapping[str, jax.Array]


def _second_moments(optimizer_def, states, places):
  """Their name, and a function that gives them for all sparse kernels, or None."""
  if isinstance(optimizer_def, adafactor.Adafactor):
    kept = traverse_util.flatten_dict(unfreeze(states), sep="/")
    dims = {path: _factored_dims(optimizer_def, path, p.shape) for path, p in places.items()}
    kind = "second_moment_var_factored" if any(dims.values()) else "second_moment_var"
    return kind, lambda: _Moments({p: _estimate(kept[p], d) for p, d in dims.items()})
  try:
    found = metrics.second_moments(states)
  except ValueError:  # none, or two of one weight
    found = {}
  is_whole = bool(found) and set(places) <= set(found)
  return "second_moment_var", lambda: _Moments(found) if is_whole else None


def _factored_dims(optimizer_def, path, shape):
  """(axes of the rows, axes of the columns) by which Adafactor factors, or None."""
  settings = optimizer_def.hyper_params
  rule = settings.factor_map[path] if settings.factor_map else adafactor.HEURISTIC_RULE
  rule = rule if settings.factored else None
  dims = optimizer_def._parse_rule(rule, shape, path)[1]
  return optimizer_def._factored_dims(shape) if dims is adafactor.HEURISTIC_RULE else dims


def _estimate(kept, dims):
  """v as Adafactor divides by it: whole, or the outer product of its means."""
  return metrics.adafactor_estimate(kept.v_row, kept.v_col, *dims) if dims else kept.v


def loss_scale(loss_normalizing_factor, batch, num_microbatches: int | None = None) -> jax.Array:
  """T5X's loss over the mean loss per target: what lambda is multiplied by.

  T5X's loss is sum(w * l) / F with weights w and a factor F, so it is sum(w) / F times the weighted
  mean of l. With F = None that is the number of target tokens. T5X sums the losses of
  microbatches; those that make a factor of their own from their tokens are added one by one.
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


def require_sparse(checkpoint, model_state):
  """Refuses a dense checkpoint: `state_transformation_fns` of the restore in eval and infer."""
  if COLLECTION not in checkpoint.get("flax_mutables", {}):
    raise ValueError(
      "this checkpoint is dense: it has no flax_mutables/nm_sparsity, so no sparse step. Evaluate "
      "it with T5X's own model, or fine-tune it first (runs/t5x_finetune.gin)."
    )
  return _with_the_same_masks(checkpoint, model_state)


def resume_sparse(checkpoint, model_state, *, fresh: str = "", is_resuming: bool = False):
  """The same for training: a sparse run may start from a dense checkpoint, but not resume one.

  What it starts from must have every parameter; T5X's `fallback_to_scratch`, which a dense
  checkpoint needs for the rest of the train state, would draw a missing one at random.

  Args:
    checkpoint: what was read, after T5X's assignment map.
    model_state: what the run needs.
    fresh: a regex of parameters, such as 'decoder/logits_dense/.*', that may be drawn.
    is_resuming: whether the checkpoint is one of this run; T5X says so.
  """
  if not is_resuming:
    _refuse_missing(checkpoint, model_state, fresh)
    return checkpoint
  if COLLECTION not in checkpoint.get("flax_mutables", {}):
    raise ValueError(
      "MODEL_DIR holds checkpoints of a dense run, and T5X would resume that one. Take an empty "
      "MODEL_DIR and name the dense checkpoint as INITIAL_CHECKPOINT_PATH."
    )
  return _with_the_same_masks(checkpoint, model_state)


def _refuse_missing(checkpoint, model_state, fresh):
  wanted, has = (state_utils.flatten_state_dict(x["target"]) for x in (model_state, checkpoint))
  if lost := [name for name in wanted if name not in has and not re.fullmatch(fresh, name)]:
    raise ValueError(
      f"the checkpoint has no {', '.join(lost[:3])}"
      f"{f', nor {len(lost) - 3} more' if lost[3:] else ''}, which would start from random values. "
      "Take the model file that it was trained with, map names by assignment_map, or allow it: "
      "t5x_adapter.resume_sparse.fresh = 'a regex of parameters'."
    )


def _with_the_same_masks(checkpoint, model_state):
  """The text of other rules is refused once it is read; without these masks it never would be."""
  names = lambda tree: set(state_utils.flatten_state_dict(tree["flax_mutables"]))
  if missing := sorted(names(model_state) - names(checkpoint)):
    raise ValueError(
      f"the checkpoint was trained with other rules: this run keeps {', '.join(missing[:3])}"
      f"{' and more' if missing[3:] else ''}, and the checkpoint has none. Its rules are in the "
      "config.gin beside it; for a new run take another MODEL_DIR."
    )
  return checkpoint


def get_dataset(cfg, shard_id, num_shards, feature_converter_cls, *, model_dir: str, **kwargs):
  """T5X's training data, of which only the checkpoints in `model_dir` know the position.

  With `SaveCheckpointConfig.save_dataset` T5X asks every checkpoint for it, the dense one that a
  run starts from too: there it is absent, or the position in other data.
  """
  data = utils.get_dataset(cfg, shard_id, num_shards, feature_converter_cls, **kwargs)
  return _OwnPosition(data, model_dir) if isinstance(data, tf.data.Dataset) else data


class _OwnPosition(dataset_iterator.TfDatasetIterator):
  """A data iterator that restores its position from the checkpoints of one directory only."""

  def __init__(self, dataset, model_dir):
    super().__init__(dataset, checkpoint=True)
    self._model_dir = epath.Path(model_dir)

  def restore(self, filename):
    if self._model_dir in epath.Path(filename).parents:
      super().restore(filename)
    else:
      logging.info("A new run: data from the beginning, not from the position in %s.", filename)


class SparseTrainStateInitializer(utils.TrainStateInitializer):
  """T5X's, but a restored train state is checked against the model: for t5x.eval and t5x.infer.

  (`SparseTrainer` checks what it is given.)
  """

  def __init__(self, optimizer_def, init_fn, input_shapes, partitioner, input_types=None):
    super().__init__(optimizer_def, init_fn, input_shapes, partitioner, input_types)
    self.global_train_state_shape = _CheckedState(
      self.global_train_state_shape, init_fn.__self__.check
    )


class _CheckedState:
  """A train state of shapes, whose `restore_state` checks what comes out."""

  def __init__(self, state, check):
    self._state, self._check = state, check

  def __getattr__(self, name):
    return getattr(self._state, name)

  def restore_state(self, state_dict):
    restored = self._state.restore_state(state_dict)
    self._check(restored)
    return restored


def _begin(model, train_state, axes, partitioner, pretrained_steps):
  """The first train state of this process, checked; a new run's with masks of its weights."""
  model.check(train_state)
  _refuse_in_chain(train_state)
  local = lambda x: int(utils.get_local_data(x))
  mine = train_state.flax_mutables[COLLECTION]
  step, start, now = local(mine["step"]), local(mine["start"]), local(train_state.step)
  is_new = start == UNKNOWN
  start = now if is_new else start
  ends = {r.phases.total for r in model.rules.places.values() if r.phases}
  logging.info("%s", model.stored_rules.assign(train_state.params))
  logging.info("Sparse step %d; sparse step 0 is global step %d; ends at %s", step, start, ends)
  if pretrained_steps is not None and start != pretrained_steps:
    raise ValueError(
      f"PRETRAINED_STEPS={pretrained_steps}, but the sparse run starts at global step {start}: "
      f"it would end at another step than its schedule. Set PRETRAINED_STEPS={start}."
    )
  if not is_new:
    return train_state

  # The masks of a new state were made from initial weights; these may be restored ones.
  def renew(params, mine):
    state = apply.init_state(params, model.stored_rules)
    return freeze(model._collect(mine["step"], jnp.int32(start), state))

  mine_axes = axes.flax_mutables[COLLECTION]
  made = partitioner.partition(
    renew, in_axis_resources=(axes.params, mine_axes), out_axis_resources=mine_axes
  )(train_state.params, mine)
  mutables = train_state.flax_mutables.copy({COLLECTION: made})
  return train_state.replace_flax_mutables(mutables)


def _refuse_in_chain(train_state):
  def has(kind):
    is_one = lambda x: isinstance(x, kind)
    leaves = jax.tree_util.tree_leaves(train_state.param_states, is_leaf=is_one)
    return any(map(is_one, leaves))

  if has(optim.SrSteState):
    raise ValueError(
      "the optimizer chain holds nms.sr_ste, but in T5X the trainer adds SR-STE's term, for every "
      "optimizer: it would act twice. Take it out of the chain."
    )
  if has(optax.MultiStepsState):
    raise ValueError(
      "the optimizer holds optax.MultiSteps, under which T5X's steps are not updates: TRAIN_STEPS "
      "would end the run in the middle of its schedule. Take it out and set "
      "t5x_adapter.SparseTrainer.num_microbatches, which accumulates gradients within a step."
    )


def _applied(optimizer_def, before, after):
  """How many updates the optimizer applied from one train state to the next: 1, or 0."""
  if isinstance(optimizer_def, optimizers.OptaxWrapper):
    try:
      return optim.step_count(after.param_states) - optim.step_count(before.param_states)
    except ValueError:  # a chain without a count
      pass
  return jnp.int32(1)


def _axes_like(mine, params_axes):
  """Logical axes of the collection: masks and scores as their parameters, the rest replicated."""
  names = dict(flatten_axes(params_axes))
  axes = {}
  for path, leaf in flatten(mine):
    kind, _, rest = path.partition("/")
    found = names[f"{rest}_axes"] if kind in ("mask", "score") else (None,) * leaf.ndim
    axes[f"{path}_axes"] = partitioning.AxisMetadata(names=found)
  return traverse_util.unflatten_dict(axes, sep="/")


def flatten_axes(params_axes):
  """(path, names) of a tree of flax's AxisMetadata."""
  is_leaf = lambda x: isinstance(x, partitioning.AxisMetadata)
  leaves, _ = jax.tree_util.tree_flatten_with_path(params_axes, is_leaf=is_leaf)
  return [("/".join(k.key for k in keys), leaf.names) for keys, leaf in leaves]
