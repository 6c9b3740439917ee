"""What the local runner asks of a model family, and so do plans, comparisons and reports of runs.

    init(rng) -> variables -> [params | state | logical axes]
    batches(seed, start) -> batch -> loss(params, state, batch, rng) -> loss, sums, new state
    splits() -> batches -> loss(..., rng=None) -> sums -> scalars(sums) -> names and values
                        -> predict(params, state, batch) -> a row of each example, if you define it

The runner owns all the rest: sparsity, devices, the optimizer, checkpoints, curves. A workload
knows nothing of sparsity: its parameters are the effective ones.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.training import flops

_log = logging.getLogger(__name__)
# 'mse' and its like count only as a whole word of a name, such as 'eval_mse'.
_LESS = re.compile(r"loss|error|perplexity|(^|_)(mse|mae|rmse)($|_)")
# Fields of a network's config that no shape of a parameter reveals: Swin's, a ViT's, a T5's.
_UNSEEN = ("window", "heads", "mlp_activations")

Batch = Mapping[str, Any]


class Workload(abc.ABC):
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

  A batch is a flat dict of arrays. Their first axis counts examples, as many in every batch. Where
  rows only fill it, an array 'real' is 0 for them: they get no prediction.

  Attributes:
    weight: which of the sums divides the others; also the unit of the throughput that is printed.
    batch_size: examples of a training batch.
    network_config: what its variables do not reveal of a network, such as the window of a Swin V2.
      Weights of timm or Hugging Face, and checkpoints of other runs, are compared with it.
  """

  weight: str = "examples"
  batch_size: int
  network_config: Any = None

  @abc.abstractmethod
  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns new variables, as flax' `module.init` does: float32 parameters, dense.

    Args:
      rng: a key.

    Returns:
      'params'; 'params_axes' where the parameters have logical axes, which lay them over devices
      and say which axis a scan added; each other collection, such as 'batch_stats', is state.
    """

  @abc.abstractmethod
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

  @abc.abstractmethod
  def batches(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless training batches from number `start` on.

    Batch i must be a function of (seed, i) alone, so that a run that resumes reads what it would
    have read.
    """

  @abc.abstractmethod
  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns name -> the finite batches that an evaluation goes through.

    A run calls it before its first step: raise a ValueError where the data are not there.
    """

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
    raise ValueError(f"{type(self).__name__} has no method `predict`: write one.")

  def scalars(self, sums: Mapping[str, float]) -> dict[str, float]:
    """Returns what is written of sums, name -> value; 'loss' must be one of them.

    By default each sum / sums[weight]; where that is 0, each sum.

    Args:
      sums: 'loss' and the sums of `loss`, added up over batches.
    """
    weight = sums[self.weight] or 1.0  # an empty batch has no mean
    return {name: x / weight for name, x in sums.items() if name != self.weight}

  def less_is_better(self, metric: str) -> bool:
    """Returns whether a smaller value of a metric is better; by default its name says it.

    The best checkpoint, reports and sweeps go by it.

    Args:
      metric: a name of `scalars`, such as 'absolute_error'.
    """
    return less_by_name(metric)

  def example(self) -> Batch:
    """Returns a batch of one row, as arrays or shapes; FLOPs are counted of it.

    By default it is a row of the first training batch, which is read for that.
    """
    # A generator is left after one batch: nothing is read ahead.
    batch = next(iter(self.batches(0, 0)))
    return jax.eval_shape(lambda batch: {name: x[:1] for name, x in batch.items()}, dict(batch))

  def cost(self) -> flops.Cost:
    """Returns the dense forward FLOPs of one example, those of `loss` without a key."""
    variables = dict(jax.eval_shape(self.init, jax.random.PRNGKey(0)))
    params, _ = variables.pop("params"), variables.pop("params_axes", None)
    forward = lambda params, state, batch: self.loss(params, state, batch, None)
    return flops.forward(forward, params, variables, self.example())


def filled(batch: Batch, size: int) -> dict[str, np.ndarray]:
  """Returns a batch of `size` rows; those that are missing are all zero."""
  fill = lambda x: np.pad(x, [(0, size - len(x))] + [(0, 0)] * (x.ndim - 1))
  return {name: fill(x) for name, x in batch.items()}


def less_by_name(metric: str) -> bool:
  """Returns whether less of a metric is better, as its name says.

  >>> less_by_name("absolute_error"), less_by_name("eval_mse"), less_by_name("accuracy")
  (True, True, False)
  """
  return _LESS.search(metric) is not None


def describe(workload: Workload) -> dict[str, Any]:
  """Returns what run.json says of a workload: plain values.

  'ops': of its cost, each a dict of the fields of `flops.Op`, or None where it cannot be traced,
  which is logged;
  'network_settings': those that shapes do not reveal.
  """
  try:
    ops = [dataclasses.asdict(op) for op in workload.cost().ops]
  except Exception as e:  # of the user's own code: a run does without
    _log.warning("no FLOPs of %s: %s", type(workload).__name__, e)
    ops = None
  # A window, or an activation, may also be a function, '<function ...>', which JSON lacks.
  noted = {name: getattr(workload.network_config, name, None) for name in _UNSEEN}
  settings = {k: x for k, x in noted.items() if type(x) in (int, tuple) and "<" not in repr(x)}
  return {"ops": ops, "network_settings": settings}
