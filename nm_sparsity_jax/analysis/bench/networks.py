"""What a network computes at once, as calls that can be timed.

network, batch -> [works] -> Work: a tree of parameters -> calls -> seconds; which kernels it reads

    T5       the inputs of a batch are read, once; a token is decoded by `start` and `step`
    images   a forward pass
    others   a workload's `predict`, on the first batch of its first split
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.trainer.workloads import Workload, decoding

_NEVER = -1  # no token ends a row

Times = Mapping[Any, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Work:
  """Something that a network computes at once.

  Attributes:
    name: such as 'a token'.
    run: parameters, number -> what is computed; jitted, the number static.
    numbers: those that are timed; the work is the last less the first, for each of them between.
    reads: path of a kernel -> whether it is multiplied.
  """

  name: str
  run: Callable[[Any, int], Any]
  numbers: Sequence[int]
  reads: Callable[[str], bool]

  def programs(self, params: Any) -> dict[int, Any]:
    """Returns number -> a compiled program, which takes the parameters.

    Args:
      params: dense or packed, on the device.
    """
    made = jax.jit(self.run, static_argnums=1)
    return {n: made.lower(params, n).compile() for n in self.numbers}

  def seconds(self, times: Mapping[int, Sequence[float]]) -> float:
    """Returns the median of the work's time.

    Args:
      times: number -> seconds of each turn.
    """
    return max(statistics.median(self.each(times)), 0.0)

  def each(self, times: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the work's time in each turn; below 0 where it is too short to be measured.

    Args:
      times: number -> seconds of each turn.
    """
    first, *rest = self.numbers
    if not rest:
      return list(times[first])
    pairs = zip(times[rest[-1]], times[first], strict=True)
    return [(a - b) / (rest[-1] - first) for a, b in pairs]


def memory(program: Any) -> int:
  """Returns the bytes that XLA says are held at once at most, the parameters among them."""
  stats = program.memory_analysis()
  return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes)


def works(network: Any, state: Any, batch: int, inputs: int, tokens: int) -> list[Work]:
  """Returns what a network computes at once.

  Args:
    network: a T5 or a network of images, or a `Workload`.
    state: collections beside the parameters, such as {'batch_stats': ...}.
    batch: examples at once.
    inputs: tokens of an input of a T5.
    tokens: that a T5 decodes, 2 or more.

  Raises:
    ValueError: nobody knows what to feed the network.
  """
  config: Any = getattr(network, "config", None)
  if isinstance(config, T5Config):
    return _t5(network, batch, inputs, tokens)
  if hasattr(config, "image_size"):
    side = config.image_size
    x = np.random.default_rng(0).standard_normal((batch, side, side, config.channels), np.float32)
    images = jnp.asarray(x)
    passed = lambda params, _: network.apply({"params": params, **state}, images, train=False)
    return [Work("a forward pass", passed, (1,), lambda path: True)]
  if isinstance(network, Workload):
    batches = next(iter(network.splits().values()))
    first = {name: jnp.asarray(x) for name, x in next(iter(batches)).items()}
    said = lambda params, _: network.predict(params, state, first)
    return [Work("a batch of predictions", said, (1,), lambda path: True)]
  raise ValueError(
    f"{type(network).__name__}: nobody knows what to feed it. Give a T5 or a network of images of "
    "this package, or a workload with `predict`; `benches.products` takes shapes alone."
  )


def _t5(network: Any, batch: int, inputs: int, tokens: int) -> list[Work]:
  ids = np.random.default_rng(0).integers(2, network.config.vocab_size, (batch, inputs))
  given = jnp.asarray(ids, jnp.int32)
  once = re.compile(r"(encoder/|.*/encoder_decoder_attention/(key|value)/).*")

  def read(params, _):
    made = ["prepared", "decoded"]
    return network.apply({"params": params}, given, 1, mutable=made, method="start")[1]

  decoded = lambda params, n: decoding.greedy(network, params, given, n, eos_id=_NEVER)[0]
  return [
    # `start` runs the decoder for its shapes alone, and XLA leaves that out.
    Work("the inputs", read, (1,), lambda path: bool(once.fullmatch(path))),
    Work("a token", decoded, (1, tokens), lambda path: not once.fullmatch(path)),
  ]
