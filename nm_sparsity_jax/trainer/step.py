"""One optimizer step of any workload, on all local devices.

params = W~ -> [workload.loss, microbatch by microbatch] -> mean over the workload's weight
-> gradients -> [nms.sparse: optax on W, step + 1, stored masks] -> params = W~ of the next step
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.linen import partitioning, spmd
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nm_sparsity_jax.core.trees import flatten, path_name
from nm_sparsity_jax.recipes import Dense
from nm_sparsity_jax.trainer.workloads import Batch, Workload
from nm_sparsity_jax.training import apply, metrics
from nm_sparsity_jax.training.layers import COLLECTION
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.transform import dense_params, sparse

# Logical axis -> mesh axis, as in T5X's standard rules; all others are whole on each device.
AXIS_RULES = [
  ("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("heads", "model"),
  ("joined_kv", "model"),
]  # fmt: skip
NORMS = ("grad_norm", "update_norm")  # the sums that the step adds to a workload's


@struct.dataclass
class TrainState:
  """Holds all that a checkpoint holds.

  Attributes:
    step: int32 scalar, the global step: that of the initial checkpoint, and one per update.
    params: float32, the effective weights W~.
    opt_state: `SparseState`, of `nms.sparse` around the optimizer; it holds the dense weights W.
    collections: the workload's state, such as {'batch_stats': ...}; `{}` for T5.
    average: of W and of the collections, `Model.ema_decay`; `{}` where the run keeps none.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  collections: Any
  average: Any

  @property
  def sparse_step(self) -> jax.Array:
    """Returns the updates that this run has applied, int32; also the position in the data."""
    return self.opt_state.count

  @property
  def masks(self) -> Any:
    """Returns what `nms.init_state` keeps; `{}` for recipes without state."""
    return self.opt_state.masks


