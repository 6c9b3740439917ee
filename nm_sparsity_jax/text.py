"""Text for people: columns that line up, the first line of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
  """Lines of aligned columns, the header first."""
  cells = [tuple(map(str, row)) for row in (head, *rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
  return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells]


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, at most 200 characters; its class if it has none.

  >>> first_line(OSError("no room\\nTraceback ..."))
  'no room'
  """
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return (lines or [type(error).__name__])[0][:200]
