"""Products alone, of random weights: the best dense one and the packed one, in turns.

With few rows a product is as fast as its weight is read. The layers of a model come from memory, so
other memory is read before each call, and a call multiplies by several weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import timing
from nm_sparsity_jax.analysis.bench.timing import Found, Timing
from nm_sparsity_jax.core import packed as of_one
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import NMPacked, choice, cpu
from nm_sparsity_jax.core.patterns import NM

_FEW = 16  # rows; with more the product takes longer than reading its weight


def products(
  shapes: Sequence[tuple[int, int, int]], pattern: str | NM, dtype: Any = None, turns: int = 9
) -> Found:
  """Measures products of random weights alone.

      print(products([(1024, 4096, 1), (1024, 4096, 128)], "1:8"))

  Args:
    shapes: (depth, features, rows of x) of each product.
    pattern: n:m of the weights, along their depth.
    dtype: of the packed values: 'float32', 'bfloat16' or 'int8'.
    turns: of each product; figures are medians.
  """
  pattern = NM.parse(pattern)
  timings = [_measured(random(k, f, pattern, dtype), rows, turns) for k, f, rows in shapes]
  return Found(f"Products of random weights, {pattern}", timings, timing.threads(), turns)


def _measured(kernel: NMPacked, rows: int, turns: int) -> Timing:
  way = choice.best(kernel, rows, dense=False)
  x = np.random.default_rng(0).standard_normal((rows, kernel.depth), np.float32)
  # One weight alone would stay in the cache, and then its bytes cost nothing.
  copies = 4 if rows <= _FEW else 1
  calls = _calls(jnp.asarray(x), kernel, copies, way)
  taken = timing.interleave(calls, turns, cold=timing.CACHE).items()
  spent = {name: seconds / copies for name, seconds in taken}
  packed = spent.pop(way)
  dense = min(spent, key=spent.__getitem__)
  return Timing(
    what=f"{kernel.depth:,} x {kernel.features:,}, {rows:,} rows",
    dense=spent[dense],
    packed=packed,
    times=spent[dense] / packed,
    dense_bytes=4 * kernel.depth * kernel.features,
    packed_bytes=kernel.nbytes,
    ways=f"{dense}; {way} {cpu.isa() if way == 'cpu_ffi' else ''}".rstrip(),
  )


def _calls(x: jax.Array, kernel: NMPacked, copies: int, way: str) -> dict[str, Any]:
  """Returns name -> a call that multiplies x by each of several weights."""
  dense = np.asarray(of_one.unpack(kernel), np.float32)
  ready = of_one.prepare(kernel, len(x), way, memory=True)
  return {
    "x @ W": repeated(lambda x, w: x @ w, x, [dense] * copies),
    "x @ W.T": repeated(lambda x, w: x @ w.T, x, [np.ascontiguousarray(dense.T)] * copies),
    way: repeated(lambda x, w: of_one.nm_dot(x, w, way), x, [ready] * copies),
  }


def repeated(
  function: Callable[..., Any], x: jax.Array, weights: Sequence[Any]
) -> Callable[[], Any]:
  """Returns a call that multiplies x by each weight.

  Each product waits for the one before, as layers do: with several cores XLA would hand independent
  ones to all of them.

  Args:
    function: x, a weight -> their product.
    x: the rows.
    weights: dense ones or packed ones.
  """

  def turn(state: Any, held: Sequence[Any]) -> Any:
    x, found = state[0], []
    for w in held:
      found.append(function(x, w))
      # Donated: updated in place, and by a value that XLA does not know, so that no product can be
      # left out or reused.
      x = x.at[0, 0].set(0 * found[-1][0, 0])
    return x, found

  run = jax.jit(turn, donate_argnums=0)
  there = jax.tree.map(lambda a: jnp.array(a, copy=True), list(weights))  # each lies elsewhere
  like = jax.eval_shape(function, x, weights[0])
  products = [jnp.zeros(like.shape, like.dtype) for _ in weights]
  state = [(jnp.array(x, copy=True), products)]

  def call() -> Any:
    state[0] = run(state[0], there)
    return jax.block_until_ready(state[0])[1]

  return call


def random(depth: int, features: int, pattern: NM, dtype: Any = None) -> NMPacked:
  """Returns a packed weight of random numbers.

  >>> random(16, 4, NM(1, 8)).rows
  2

  Args:
    depth: the axis that is contracted.
    features: columns.
    pattern: n:m.
    dtype: of the values; None: float32.
  """
  w = np.random.default_rng(0).standard_normal((depth, features), np.float32)
  kept = Groups(w.shape, 0, pad=-depth % pattern.m).magnitude_mask(jnp.asarray(w), pattern)
  return of_one.pack(np.where(kept, w, np.float32(0)), pattern, dtype=dtype)
