"""What each backend gains on this machine, for `auto`.

[tune] -> products of random weights -> the slowest ratio of each cell -> `choice.tuned_file`
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax.benches import layers, timing
from nm_sparsity_jax.benches.results import Product, ratio
from nm_sparsity_jax.packed import choice, cpu
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.runs import files

SHAPES = (1024, 4096), (4096, 1024)
PATTERNS = "2:4", "1:4", "1:8", "1:16", "1:32", "1:128"
ROWS = 1, 16, 128, 1024


def tune(
  shapes: Sequence[tuple[int, int]] | None = None,
  patterns: Sequence[str] | None = None,
  rows: Sequence[int] | None = None,
  turns: int = 5,
) -> pathlib.Path:
  """Measures packed products on this machine and writes the table that `auto` reads from now on.

      print(tune())

  Of the shapes the slowest one counts, so a product that is taken is faster than a dense one. The
  default shapes are large: smaller weights keep our rows, unless you give some.

  Args:
    shapes: (depth, features) of the weights; None = `SHAPES`.
    patterns: n:m; None = `PATTERNS`.
    rows: of x, ascending; None = `ROWS`.
    turns: of each product; figures are medians.

  Returns:
    The file.
  """
  shapes = SHAPES if shapes is None else shapes
  patterns, rows = PATTERNS if patterns is None else patterns, ROWS if rows is None else rows
  if list(rows) != sorted(set(rows)) or not rows or min(rows) < 1:
    raise ValueError(f"rows={rows}: give numbers above 0, ascending.")
  if turns < timing.LEAST:
    raise ValueError(f"turns={turns!r}: a median needs {timing.LEAST} or more.")
  made = sorted({NM.parse(text) for text in patterns}, key=lambda x: x.m / x.n)
  found: dict[str, Any] = {}
  for way in ("xla_scan", *([] if cpu.missing() else ["cpu_ffi"])):
    name = choice.row(way, measured=False)
    for kind, own in _kinds(shapes, made).items():
      speed = {f"{x.m / x.n:g}": [_slowest(x, n, of, way, turns) for n in rows] for x, of in own}
      found[name + kind] = {"rows": list(rows), "speed": speed}
  file = choice.tuned_file()
  file.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(file, choice.tuned_text(found))
  choice.table.cache_clear()
  return file


def _kinds(shapes: Sequence[tuple[int, int]], patterns: Sequence[NM]) -> dict[str, Any]:
  """Returns a kind of weight -> [(pattern, its shapes)], as rows of the table have them."""
  found: dict[str, Any] = {}
  for pattern in patterns:
    of: dict[str, list[tuple[int, int]]] = {}
    for shape in shapes:
      if pattern.m <= shape[0]:
        of.setdefault(choice.kinds(shape, pattern)[-1], []).append(shape)
    for kind, own in of.items():
      found.setdefault(kind, []).append((pattern, own))
  return found


def _slowest(
  pattern: NM, rows: int, shapes: Sequence[tuple[int, int]], way: str, turns: int
) -> float:
  """Returns the smallest ratio to the best dense product, over the shapes."""
  products = (
    layers.measured("tuned", [layers.random(*shape, pattern)], rows, 1, turns, way)
    for shape in shapes
  )
  return round(min(_ratio(product) for product in products), 2)


def _ratio(product: Product) -> float:
  """Returns the ratio of a product; one too short to time counts with the cost of a call."""
  call = product.call if product.is_short else 0.0
  return ratio(product.dense + call, product.packed + call)
