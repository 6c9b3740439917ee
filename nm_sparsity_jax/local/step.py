"""One optimizer step, on all local devices.

    params, sparse step, stored masks -> [sparsify, once] -> W~ -> [network, microbatch by
    microbatch] -> mean loss per target token + z-loss -> gradients -> [+ SR-STE's term, once]
    -> optax -> new params, step + 1 -> [update_state] -> stored masks

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

from nm_sparsity_jax import apply, metrics, optim
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.trees import flatten, path_name

# Logical axis -> mesh axis: T5X's standard rules, one axis of data and one of model parallelism.
AXIS_RULES = (
  ("batch", "data"), ("vocab", "model"), ("embed", None), ("mlp", "model"), ("heads", "model"),
  ("kv", None), ("joined_kv", "model"), ("relpos_buckets", None), ("length", None),
  ("layers", None), ("stack", None), ("mlp_activations", None),
)  # fmt: skip
PACKED = ("encoder_segment_ids", "decoder_segment_ids")


@struct.dataclass
class TrainState:
  """All that a checkpoint holds.

  Attributes:
    step: int32 scalar, the global step: that of the initial checkpoint, and one per update.
    params: float32.
    opt_state: of optax.
    sparse_step: int32 scalar, updates that this run has applied; also the position in the data.
    masks: what `apply.init_state` keeps; `{}` for recipes without state.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  sparse_step: jax.Array
  masks: Any


@dataclasses.dataclass(frozen=True)
class Summed:
  """The sums over a batch that every report is made of, in the order of their vector."""

  loss: float
  z_loss: float
  correct: float
  tokens: float

  def scalars(self) -> dict[str, float]:
    """Under T5X's names; the loss is a mean per target token."""
    tokens = max(self.tokens, 1.0)
    return {
      "loss": self.loss / tokens,
      "loss_per_nonpadding_target_token": self.loss / tokens,
      "cross_ent_loss": (self.loss - self.z_loss) / tokens,
      "z_loss": self.z_loss / tokens,
      "accuracy": self.correct / tokens,
    }


class WrongDevices(ValueError):
  """The devices of this machine cannot be split as asked."""


