"""T5X's models with sparse weights. The step, stored masks and rules travel in `flax_mutables`.

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
import optax
from flax.core import freeze, unfreeze
from flax.linen import partitioning
from jax.sharding import NamedSharding, PartitionSpec
from t5x import models, optimizers, utils

from nm_sparsity_jax.core.schedules import NO_STEP
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.training import apply, layers, rules_text, transform
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State, init_state

COLLECTION = layers.COLLECTION
UNKNOWN = -1  # the start of a run that has not begun


def _refuse(state: Any, _: Any) -> None:
  raise ValueError(
    f"OPTIMIZER holds a {type(state).__name__}, but in T5X the trainer counts updates and adds "
    "SR-STE's term: leave nms.sparse and nms.sr_ste out, and replace optax.MultiSteps by "
    "t5x_adapter.SparseTrainer.num_microbatches."
  )


# T5X looks up how an optax state is sharded before anything compiles. Under MultiSteps its steps
# are no updates, so TRAIN_STEPS would end the run in the middle of the schedule.
optimizers.OptaxStatePartitionRules._RULES.update(
  dict.fromkeys((transform.SrSteState, transform.SparseState, optax.MultiStepsState), _refuse)
)


class SparseModel(models.BaseTransformerModel):
  """Adds sparse weights to a model of T5X; `sparse` puts it before T5X's class in the bases.

  `module` is the dense network and gets effective parameters. They are made outside its scan,
  where it is known how devices share each weight.

  Attributes:
    rules: what is sparse, and how.
    stored_rules: the same, with the axes and shardings that `get_initial_variables` and
      `know_shardings` learn.
    made: path -> shape and dtype of each parameter, from `get_initial_variables` on.
    is_counted: whether the train step that calls `loss_fn` counts sparse steps.
  """

  is_counted = False
  rules: Rules
  stored_rules: Rules
  made: Mapping[str, Any]

  def counted(self) -> SparseModel:
    """Returns the same model, for a train step that counts sparse steps."""
    other = copy.copy(self)
    other.is_counted = True
    return other

  def with_rules(self, rules: Rules) -> SparseModel:
    """Returns the same model with other rules."""
    other = copy.copy(self)
    other.rules = other.stored_rules = rules
    other.made = {}  # shapes are known from `get_initial_variables` on
    return other

  @property
  def _text(self) -> np.ndarray:
    # The same on all devices: shardings are not in it.
    return rules_text.pack(rules_text.describe(self.stored_rules))

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """Returns T5X's variables, and the collection `nm_sparsity` at step 0."""
    variables = unfreeze(super().get_initial_variables(rng, input_shapes, input_types))
    params, axes = variables["params"], variables.get("params_axes")
    # T5X names the axes of each parameter, so those of scanned kernels are known from here on.
    self.stored_rules = self.rules.with_logical_axes(axes) if axes else self.rules
    self.made = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flatten(params)}
    state = init_state(params, self.stored_rules)
    mine = self.collect(jnp.int32(0), jnp.int32(UNKNOWN), state)
    variables[COLLECTION] = mine
    if axes:
      # What has the shape of its parameter has its axes too. So what a recipe of a user's own keeps
      # is sharded, whatever it is called.
      is_axes = lambda x: isinstance(x, partitioning.AxisMetadata)
      names, found = dict(flatten(axes, is_leaf=is_axes)), {}
      for path, leaf in flatten(mine):
        owner = path.partition("/")[2]  # without a word such as 'mask'
        is_alike = owner in self.made and self.made[owner].shape == leaf.shape
        own = names[f"{owner}_axes"].names if is_alike else (None,) * leaf.ndim
        found[f"{path}_axes"] = partitioning.AxisMetadata(names=own)
      variables[f"{COLLECTION}_axes"] = nested(found)
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
    if dropout_rng is not None and not self.is_counted:  # no evaluation
      raise ValueError(
        "the trainer of this run counts no sparse steps, so the schedule would stay at step 0: "
        "bind train.trainer_cls = @t5x_adapter.SparseTrainer, or name our run file last."
      )
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
    """Returns the step and the stored masks in `flax_mutables`."""
    mine = flax_mutables[COLLECTION]
    # Under jit no value can be looked at. Other rules give NO_STEP there, so every loss is NaN.
    same = jnp.all(mine["rules"] == jnp.asarray(self._text))
    step = jnp.where(same, mine["step"], NO_STEP)
    # Stored masks know the step that they were made for; it is saved once, not twice.
    kept = {k: v for k, v in mine.items() if k not in ("step", "start", "rules")}
    return step, {"step": mine["step"], **kept} if kept else {}

  def write(self, flax_mutables, step, state):
    """Returns `flax_mutables` with a new step and new masks."""
    start = flax_mutables[COLLECTION]["start"]
    return flax_mutables.copy({COLLECTION: freeze(self.collect(step, start, state))})

  def collect(self, step, start, state):
    """Returns the collection `nm_sparsity` as a dict."""
    kept = {k: v for k, v in state.items() if k != "step"}
    return {"step": step, "start": start, "rules": jnp.asarray(self._text), **unfreeze(kept)}

  def check(self, train_state) -> None:
    """Refuses a restored train state of another network, of rounded weights or of other rules."""
    for path, x in flatten(train_state.params):
      made = self.made[path]
      if (x.shape, x.dtype) != (made.shape, made.dtype):
        raise ValueError(
          f"{path!r} was restored as {x.dtype}{list(x.shape)}, but this model has {made.dtype}"
          f"{list(made.shape)}: take the model file of the checkpoint, and "
          "RestoreCheckpointConfig.dtype = 'float32', since rounding changes which weights survive."
        )
    stored = np.asarray(utils.get_local_data(train_state.flax_mutables[COLLECTION]["rules"]))
    if not np.array_equal(stored, self._text):
      raise ValueError(
        f"the checkpoint was trained with the rules\n{rules_text.unpack(stored)}\nbut this run "
        f"has\n{rules_text.unpack(self._text)}\nContinue with the checkpoint's rules. For a "
        "new run with the others, take another MODEL_DIR and name the checkpoint as "
        "INITIAL_CHECKPOINT_PATH."
      )


def sparse(model: models.BaseTransformerModel, rules: Rules) -> SparseModel:
  """Returns a model of T5X with sparse weights.

  A model file of T5X serves as it is, and so does a class of your own below T5X's:

      train_script.train.model = @t5x_adapter.sparse()
      t5x_adapter.sparse:
        model = %MODEL
        rules = %RULES

  Args:
    model: of a class of T5X, or of one below it.
    rules: what is sparse, and how.
  """
  cls = type(model)
  made: Any = copy.copy(model)
  # T5X's methods stay those of the model's class, which gin may have bound arguments of.
  made.__class__ = type(f"Sparse{cls.__name__}", (SparseModel, cls), {})
  return made.with_rules(rules)
