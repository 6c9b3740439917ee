"""One self-contained HTML page of what a bench found, with bars; by the page of `report`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

from nm_sparsity_jax.analysis import page
from nm_sparsity_jax.analysis.bench import results
from nm_sparsity_jax.analysis.bench.results import Found
from nm_sparsity_jax.analysis.page import Cell, Section, Table

_SIDES = ("dense", "packed")  # their colours are those of the page's first two runs


def write(found: Found, path: str | os.PathLike) -> pathlib.Path:
  """Writes what a bench found as one HTML page, and returns its path.

      write(products([(1024, 4096, 1)], "1:8"), "bench.html")

  Args:
    found: of `bench` or `products`.
    path: the file; its folder is made where it is missing.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
  """
  title = f"Packed against dense: {found.title}"
  text = page.render(title, _SIDES, sections(found), made_by=found.machine)
  return page.write(text, pathlib.Path(path))


def sections(found: Found) -> list[Section]:
  """Returns what the page shows: tables whose bars begin at 0."""
  made = [Section("layers", "One product", [found.how, *_layers(found)])]
  if found.wholes:
    whole = [*_wholes(found), *_memory(found), *results.lines(found)]
    made.insert(0, Section("whole", "End to end", whole))
  else:
    made[0] = Section("layers", "One product", [*made[0].parts, *results.lines(found)])
  return made


def _wholes(found: Found) -> Iterator[Table]:
  """Yields the times end to end: three bars for each, the last at the bound."""
  head = ["", "milliseconds", "faster", "half of the turns"]
  rows = []
  for w in found.wholes:
    at_most = w.dense / w.bound if w.bound else 0.0
    top = max(w.dense, w.packed) or 1.0
    limit = Cell(results.milli(at_most), at_most / top) if at_most else results.UNKNOWN
    rows += [
      [f"{w.name}, dense", Cell(results.milli(w.dense), w.dense / top, run=0), "1.00x", ""],
      [
        f"{w.name}, packed",
        Cell(results.milli(w.packed), w.packed / top, run=1),
        results.times(w.times),
        results.half(w),
      ],
      [f"{w.name}, at the bound", limit, results.at_most(w), ""],
    ]
  yield Table(head, rows, words=True)


def _memory(found: Found) -> Iterator[Table | str]:
  """Yields the bytes of weights, and of all that a program holds."""
  named = [("all weights", found.dense_bytes, found.packed_bytes)]
  named += [(f"{w.name}, with temporaries", w.dense_memory, w.packed_memory) for w in found.wholes]
  rows = [
    [
      name,
      Cell(results.mega(dense), dense / max(dense, packed, 1), run=0),
      Cell(results.mega(packed), packed / max(dense, packed, 1), run=1),
      results.times(results.ratio(dense, packed)),
    ]
    for name, dense, packed in named
  ]
  yield Table(["megabytes", *_heads(), "smaller"], rows)


def _layers(found: Found) -> Iterator[Table]:
  """Yields a row for each product."""
  head = ["kernels", "count", "shape", "rows of x", "pattern", "values"]
  head = [*head, *_heads("us"), "faster", *_heads("bytes"), "by", "taken"]
  rows = []
  for p in found.products:
    slow, large = max(p.dense, p.packed) or 1.0, max(p.dense_bytes, p.packed_bytes)
    rows.append([
      p.name, f"{p.kernels}", p.shape, f"{p.rows:,}", p.pattern, p.values,
      Cell(results.micro(p.dense), p.dense / slow, run=0),
      Cell(results.micro(p.packed), p.packed / slow, run=1),
      results.faster(p),
      Cell(f"{p.dense_bytes:,}", p.dense_bytes / large, run=0),
      Cell(f"{p.packed_bytes:,}", p.packed_bytes / large, run=1),
      f"{p.dense_way}; {p.packed_way}", results.taken(p),
    ])  # fmt: skip
  yield Table(head, rows)


def _heads(unit: str = "") -> list[Cell]:
  return [Cell(f"{side}, {unit}" if unit else side, run=i) for i, side in enumerate(_SIDES)]
