"""What the local runner asks of a model family, and so do plans, comparisons and reports of runs.

    init(rng) -> variables -> [params | state | logical axes]
    batches(seed, start) -> batch -> loss(params, state, batch, rng) -> loss, sums, new state
    splits() -> batches -> loss(..., rng=None) -> sums -> scalars(sums) -> names and values
                        -> predict(params, state, batch) -> a row of each example, if you define it

The runner owns all the rest: sparsity, devices, the optimizer, checkpoints, curves. A workload
knows nothing of sparsity: it is given effective parameters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import struct

from nm_sparsity_jax.trainer import directions
from nm_sparsity_jax.trainer.workloads import predictions
from nm_sparsity_jax.training import flops

Batch = Mapping[str, Any]


class Workload:
  """A model family as a trainer sees it. Subclass it, and name your class in a gin file.

      class Regression(Workload):

        def init(self, rng):
          return Mlp().init(rng, jnp.zeros((1, 16)))

        def loss(self, params, state, batch, rng):
          variables = {"params": params, **state}
          out, state = Mlp().apply(variables, batch["x"], rng is not None, mutable=[*state])
          error = jnp.sum((out - batch["y"]) ** 2)
          return error, {"examples": jnp.float32(len(out))}, state

        def batches(self, seed, start):
          for position in itertools.count(start):
            yield make_batch(np.random.default_rng((seed, position)))

        def splits(self):
          return {"validation": [make_batch(np.random.default_rng(0))]}

  Where rules are to name kernels by roles such as 'ff', your module also calls
  `nm_sparsity_jax.training.roles.register`; regexes for whole paths need nothing.

  A batch is a flat dict of arrays whose first axis counts examples, as many in every batch.

  Attributes:
    weight: which of the sums divides the others; also the unit of the throughput that is printed.
    headline: which of the scalars an evaluation prints as its loss line.
    batch_size: examples of a training batch; None where something else brings the batches.
    real: which array of a batch is 0 where a row only fills it, so that it gets no prediction;
      None = each row is an example.
    network_config: what its variables do not tell of a network, such as the window of a Swin V2: a
      file of timm's weights, or a folder of Hugging Face's, is held against it; None = nothing.
  """

  weight: str = "examples"
  headline: Sequence[str] = ("loss",)
  batch_size: int | None = None
  real: str | None = None
  network_config: Any = None

  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns new variables, as flax' `module.init` does: float32 parameters, dense.

    Args:
      rng: a key.

    Returns:
      'params'; 'params_axes' where the parameters have logical axes, which lay them over devices
      and say which axis a scan added; each other collection, such as 'batch_stats', is state.
    """
    raise NotImplementedError

  def loss(
    self, params: Any, state: Mapping[str, Any], batch: Batch, rng: jax.Array | None
  ) -> tuple[jax.Array, Mapping[str, jax.Array], Mapping[str, Any]]:
    """Returns the summed loss of a batch, more sums over it, and the new state.

    It is traced. The gradient is that of the summed loss / sums[weight], whatever the microbatches;
    where that sum is 0, as in a batch of padding alone, it divides by 1.

    Args:
      params: effective parameters.
      state: collection -> variables; {} where `init` returned 'params' alone.
      batch: of `batches` or of a split.
      rng: a key for dropout, mixup and their like; None = this is an evaluation, and the new state
        is dropped.

    Returns:
      the loss, a float32 scalar; name -> sum, float32 scalars, among them `weight`; the state with
      the structure that it came with.
    """
    raise NotImplementedError

  def batches(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless training batches from number `start` on.

    Batch i must be a function of (seed, i) alone, so that a run that resumes reads what it would
    have read.
    """
    raise NotImplementedError

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns name -> the finite batches that an evaluation goes through."""
    raise NotImplementedError

  def predict(self, params: Any, state: Mapping[str, Any], batch: Batch) -> Mapping[str, jax.Array]:
    """Returns what the model says of each row of a batch; `nm-sparsity infer` writes it.

    It is traced. Only `infer` needs it.

    Args:
      params: effective parameters.
      state: collection -> variables.
      batch: of a split.

    Returns:
      name -> an array of finite real numbers or booleans; its first axis counts the rows.
    """
    raise NotImplementedError

  def scalars(self, sums: Mapping[str, float]) -> dict[str, float]:
    """Returns what is written of sums, name -> value; 'loss' must be one of them.

    By default each sum / sums[weight]; where that is 0, each sum.

    Args:
      sums: 'loss' and the sums of `loss`, added up over batches.
    """
    weight = sums[self.weight] or 1.0
    return {name: x / weight for name, x in sums.items() if name != self.weight}

  def less_is_better(self, metric: str) -> bool:
    """Returns whether a smaller value of a metric is better; by default its name tells.

    The best checkpoint, reports and sweeps go by it.

    Args:
      metric: a name of `scalars`, such as 'absolute_error'.
    """
    return directions.by_name(metric)

  def example(self, lengths: Mapping[str, int] | None = None) -> Batch:
    """Returns a batch of one row, as arrays or shapes; FLOPs are counted of it.

    By default it is a row of the first training batch, which is read for that.

    Args:
      lengths: feature -> tokens of an example, where the settings of a run say them.
    """
    del lengths
    batch = next(iter(self.batches(0, 0)))
    return jax.eval_shape(lambda batch: {name: x[:1] for name, x in batch.items()}, dict(batch))

  def cost(self, lengths: Mapping[str, int] | None = None) -> flops.Cost:
    """Returns the dense forward FLOPs of one example, those of `loss` without a key.

    Args:
      lengths: as of `example`.
    """
    variables = dict(jax.eval_shape(self.init, jax.random.PRNGKey(0)))
    params, _ = variables.pop("params"), variables.pop("params_axes", None)
    forward = lambda params, state, batch: self.loss(params, state, batch, None)
    return flops.forward(forward, params, variables, self.example(lengths))

  def setting_of(self, path: str) -> str | None:
    """Returns which setting the shape of a parameter hangs on; None if no single one.

    A checkpoint whose parameter has another shape is refused by that name.

    Args:
      path: of a parameter, such as 'head/kernel'.
    """
    del path
    return None

  def network_settings(self) -> Mapping[str, int]:
    """Returns fields of `network_config` that no shape of a parameter tells: name -> number.

    A run notes them, and a network with others is refused its checkpoints.
    """
    return {}

  def check(self, source: Any = None) -> None:
    """Raises ValueError where data do not fit the model; called before the first step.

    Args:
      source: where training batches come from, if not from `batches`.
    """


# What a class has to write itself.
REQUIRED = ("init", "loss", "batches", "splits")


@struct.dataclass
class Sums:
  """Sums over a batch as one vector: what a compiled program returns.

  Attributes:
    values: float32 [n].
    names: of each.
  """

  values: jax.Array
  names: tuple[str, ...] = struct.field(pytree_node=False)

  @classmethod
  def of(cls, loss: jax.Array, sums: Mapping[str, jax.Array]) -> Sums:
    """Returns the loss, first, and its sums."""
    return cls(jax.numpy.stack([loss, *sums.values()]), ("loss", *sums))


class Devices(Protocol):
  """What an evaluation asks of the runner: see `nm_sparsity_jax.trainer.step.Model`."""

  workload: Workload

  def jit(self, function: Callable, **kwargs: Any) -> Callable: ...
  def put(self, batch: Batch) -> dict[str, jax.Array]: ...
  def check_batch(self, batch_size: int, parts: int = 1) -> None: ...
  def eval_step(self) -> Any: ...


class Stopped(Exception):
  """The process was asked to end during an evaluation."""


class Found(NamedTuple):
  """What an evaluation finds.

  Attributes:
    scalars: split -> what `Workload.scalars` makes of its sums.
    metrics: split -> name -> value; `Workload.less_is_better` tells which way is better.
  """

  scalars: dict[str, dict[str, float]]
  metrics: dict[str, dict[str, float]]


KEPT = 1 << 28  # bytes of a split that an evaluator keeps


class Evaluator:
  """Evaluates one model again and again: sums over each split; data that are few are read once.

  Args:
    devices: the runner's model.
    splits: name -> its batches, called for when they are first needed.
    stop: asked between batches; where it is true, `Stopped` is raised.
  """

  def __init__(
    self,
    devices: Devices,
    splits: Mapping[str, Callable[[], Iterable[Batch]]],
    stop: Callable[[], bool] = lambda: False,
  ):
    self.devices, self.stop, self.splits = devices, stop, splits
    self._step = devices.eval_step()
    self._batches: dict[str, list[Batch]] = {}

  def evaluate(self, variables: Mapping[str, Any], step: int) -> Found:
    """Returns what is found at a step; of a workload's own splits, all scalars but the loss."""
    scalars = self.scalars(variables)
    metrics = {
      split: {name: x for name, x in values.items() if name != "loss"}
      for split, values in scalars.items()
    }
    return Found(scalars, {split: values for split, values in metrics.items() if values})

  def metric_names(self, variables: Mapping[str, Any]) -> Collection[str] | None:
    """Returns the names of the metrics that `evaluate` finds; None where they are not known yet.

    It traces the loss, and computes nothing.

    Args:
      variables: what `evaluate` takes, or their shapes.
    """
    if type(self).evaluate is not Evaluator.evaluate:  # one of your own, which may find others
      return None
    names: set[str] = set()
    for split in self.splits:
      for batch in itertools.islice(self.batches(split), 1):
        sums = self._step.eval_shape(variables, self.devices.put(batch))
        try:
          names |= self.devices.workload.scalars(dict.fromkeys(sums.names, 1.0)).keys()
        except Exception:  # it does not take such sums, and may take real ones
          return None
    return names - {"loss"}

  def scalars(self, variables: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns split -> scalars over its examples.

    Args:
      variables: effective 'params', and the state.
    """
    found = {}
    for split in self.splits:
      names, total = (), np.zeros(())
      for batch in self.batches(split):
        self.check()
        sums = self._step(variables, self.devices.put(batch))
        names, total = sums.names, total + np.asarray(sums.values, np.float64)
      sums = dict(zip(names, map(float, total), strict=True)) if names else {}
      if not sums:
        raise ValueError(f"the split {split!r} has no batches: there is nothing to evaluate.")
      found[split] = self.devices.workload.scalars(sums)
    return found

  def predictions(
    self, variables: Mapping[str, Any]
  ) -> Iterator[tuple[str, Iterator[predictions.Row]]]:
    """Yields each split and what `Workload.predict` says of its examples, in their order.

    Args:
      variables: effective 'params', and the state.
    """
    workload = self.devices.workload
    step = self.devices.jit(functools.partial(predictions.of_batch, workload))
    for split in self.splits:
      yield split, predictions.rows(workload, split, self._predicted(step, split, variables))

  def _predicted(self, step: Callable, split: str, variables: Any) -> Iterator[tuple[Batch, Any]]:
    """Yields each batch of a split and what is predicted from it."""
    for batch in self.splits[split]():
      self.check()
      yield batch, jax.device_get(step(variables, self.devices.put(batch)))

  def batches(self, split: str) -> Iterable[Batch]:
    """Returns the batches of a split; a small split is read once, a large one each time."""
    if split in self._batches:
      return self._batches[split]
    return self._read(split)

  def _read(self, split: str) -> Iterator[Batch]:
    """Yields the batches of a split, and keeps them if they are few."""
    kept, size = [], 0
    for batch in self.splits[split]():
      size += sum(np.asarray(x).nbytes for x in batch.values())
      if size <= KEPT:
        kept.append(batch)
      else:
        kept.clear()
      yield batch
    if size <= KEPT:
      self._batches[split] = kept

  def check(self) -> None:
    """Raises `Stopped` where the process is asked to end."""
    if self.stop():
      raise Stopped


def take(batches: Iterable[Batch], count: int | None) -> Iterator[Batch]:
  """Returns the first `count` batches; None = all."""
  return itertools.islice(batches, count)
