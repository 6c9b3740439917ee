"""What was found: plain values, and tables of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.text import printable, table

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
    int8_head: `bound` where the head had a byte a weight; 0 where there is no head, or no bound.
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
  int8_head: float = 0.0
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
    told = dataclasses.asdict(self)
    for name in ("products", "wholes"):
      rows = zip(told[name], getattr(self, name), strict=True)
      told[name] = [{**row, "times": one.times, "half": list(one.half)} for row, one in rows]
    for row, one in zip(told["products"], self.products, strict=True):
      row["is_short"] = one.is_short
    return told

  @property
  def how(self) -> str:
    """Returns a sentence on how it was measured."""
    clock = "processor time" if self.threads == 1 else "time of the clock"
    return (
      f"{self.threads} thread{'s' * (self.threads != 1)}, {clock}, medians of {self.turns} turns; "
      "dense weights are float32."
    )

  def __str__(self) -> str:
    lines = [self.title, self.how, ""]
    lines += table(_HEAD, [_row(p) for p in self.products])
    if self.wholes:
      lines += ["", *table(_WHOLE, [_whole_row(w) for w in self.wholes]), "", BOUND]
      lines += [f"All weights: {self.dense_bytes:,} bytes dense, {self.packed_bytes:,} packed."]
    return "\n".join(map(printable, [*lines, *self.notes, *summary(self)]))


_HEAD = (
  "kernels", "count", "shape", "rows", "pattern", "values", "dense, us", "by", "packed, us", "by",
  "faster", "bytes dense", "packed", "taken",
)  # fmt: skip
_WHOLE = (
  "end to end", "dense, ms", "packed, ms", "faster", "half of the turns", "bound",
  "memory dense, MB", "packed, MB",
)  # fmt: skip


def _row(p: Product) -> tuple[Any, ...]:
  return (
    p.name, p.kernels, p.shape, p.rows, p.pattern, p.values, micro(p.dense), p.dense_way,
    micro(p.packed), p.packed_way, faster(p), f"{p.dense_bytes:,}", f"{p.packed_bytes:,}",
    taken(p),
  )  # fmt: skip


def _whole_row(w: Whole) -> tuple[Any, ...]:
  return (
    w.name, milli(w.dense), milli(w.packed), times(w.times), half(w), at_most(w),
    mega(w.dense_memory), mega(w.packed_memory),
  )  # fmt: skip


def taken(product: Product) -> str:
  """Returns which product `prepare` takes."""
  return "packed" if product.is_taken else "dense"


def micro(seconds: float) -> str:
  """Returns microseconds as text."""
  return f"{seconds * 1e6:,.1f}"


def milli(seconds: float) -> str:
  """Returns milliseconds as text; 0 is what could not be measured."""
  if not seconds:
    return SHORT
  return f"{seconds * 1e3:,.2f}" if seconds >= 1e-4 else f"{seconds * 1e3:.4f}"


def mega(count: int) -> str:
  """Returns millions of bytes as text."""
  return f"{count / 1e6:,.1f}"


def times(value: float) -> str:
  """Returns a ratio as text; '-' where it is not known."""
  return f"{value:.2f}x" if value else "-"


def at_most(whole: Whole) -> str:
  """Returns the bound as text."""
  return times(whole.bound) if whole.bound else UNKNOWN


def faster(product: Product) -> str:
  """Returns the ratio of a product as text."""
  return SHORT if product.is_short else times(product.times)


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
  told = list(products)
  left = sum(seconds * share for seconds, share in told)
  return sum(seconds for seconds, _ in told) / left if left else 0.0


def bound(whole: float, products: Iterable[tuple[float, float]]) -> tuple[float, float]:
  """Returns (seconds of the dense products, how many times faster a whole can be at most).

  The second is 0 where it is not known: measured alone, the products take longer than the whole.

  >>> bound(10.0, [(8.0, 0.25)])
  (8.0, 2.5)

  Args:
    whole: seconds with dense weights.
    products: (seconds of dense products, the share of their bytes that is left when packed).
  """
  told = list(products)
  spent = sum(seconds for seconds, _ in told)
  left = sum(seconds * share for seconds, share in told)
  rest = whole - spent
  if rest < 0 or not rest + left:
    return spent, 0.0
  return spent, (rest + spent) / (rest + left)


def head_bound(whole: float, products: Iterable[tuple[float, float]], head: float) -> float:
  """Returns the bound where the head had a byte a weight; 0 where it is not known.

  >>> head_bound(10.0, [(8.0, 0.25)], 1.0)
  3.076923076923077

  Args:
    whole: seconds with dense weights.
    products: as in `bound`.
    head: seconds of the head's dense product. It is no more than the products leave of the whole.
  """
  told = list(products)
  spent, without = bound(whole, told)
  return whole / (whole / without - min(head, whole - spent) * 3 / 4) if without else 0.0


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
  of = lambda name: ", ".join(
    f"{w.name} {times(getattr(w, name))}" for w in found.wholes if getattr(w, name)
  )
  bounds = ", ".join(f"{w.name} {at_most(w)}" for w in found.wholes)
  yield f"At most by the bytes of the packed products alone: {of('bytes_bound') or '-'}."
  head = of("int8_head")
  also = f"; with a head of one byte a weight, which is not built: {head}" if head else ""
  rest = "all else as it is (head, softmax, norms are dense)"
  yield f"At most with {rest}: {bounds}{also}."
  yield f"Reached: {of('times') or '-'}."
