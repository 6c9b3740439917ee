"""Keras on JAX: an optimizer that holds an optax transformation, and a callback that watches masks.

    model.compile(optimizer=OptaxOptimizer(nms.sparse(optax.adamw(1e-3), rules)), loss=...)
    model.fit(x, y, callbacks=[Metrics()])
    print(nms.verify(params(model), rules))

    Keras' variables -> [params] -> path -> value -> [tx.update] -> Keras' variables
    the state of tx, one Keras variable a leaf -> .keras and .weights.h5 files

The model's weights are always the effective weights W~, as in every loop with `nms.sparse`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from jax.sharding import NamedSharding

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics, rules_text, stored
from nm_sparsity_jax.training.transform import SparseState, dense_params, states


def params(model: keras.Model) -> OrderedDict[str, jax.Array]:
  """Returns path -> value of the trainable variables, in the model's order.

      print(rules.assign(params(model)))
      rules = rules.for_model(
        lambda p, x: model.stateless_call([*p.values()], model.non_trainable_variables, x),
        params(model), x,
      )

  A path is Keras' own, such as 'sequential/dense_1/kernel'. A second variable of the same path is
  '2/' + path.

  Args:
    model: a model whose variables exist.
  """
  variables = model.trainable_variables
  return OrderedDict(zip(_names(variables), [v.value for v in variables], strict=True))


@keras.saving.register_keras_serializable("nm_sparsity_jax")
class OptaxOptimizer(keras.optimizers.Optimizer):
  """A Keras optimizer that updates the model by any optax transformation.

      tx = nms.sparse(optax.adamw(1e-3), rules)
      model.compile(optimizer=OptaxOptimizer(tx), loss="mse")

  Learning rate, clipping and weight decay are those of `tx`, and so are their schedules. For Keras'
  `LearningRateScheduler` and `ReduceLROnPlateau` let `optax.inject_hyperparams(optax.adamw)(1e-3)`
  be the inner optimizer: `learning_rate` then reads and sets that rate.

  Files of Keras hold the state of `tx`, with the dense weights and the step, and not `tx` itself:

      model = keras.models.load_model("run.keras", custom_objects={"tx": tx})   # to go on
      model = keras.models.load_model("run.keras", compile=False)               # the weights alone

  One optimizer is for one model. To start again from other weights, compile with a new one: the
  dense weights of the old one would come back.

  Args:
    tx: any optax transformation; `optax.MultiSteps` may stand around `nms.sparse`.
    gradient_accumulation_steps: Keras' own; a step of the schedule is then so many batches.
    name: the name in Keras' files.
  """

  def __init__(
    self,
    tx: optax.GradientTransformation,
    gradient_accumulation_steps: int | None = None,
    name: str = "optax",
  ):
    if keras.backend.backend() != "jax":
      raise RuntimeError(
        f"Keras runs on {keras.backend.backend()}, and optax needs JAX: set the environment "
        "variable KERAS_BACKEND=jax before Keras is imported."
      )
    super().__init__(
      learning_rate=0.0, gradient_accumulation_steps=gradient_accumulation_steps, name=name
    )
    self.tx = tx
    self._slots, self._treedef, self._rate = [], jax.tree.structure(()), None

  def build(self, variables: Sequence[keras.Variable]) -> None:
    """Makes Keras variables of the state of `tx`; Keras calls it with the model's variables."""
    if self.built:
      if [*map(id, variables)] != [*map(id, self._trainable_variables)]:
        raise _of_another_model()
      return
    super().build(variables)
    self._paths = _names(variables)
    own = [v for v in variables if not self._overwrite_variable_with_gradient(v)]
    state = self.tx.init(self._tree(own, [v.value for v in own]))
    sparse = {path for found in states(state, SparseState) for path, _ in flatten(found.dense)}
    for path, variable in zip(self._paths, variables, strict=True):
      if path in sparse and variable.constraint is not None:
        raise ValueError(
          f"{path!r} has a constraint, which changes what nms.sparse made of the dense weights: "
          "build its layer without, or leave it out of the rules."
        )
    leaves, self._treedef = flatten(state), jax.tree.structure(state)
    # Keras finds variables in a file by their order. That of the tree is by name, and Keras counts
    # names on: the layers dense_9, dense_10 of one process are dense, dense_1 of the next.
    order = sorted(range(len(leaves)), key=lambda i: self._place(leaves[i][0]))
    slots = {i: self._slot(f"optax_{n}", leaves[i][1]) for n, i in enumerate(order)}
    self._slots = [slots[i] for i in range(len(leaves))]
    rates = [i for i, (name, _) in enumerate(leaves) if name.endswith("hyperparams/learning_rate")]
    self._rate = self._slots[rates[0]] if rates else None

  @property
  def opt_state(self) -> Any:
    """The state of `tx`, for `nms.dense_params(params(model), model.optimizer.opt_state)`."""
    return jax.tree.unflatten(self._treedef, [slot.value for slot in self._slots])

  @property
  def learning_rate(self) -> Any:
    """The rate of `optax.inject_hyperparams`; infinite where `tx` keeps its own."""
    # Not NaN: ReduceLROnPlateau would never reduce it, so nobody would see that it cannot.
    return math.inf if self._rate is None else self._rate

  @learning_rate.setter
  def learning_rate(self, value: Any) -> None:
    if self._rate is None:
      raise ValueError(
        f"the learning rate cannot become {value}, since the optax transformation keeps its own: "
        "let the inner optimizer be optax.inject_hyperparams(optax.adamw)(learning_rate=...), in "
        "place of optax.adamw(...)."
      )
    self._rate.assign(value)

  def _backend_update_step(self, grads, trainable_variables, learning_rate):
    """Updates all variables at once; Keras calls it for each step."""
    # A training loop takes the values of a model's variables away, and so of its optimizer's.
    if self._iterations._value is None and any(v._value is not None for v in trainable_variables):
      raise _of_another_model()
    now = self._tree(trainable_variables, [v.value for v in trainable_variables])
    updates, state = self.tx.update(self._tree(trainable_variables, grads), self.opt_state, now)
    new = jax.tree.leaves(optax.apply_updates(now, updates))
    for variable, value in zip(trainable_variables, new, strict=True):
      variable.assign(value)
    for slot, value in zip(self._slots, jax.tree.leaves(state), strict=True):
      slot.assign(value)

  def load_own_variables(self, store: Any) -> None:
    """Reads the state from a file of Keras; warns where the file has none."""
    if len(store.keys()) != len(self.variables):
      warnings.warn(
        f"the file has {len(store.keys())} arrays of an optimizer's state and this optimizer has "
        f"{len(self.variables)}, so the step and the dense weights W are not restored, and what is "
        "pruned begins again at 0. To go on with a run, compile with its transformation and call "
        "model.optimizer.build(model.trainable_variables) before load_weights. To start a new run "
        "from these weights, compile after load_weights.",
        stacklevel=2,
      )
      return
    of = states(jax.tree.unflatten(self._treedef, self._slots), SparseState)
    own = [rules_text.unpack(state.rules.numpy()) for state in of]
    super().load_own_variables(store)
    for state, text in zip(of, own, strict=True):
      theirs = rules_text.unpack(state.rules.numpy())
      if _uncounted(text) != _uncounted(theirs):
        raise ValueError(
          "the file was trained by nms.sparse with other rules than these: go on with its rules\n"
          + theirs
        )
      state.rules.assign(rules_text.pack(text))

  def get_config(self) -> dict[str, Any]:
    """Returns what Keras writes into a file: all but `tx`, which holds functions."""
    return {"gradient_accumulation_steps": self.gradient_accumulation_steps, "name": self.name}

  @classmethod
  def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> OptaxOptimizer:
    """Makes the optimizer of a file, by the `tx` of `load_model(custom_objects={"tx": tx})`."""
    tx = keras.saving.get_registered_object("tx", custom_objects)
    if tx is None:
      raise ValueError(
        "the file was trained by an optax transformation, which no file can hold: pass it, "
        'load_model(path, custom_objects={"tx": nms.sparse(...)}), or load the weights alone, '
        "load_model(path, compile=False)."
      )
    return cls(tx, **config)

  def _tree(self, variables, values) -> OrderedDict[str, Any]:
    return OrderedDict(
      (self._paths[self._get_variable_index(v)], x) for v, x in zip(variables, values, strict=True)
    )

  def _place(self, name: str) -> tuple[str, int]:
    """Returns where a leaf of the state stands, without the name of a variable in it."""
    of = max((p for p in self._paths if name.endswith(f"/{p}")), key=len, default="")
    return name.removesuffix(of), self._paths.index(of) if of else -1

  def _slot(self, name: str, value: jax.Array) -> keras.Variable:
    # A copy: the loop donates the model and the state, and one buffer cannot be donated twice.
    copied: Any = lambda shape, dtype=None: jnp.array(value, copy=True)
    layout = value.sharding if isinstance(value.sharding, NamedSharding) else None
    dtype = str(value.dtype)
    return self.add_variable(value.shape, copied, dtype=dtype, layout=layout, name=name)