class Model:
  """A network, its rules and its loss, laid out over the local devices.

  Args:
    network: a T5 of this package (or one with its interface), dense: without rules of its own.
    rules: what is sparse, and how.
    z_loss: weight of log(Z)^2, which keeps the logits from drifting.
    label_smoothing: share of the probability that goes to all other tokens.
    num_partitions: devices that share each weight; the others share the batch.
    devices: to run on; None = all local ones.
  """

  def __init__(
    self,
    network: nn.Module,
    rules: Rules,
    z_loss: float = 0.0001,
    label_smoothing: float = 0.0,
    num_partitions: int = 1,
    devices: Sequence[Any] | None = None,
  ):
    self.network: Any = network
    if self.network.config.rules is not None:
      raise ValueError("the network has rules of its own: give them to the run alone, RULES.")
    self.given_rules = rules
    self.z_loss, self.label_smoothing = z_loss, label_smoothing
    devices = jax.local_devices() if devices is None else devices
    if num_partitions < 1 or len(devices) % num_partitions:
      raise WrongDevices(
        f"NUM_PARTITIONS={num_partitions} does not divide the {len(devices)} local devices."
      )
    grid = np.reshape(devices, (-1, num_partitions))
    self.mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    self.replicated = NamedSharding(self.mesh, PartitionSpec())
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(self._init, jax.random.PRNGKey(0), tokens)
    axes = shapes["params_axes"]
    self.shapes = shapes["params"]
    # As stored: a scan stacks kernels, which moves the axis of their groups.
    self.rules = rules.with_logical_axes(axes)
    self.rules.assign(self.shapes)  # what does not fit is said before data are read
    specs = spmd.logical_to_mesh_sharding(
      partitioning.get_axis_names(axes), self.mesh, list(AXIS_RULES)
    )
    by_path = dict(flatten(self.shapes))
    self._shardings = {path: (by_path[path].shape, s) for path, s in flatten(specs)}

  def _init(self, rng, tokens):
    return self.network.init(rng, tokens, tokens, tokens, enable_dropout=False)

  def jit(self, function: Callable, **kwargs: Any) -> Callable:
    """`jax.jit`, with the mesh and the logical axes in force while it is traced."""
    jitted = jax.jit(function, **kwargs)

    def call(*args):
      with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(AXIS_RULES)):
        return jitted(*args)

    return call

  def shardings(self, tree: Any) -> Any:
    """Of every leaf: that of the parameter whose path it ends in and whose shape it has."""

    def find(keys, leaf):
      words = path_name(keys).split("/")
      for i in range(len(words)):
        shape, sharding = self._shardings.get("/".join(words[i:]), (None, None))
        if shape == jnp.shape(leaf):
          return sharding
      return self.replicated

    return jax.tree_util.tree_map_with_path(find, tree)

  def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch on the devices, rows over the data axis."""
    return jax.device_put(dict(batch), NamedSharding(self.mesh, PartitionSpec("data")))

  def check_batch(self, batch_size: int, parts: int = 1) -> None:
    """Refuses a batch that does not divide by microbatches and devices."""
    data = self.mesh.shape["data"]
    if parts < 1 or batch_size % (parts * data):
      raise ValueError(
        f"BATCH_SIZE={batch_size} must be a multiple of {parts} microbatches times {data} devices "
        f"that share the batch, {parts * data}."
      )

  # --- state --------------------------------------------------------------------------------------

  def initial_params(self, seed_key: jax.Array) -> Any:
    """Random parameters; T5X's, for its key."""
    init = lambda rng: self._init(rng, jnp.ones((1, 1), jnp.int32))["params"]
    return self.jit(init, out_shardings=self.shardings(self.shapes))(seed_key)

  def begin(self, params: Any, optimizer: optax.GradientTransformation, step: int) -> TrainState:
    """The state of a new run from these parameters, which are donated."""
    shardings = self.shardings(self.state_shapes(optimizer))
    make = lambda params: self._begin(params, optimizer, step)
    return self.jit(make, out_shardings=shardings, donate_argnums=0)(params)

  def state_shapes(self, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of what `begin` makes."""
    return jax.eval_shape(lambda params: self._begin(params, optimizer, 0), self.shapes)

  def _begin(self, params, optimizer, step):
    with jax.numpy_dtype_promotion("standard"):
      opt_state = optimizer.init(params)
    masks = apply.init_state(params, self.rules)
    return TrainState(jnp.int32(step), params, opt_state, jnp.int32(0), masks)

  def effective(self, state: TrainState) -> Any:
    """The parameters that the dense network runs with at this state."""
    make = lambda s: apply.sparsify(s.params, self.rules, s.sparse_step, s.masks)
    return self.jit(make, out_shardings=self.shardings(self.shapes))(state)

  # --- loss ---------------------------------------------------------------------------------------

  def sums(self, effective: Any, batch: Mapping[str, jax.Array], rng: jax.Array | None):
    """(summed loss, [loss, z-loss, correct, tokens]) of the target tokens of a batch."""
    targets = batch["decoder_target_tokens"]
    logits = self._logits(effective, batch, rng)
    weights = batch["decoder_loss_weights"].astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, -1)
    hit = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    cross_entropy = log_z - hit
    if self.label_smoothing:
      share = self.label_smoothing
      each = share / (logits.shape[-1] - 1)  # of every other token
      others = logits.shape[-1] * log_z - jnp.sum(logits, -1) - cross_entropy
      entropy = -((1 - share) * np.log(1 - share) + share * np.log(each))
      cross_entropy = (1 - share) * cross_entropy + each * others - entropy
    z_loss = self.z_loss * log_z**2
    correct = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
    summed = [jnp.sum(weights * x) for x in (cross_entropy + z_loss, z_loss, correct)]
    return summed[0], jnp.stack([*summed, jnp.sum(weights)])

  def eval_step(self) -> Callable:
    """(effective params, batch) -> the vector of `Summed` without a gradient."""
    return self.jit(lambda params, batch: self.sums(params, batch, None)[1])

  def score(self, effective: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Log likelihood of the targets of each row."""
    logits = self._logits(effective, batch, None)
    log_probs = jax.nn.log_softmax(logits)
    hit = jnp.take_along_axis(log_probs, batch["decoder_target_tokens"][..., None], -1)[..., 0]
    return jnp.sum(hit * batch["decoder_loss_weights"].astype(jnp.float32), -1)

  def _logits(self, effective, batch, rng):
    return self.network.apply(
      {"params": effective},
      batch["encoder_input_tokens"],
      batch["decoder_input_tokens"],
      batch["decoder_target_tokens"],
      **{name: batch[name] for name in PACKED if name in batch},
      enable_dropout=rng is not None,
      rngs=None if rng is None else {"dropout": rng},
    ).astype(jnp.float32)

  # --- the step -----------------------------------------------------------------------------------

  def train_step(
    self,
    optimizer: optax.GradientTransformation,
    rng: jax.Array,
    like: TrainState,
    microbatches: int = 1,
    metrics_every: int | None = None,
  ) -> Callable:
    """(state, batch) -> (new state, sums, sampled metrics); the state is donated.

    The sums are the vector of `Summed`, then the norms of the gradient and of the update.

    Args:
      optimizer: of optax; SR-STE's term and the accumulation are not its business.
      rng: of dropout; the global step is folded in.
      like: a state, for its shardings.
      microbatches: parts that a batch is cut into, one after the other.
      metrics_every: after every so many sparse steps the third result is worth reading.
    """
    rules = self.rules

    def step(state: TrainState, batch):
      now, masks = state.sparse_step, state.masks
      sparsify = lambda params: apply.sparsify(params, rules, now, masks)
      effective, pull_back = jax.vjp(sparsify, state.params)
      key = jax.random.fold_in(rng, state.step)
      summed, grads = self._accumulate(effective, batch, key, microbatches)
      tokens = jnp.maximum(summed[3], 1.0)
      grads = pull_back(jax.tree.map(lambda g: g / tokens, grads))[0]
      with jax.numpy_dtype_promotion("standard"):
        full = optim.add_sr_ste(grads, state.params, rules, now, masks)
        updates, opt_state = optimizer.update(full, state.opt_state, state.params)
        norms = jnp.stack([optax.global_norm(grads), optax.global_norm(updates)])
      params = optax.apply_updates(state.params, updates)
      masks = apply.update_state(masks, params, rules, now + 1, grads, grads_at=state.params)
      new = TrainState(state.step + 1, params, opt_state, now + 1, masks)
      sampled = _sample(state, new, grads, rules, metrics_every) if metrics_every else {}
      return new, jnp.concatenate([summed, norms]), sampled

    out = self.shardings(like), self.replicated, self.replicated
    return self.jit(step, donate_argnums=0, out_shardings=out)

  def _accumulate(self, effective, batch, key, parts):
    """The vector of sums, and the gradient of the summed loss by the effective parameters."""
    grad = jax.value_and_grad(self.sums, has_aux=True)
    if parts == 1:
      (_, summed), grads = grad(effective, batch, key)
      return summed, grads

    def add(carry, x):
      i, part = x
      (_, summed), grads = grad(effective, part, jax.random.fold_in(key, i))
      return jax.tree.map(jnp.add, carry, (summed, grads)), None

    # Row r goes to part r % parts, so that each device has its rows of every part already.
    cut = lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
    zero = jnp.zeros(4), jax.tree.map(jnp.zeros_like, effective)
    return jax.lax.scan(add, zero, (jnp.arange(parts), jax.tree.map(cut, batch)))[0]


def _sample(old: TrainState, new: TrainState, grads, rules: Rules, every: int) -> dict[str, Any]:
  """What T5X's trainer writes every so many steps, under the same names; else zeros."""
  is_due = new.sparse_step % every == 0
  before = (old.params, rules, old.sparse_step, old.masks)
  after = (new.params, rules, new.sparse_step, new.masks)
  places = rules.assign(new.params).places
  try:
    moments = metrics.second_moments(new.opt_state, new.params)
  except ValueError:  # the optimizer keeps none
    moments = {}
  state = new.opt_state if set(places) <= set(moments) and moments else None

  def look():
    variances = metrics.summary(*before, grads, per_place=False)
    out = metrics.summary(*after, None, state, metrics.masks_of(*before), per_place=False)
    out |= {k: v for k, v in variances.items() if k.startswith("nm/grad")}
    shares = metrics.density(new.params, rules, new.sparse_step, new.masks)
    for path in places:
      out[f"nm/density/{path}"] = shares.places[path]
      out[f"nm/density_target/{path}"] = shares.targets[path]
    for rule, (pattern, _) in metrics.rule_patterns(*after[:3]).items():
      out |= {f"nm/{name}/{rule}": x for name, x in pattern._asdict().items()}
    return {name: jnp.float32(x) for name, x in out.items()}

  shapes = jax.eval_shape(look)
  nothing = lambda: {name: jnp.float32(0) for name in shapes}
  return jax.lax.cond(is_due, look, nothing)


def patterns_at(rules: Rules, params: Any, step: int) -> Sequence[tuple[str, str, float, int]]:
  """(rule, pattern, D, weights) of every kind of place at a step, for people; on the host."""
  places = rules.assign(params).places.values()
  decays = {recipe: float(recipe.decay(step)) for recipe in {place.recipe for place in places}}
  kinds: dict[tuple[str, str, float], int] = {}
  for place in places:
    held = [p for start, p in place.recipe.levels(place.axis_size) if start <= step]
    kind = place.key, str(held[-1]) if held else "dense", decays[place.recipe]
    kinds[kind] = kinds.get(kind, 0) + int(np.prod(place.shape))
  return [(*kind, size) for kind, size in kinds.items()]
