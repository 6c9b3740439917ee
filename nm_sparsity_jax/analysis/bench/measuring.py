"""Measures a network, or products alone: packed weights against dense ones.

params, rules -> [pack_tree] -> both trees, prepared -> layers, networks -> timing -> Found
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import layers, networks, results, timing
from nm_sparsity_jax.analysis.bench.results import (
  Found,
  Product,
  Whole,
  bound,
  bytes_bound,
)
from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.packed import BACKENDS, NMPacked, cpu
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.trees import alike, flatten
from nm_sparsity_jax.deploy import inference_tree, unstack_layers
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.training.rules import Rules


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

  Raises:
    ValueError: a size is not a positive number, or no such weight can be packed.
  """
  _check(turns=turns, backend=backend)
  made, found = NM.parse(pattern), []
  for depth, features, rows in shapes:
    _check(depth=depth, features=features, rows=rows)
    kernel = layers.random(depth, features, made, dtype)
    found.append(layers.measured("random", [kernel], rows, 1, turns, backend))
  held = [sum(getattr(p, name) for p in found) for name in ("dense_bytes", "packed_bytes")]
  return _found(f"Products of random weights, {made}", found, [], held, turns, backend)


def bench(
  network: Any,
  params: Any,
  rules: Rules | None = None,
  *,
  state: Any = None,
  dtype: Any = None,
  batch: int = 1,
  inputs: int = 64,
  tokens: int = 16,
  turns: int = 9,
  backend: str = "auto",
  title: str = "",
) -> Found:
  """Measures a network with packed weights, and the same one with dense weights.

      found = bench(network, params, rules, batch=1)
      print(found)

  Args:
    network: a T5 or a network of images of this package, scanned or not; or a `Workload`.
    params: finalized parameters; or a tree of `deployed.pack_tree`, which needs no rules.
    rules: of the parameters.
    state: collections beside the parameters, such as {'batch_stats': ...}.
    dtype: of the packed values, as in `deployed.pack_tree`.
    batch: examples at once.
    inputs: tokens of an input of a T5.
    tokens: that a T5 decodes, for the time of one.
    turns: of each call; figures are medians.
    backend: as in `packed.nm_dot`.
    title: what was looked at.

  Raises:
    ValueError: a kernel is not n:m, nothing is packed, or the network is of another kind.
  """
  _check(batch=batch, inputs=inputs, turns=turns, backend=backend)
  if tokens < 2:
    raise ValueError(f"tokens={tokens!r}: give 2 or more, since a token is a difference of two.")
  tree, network = _packed(network, params, rules, dtype)
  kernels = {path: x for path, x in _flat(tree) if isinstance(x, NMPacked)}
  rows_of = inference_tree.rows_of(getattr(network, "config", None), batch, inputs)
  rows = {path: rows_of(path) for path in kernels}
  unpacked = jax.tree.map(_float32, inference_tree.unpack_tree(tree))
  found = dict(_layers(kernels, rows, turns, backend, _bytes(unpacked)))
  ready = {"dense": unpacked, "packed": inference_tree.prepare(tree, rows_of, backend)}
  todo = networks.works(network, state or {}, batch, inputs, tokens)
  wholes = [_whole(work, ready, found, turns) for work in todo]
  held = [_bytes(unpacked), _bytes(tree)]
  notes = []
  if not isinstance(getattr(network, "config", None), T5Config | ViTConfig):
    notes.append(
      "How many rows a kernel of this network gets is not known: each product was measured with "
      "the batch, and the bound is rough."
    )
  notes += _unknown(wholes)
  distinct = list({id(p): p for p in found.values()}.values())
  return _found(title or type(network).__name__, distinct, wholes, held, turns, backend, notes)


def _packed(network: Any, params: Any, rules: Rules | None, dtype: Any) -> tuple[Any, Any]:
  """Returns a packed tree without a scan, and the network that takes it."""
  if not inference_tree.is_packed(params):
    if rules is None or rules.is_dense:
      raise ValueError(
        "nothing is packed here, and no rules say what is n:m: give a packed tree, or finalized "
        "parameters with the rules of their run."
      )
    params, _ = unstack_layers.unstacked(params, getattr(network, "config", None))
    params, report = inference_tree.pack_tree(params, rules, dtype)
    if not report.packed:
      why = "; ".join(dict.fromkeys(report.dense.values()))
      raise ValueError(f"no kernel of this network is packed: {why}.")
  config = getattr(network, "config", None)
  plain = unstack_layers.without_scan(config)
  return params, network if plain is config else network.clone(config=plain)


def _layers(
  kernels: dict[str, NMPacked], rows: dict[str, int], turns: int, backend: str, beside: int
) -> Iterator[tuple[str, Product]]:
  """Yields each path with the product of its shape; each distinct one is measured once."""
  facts = {
    path: (x.shape, str(x.pattern), str(x.values.dtype), rows[path]) for path, x in kernels.items()
  }
  groups: dict[Any, list[str]] = {}
  for path, fact in facts.items():
    groups.setdefault(fact, []).append(path)
  names: dict[Any, list[str]] = {}
  for name, _, fact in alike(facts):
    names.setdefault(fact, []).append(name)
  for fact, paths in groups.items():
    few = [kernels[path] for path in paths[:4]]
    count, name = len(paths), ", ".join(names[fact])
    product = layers.measured(name, few, fact[-1], count, turns, backend, beside)
    yield from ((path, product) for path in paths)