class Metrics(keras.callbacks.Callback):
  """Adds to Keras' logs, after each epoch, what `nms.metrics.summary` tells of the masks.

      model.fit(x, y, callbacks=[Metrics(), keras.callbacks.CSVLogger("log.csv")])

  The names are `nm/density`, `nm/D`, `nm/n/<rule>`, `nm/m/<rule>`, `nm/flip_rate/all`, `/kept` and
  others. Flips are those since the epoch before. Put it before callbacks that read logs.
  """

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    """Notes the masks that the epoch begins with."""
    self._seen = metrics.before(*self._now())

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    """Adds the metrics to `logs`."""
    found = metrics.summary(*self._now(), seen=self._seen)
    logs.update({name: float(value) for name, value in found.items()})

  def _now(self):
    """Returns W, the rules, the step and the stored masks."""
    model: Any = self.model
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    opt_state = getattr(optimizer, "opt_state", ())
    weights = dense_params(params(model), opt_state)
    (state,) = states(opt_state, SparseState)
    rules = rules_text.parse(rules_text.unpack(np.asarray(state.rules)))
    # Weights may be loaded after the state was made, so the first update makes masks anew.
    masks = state.masks if state.count else stored.init_state(weights, rules)
    return weights, rules, state.count, masks


def _names(variables: Sequence[keras.Variable]) -> list[str]:
  # keras-hub's T5 has two variables of one path.
  paths = [variable.path for variable in variables]
  nth = [paths[: i + 1].count(path) for i, path in enumerate(paths)]
  return [path if n == 1 else f"{n}/{path}" for n, path in zip(nth, paths, strict=True)]


def _uncounted(text: str) -> str:
  """Returns the text of rules without the numbers by which Keras counts names in its `axes`.

  `for_model` writes names such as sequential_1/einsum_dense_3, and an equal model has others.
  """
  return re.sub(r"(?m)^axis .*", lambda line: re.sub(r"_\d+(?=/)", "", line[0]), text)


def _of_another_model() -> ValueError:
  return ValueError(
    "this optimizer was built for the variables of another model, and holds their dense weights: "
    "compile this model with an optimizer of its own, OptaxOptimizer(nms.sparse(...))."
  )
