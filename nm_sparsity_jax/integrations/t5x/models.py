"""T5X's models with sparse weights, whose step, masks and rules travel in `flax_mutables`.

params + flax_mutables/nm_sparsity -> [W~ of that step] -> T5X's model -> loss, decode, score
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.core import freeze, unfreeze
from flax.linen import partitioning
from jax.sharding import NamedSharding, PartitionSpec
from t5x import models, optimizers, utils

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import apply, layers, rules_text, transform
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State, init_state

COLLECTION = layers.COLLECTION
UNKNOWN = -1  # the start of a run that has not begun


def _refuse(*_: Any) -> None:
  raise ValueError(
    "the optimizer chain holds nms.sparse or nms.sr_ste, but in T5X the trainer counts, keeps the "
    "stored masks and adds SR-STE's term, for every optimizer: it would act twice. Take it out."
  )


# T5X shards an optax state by a table of known types, which it reads before anything compiles.
optimizers.OptaxStatePartitionRules._RULES.update(
  {
    transform.CountStepsState: lambda state, axes: transform.CountStepsState(count=None),  # type: ignore
    transform.SrSteState: _refuse,
    transform.SparseState: _refuse,
  }
)


class SparseModel(models.BaseTransformerModel):
  """Adds sparse weights to a model of T5X; stands before T5X's class in the bases.

  `module` is always the dense network, and gets effective parameters. They are made outside its
  scan, where it is known how devices share each weight.
  """

  def __init__(self, *args, rules: Rules, **kwargs):
    super().__init__(*args, **kwargs)
    self._take(rules)

  def _take(self, rules: Rules) -> None:
    """Sets what this class adds to a model of T5X."""
    if getattr(getattr(self.module, "config", None), "rules", None) is not None:
      raise ValueError("the network has rules of its own: give them to T5X's model only.")
    self.rules = rules
    self._text = rules_text.pack(rules_text.describe(rules))
    # Known from get_initial_variables on, which T5X calls first: shapes and dtypes, and the axes of
    # stacked kernels.
    self.made: Mapping[str, Any] = {}
    self.stored_rules = rules

  def with_rules(self, rules: Rules) -> SparseModel:
    """Returns the same model with other rules."""
    made = copy.copy(self)
    made._take(rules)
    return made

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """Returns T5X's variables, and the collection `nm_sparsity` at step 0."""
    variables = super().get_initial_variables(rng, input_shapes, input_types)
    variables = unfreeze(variables)
    params, axes = variables["params"], variables.get("params_axes")
    self.stored_rules = self.rules.with_logical_axes(axes) if axes else self.rules
    self._text = rules_text.pack(rules_text.describe(self.stored_rules))
    self.made = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flatten(params)}
    state = init_state(params, self.stored_rules)
    mine = self.collect(jnp.int32(0), jnp.int32(UNKNOWN), state)
    variables[COLLECTION] = mine
    if axes:
      variables[f"{COLLECTION}_axes"] = axes_like(mine, axes, self.made)
    return freeze(variables)

  def know_shardings(self, mesh, axes):
    """Tells the rules how devices share each parameter; call it after `get_initial_variables`.

    On several TPUs masks then take one pass; see `Rules.with_shardings`.

    Args:
      mesh: of the partitioner.
      axes: a tree like the parameters; leaves are `PartitionSpec`.
    """
    is_spec = lambda x: isinstance(x, PartitionSpec)
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, x), unfreeze(axes), is_leaf=is_spec)
    self.stored_rules = self.stored_rules.with_shardings(shardings)

  def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
    """Returns the loss at the step that `flax_mutables` holds, metrics and the same mutables."""
    params = self.effective(params, flax_mutables)
    loss, metrics = super().loss_fn(params, batch, dropout_rng)
    return loss, (metrics, flax_mutables)

  def eval_fn(self, params, batch, flax_mutables=None):
    """Returns the loss without dropout, and metrics."""
    loss, (metrics, _) = self.loss_fn(params, batch, None, flax_mutables)
    return loss, metrics

  def predict_batch(self, params, batch, rng=None, *, flax_mutables=None):
    """Decodes with the effective weights of the step in `flax_mutables`."""
    return self.predict_batch_with_aux(params, batch, rng, flax_mutables=flax_mutables)[0]

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None, **kwargs):
    """Decodes as `predict_batch`, and returns the scores too."""
    params = self.effective(params, flax_mutables)
    return super().predict_batch_with_aux(params, batch, rng, **kwargs)

  def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
    """Returns log likelihoods under the effective weights of the step in `flax_mutables`."""
    return super().score_batch(self.effective(params, flax_mutables), batch, return_intermediates)

  def effective(self, params, flax_mutables):
    """Returns parameters for the dense network at the step that `flax_mutables` holds."""
    return apply.sparsify(params, self.stored_rules, *self.read(flax_mutables))

  def read(self, flax_mutables) -> tuple[jax.Array, State]:
    """Returns the step and the stored masks in `flax_mutables`.

    Under jit, where no value can be looked at, other rules give step -1: every loss is NaN then.
    """
    mine = (flax_mutables or {}).get(COLLECTION)
    if mine is None:
      raise ValueError(
        f"no {COLLECTION!r} in flax_mutables, so the sparse step is unknown. T5X passes it from a "
        "train state of this model; called by hand, pass flax_mutables=train_state.flax_mutables."
      )
    stored = mine["rules"]
    if not isinstance(stored, jax.core.Tracer):
      self._refuse_other_rules(stored)
    step = jnp.where(jnp.all(stored == jnp.asarray(self._text)), mine["step"], jnp.int32(-1))
    kept = {k: v for k, v in mine.items() if k not in ("step", "start", "rules")}
    return step, {"step": mine["step"], **kept} if kept else {}

  def write(self, flax_mutables, step, state):
    """Returns `flax_mutables` with a new step and new masks."""
    start = flax_mutables[COLLECTION]["start"]
    return flax_mutables.copy({COLLECTION: freeze(self.collect(step, start, state))})

  def check(self, train_state) -> None:
    """Refuses a restored train state that this model did not make, and names both."""
    for path, x in flatten(train_state.params):
      made = self.made[path]
      if x.shape != made.shape:
        raise ValueError(
          f"{path!r} was restored with the shape {x.shape}, but the network has {made.shape}: the "
          "checkpoint is of a model of another size. Take the model file that it was trained with."
        )
      if x.dtype != made.dtype:
        raise ValueError(
          f"{path!r} was restored as {x.dtype}, but masks are taken from {made.dtype}: rounding "
          "changes which weights survive. Set RestoreCheckpointConfig.dtype = 'float32' (T5X's "
          "infer.gin says 'bfloat16')."
        )
    self.read(train_state.flax_mutables)

  def collect(self, step, start, state):
    """Returns the collection `nm_sparsity` as a dict."""
    kept = {k: v for k, v in state.items() if k != "step"}
    return {"step": step, "start": start, "rules": jnp.asarray(self._text), **unfreeze(kept)}

  def _refuse_other_rules(self, stored):
    stored = np.asarray(utils.get_local_data(stored))
    if not np.array_equal(stored, self._text):
      raise ValueError(
        f"the checkpoint was trained with the rules\n{rules_text.unpack(stored)}\nbut this run "
        f"has\n{rules_text.unpack(self._text)}\nContinue with the checkpoint's rules. For a "
        "new run with the others, take another MODEL_DIR and name the checkpoint as "
        "INITIAL_CHECKPOINT_PATH."
      )


