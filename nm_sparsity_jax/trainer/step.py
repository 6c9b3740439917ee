"""One optimizer step of any workload, on all local devices.

    params = W~ -> [workload.loss, microbatch by microbatch] -> mean over the workload's weight
    -> gradients -> [nms.sparse: optax on W, step + 1, stored masks] -> params = W~ of the next step

The network is the dense one, on effective parameters, in training, evaluation and decoding alike.
Parameters and optimizer state are float32 whatever the network computes in.
"""

from __future__ import annotations

import dataclasses
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

# Logical axis -> mesh axis: T5X's standard rules, one axis of data and one of model parallelism.
AXIS_RULES = (
  ("batch", "data"), ("vocab", "model"), ("embed", None), ("mlp", "model"), ("heads", "model"),
  ("kv", None), ("joined_kv", "model"), ("relpos_buckets", None), ("length", None),
  ("layers", None), ("stack", None), ("mlp_activations", None),
)  # fmt: skip
AXES = "params_axes"  # the collection of logical axes
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
  average: Any = struct.field(default_factory=dict)

  @property
  def sparse_step(self) -> jax.Array:
    """Returns the updates that this run has applied, int32; also the position in the data."""
    return self.opt_state.count

  @property
  def masks(self) -> Any:
    """Returns what `nms.init_state` keeps; `{}` for recipes without state."""
    return self.opt_state.masks

  @property
  def dense(self) -> Any:
    """Returns the dense parameters W."""
    return dense_params(self.params, self.opt_state)


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that is called, lowered or traced with the mesh and the axes in force."""

  jitted: Any
  mesh: Mesh

  def __call__(self, *args: Any) -> Any:
    """Returns what the function does."""
    with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(AXIS_RULES)):
      return self.jitted(*args)

  def lower(self, *args: Any) -> Any:
    """Returns what `jax.jit(...).lower(*args)` does; `args` may be shapes with shardings."""
    with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(AXIS_RULES)):
      return self.jitted.lower(*args)


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
    if not isinstance(workload, Workload):
      raise ValueError(f"workload={workload!r:.80}: give an object of a subclass of Workload.")
    if ema_decay is not None and not 0 < ema_decay < 1:
      raise ValueError(f"EMA_DECAY={ema_decay!r}: give a number between 0 and 1, or None.")
    self.workload, self.ema_decay = workload, ema_decay
    self.given_rules = Rules({".*": Dense()}) if rules is None else rules
    devices = jax.local_devices() if devices is None else devices
    if len(devices) % num_partitions:
      raise ValueError(
        f"NUM_PARTITIONS={num_partitions} does not divide the {len(devices)} local devices."
      )
    grid = np.reshape(devices, (-1, num_partitions))
    self.mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    self.replicated = NamedSharding(self.mesh, PartitionSpec())
    shapes = dict(jax.eval_shape(self.workload.init, jax.random.PRNGKey(0)))
    axes = shapes.pop(AXES, None)
    if COLLECTION in shapes:
      raise ValueError(
        f"{type(self.workload).__name__}: the collection {COLLECTION!r} is the runner's own. Give "
        "a network without sparse layers."
      )
    self.shapes = shapes.pop("params")
    self.collections = shapes
    # As stored: a scan stacks kernels, which moves the axis of their groups.
    self.rules = self.given_rules if axes is None else self.given_rules.with_logical_axes(axes)
    self.rules.assign(self.shapes)  # what does not fit is said before data are read
    self._shardings = {} if axes is None else self._of_axes(axes)
    self.rules = self.rules.with_shardings(self.shardings(self.shapes))

  def _of_axes(self, axes: Any) -> dict[str, Any]:
    """Returns path -> (shape, sharding) of every parameter."""
    names = partitioning.get_axis_names(axes)
    specs = spmd.logical_to_mesh_sharding(names, self.mesh, list(AXIS_RULES))
    by_path = dict(flatten(self.shapes))
    return {path: (by_path[path].shape, s) for path, s in flatten(specs)}

  def jit(self, function: Callable, **kwargs: Any) -> OnMesh:
    """Returns `jax.jit(function)`, with the mesh and the logical axes in force when it traces."""
    return OnMesh(jax.jit(function, **kwargs), self.mesh)

  def shardings(self, tree: Any) -> Any:
    """Returns each leaf's sharding: that of the parameter with its shape whose path it ends in."""

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
    return jax.device_put(dict(batch), NamedSharding(self.mesh, PartitionSpec("data")))

  def check_batch(self, batch_size: int, parts: int = 1) -> None:
    """Refuses a batch that does not divide by microbatches and devices."""
    for macro, size in (("BATCH_SIZE", batch_size), ("MICROBATCHES", parts)):
      if not isinstance(size, int) or size < 1:
        raise ValueError(f"{macro}={size!r}: give a whole number, 1 or more.")
    data = self.mesh.shape["data"]
    if batch_size % (parts * data):
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
    collections: Mapping[str, Any] | None = None,
  ) -> TrainState:
    """Returns the state of a new run from these variables, which are donated."""
    shardings = jax.tree.map(lambda x: x.sharding, self.state_like(optimizer))
    make = lambda params, collections: self._begin(params, collections, optimizer, step)
    made = self.jit(make, out_shardings=shardings, donate_argnums=(0, 1))
    return made(params, dict(collections or {}))

  def state_like(self, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns shapes, dtypes and shardings of what `begin` makes."""
    make = lambda params, collections: self._begin(params, collections, optimizer, 0)
    shapes = jax.eval_shape(make, self.shapes, self.collections)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(place, shapes, self.shardings(shapes))

  def _begin(self, params, collections, optimizer, step):
    opt_state = sparse(optimizer, self.rules).init(params)
    # An average begins with a copy of what the run starts from, as timm's does.
    average = {} if self.ema_decay is None else {"params": params, **collections}
    average = jax.tree.map(jnp.copy, average)
    return TrainState(jnp.int32(step), params, opt_state, collections, average)

  def effective(self, dense: Any, step: jax.Array, masks: Any) -> Any:
    """Returns W~ of dense parameters, such as those of an average."""
    make = lambda params, step, masks: apply.sparsify(params, self.rules, step, masks)
    return self.jit(make, out_shardings=self.shardings(self.shapes))(dense, step, masks)

  def variables(self, state: TrainState) -> dict[str, Any]:
    """Returns what is scored: effective 'params' and the workload's state, or those of the average.

    The average is one of W: an average of W~ would not be n:m.
    """
    if not state.average:
      return {"params": state.params, **state.collections}
    params = self.effective(state.average["params"], state.sparse_step, state.masks)
    return {**state.average, "params": params}

  # --- loss ---------------------------------------------------------------------------------------

  def sums(
    self, effective: Any, collections: Any, batch: Batch, rng: jax.Array | None
  ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
    """Returns (summed loss, (all sums of a batch, the workload's new state))."""
    loss, sums, collections = self.workload.loss(effective, collections, batch, rng)
    if self.workload.weight not in sums or "loss" in sums:
      raise ValueError(
        f"{type(self.workload).__name__}.loss returned the sums {', '.join(sums)}: there must be "
        f"{self.workload.weight!r}, which divides the others, and no 'loss', which is added."
      )
    return loss, ({"loss": loss, **sums}, dict(collections))

  def eval_step(self) -> Callable:
    """Returns (effective params and state, batch) -> name -> sum, without a gradient."""

    def step(variables, batch):
      collections = {name: x for name, x in variables.items() if name != "params"}
      return self.sums(variables["params"], collections, batch, None)[1][0]

    return self.jit(step)

  # --- the step -----------------------------------------------------------------------------------

  def train_step(
    self,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    like: TrainState,
    microbatches: int = 1,
  ) -> OnMesh:
    """Returns (state, batch) -> (new state, name -> sum); the state is donated.

    The sums are those of the batch, and `NORMS`, the norms of the gradient and of the update.

    Args:
      optimizer: of optax, bare: `nms.sparse` is put around it here.
      rng: of dropout; the global step is folded in.
      like: a state, for its shardings.
      microbatches: parts that a batch is cut into, one after the other.
    """
    tx = sparse(optimizer, self.rules)

    def step(state: TrainState, batch):
      sums, collections, grads = self._gradient(state, batch, rng, microbatches)
      updates, opt_state = tx.update(grads, state.opt_state, state.params)
      with jax.numpy_dtype_promotion("standard"):
        norms = optax.global_norm(grads), optax.global_norm(updates)
      params = optax.apply_updates(state.params, updates)
      average = state.average
      if self.ema_decay is not None:
        dense = dense_params(params, opt_state)
        average = _moved(average, {"params": dense, **collections}, self.ema_decay)
      new = TrainState(state.step + 1, params, opt_state, collections, average)
      return new, sums | dict(zip(NORMS, norms, strict=True))

    out = self.shardings(like), self.replicated
    return self.jit(step, donate_argnums=0, out_shardings=out)

  def samplers(self, rng: jax.Array, microbatches: int = 1) -> tuple[Callable, Callable]:
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
      dense, at = state.dense, (self.rules, state.sparse_step, state.masks)
      _, pull_back = jax.vjp(lambda w: apply.sparsify(w, *at), dense)
      return metrics.before(dense, *at, *pull_back(grads))

    def after(state: TrainState, seen: metrics.Before):
      return metrics.summary(
        state.dense, self.rules, state.sparse_step, state.masks, None, state.opt_state, seen,
        per_place=("density", "density_target"),
      )  # fmt: skip

    return self.jit(before), self.jit(after, out_shardings=self.replicated)

  def _gradient(self, state: TrainState, batch, rng, parts):
    """Returns the sums of a batch, the new collections, and the mean loss's gradient."""
    key = jax.random.fold_in(rng, state.step)
    found, grads = self._accumulate(state.params, state.collections, batch, key, parts)
    sums, collections = found
    weight = sums[self.workload.weight]
    weight = jnp.where(weight == 0, jnp.ones_like(weight), weight)  # nothing to learn from
    return sums, collections, jax.tree.map(lambda g: g / weight, grads)

  def _accumulate(self, effective, collections, batch, key, parts):
    """Returns the sums, the new state, and the summed loss's gradient."""
    grad = jax.value_and_grad(self.sums, has_aux=True)
    if parts == 1:
      (_, found), grads = grad(effective, collections, batch, key)
      return found, grads

    def add(carry, x):
      (sums, collections), so_far = carry
      i, part = x
      (_, found), grads = grad(effective, collections, part, jax.random.fold_in(key, i))
      sums, grads = jax.tree.map(jnp.add, (sums, so_far), (found[0], grads))
      return ((sums, found[1]), grads), None

    # Row r goes to part r % parts, so that each device has its rows of every part already.
    cut = lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
    cuts = jax.tree.map(cut, dict(batch))
    first = jax.tree.map(lambda x: x[0], cuts)
    like = jax.eval_shape(self.sums, effective, collections, first, key)[1][0]
    zero = jax.tree.map(jnp.zeros_like, (like, effective))
    return jax.lax.scan(add, ((zero[0], collections), zero[1]), (jnp.arange(parts), cuts))[0]


def _moved(average: Any, variables: Any, decay: float) -> Any:
  """Returns decay * average + (1 - decay) * variables; of what is no float, the newest.

  State such as batch statistics is averaged with the parameters, as in timm: averaged weights with
  the statistics of the newest ones would be a network that never was.
  """

  def move(a, x):
    return a + (1 - decay) * (x - a) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(move, average, variables)