class Model:
  """A workload and its rules, laid out over the local devices.

  Args:
    workload: a model family and its data.
    rules: what is sparse, and how; None = nothing is.
    num_partitions: devices that share each weight; the others share the batch.
    devices: to run on; None = all local ones.
    ema_decay: keeps a moving average of what is trained, which is what evaluations use, `finalize`
      writes and a next run starts from; a number between 0 and 1, such as 0.9999. None = there is
      none [EMA_DECAY].
  """

  def __init__(
    self,
    workload: Workload,
    rules: Rules | None = None,
    num_partitions: int = 1,
    devices: Sequence[Any] | None = None,
    ema_decay: float | None = None,
  ):
    self.workload, self.ema_decay = workload, ema_decay
    rules = rules or Rules({".*": Dense()})
    devices = jax.local_devices() if devices is None else devices
    if len(devices) % num_partitions:
      raise ValueError(
        f"NUM_PARTITIONS={num_partitions} does not divide the {len(devices)} local devices."
      )
    # Neighbours share weights, since the links between them are the fastest.
    grid = np.reshape(devices, (-1, num_partitions))
    self.mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    self.replicated = NamedSharding(self.mesh, PartitionSpec())
    self.over_rows = NamedSharding(self.mesh, PartitionSpec("data"))
    # Only shapes are made: a plan lays out models that no host could hold.
    self.collections = dict(jax.eval_shape(workload.init, jax.random.PRNGKey(0)))
    if COLLECTION in self.collections:  # D would act twice
      raise ValueError(
        f"{type(workload).__name__}: the network masks its own weights. Give the rules to the run "
        "only (RULES)."
      )
    self.shapes = self.collections.pop("params")
    axes = self.collections.pop("params_axes", None)
    if num_partitions > 1 and axes is None:  # devices would do the same work
      raise ValueError(
        f"NUM_PARTITIONS={num_partitions}: the parameters of {type(workload).__name__} have no "
        "logical axes to be shared along. Leave it out."
      )
    # As stored: a scan stacks kernels, which moves the axis of their groups.
    self.rules = rules if axes is None else rules.with_logical_axes(axes)
    self.rules.assign(self.shapes)  # rules that do not fit are refused before data are read
    self._shardings = {}  # path of a parameter -> its shape, its sharding
    if axes is not None:
      names = partitioning.get_axis_names(axes)
      specs = dict(flatten(spmd.logical_to_mesh_sharding(names, self.mesh, AXIS_RULES)))
      by_path = dict(flatten(self.shapes))
      self._shardings = {path: (by_path[path].shape, s) for path, s in specs.items()}
    self.rules = self.rules.with_shardings(self.shardings(self.shapes))

  def jit(self, function: Callable, **kwargs: Any) -> Any:
    """Returns `jax.jit(function)`, with the mesh and the logical axes in force when it traces."""

    @functools.wraps(function)
    def traced(*args):
      # `jax.set_mesh` cannot be entered by a trace, and around each call it would hide `lower`.
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        with nn.logical_axis_rules(AXIS_RULES):
          return function(*args)

    return jax.jit(traced, **kwargs)

  def shardings(self, tree: Any) -> Any:
    """Returns each leaf's sharding: that of the parameter with its shape whose path it ends in."""

    # A moment of Adam has its parameter's shape and the end of its path. A factored moment has
    # another shape, and is small enough to lie on every device.
    def find(keys, leaf):
      words = path_name(keys).split("/")
      for i in range(len(words)):
        shape, sharding = self._shardings.get("/".join(words[i:]), (None, None))
        if shape == jnp.shape(leaf):
          return sharding
      return self.replicated

    return jax.tree_util.tree_map_with_path(find, tree)

  def put(self, batch: Batch) -> dict[str, jax.Array]:
    """Returns a batch on the devices, rows over the data axis."""
    return jax.device_put(dict(batch), self.over_rows)

  def check_batch(self, batch_size: int, parts: int = 1) -> None:
    """Refuses a batch that does not divide by microbatches and devices."""
    data = self.mesh.shape["data"]
    if batch_size < 1 or parts < 1 or batch_size % (parts * data):
      raise ValueError(
        f"BATCH_SIZE={batch_size} must be a multiple of {parts} microbatches times {data} devices "
        f"that share the batch, {parts * data}."
      )

  # --- state --------------------------------------------------------------------------------------

  def initial(self, seed_key: jax.Array) -> tuple[Any, dict[str, Any]]:
    """Returns random parameters, T5X's for its key, and the workload's state at the start."""

    def init(rng):
      found = self.workload.init(rng)
      return found["params"], {name: found[name] for name in self.collections}

    shardings = self.shardings(self.shapes), self.shardings(self.collections)
    return self.jit(init, out_shardings=shardings)(seed_key)

  def begin(
    self,
    params: Any,
    optimizer: optax.GradientTransformation,
    step: int,
    collections: Mapping[str, Any],
  ) -> TrainState:
    """Returns the state of a new run from these variables, which are donated."""
    make = functools.partial(self._begin, optimizer=optimizer, step=step)
    shardings = jax.tree.map(lambda x: x.sharding, self.state_like(optimizer))
    # Without shardings XLA would lay the moments out as it likes, and donation would fail later.
    made = self.jit(make, out_shardings=shardings, donate_argnums=(0, 1))
    return made(params, collections)

  def state_like(self, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns shapes, dtypes and shardings of what `begin` makes."""
    make = functools.partial(self._begin, optimizer=optimizer, step=0)
    shapes = jax.eval_shape(make, self.shapes, self.collections)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(place, shapes, self.shardings(shapes))

  def _begin(self, params, collections, optimizer, step):
    # No update is made here, so no learning rate is asked for.
    opt_state = sparse(optimizer, self.rules, learning_rate=0.0).init(params)
    # An average begins with a copy of what the run starts from, as timm's does.
    average = {} if self.ema_decay is None else {"params": params, **collections}
    average = jax.tree.map(jnp.copy, average)
    return TrainState(jnp.int32(step), params, opt_state, collections, average)

  @functools.cached_property
  def effective(self) -> Any:
    """Returns (dense parameters, such as those of an average; step; masks) -> W~."""
    make = lambda params, step, masks: apply.sparsify(params, self.rules, step, masks)
    return self.jit(make, out_shardings=self.shardings(self.shapes))

  def variables(self, state: TrainState) -> dict[str, Any]:
    """Returns what is scored: effective 'params' and the workload's state, or those of the average.

    The average is one of W: an average of W~ would not be n:m.
    """
    if not state.average:
      return {"params": state.params, **state.collections}
    params = self.effective(state.average["params"], state.sparse_step, state.masks)
    return {**state.average, "params": params}

  # --- the step -----------------------------------------------------------------------------------

  @functools.cached_property
  def eval_step(self) -> Any:
    """Returns (effective params and state, batch) -> name -> sum, without a gradient."""

    def step(variables, batch):
      collections = dict(variables)
      params = collections.pop("params")
      return self._loss(params, collections, batch, None)[1][0]

    return self.jit(step)

  def train_step(
    self,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    microbatches: int = 1,
    learning_rate: optax.ScalarOrSchedule | None = None,
  ) -> Any:
    """Returns (state, batch) -> (new state, name -> sum); the state is donated.

    The sums are those of the batch, and `NORMS`, the norms of the gradient and of the update.

    Args:
      optimizer: of optax, bare: `nms.sparse` is put around it here.
      rng: of dropout; the global step is folded in.
      microbatches: parts that a batch is cut into, one after the other.
      learning_rate: of `nms.sparse`.
    """
    tx = sparse(optimizer, self.rules, learning_rate)

    def step(state: TrainState, batch):
      sums, collections, grads = self._gradient(state, batch, rng, microbatches)
      updates, opt_state = tx.update(grads, state.opt_state, state.params)
      with jax.numpy_dtype_promotion("standard"):
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
      params = optax.apply_updates(state.params, updates)
      average = state.average
      if self.ema_decay is not None:
        dense = dense_params(params, opt_state)
        average = _moved(average, {"params": dense, **collections}, self.ema_decay)
      new = TrainState(state.step + 1, params, opt_state, collections, average)
      return new, sums | dict(zip(NORMS, norms, strict=True))

    # The state comes out as it went in, so that its buffers are used again.
    out = self.shardings(self.state_like(optimizer)), self.replicated
    return self.jit(step, donate_argnums=0, out_shardings=out)

  def samplers(self, rng: jax.Array, microbatches: int = 1) -> tuple[Any, Any]:
    """Returns the programs that look at a sampled step: one before it, one after it.

        seen = before(state, batch)
        state, sums = train_step(state, batch)
        scalars = after(state, seen)

    The first takes the gradient a second time, so that the train step holds nothing for it.

    Args:
      rng: as in `train_step`.
      microbatches: as in `train_step`.
    """

    def before(state: TrainState, batch):
      grads = self._gradient(state, batch, rng, microbatches)[2]
      dense = dense_params(state.params, state.opt_state)
      at = self.rules, state.sparse_step, state.masks
      # The gradient is one of W~; statistics of the optimizer's are of W's.
      _, pull_back = jax.vjp(lambda w: apply.sparsify(w, *at), dense)
      return metrics.before(dense, *at, *pull_back(grads))

    def after(state: TrainState, seen: metrics.Before):
      dense = dense_params(state.params, state.opt_state)
      moments = metrics.second_moments(state.opt_state, dense)
      at = self.rules, state.sparse_step, state.masks
      return metrics.summary(dense, *at, moments=moments, seen=seen)

    return self.jit(before), self.jit(after, out_shardings=self.replicated)

  def _loss(self, params, collections, batch, key):
    """Returns the summed loss, and beside it all sums of the batch and the new collections."""
    loss, sums, collections = self.workload.loss(params, collections, batch, key)
    return loss, ({**sums, "loss": loss}, dict(collections))

  def _gradient(self, state: TrainState, batch, rng, parts):
    """Returns the sums of a batch, the new collections, and the mean loss's gradient."""
    # A key of the step, so a resumed run draws what it would have drawn.
    key = jax.random.fold_in(rng, state.step)
    grad = jax.grad(self._loss, has_aux=True)

    def add(carry, x):
      (sums, collections), so_far = carry
      i, part = x
      grads, found = grad(state.params, collections, part, jax.random.fold_in(key, i))
      # Sums, divided once at the end: parts may hold unequal numbers of tokens.
      sums, grads = jax.tree.map(jnp.add, (sums, so_far), (found[0], grads))
      return ((sums, found[1]), grads), None

    if parts == 1:
      grads, (sums, collections) = grad(state.params, state.collections, batch, key)
    else:
      # Row r goes to part r % parts, so that each device has its rows of every part already.
      cut = lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
      cuts = jax.tree.map(cut, dict(batch))
      first = jax.tree.map(lambda x: x[0], cuts)
      like = jax.eval_shape(self._loss, state.params, state.collections, first, key)[1][0]
      zero = jax.tree.map(jnp.zeros_like, (like, state.params))
      begin = (zero[0], state.collections), zero[1]
      ((sums, collections), grads), _ = jax.lax.scan(add, begin, (jnp.arange(parts), cuts))
    weight = sums[self.workload.weight]
    weight = jnp.where(weight == 0, jnp.ones_like(weight), weight)  # a batch of padding alone
    return sums, collections, jax.tree.map(lambda g: g / weight, grads)


def _moved(average: Any, variables: Any, decay: float) -> Any:
  """Returns decay * average + (1 - decay) * variables; of what is no float, the newest.

  State such as batch statistics is averaged with the parameters, as in timm: averaged weights with
  the statistics of the newest ones would be a network that never was.
  """

  def move(a, x):
    return a + (1 - decay) * (x - a) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(move, average, variables)
