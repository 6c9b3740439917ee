"""What to keep: the pattern n:m, a value.

[pattern] -> masks -> recipes -> rules -> layers
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class NM:
  """Keep `n` of every `m` consecutive weights along one axis.

  >>> NM.parse("1:8")
  NM(n=1, m=8)
  >>> str(NM(2, 4)), NM(2, 4).density
  ('2:4', 0.5)

  Attributes:
    n: how many weights of a group are *kept* (some tools count the removed ones).
    m: the length of a group.
  """

  n: int
  m: int

  def __post_init__(self):
    are_ints = all(type(value) is int for value in (self.n, self.m))  # True is no count
    if not are_ints or not 1 <= self.n <= self.m:
      is_swapped = are_ints and 1 <= self.m < self.n
      swapped = f" Did you mean '{self.m}:{self.n}'?" if is_swapped else ""
      raise ValueError(
        f"'{self.n}:{self.m}' is not a pattern: n counts the weights kept in a group of m, so "
        f"they are ints and 1 <= n <= m.{swapped}"
      )

  @classmethod
  def parse(cls, text: str | NM) -> NM:
    """Reads "n:m". An `NM` is returned as it is."""
    if isinstance(text, cls):
      return text
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text) if isinstance(text, str) else None
    if not found:
      raise ValueError(
        f"{text!r} is not a pattern: write two whole numbers with a colon, kept:group, "
        "for example '1:8' (keep 1 of every 8)."
      )
    return cls(int(found[1]), int(found[2]))

  @property
  def density(self) -> float:
    """Returns the share of weights kept, n / m."""
    return self.n / self.m

  def __str__(self) -> str:
    return f"{self.n}:{self.m}"
