"""Text for people: columns that line up, the first line of an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
  """Returns a text whose control characters, which a terminal obeys, are replaced by their escapes.

  >>> print(printable("a" + chr(27) + "[31mb" + chr(10) + "c"))
  a\\x1b[31mb\\nc

  Args:
    text: one line, maybe of a name that somebody else chose.
  """
  escaped = lambda c: c.encode("unicode_escape", "backslashreplace").decode()
  return "".join(c if c.isprintable() else escaped(c) for c in text)


def columns(rows: Sequence[Sequence[Any]]) -> list[str]:
  """Returns each row as a line; all columns line up, and no line ends in a space.

  >>> columns([["task", "rows"], ["RTE", 3000]])
  ['task  rows', 'RTE   3000']

  Args:
    rows: rows of equally many cells. A cell that is not text is shown by `str`, and what a
      terminal obeys by `printable`.
  """
  cells = [[printable(str(cell)) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, at most 200 characters; its class if it has none.

  >>> first_line(OSError("no room\\nTraceback ..."))
  'no room'
  """
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return (lines or [type(error).__name__])[0][:200]