def _whole(work: networks.Work, ready: dict[str, Any], of: dict[str, Product], turns: int) -> Whole:
  made = {side: work.programs(tree) for side, tree in ready.items()}

  def call(side, n):
    return lambda: jax.block_until_ready(made[side][n](ready[side]))

  names = [(side, n) for side in ready for n in work.numbers]
  times = timing.interleave({name: call(*name) for name in names}, turns)
  of_side = {side: {n: found for (own, n), found in times.items() if own == side} for side in ready}
  spent = {side: work.seconds(found) for side, found in of_side.items()}
  dense, packed = (work.each(of_side[side]) for side in ("dense", "packed"))
  read = [p for path, p in of.items() if work.reads(path)]
  shares = [(p.dense, p.packed_bytes / p.dense_bytes) for p in read]
  products_, at_most = bound(spent["dense"], shares)
  memory = {side: networks.memory(programs[work.numbers[-1]]) for side, programs in made.items()}
  return Whole(
    work.name, spent["dense"], spent["packed"], products_, at_most, memory["dense"],
    memory["packed"], bytes_bound(shares),
    timing.quartiles(timing.ratios(dense, packed)),
  )  # fmt: skip


def _unknown(wholes: Sequence[Whole]) -> list[str]:
  """Returns sentences on the wholes whose bound is not known; none where all are."""
  if lost := [w.name for w in wholes if not (w.dense and w.packed)]:
    return [f"{', '.join(lost)}: {results.SHORT}. Decode more tokens, or repeat it."]
  names = [w.name for w in wholes if w.products > w.dense]
  return names and [
    f"{', '.join(names)}: the bound is not known. Measured one by one, the products take longer "
    "than the whole: they are too short to time, or the whole has their weights in a nearer cache."
  ]


# --- small ones -----------------------------------------------------------------------------------


def _check(turns: int = timing.LEAST, backend: str = "auto", **sizes: int) -> None:
  if backend not in BACKENDS:
    raise ValueError(f"backend {backend!r} is unknown: take one of {', '.join(BACKENDS)}.")
  for name, value in sizes.items():
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"{name}={value!r}: give a whole number, 1 or more.")
  if not isinstance(turns, int) or turns < timing.LEAST:
    raise ValueError(f"turns={turns!r}: a median needs {timing.LEAST} or more.")


def _flat(tree: Any) -> list[tuple[str, Any]]:
  return flatten(tree, lambda x: isinstance(x, NMPacked))


def _float32(x: Any) -> jax.Array:
  floats = jnp.issubdtype(x.dtype, jnp.floating)
  return jnp.asarray(np.asarray(x, np.float32) if floats else x)


def _bytes(tree: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def _found(
  title: str,
  rows: Sequence[Product],
  wholes: Sequence[Whole],
  held: Sequence[int],
  turns: int,
  backend: str,
  notes: Sequence[str] = (),
) -> Found:
  given, notes = notes, []
  if why := cpu.missing():
    notes.append(f"The C++ kernels cannot be used, and xla_scan multiplies instead: {why}.")
  lost = sum(p.kernels for p in rows if not p.is_taken) if backend == "auto" else 0
  if lost:
    what = "kernel gets its" if lost == 1 else "kernels get their"
    alone = f"{lost} of these `auto` would multiply densely"
    said = f"{lost} {what} zeros back end to end" if wholes else alone
    notes.append(
      f"{said}, since the measured table has no packed product that is faster for so many rows."
    )
  if short := sum(p.is_short for p in rows):
    notes.append(
      f"{short} of {len(rows)} products: {results.SHORT}, since the cost of a call hides them. "
      "Their times are rough."
    )
  notes += _noise([(w.name, w) for w in wholes])
  timed = [p for p in rows if not p.is_short]
  notes += _noise([(f"a product of {p.shape} at {p.rows} rows", p) for p in timed])
  if jax.default_backend() != "cpu":
    notes.append("No product was tuned for this device: figures of a CPU are what to compare.")
  notes += given
  machine = {"processor": platform.processor() or platform.machine()}
  machine["device"] = jax.devices()[0].device_kind
  machine |= installed.versions(installed.NAME, "Python", "jax", "jaxlib")
  return Found(title, rows, wholes, held[0], held[1], timing.threads(), turns, notes, machine)


def _noise(named: Sequence[tuple[str, Product | Whole]]) -> list[str]:
  """Returns a sentence on the one whose turns differ most; none where none differ much."""
  wide = [(name, one) for name, one in named if results.is_wide(one)]
  if not wide:
    return []
  name, one = max(wide, key=lambda x: x[1].half[1] / x[1].half[0])
  others = f", and {len(wide) - 1} more differ" if len(wide) > 1 else ""
  return [
    f"Turns differ: half of those of {name} lie in {results.half(one)}{others}. Other work runs "
    f"here: repeat it{', or take one core' * (timing.threads() > 1)}."
  ]
