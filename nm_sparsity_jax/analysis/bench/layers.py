"""One product: the best dense one beside the packed one, in turns.

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
from nm_sparsity_jax.core import packed as of_one
from nm_sparsity_jax.core.packed import NMPacked, choice, cpu
from nm_sparsity_jax.core.patterns import NM

_DENSE: dict[str, Callable[..., Any]] = {
  "x @ W": lambda x, w: x @ w,
  "x @ W.T": lambda x, w: x @ w.T,
}
_NOTHING = "nothing"
_NEAR = 1 << 20  # bytes: so many stay in the cache of a core
_WORK, _AGAIN = 1 << 23, 64  # multiplications and additions of a call from the cache; most turns
_ROOM = 1 << 24  # bytes of dense weights of a call from memory
_LEAST = 3  # calls without a product that a timed call must take


@dataclasses.dataclass(frozen=True)
class Product:
  """One product x . W, of kernels that are alike.

  Attributes:
    name: of the kernels.
    kernels: how many they are.
    pattern: n:m.
    values: dtype of the packed values.
    depth: length of the axis that is contracted.
    features: columns.
    rows: of x.
    dense: seconds of the best dense product, in float32.
    dense_way: 'x @ W' or 'x @ W.T', whichever is faster.
    packed: seconds of the packed product.
    packed_way: its backend.
    is_taken: whether `prepare` keeps the kernel packed; else it takes the dense product.
    dense_bytes: of one kernel with its zeros, in float32.
    packed_bytes: of one kernel without.
    times: how many times faster the packed product is; 0 where one is too short to time.
  """

  name: str
  kernels: int
  pattern: str
  values: str
  depth: int
  features: int
  rows: int
  dense: float
  dense_way: str
  packed: float
  packed_way: str
  is_taken: bool
  dense_bytes: int
  packed_bytes: int
  times: float


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
  copies, again, cold = _repeats(first.depth, first.features, rows, beside)
  weights = [kernels[i % len(kernels)] for i in range(copies)]
  x = np.random.default_rng(0).standard_normal((rows, first.depth), np.float32)
  calls = _calls(jnp.asarray(x), weights, way, again)
  times = timing.interleave(calls, turns, cold=cold, nothing=_NOTHING)
  share = lambda name: [spent / (copies * again) for spent in times[name]]
  call = statistics.median(share(_NOTHING))
  spent = {name: max(statistics.median(share(name)) - call, 0.0) for name in (*_DENSE, way)}
  dense = min(_DENSE, key=spent.__getitem__)
  # Where a call takes most of the time, the difference of two is noise.
  is_long = min(spent[dense], spent[way]) + call >= _LEAST * call
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
    packed_way=f"{way} {cpu.isa()}" if way == "cpu_ffi" else way,
    is_taken=isinstance(of_one.prepare(first, rows, backend), NMPacked),
    dense_bytes=4 * first.depth * first.features,
    packed_bytes=first.nbytes,
    times=spent[dense] / spent[way] if is_long and spent[way] else 0.0,
  )


def _repeats(depth: int, features: int, rows: int, beside: int | None) -> tuple[int, int, int]:
  """Returns the weights of a call, how often it goes through them, bytes that are read before."""
  one, copies = 4 * depth * features, 4 if rows <= 16 else 1
  if (copies * one if beside is None else beside) <= _NEAR:
    work = copies * rows * depth * features
    return copies, max(1, min(_AGAIN, _WORK // work)), 0
  if rows <= 16:
    copies = max(copies, min(16, _ROOM // one))
  return copies, 1, timing.CACHE if beside is None else min(beside, timing.CACHE)


def _calls(x: jax.Array, weights: Sequence[NMPacked], way: str, again: int) -> dict[str, Any]:
  """Returns name -> a call that multiplies x by each weight; one that multiplies nothing too."""
  dense = [np.asarray(of_one.unpack(w), np.float32) for w in weights]
  ready = [of_one.prepare(w, len(x), way, memory=True) for w in weights]
  plain, transposed = _DENSE
  return {
    plain: repeated(_DENSE[plain], x, dense, again),
    transposed: repeated(_DENSE[transposed], x, [np.ascontiguousarray(w.T) for w in dense], again),
    way: repeated(lambda x, w: of_one.nm_dot(x, w, way), x, ready, again),
    _NOTHING: repeated(lambda x, w: jnp.zeros((len(x), weights[0].features)), x, ready, again),
  }


def repeated(
  function: Callable[..., Any], x: jax.Array, weights: Sequence[Any], again: int = 1
) -> Callable[[], Any]:
  """Returns a call that multiplies x by each weight, `again` times over.

  With several cores each product waits for the one before, as layers do: XLA would hand independent
  ones to all of them.

  Args:
    function: x, a weight -> their product.
    x: the rows.
    weights: dense ones or packed ones.
    again: how often a call goes through them.
  """
  several = timing.threads() > 1

  def turn(_: Any, state: Any, held: Sequence[Any]) -> Any:
    x, found = state[0], []
    for w in held:
      found.append(function(x, w))
      if several or len(found) == len(held):
        # Donated: updated in place, and by a value that XLA does not know, so that no product can
        # be left out or reused.
        x = x.at[0, 0].set(0 * found[-1][0, 0])
    return x, found

  def chained(state: Any, held: Sequence[Any]) -> Any:
    if again == 1:
      return turn(0, state, held)
    return jax.lax.fori_loop(0, again, lambda i, state: turn(i, state, held), state)

  run = jax.jit(chained, donate_argnums=0)
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
    depth: the axis that is contracted, a multiple of m.
    features: columns.
    pattern: n:m.
    dtype: of the values; None: float32.
  """
  if depth % pattern.m or min(depth, features) < 1:
    raise ValueError(f"{depth} x {features}: the depth must be a multiple of {pattern.m}.")
  rng = np.random.default_rng(0)
  groups = depth // pattern.m, pattern.m, features
  # A random permutation of each group has n entries below n.
  kept = np.argsort(rng.random(groups, np.float32), axis=1) < pattern.n
  w = np.where(kept, rng.standard_normal(groups, np.float32), np.float32(0))
  return of_one.pack(w.reshape(depth, features), pattern, dtype=dtype)
