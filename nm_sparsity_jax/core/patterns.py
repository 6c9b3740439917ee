"""What to keep: the pattern n:m, a value.

[pattern] -> masks -> recipes -> rules -> layers
"""

from __future__ import annotations

import dataclasses
import re

_TEXT = re.compile(r"\s*(\d{1,12})\s*:\s*(\d{1,12})\s*")
_MOST = 1 << 20  # the length of a group


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
    for name in ("n", "m"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
          f"NM(n={self.n!r}, m={self.m!r}): {name} must be an int, got "
          f"{type(value).__name__}. Write NM(1, 8), or NM.parse('1:8') for text."
        )
    if not 1 <= self.n <= self.m:
      swapped = f" Did you mean NM({self.m}, {self.n})?" if 1 <= self.m < self.n else ""
      raise ValueError(
        f"NM({self.n}, {self.m}): n counts the weights kept in a group of m, so "
        f"1 <= n <= m must hold.{swapped}"
      )
    if self.m > _MOST:
      raise ValueError(
        f"NM({self.n}, {self.m}): no axis is as long as such a group. Take an m of at most {_MOST}."
      )

  @classmethod
  def parse(cls, text: str | NM) -> NM:
    """Reads "n:m". An `NM` is returned as it is."""
    if isinstance(text, cls):
      return text
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if not found:
      raise ValueError(
        f"{text!r} is not a pattern: write two whole numbers with a colon, kept:group, "
        "for example '1:8' (keep 1 of every 8)."
      )
    n, m = int(found[1]), int(found[2])
    if not 1 <= n <= m:
      swapped = f" Did you mean '{m}:{n}'?" if 1 <= m < n else ""
      raise ValueError(
        f"{text!r}: the first number counts the weights kept in a group as long as the second, so "
        f"1 <= n <= m must hold in n:m.{swapped}"
      )
    return cls(n, m)

  @property
  def density(self) -> float:
    """Returns the share of weights kept, n / m."""
    return self.n / self.m

  def __str__(self) -> str:
    return f"{self.n}:{self.m}"