class SparseEncoderDecoderModel(SparseModel, models.EncoderDecoderModel):
  """T5X's encoder-decoder model with sparse weights; one argument more, `rules`.

  Args:
    rules: what is sparse, and how.
    **kwargs: as of T5X's model.
  """


class SparseDecoderOnlyModel(SparseModel, models.DecoderOnlyModel):
  """T5X's decoder-only model with sparse weights; one argument more, `rules`.

  Args:
    rules: what is sparse, and how.
    **kwargs: as of T5X's model.
  """


def sparse(model: models.BaseTransformerModel, rules: Rules) -> SparseModel:
  """Returns a model of T5X with sparse weights; one that has them already stays as it is.

  A model file of T5X serves as it is, and so does a class of your own below T5X's:

      train_script.train.model = @t5x_adapter.sparse()
      t5x_adapter.sparse:
        model = %MODEL
        rules = %RULES

  Args:
    model: of a class of T5X, or of one below it.
    rules: what is sparse, and how.
  """
  if isinstance(model, SparseModel):
    return model
  cls = type(model)
  made: Any = copy.copy(model)
  made.__class__ = type(f"Sparse{cls.__name__}", (SparseModel, cls), {})
  made._take(rules)
  return made


def axes_like(mine, params_axes, made):
  """Returns logical axes of the collection: what has the shape of its parameter has its axes too.

  So what a recipe of a user's own keeps is sharded, whatever it is called.

  Args:
    mine: the collection, whose paths are those of the parameters below a word such as 'mask'.
    params_axes: logical axes of the parameters.
    made: path -> shape and dtype of each parameter.
  """
  is_axes = lambda x: isinstance(x, partitioning.AxisMetadata)
  names = dict(flatten(params_axes, is_leaf=is_axes))
  axes = {}
  for path, leaf in flatten(mine):
    owner = path.partition("/")[2]
    is_alike = owner in made and made[owner].shape == leaf.shape
    found = names[f"{owner}_axes"].names if is_alike else (None,) * leaf.ndim
    axes[f"{path}_axes"] = partitioning.AxisMetadata(names=found)
  return traverse_util.unflatten_dict(axes, sep="/")
