"""Measures a network, or products alone: packed weights against dense ones.

packed tree -> both trees, prepared -> layers, networks -> Found
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import layers, networks, timing
from nm_sparsity_jax.analysis.bench.layers import Product
from nm_sparsity_jax.analysis.bench.networks import Whole
from nm_sparsity_jax.core.packed import NMPacked, cpu
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.text import table
from nm_sparsity_jax.core.trees import alike, flatten
from nm_sparsity_jax.deploy import inference_tree

_SHORT = "too short to time"


@dataclasses.dataclass(frozen=True)
class Found:
  """What a bench found; its `str` is two tables.

  Attributes:
    title: what was looked at.
    products: each distinct product.
    wholes: what the network computes at once; none where products alone were asked for.
    dense_bytes: of all weights with zeros, in float32.
    packed_bytes: of all weights.
    threads: that XLA multiplies with.
    turns: of each call; figures are medians.
    notes: sentences on what you should know.
  """

  title: str
  products: Sequence[Product]
  wholes: Sequence[Whole]
  dense_bytes: int
  packed_bytes: int
  threads: int
  turns: int
  notes: Sequence[str]

  def __str__(self) -> str:
    clock = "processor time" if self.threads == 1 else "time of the clock"
    how = f"{self.threads} threads, {clock}, medians of {self.turns} turns; dense is float32."
    parts = [f"{self.title}\n{how}"]
    # A text is short where the number is 0, which is not known.
    ratio = lambda value, unknown: f"{value:.2f}x" if value else unknown
    if self.wholes:
      head = "end to end", "dense, ms", "packed, ms", "faster", "at most"
      rows = [
        [
          w.name, *(f"{x * 1e3:,.4g}" for x in (w.dense, w.packed)), ratio(w.times, _SHORT),
          ratio(w.bound, "not known"), *_mega(w.dense_memory, w.packed_memory),
        ]
        for w in self.wholes
      ]  # fmt: skip
      rows.append(["all weights", *[""] * 4, *_mega(self.dense_bytes, self.packed_bytes)])
      parts.append("\n".join(table([*head, "dense, MB", "packed, MB"], rows)))
    head = "kernels", "count", "shape", "rows", "pattern", "values", "dense, us", "packed, us", "by"
    rows = [
      [
        p.name, p.kernels, f"{p.depth:,} x {p.features:,}", f"{p.rows:,}", p.pattern, p.values,
        *(f"{x * 1e6:,.1f}" for x in (p.dense, p.packed)), f"{p.dense_way}; {p.packed_way}",
        ratio(p.times, _SHORT), f"{p.dense_bytes:,}", f"{p.packed_bytes:,}",
        "packed" if p.is_taken else "dense",
      ]
      for p in self.products
    ]  # fmt: skip
    more = "faster", "dense, bytes", "packed, bytes", "taken"
    parts.append("\n".join(table([*head, *more], rows)))
    return "\n\n".join([*parts, *self.notes])


def _mega(*counts: int) -> list[str]:
  return [f"{count / 1e6:,.1f}" for count in counts]


def products(
  shapes: Sequence[tuple[int, int, int]],
  pattern: str | NM,
  dtype: Any = None,
  turns: int = 9,
  backend: str = "auto",
) -> Found:
  """Measures products of random weights alone.

      print(products([(1024, 4096, 1), (1024, 4096, 128)], "1:8"))

  Args:
    shapes: (depth, features, rows of x) of each product.
    pattern: n:m of the weights, along their depth.
    dtype: of the packed values: 'float32', 'bfloat16' or 'int8'.
    turns: of each product; figures are medians.
    backend: as in `packed.nm_dot`.
  """
  made, found = NM.parse(pattern), []
  for depth, features, rows in shapes:
    kernel = layers.random(depth, features, made, dtype)
    found.append(layers.measured("random", [kernel], rows, 1, turns, backend))
  held = [sum(getattr(p, name) for p in found) for name in ("dense_bytes", "packed_bytes")]
  return _found(f"Products of random weights, {made}", found, [], held, turns)


def bench(
  network: Any,
  tree: Any,
  *,
  state: Any = None,
  batch: int = 1,
  inputs: int = 64,
  tokens: int = 16,
  turns: int = 9,
  backend: str = "auto",
  title: str = "",
) -> Found:
  """Measures a network with packed weights, and the same one with dense weights.

      tree, _ = nms.inference_tree.pack_tree(finalized, rules)
      found = bench(network, tree, batch=1)
      print(found)

  Args:
    network: a T5 or a network of images of this package, not scanned; or a `Workload`.
    tree: what `inference_tree.pack_tree` returns.
    state: collections beside the parameters, such as {'batch_stats': ...}.
    batch: examples at once.
    inputs: tokens of an input of a T5.
    tokens: that a T5 decodes, for the time of one; 2 or more.
    turns: of each call; figures are medians.
    backend: as in `packed.nm_dot`.
    title: what was looked at.

  Raises:
    ValueError: nothing is packed, or the network is of another kind.
  """
  kernels = {
    path: x
    for path, x in flatten(tree, lambda x: isinstance(x, NMPacked))
    if isinstance(x, NMPacked)
  }
  if not kernels:
    raise ValueError("nothing is packed here: take the tree of inference_tree.pack_tree.")
  rows_of = inference_tree.rows_of(getattr(network, "config", None), batch, inputs)
  unpacked = jax.tree.map(_float32, inference_tree.unpack_tree(tree))
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  found = dict(_layers(kernels, rows_of, turns, backend, size(unpacked)))
  ready = {"dense": unpacked, "packed": inference_tree.prepare(tree, rows_of, backend)}
  todo = networks.works(network, state or {}, batch, inputs, tokens)
  wholes = [networks.measured(work, ready, found, turns) for work in todo]
  distinct = list({id(p): p for p in found.values()}.values())
  held = size(unpacked), size(tree)
  return _found(title or type(network).__name__, distinct, wholes, held, turns)


def _layers(
  kernels: Mapping[str, NMPacked], rows_of: Any, turns: int, backend: str, beside: int
) -> Iterator[tuple[str, Product]]:
  """Yields each path with the product of its shape; each distinct one is measured once."""
  facts = {
    path: (x.shape, str(x.pattern), str(x.values.dtype), rows_of(path))
    for path, x in kernels.items()
  }
  groups: dict[Any, dict[str, list[str]]] = {}
  for name, paths, fact in alike(facts):
    groups.setdefault(fact, {})[name] = paths
  for fact, named in groups.items():
    paths = [path for of in named.values() for path in of]
    few = [kernels[path] for path in paths[:4]]
    name, rows = ", ".join(named), fact[-1]
    product = layers.measured(name, few, rows, len(paths), turns, backend, beside)
    yield from ((path, product) for path in paths)


def _float32(x: Any) -> jax.Array:
  floats = jnp.issubdtype(x.dtype, jnp.floating)
  return jnp.asarray(np.asarray(x, np.float32) if floats else x)


def _found(
  title: str, found: Sequence[Product], wholes: Sequence[Whole], held: Sequence[int], turns: int
) -> Found:
  notes = []
  if why := cpu.missing():
    notes.append(f"The C++ kernels cannot be used, and xla_scan multiplies instead: {why}.")
  if lost := sum(p.kernels for p in found if not p.is_taken):
    notes.append(
      f"{lost} of the kernels would multiply densely, since the measured table has no packed "
      "product that is faster for so many rows."
    )
  return Found(title, found, wholes, held[0], held[1], timing.threads(), turns, notes)
