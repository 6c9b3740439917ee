"""One product: the best dense one beside the packed one, in turns.

kernels that are alike, rows of x -> [measured] -> Product
depth, features, n:m -> [random] -> a packed kernel

With few rows a product is as fast as its weight is read. The layers of a model come from memory, so
other memory is read before each call: one weight alone would stay in the cache. A call multiplies
by several weights, since starting one takes microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax import packed as of_one
from nm_sparsity_jax.benches import timing
from nm_sparsity_jax.benches.results import Product
from nm_sparsity_jax.packed import MOST, NMPacked, choice, cpu
from nm_sparsity_jax.patterns import NM

_DENSE = ("x @ W", "x @ W.T")
_PRODUCT: dict[str, Callable[..., Any]] = {
  _DENSE[0]: lambda x, w: x @ w,
  _DENSE[1]: lambda x, w: x @ w.T,
}


def measured(
  name: str, kernels: Sequence[NMPacked], rows: int, count: int, turns: int, backend: str
) -> Product:
  """Returns what one product takes, dense and packed.

  Args:
    name: of the kernels.
    kernels: one or more of the same shape and pattern.
    rows: of x.
    count: how many such kernels there are.
    turns: of each product.
    backend: as in `packed.nm_dot`.
  """
  first = kernels[0]
  way = choice.best(first, rows, dense=False) if backend == "auto" else backend
  weights = [kernels[i % len(kernels)] for i in range(_copies(rows))]
  x = np.random.default_rng(0).standard_normal((rows, first.depth), np.float32)
  calls = _calls(jnp.asarray(x), weights, way)
  times = timing.interleave(calls, turns, cold=True)
  spent = {name: statistics.median(found) / len(weights) for name, found in times.items()}
  dense = min(_DENSE, key=spent.__getitem__)
  ready = of_one.prepare(first, rows, backend)
  is_ffi = way == "cpu_ffi"
  return Product(
    name=name,
    kernels=count,
    pattern=str(first.pattern),
    values=str(first.values.dtype),
    depth=first.depth,
    features=first.features,
    rows=rows,
    dense=spent[dense],
    dense_way=dense,
    packed=spent[way],
    packed_way=f"{way} {cpu.isa()}" if is_ffi else way,
    is_taken=isinstance(ready, NMPacked),
    dense_bytes=4 * first.depth * first.features,
    packed_bytes=of_one.sizes(first).total,
  )


def dense_seconds(depth: int, features: int, rows: int, turns: int) -> float:
  """Returns what one dense product takes, the best of `x @ W` and `x @ W.T`.

  Args:
    depth: the axis that is contracted.
    features: columns.
    rows: of x.
    turns: of each product; the figure is a median.
  """
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((rows, depth), np.float32))
  w = rng.standard_normal((depth, features), np.float32)
  held = {_DENSE[0]: w, _DENSE[1]: np.ascontiguousarray(w.T)}
  calls = {name: _call(_PRODUCT[name], x, [one]) for name, one in held.items()}
  times = timing.interleave(calls, turns, cold=True)
  return min(statistics.median(found) for found in times.values())


def _calls(x: jax.Array, weights: Sequence[NMPacked], way: str) -> dict[str, Any]:
  """Returns name -> a call that multiplies x by each weight."""
  dense = [np.asarray(of_one.unpack(w), np.float32) for w in weights]
  ready = [of_one.prepare(w, len(x), way, memory=True) for w in weights]
  candidates = {
    _DENSE[0]: (_PRODUCT[_DENSE[0]], dense),
    _DENSE[1]: (_PRODUCT[_DENSE[1]], [np.ascontiguousarray(w.T) for w in dense]),
    way: (lambda x, w: of_one.nm_dot(x, w, way), ready),
  }
  return {name: _call(function, x, held) for name, (function, held) in candidates.items()}


def _call(function: Callable[..., Any], x: jax.Array, held: Sequence[Any]) -> Callable[[], Any]:
  """Returns a call that multiplies x by each weight.

  With several cores each product waits for the one before, as layers do: XLA would hand independent
  ones to all of them.
  """

  def chained(x: jax.Array, held: Sequence[Any]) -> tuple[jax.Array, list[jax.Array]]:
    found = []
    for w in held:
      found.append(function(x, w))
      if timing.threads() > 1:  # x is changed where it lies, since the caller gives it up
        x = x.at[0, 0].set(0 * found[-1][0, 0])
    return x, found

  run = jax.jit(chained, donate_argnums=0)
  there = jax.tree.map(lambda a: jnp.array(a, copy=True), held)  # each lies elsewhere
  inputs = [jnp.array(x, copy=True)]

  def call() -> Any:
    inputs[0], products = run(inputs[0], there)
    return jax.block_until_ready(products)

  return call


def _copies(rows: int) -> int:
  return 4 if rows <= 16 else 1


def random(depth: int, features: int, pattern: NM, dtype: Any = None) -> NMPacked:
  """Returns a packed weight of random numbers.

  >>> random(16, 4, NM(1, 8)).rows
  2

  Args:
    depth: the axis that is contracted, a multiple of m.
    features: columns.
    pattern: n:m.
    dtype: of the values; None: float32.

  Raises:
    ValueError: no such weight can be packed.
  """
  why = ""
  if pattern.m > MOST:
    why = f"an index reaches through {MOST} entries at most"
  elif pattern.n == pattern.m:
    why = "it keeps every weight, so nothing is left out"
  elif depth % pattern.m:
    why = f"a depth of {depth} is not a multiple of {pattern.m}"
  if why:
    raise ValueError(f"{pattern} is not packed: {why}. Take another pattern, such as 1:8.")
  rng = np.random.default_rng(0)
  cut = depth // pattern.m, pattern.m, features
  if pattern.n == 1:
    at = rng.integers(0, pattern.m, (cut[0], 1, features))
  else:
    at = np.argsort(rng.random(cut, np.float32), axis=1)[:, : pattern.n]
  w = np.zeros(cut, np.float32)
  np.put_along_axis(w, at, rng.standard_normal(at.shape, np.float32), 1)
  return of_one.pack(w.reshape(depth, features), pattern, dtype=dtype)
