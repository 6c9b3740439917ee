"""What was found: plain values, and the tables of them as text and on a page with bars."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import page
from nm_sparsity_jax.analysis.page import Cell, Section, Table
from nm_sparsity_jax.core.text import format_table, printable

BOUND = (
  "The bound is what packing can give at most: the time if the packed products took their bytes' "
  "share of what the dense ones take, and all else stayed. Where a token only reads weights, that "
  "is the ratio of the bytes of weights that it reads."
)
SHORT = "too short to time"
UNKNOWN = "not known"
_LEAST = 3  # calls without a product that a timed call must take
_WIDE = 1.25  # from here on the middle half of ratios is wide


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
    call: seconds of a call without a product, as the share of one product. They are subtracted.
    half: the ends of the middle half of the ratios of the turns; (0, 0) where not known.
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
  call: float = 0.0
  half: tuple[float, float] = (0.0, 0.0)

  @property
  def times(self) -> float:
    """Returns how many times faster the packed product is; 0 where one is too short to time."""
    return 0.0 if self.is_short else ratio(self.dense, self.packed)

  @property
  def is_short(self) -> bool:
    """Returns whether the cost of a call hides the time of a product."""
    return min(self.dense, self.packed) + self.call < _LEAST * self.call

  @property
  def shape(self) -> str:
    """Returns depth and features, as 'depth x features'."""
    return f"{self.depth:,} x {self.features:,}"


@dataclasses.dataclass(frozen=True)
class Whole:
  """What a network computes at once, with all that is not a packed product.

  Attributes:
    name: such as 'a token'.
    dense: seconds with dense weights.
    packed: seconds with packed ones.
    products: seconds of the dense products that packing replaces, each measured alone.
    bound: how many times faster it can be at most; see `BOUND`. 0 where it is not known.
    bytes_bound: the same of the packed products alone, by their bytes.
    dense_memory: bytes of weights and temporaries that the dense program holds at most, as XLA
      says.
    packed_memory: the same of the packed one.
    half: the ends of the middle half of the ratios of the turns; (0, 0) where not known.
  """

  name: str
  dense: float
  packed: float
  products: float
  bound: float
  dense_memory: int
  packed_memory: int
  bytes_bound: float = 0.0
  half: tuple[float, float] = (0.0, 0.0)

  @property
  def times(self) -> float:
    """Returns how many times faster it is with packed weights."""
    return ratio(self.dense, self.packed)


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
    machine: name -> value: processor and versions.
  """

  title: str
  products: Sequence[Product]
  wholes: Sequence[Whole]
  dense_bytes: int
  packed_bytes: int
  threads: int
  turns: int
  notes: Sequence[str]
  machine: Mapping[str, str]

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows; times are seconds."""
    out = dataclasses.asdict(self)
    for name in ("products", "wholes"):
      rows = zip(out[name], getattr(self, name), strict=True)
      out[name] = [{**row, "times": one.times, "half": list(one.half)} for row, one in rows]
    for row, one in zip(out["products"], self.products, strict=True):
      row["is_short"] = one.is_short
    return out

  @property
  def how(self) -> str:
    """Returns a sentence on how it was measured."""
    clock = "processor time" if self.threads == 1 else "time of the clock"
    return (
      f"{self.threads} thread{'s' * (self.threads != 1)}, {clock}, medians of {self.turns} turns; "
      "dense weights are float32."
    )

  def __str__(self) -> str:
    texts = lambda cells: [cell.text if isinstance(cell, Cell) else cell for cell in cells]
    parts = [f"{self.title}\n{self.how}"]
    parts += [format_table([texts(t.head), *map(texts, t.rows)]) for t in tables(self)]
    return "\n\n".join([*parts, "\n".join(map(printable, lines(self)))])


_SIDES = ("dense", "packed")  # their colours are those of the page's first two runs


def write(found: Found, path: str | os.PathLike) -> pathlib.Path:
  """Writes what a bench found as one HTML page, and returns its path.

      write(products([(1024, 4096, 1)], "1:8"), "bench.html")

  Args:
    found: of `bench` or `products`.
    path: the file; its folder is made where it is missing.

  Raises:
    ModuleNotFoundError: jinja2 or matplotlib is not installed.
  """
  section = Section("found", "Time and bytes", [found.how, *tables(found), *lines(found)])
  title = f"Packed against dense: {found.title}"
  return page.write(path, title, _SIDES, [section], made_by=found.machine)


def tables(found: Found) -> list[Table]:
  """Returns the tables; bars of times and bytes begin at 0."""
  heads = lambda unit: [Cell(f"{side}, {unit}", run=i) for i, side in enumerate(_SIDES)]
  made = []
  if found.wholes:
    head = ["end to end", *heads("ms"), "faster", "half of the turns", "bound", *heads("MB")]
    rows = [
      [w.name, *_pair(w.dense, w.packed, milli), times(w.times), half(w), at_most(w),
       *_pair(w.dense_memory, w.packed_memory, mega)]
      for w in found.wholes
    ]  # fmt: skip
    blank = [""] * 5
    rows.append(["all weights", *blank, *_pair(found.dense_bytes, found.packed_bytes, mega)])
    made.append(Table(head, rows))
  head = ["kernels", "count", "shape", "rows", "pattern", "values", *heads("us"), "by", "faster"]
  rows = [
    [p.name, f"{p.kernels}", p.shape, f"{p.rows:,}", p.pattern, p.values,
     *_pair(p.dense, p.packed, micro), f"{p.dense_way}; {p.packed_way}",
     SHORT if p.is_short else times(p.times),
     *_pair(p.dense_bytes, p.packed_bytes, "{:,}".format), "packed" if p.is_taken else "dense"]
    for p in found.products
  ]  # fmt: skip
  made.append(Table([*head, *heads("bytes"), "taken"], rows))
  return made


def _pair(dense: float, packed: float, text: Any) -> list[Cell]:
  top = max(dense, packed) or 1
  return [Cell(text(x), bar=x / top, run=i) for i, x in enumerate((dense, packed))]


def micro(seconds: float) -> str:
  """Returns microseconds as text."""
  return f"{seconds * 1e6:,.1f}"


def milli(seconds: float) -> str:
  """Returns milliseconds as text; 0 is what could not be measured."""
  return f"{seconds * 1e3:,.4g}" if seconds else SHORT


def mega(count: float) -> str:
  """Returns millions of bytes as text."""
  return f"{count / 1e6:,.1f}"


def times(value: float) -> str:
  """Returns a ratio as text; '-' where it is not known."""
  return f"{value:.2f}x" if value else "-"


def at_most(whole: Whole) -> str:
  """Returns the bound as text."""
  return times(whole.bound) if whole.bound else UNKNOWN


def half(one: Product | Whole) -> str:
  """Returns the middle half of the ratios of the turns as text; '-' where it is not known."""
  low, high = one.half
  return f"{low:.2f}x to {high:.2f}x" if low else "-"


def is_wide(one: Product | Whole) -> bool:
  """Returns whether the turns differ much."""
  low, high = one.half
  return low > 0 and high / low > _WIDE


def ratio(dense: float, packed: float) -> float:
  """Returns dense / packed; 0 where one of them is too short to be measured."""
  return dense / packed if dense > 0 and packed > 0 else 0.0


def bytes_bound(products: Iterable[tuple[float, float]]) -> float:
  """Returns how many times faster the products alone can be, by their bytes; 0 without any.

  >>> bytes_bound([(8.0, 0.25)])
  4.0

  Args:
    products: as in `bound`.
  """
  products = list(products)
  left = sum(seconds * share for seconds, share in products)
  return sum(seconds for seconds, _ in products) / left if left else 0.0


def bound(whole: float, products: Iterable[tuple[float, float]]) -> tuple[float, float]:
  """Returns (seconds of the dense products, how many times faster a whole can be at most).

  The second is 0 where it is not known: measured alone, the products take longer than the whole.

  >>> bound(10.0, [(8.0, 0.25)])
  (8.0, 2.5)

  Args:
    whole: seconds with dense weights.
    products: (seconds of dense products, the share of their bytes that is left when packed).
  """
  pairs = list(products)
  spent = sum(seconds for seconds, _ in pairs)
  left = sum(seconds * share for seconds, share in pairs)
  rest = whole - spent
  if rest < 0 or not rest + left:
    return spent, 0.0
  return spent, (rest + spent) / (rest + left)


def lines(found: Found) -> Iterator[str]:
  """Yields the sentences that stand below the tables."""
  if found.wholes:
    yield BOUND
  yield from found.notes
  yield from summary(found)


def summary(found: Found) -> Iterator[str]:
  """Yields the three lines at the end: two bounds, and what was reached."""
  if not found.wholes:
    return
  of = lambda name: ", ".join(f"{w.name} {times(getattr(w, name))}" for w in found.wholes)
  bounds = ", ".join(f"{w.name} {at_most(w)}" for w in found.wholes)
  yield f"At most by the bytes of the packed products alone: {of('bytes_bound')}."
  yield f"At most with all else as it is (head, softmax, norms are dense): {bounds}."
  yield f"Reached: {of('times')}."
