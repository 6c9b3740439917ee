"""What a network computes at once, timed with dense weights and with packed ones.

T5       the inputs of a batch are read, once; a token is decoded by `start` and `step`
images   a forward pass
others   a workload's `predict`, on the first batch of its first split
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import timing
from nm_sparsity_jax.analysis.bench.layers import Product
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.trainer.workloads import Workload, decoding

_NEVER = -1  # no token ends a row


@dataclasses.dataclass(frozen=True)
class Work:
  """Something that a network computes at once.

  Attributes:
    name: such as 'a token'.
    run: parameters, number -> what is computed; jitted, the number static.
    reads: path of a kernel -> whether it is multiplied.
    numbers: those that are timed; the work is the last less the first, for each of them between.
  """

  name: str
  run: Callable[[Any, int], Any]
  reads: Callable[[str], bool] = lambda path: True
  numbers: Sequence[int] = (1,)


@dataclasses.dataclass(frozen=True)
class Whole:
  """What a network computes at once, with all that is not a packed product.

  Attributes:
    name: such as 'a token'.
    dense: seconds with dense weights.
    packed: seconds with packed ones.
    times: how many times faster it is with packed weights; 0 where it is too short to time.
    products: seconds of the dense products that packing replaces, each measured alone.
    bound: how many times faster it can be at most: the time if the packed products took their
      bytes' share of what the dense ones take, and all else stayed. 0 where it is not known.
    dense_memory: bytes of weights and temporaries that the dense program holds at most, as XLA
      says.
    packed_memory: the same of the packed one.
  """

  name: str
  dense: float
  packed: float
  times: float
  products: float
  bound: float
  dense_memory: int
  packed_memory: int


def measured(
  work: Work, trees: Mapping[str, Any], products: Mapping[str, Product], turns: int
) -> Whole:
  """Returns what a work takes.

  Args:
    work: of the network.
    trees: 'dense' and 'packed' -> parameters on the device.
    products: path of a packed kernel -> what its product takes.
    turns: of each call; figures are medians.
  """
  made = jax.jit(work.run, static_argnums=1)
  programs = {
    (side, n): made.lower(tree, n).compile() for side, tree in trees.items() for n in work.numbers
  }
  calls = {
    (side, n): lambda run=run, side=side: jax.block_until_ready(run(trees[side]))
    for (side, n), run in programs.items()
  }
  spent = timing.interleave(calls, turns)
  each = {side: _each(work, {n: spent[side, n] for n in work.numbers}) for side in trees}
  dense, packed = (max(statistics.median(each[side]), 0.0) for side in ("dense", "packed"))
  read = [p for path, p in products.items() if work.reads(path)]
  memory = {side: _memory(programs[side, work.numbers[-1]]) for side in trees}
  return Whole(
    name=work.name,
    dense=dense,
    packed=packed,
    times=dense / packed if dense and packed else 0.0,
    products=sum(p.dense for p in read),
    bound=bound(dense, [(p.dense, p.packed_bytes / p.dense_bytes) for p in read]),
    dense_memory=memory["dense"],
    packed_memory=memory["packed"],
  )


def _each(work: Work, times: Mapping[int, Sequence[float]]) -> list[float]:
  """Returns the work's time in each turn; below 0 where it is too short to be measured."""
  first, last = work.numbers[0], work.numbers[-1]
  if first == last:
    return list(times[first])
  return [(a - b) / (last - first) for a, b in zip(times[last], times[first], strict=True)]


def _memory(program: Any) -> int:
  stats = program.memory_analysis()
  return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes)


def bound(whole: float, products: Iterable[tuple[float, float]]) -> float:
  """Returns how many times faster a whole can be at most.

  It is 0 where it is not known: measured alone, the products take longer than the whole.

  >>> bound(10.0, [(8.0, 0.25)])
  2.5

  Args:
    whole: seconds with dense weights.
    products: (seconds of dense products, the share of their bytes that is left when packed).
  """
  pairs = list(products)
  rest = whole - sum(seconds for seconds, _ in pairs)
  least = rest + sum(seconds * share for seconds, share in pairs)
  return whole / least if rest >= 0 and least else 0.0


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
    return [Work("a forward pass", passed)]
  if isinstance(network, Workload):
    batches = next(iter(network.splits().values()))
    first = {name: jnp.asarray(x) for name, x in next(iter(batches)).items()}
    return [Work("a batch of predictions", lambda params, _: network.predict(params, state, first))]
  raise ValueError(
    f"{type(network).__name__}: nobody knows what to feed it. Give a T5 or a network of images of "
    "this package, or a workload with `predict`; `bench.products` takes shapes alone."
  )


def _t5(network: Any, batch: int, inputs: int, tokens: int) -> list[Work]:
  ids = np.random.default_rng(0).integers(2, network.config.vocab_size, (batch, inputs))
  given = jnp.asarray(ids, jnp.int32)
  once = re.compile(r"(encoder/|.*/encoder_decoder_attention/(key|value)/).*")

  def read(params, _):
    made = ["prepared", "cache"]
    return network.apply({"params": params}, given, 1, mutable=made, method="start")[1]

  decoded = lambda params, n: decoding.greedy(network, params, given, n, eos_id=_NEVER)[0]
  return [
    # `start` runs the decoder for its shapes alone, and XLA leaves that out.
    Work("the inputs", read, lambda path: bool(once.fullmatch(path))),
    Work("a token", decoded, lambda path: not once.fullmatch(path), (1, tokens)),
  ]
