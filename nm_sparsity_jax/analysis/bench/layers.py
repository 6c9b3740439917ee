"""One product: the best dense one beside the packed one, in turns.

kernels that are alike, rows of x -> [measured] -> Product
depth, features, n:m -> [random] -> a packed kernel

With few rows a product is as fast as its weight is read. The layers of a model come from memory, so
other memory is read before each call: one weight alone would stay in the cache. A model that a
core's cache holds stays there, and so do its weights here.

A call takes microseconds of its own, so it multiplies by several weights, and where they stay in
the cache by all of them again and again. What a call without a product takes is subtracted.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import timing
from nm_sparsity_jax.analysis.bench.results import Product
from nm_sparsity_jax.core import packed as of_one
from nm_sparsity_jax.core.packed import MOST, NMPacked, choice, cpu
from nm_sparsity_jax.core.patterns import NM

_DENSE = ("x @ W", "x @ W.T")
_PRODUCT: dict[str, Callable[..., Any]] = {
  _DENSE[0]: lambda x, w: x @ w,
  _DENSE[1]: lambda x, w: x @ w.T,
}
_NOTHING = "nothing"
_NEAR = 1 << 20  # bytes: so many stay in the cache of a core
_WORK, _AGAIN = 1 << 23, 64  # multiplications and additions of a call from the cache; most turns
_ROOM = 1 << 24  # bytes of dense weights of a call from memory


def measured(
  name: str,
  kernels: Sequence[NMPacked],
  rows: int,
  count: int,
  turns: int,
  backend: str,
  beside: int | None = None,
) -> Product:
  """Returns what one product takes, dense and packed, without the cost of a call.

  Args:
    name: of the kernels.
    kernels: one or more of the same shape and pattern.
    rows: of x.
    count: how many such kernels there are.
    turns: of each product.
    backend: as in `packed.nm_dot`.
    beside: bytes of the network's weights; None: a small weight is of a small network, a large one
      of a large one.
  """
  first = kernels[0]
  way = choice.best(first, rows, dense=False) if backend == "auto" else backend
  plan = _plan(first.depth, first.features, rows, beside)
  weights = [kernels[i % len(kernels)] for i in range(plan.copies)]
  x = np.random.default_rng(0).standard_normal((rows, first.depth), np.float32)
  calls = _calls(jnp.asarray(x), weights, way, plan.again)
  nothing, found = _timed(calls, turns, plan)
  spent = {name: statistics.median(times) for name, times in found.items()}
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
    call=nothing,
    half=timing.quartiles(timing.ratios(found[dense], found[way])),
  )


@dataclasses.dataclass(frozen=True)
class _Plan:
  """How a product is timed: weights of a call, turns of a call, bytes that are read before it."""

  copies: int
  again: int
  cold: int


def _plan(depth: int, features: int, rows: int, beside: int | None) -> _Plan:
  """Returns how a product is timed."""
  one, few = 4 * depth * features, rows <= 16
  copies = 4 if few else 1
  if (copies * one if beside is None else beside) <= _NEAR:
    work = copies * rows * depth * features
    return _Plan(copies, max(1, min(_AGAIN, _WORK // work)), 0)
  copies = max(copies, min(16, _ROOM // one)) if few else 1
  return _Plan(copies, 1, timing.CACHE if beside is None else min(beside, timing.CACHE))


def _timed(
  calls: dict[str, Any], turns: int, plan: _Plan
) -> tuple[float, dict[str, Sequence[float]]]:
  """Returns the share of one product in the cost of a call, and name -> seconds of each turn."""
  times = timing.interleave(calls, turns, cold=plan.cold, nothing=_NOTHING)
  number = plan.copies * plan.again
  nothing = statistics.median(times.pop(_NOTHING)) / number
  return nothing, {
    name: [max(spent / number - nothing, 0.0) for spent in found] for name, found in times.items()
  }


def _calls(x: jax.Array, weights: Sequence[NMPacked], way: str, again: int) -> dict[str, Any]:
  """Returns name -> a call that multiplies x by each weight; one that multiplies nothing too."""
  dense = [np.asarray(of_one.unpack(w), np.float32) for w in weights]
  ready = [of_one.prepare(w, len(x), way, memory=True) for w in weights]
  candidates = {
    _DENSE[0]: (_PRODUCT[_DENSE[0]], dense),
    _DENSE[1]: (_PRODUCT[_DENSE[1]], [np.ascontiguousarray(w.T) for w in dense]),
    way: (lambda x, w: of_one.nm_dot(x, w, way), ready),
    _NOTHING: (None, ready),
  }
  features = weights[0].features
  return {
    name: _call(function, x, held, features, again) for name, (function, held) in candidates.items()
  }


def _call(
  function: Callable[..., Any] | None,
  x: jax.Array,
  held: Sequence[Any],
  features: int,
  again: int = 1,
) -> Callable[[], Any]:
  """Returns a call that multiplies x by each weight, `again` times over.

  x is changed by what was found, where it lies, since the caller gives it up. So the next turn
  multiplies anew. With several cores each product waits for the one before, as layers do: XLA would
  hand independent ones to all of them. Without a function all is done but the products.
  """

  def turn(_: Any, state: Any, held: Sequence[Any]) -> Any:
    x, before = state
    found = []
    for w, last in zip(held, before, strict=True):
      found.append(last if function is None else function(x, w))
      if timing.threads() > 1 or len(found) == len(held):
        x = x.at[0, 0].set(0 * found[-1][0, 0])
    return x, found

  def chained(state: Any, held: Sequence[Any]) -> Any:
    if again == 1:
      return turn(0, state, held)
    return jax.lax.fori_loop(0, again, lambda i, state: turn(i, state, held), state)

  run = jax.jit(chained, donate_argnums=0)
  there = jax.tree.map(lambda a: jnp.array(a, copy=True), list(held))  # each lies elsewhere
  products = [jnp.zeros((len(x), features), jnp.float32) for _ in held]
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
