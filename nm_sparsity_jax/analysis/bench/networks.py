"""What a network computes at once, timed with dense weights and with packed ones.

T5       the inputs of a batch are read; tokens are decoded
others   a workload's `predict`, of rows of zeros
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import timing
from nm_sparsity_jax.analysis.bench.timing import Found, Timing
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.trainer.workloads import decoding, vision

_TOKENS = 16  # that a T5 decodes
_NEVER = -1  # no token ends a row


def bench(
  network: Any,
  tree: Any,
  *,
  state: Any = None,
  batch: int = 1,
  inputs: int = 64,
  turns: int = 9,
  title: str = "",
) -> Found:
  """Measures a network with packed weights, and the same one with dense weights.

      tree, _ = nms.inference_tree.pack_tree(finalized, rules)
      print(bench(network, tree, batch=1))

  Args:
    network: a T5 or a network of images of this package, not scanned; or a `Workload`.
    tree: what `inference_tree.pack_tree` returns.
    state: collections next to the parameters, such as {'batch_stats': ...}.
    batch: examples at once.
    inputs: tokens of an input of a T5.
    turns: of each call; figures are medians.
    title: what was looked at.
  """
  rows_of = inference_tree.rows_of(getattr(network, "config", None), batch, inputs)
  dense = jax.tree.map(_float32, inference_tree.unpack_tree(tree))
  packed = inference_tree.prepare(tree, rows_of)
  timings = [
    _measured(name, work, dense, packed, turns)
    for name, work in _works(network, state or {}, batch, inputs).items()
  ]
  return Found(title or type(network).__name__, timings, timing.threads(), turns)


def _float32(x: Any) -> jax.Array:
  # XLA multiplies shorter floats several times more slowly on a CPU.
  floats = jnp.issubdtype(x.dtype, jnp.floating)
  return jnp.asarray(np.asarray(x, np.float32) if floats else x)


def _measured(name: str, work: Callable, dense: Any, packed: Any, turns: int) -> Timing:
  """Returns what a work takes, parameters -> what is computed."""
  # Compiled once, so that XLA says of the very program how much it holds.
  trees = {"dense": dense, "packed": packed}
  programs = {side: jax.jit(work).lower(tree).compile() for side, tree in trees.items()}
  calls = {
    side: lambda side=side: jax.block_until_ready(programs[side](trees[side])) for side in trees
  }
  spent = timing.interleave(calls, turns)
  times = spent["dense"] / spent["packed"]
  dense_bytes, packed_bytes = _memory(programs["dense"]), _memory(programs["packed"])
  return Timing(name, spent["dense"], spent["packed"], times, dense_bytes, packed_bytes)


def _memory(program: Any) -> int:
  stats = program.memory_analysis()
  return int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes)


def _works(network: Any, state: Any, batch: int, inputs: int) -> dict[str, Callable[[Any], Any]]:
  """Returns what a network computes at once: name -> a function of its parameters."""
  config: Any = getattr(network, "config", None)
  if isinstance(config, T5Config):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(2, config.vocab_size, (batch, inputs)), jnp.int32)
    made = ["prepared", "cache"]
    # `start` runs the decoder for its shapes alone, and XLA leaves that out.
    read = lambda params: network.apply({"params": params}, ids, 1, mutable=made, method="start")[1]
    decoded = lambda params: decoding.greedy(network, params, ids, _TOKENS, eos_id=_NEVER)[0]
    return {"the inputs": read, f"inputs and {_TOKENS} tokens": decoded}
  if hasattr(config, "image_size"):
    network = vision.Images(network, None)
  like = network.example().items()
  rows = {name: jnp.zeros((batch, *x.shape[1:]), x.dtype) for name, x in like}
  return {"a forward pass": lambda params: network.predict(params, state, rows)}
