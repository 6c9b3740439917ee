"""Text for people: columns that line up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
  """Lines of aligned columns, the header first."""
  cells = [tuple(map(str, row)) for row in (head, *rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
  return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells]
