"""Text for people: columns that line up, words in a row, the first line of an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def printable(text: str) -> str:
  """Returns a text whose control characters, which a terminal obeys, are replaced by their escapes.

  >>> print(printable("a" + chr(27) + "[31mb" + chr(10) + "c"))
  a\\x1b[31mb\\nc

  Args:
    text: one line, maybe of a name that somebody else chose.
  """
  if text.isprintable():
    return text
  escaped = lambda c: c.encode("unicode_escape", "backslashreplace").decode()
  return "".join(c if c.isprintable() else escaped(c) for c in text)


def columns(rows: Sequence[Sequence[Any]], align: str = "<", gap: str = "  ") -> list[str]:
  """Returns each row as a line; all columns line up, and no line ends in a space.

  Args:
    rows: rows of equally many cells. A cell that is not text is shown by `str`, and what a
      terminal obeys by `printable`.
    align: `<` (left) or `>` (right) for each column; its last character serves for all columns
      beyond it.
    gap: what stands between two columns.

  >>> columns([["task", "rows"], ["RTE", 3000]], align="<>")
  ['task  rows', 'RTE   3000']
  """
  cells = [[printable(str(cell)) for cell in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  sides = align.ljust(len(widths), align[-1])
  pad = {"<": str.ljust, ">": str.rjust}
  return [
    gap.join(pad[s](c, w) for s, c, w in zip(sides, row, widths, strict=True)).rstrip()
    for row in cells
  ]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
  """Returns lines of left-aligned columns, the header first."""
  return columns([head, *rows])


def listed(words: Sequence[str]) -> str:
  """Returns words as a sentence lists them.

  >>> listed(["init"]), listed(["init", "loss", "splits"])
  ('init', 'init, loss and splits')
  """
  return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def score_digits(values: Iterable[float | None]) -> int:
  """Returns the digits of scores behind the point: 1 on a scale up to 100, 3 on one up to 1.

  Zeros alone tell no scale: 1.

  >>> score_digits([98.6, None]), score_digits([0.986]), score_digits([0.0])
  (1, 3, 1)
  """
  return 3 if 0 < max((abs(v) for v in values if v is not None), default=0.0) <= 2 else 1


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, at most 200 characters; its class if it has none.

  >>> first_line(OSError("no room\\nTraceback ..."))
  'no room'
  """
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  return (lines or [type(error).__name__])[0][:200]


class Strong(str):
  """A cell of `format_table` that stands out: bold in Markdown and LaTeX, with `*` in text."""


_MARKDOWN = re.compile(r"([\\|*_`<>\[\]])")
_LATEX = str.maketrans(
  {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
  | {c: rf"\{c}" for c in "&%$#_{}"}
)


def format_table(rows: Sequence[Sequence[Any]], style: str = "text", align: str = "<") -> str:
  """Returns rows as one table. The first row is the head.

  >>> print(format_table([["task", "mean"], ["RTE", Strong("82.3")], ["QNLI", "7.0"]], align="<>"))
  task   mean
  RTE   82.3*
  QNLI   7.0
  >>> print(format_table([["task", "mean"], ["RTE", Strong("82.3")]], "markdown", align="<>"))
  | task |     mean |
  | :--- | -------: |
  | RTE  | **82.3** |

  Args:
    rows: rows of equally many cells. A cell that is not text is shown by `str`.
    style: 'text', 'markdown' or 'latex' (a tabular that needs no package).
    align: `<` or `>` for each column, as in `columns`.
  """
  has_strong = any(isinstance(cell, Strong) for row in rows for cell in row)
  sides = align.ljust(len(rows[0]), align[-1])[: len(rows[0])]

  def marked(cell: Any, has_mark: bool) -> str:
    text = printable(str(cell))
    strong = isinstance(cell, Strong)
    if style == "markdown":
      text = _MARKDOWN.sub(r"\\\1", text)
      return f"**{text}**" if strong else text
    if style == "latex":
      text = re.sub(r"^([+-])(?=\d)", r"$\1$", text.translate(_LATEX))
      return rf"\textbf{{{text}}}" if strong else text
    return text + ("*" if strong else " " * has_mark)

  # Where others have their mark, a number has a blank.
  cells = [
    [marked(cell, has_strong and i > 0 and s == ">") for cell, s in zip(row, sides, strict=True)]
    for i, row in enumerate(rows)
  ]
  if style == "latex":
    head, *rest = [" & ".join(row) + r" \\" for row in cells]
    spec = sides.translate({ord("<"): "l", ord(">"): "r"})
    begin, end = rf"\begin{{tabular}}{{{spec}}}", r"\end{tabular}"
    return "\n".join([begin, r"\hline", head, r"\hline", *rest, r"\hline", end])
  if style == "markdown":
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = lambda side, w: f":{'-' * (w - 1)}" if side == "<" else f"{'-' * (w - 1)}:"
    rules = [rule(side, width) for side, width in zip(sides, widths, strict=True)]
    lines = columns([cells[0], rules, *cells[1:]], align, " | ")
    width = max(map(len, lines))
    return "\n".join(f"| {line:{width}} |" for line in lines)
  return "\n".join(columns(cells, align))
