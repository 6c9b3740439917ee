"""Text of a report of `scores.score`: for people, or as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nm_sparsity_jax.analysis.scores.rows import TITLES, mean_of
from nm_sparsity_jax.core.text import columns as aligned
from nm_sparsity_jax.core.text import printable
from nm_sparsity_jax.runs import glue
from nm_sparsity_jax.training import roles

_SHORT = {
  "matthews_corrcoef": "MCC",
  "accuracy": "Acc",
  "f1": "F1",
  "pearson_corrcoef": "P",
  "spearman_corrcoef": "S",
}


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.1f}"


def _signed(value: float | None) -> str:
  return "-" if value is None else f"{round(value, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def _pair(column: Mapping[str, Any] | None) -> str:
  values = list(column["values"].values()) if column else []
  return "/".join(map(_number, values)) if len(values) > 1 else ""


def _measures(column: glue.Column) -> str:
  return "/".join(_SHORT[m] for m in column.metrics)


def text(report: Mapping[str, Any]) -> str:
  """Returns a report for people: means, and pairs beneath them.

  It is at most 120 columns wide where names are short. With several runs `*` marks the best.

  Args:
    report: what `scores.score` returned.
  """
  notes = list(_notes(report))
  heads = ["", *(head for head, _ in notes)]
  shown = [
    (head if head != before else "", note)
    for (before, head), (_, note) in zip(itertools.pairwise(heads), notes, strict=True)
  ]
  return "\n".join([*aligned(_lines(report), align="<>"), "", *aligned(shown)])


def _lines(report: Mapping[str, Any]) -> list[list[str]]:
  """Returns the cells of the table for people: for each run its means, pairs, steps and deltas."""
  lines = [["", *TITLES], ["", "", *map(_measures, glue.COLUMNS)]]
  blank = " " if report["best"] else ""  # where others have their mark

  def add(name: str, source) -> None:
    best = [t for t in TITLES if source.get("run") in report["best"].get(t, ())]
    pairs = [_pair(source["columns"].get(c.title)) for c in glue.COLUMNS]
    means = [(_number(mean_of(source, t)), "*" if t in best else blank) for t in TITLES]
    lines.append([name, *map("".join, means)])
    if any(pairs):
      lines.append(["", "", *(pair + blank for pair in pairs)])

  for row in report["runs"]:
    add(row["run"], row)
    lines.append(["  at step", *(str(row["columns"].get(t, {}).get("step", "")) for t in TITLES)])
    if row["published"]:
      add("  published", row["published"])
      lines.append(["  delta", *(_signed(row["delta"].get(t)) + blank for t in TITLES)])
  return lines


def _notes(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (head, text) of what a reader of the numbers must know."""
  meaning = {
    "best": "best, for each task the step with the best mean of its metrics",
    "last": "last, of each task",
  }
  yield "checkpoint", meaning.get(report["checkpoint"], f"step {report['checkpoint']}")
  for row in report["runs"]:
    yield row["run"], _what(row)
    if row["joined"]:
      yield row["run"], f"joined: {', '.join(row['joined'])}"
    if published := row["published"]:
      yield row["run"], f"published: Table {published['table']}, {published['row']}"
    if row["missing"]:
      reasons: dict[str, list[str]] = {}
      for title, why in row["missing"].items():
        reasons.setdefault(why, []).append(title)
      missing = "; ".join(f"{', '.join(titles)} ({why})" for why, titles in reasons.items())
      yield row["run"], f"no overall, missing: {missing}"
    for remark in row["remarks"]:
      yield row["run"], f"note: {remark}"


def _what(row: Mapping[str, Any]) -> str:
  words = [row["recipe"] or "recipe not known"]
  if row["places"]:
    words.append(roles.text_of(row["places"]))
  if row["places"] != {} and row["dense_steps"] is not None:
    of = f" of {row['sparse_steps']}" if row["sparse_steps"] else ""
    words.append(f"{row['dense_steps']}{of} steps dense")
  return ", ".join(words) + ("; mini-GLUE" if row["mini"] else "")


# --- other forms --------------------------------------------------------------------------------


def _table(report: Mapping[str, Any], bold: Callable[[str], str]) -> list[list[str]]:
  """Returns rows of cells: run, published, delta. A cell of a pair holds its mean too."""

  def cell(source, title: str) -> str:
    mean, pair = _number(mean_of(source, title)), _pair(source["columns"].get(title))
    return f"{pair} ({mean})" if pair else mean

  rows = [["", "overall", *(f"{c.title} {_measures(c)}" for c in glue.COLUMNS)]]
  for row in report["runs"]:
    best = [t for t in TITLES if row["run"] in report["best"].get(t, ())]
    cells = [cell(row, t) for t in TITLES]
    rows.append(
      [row["run"], *(bold(c) if t in best else c for c, t in zip(cells, TITLES, strict=True))]
    )
    if published := row["published"]:
      rows.append(["published", *(cell(published, t) for t in TITLES)])
      rows.append(["delta", *(_signed(row["delta"].get(t)) for t in TITLES)])
  return rows


def _steps(report: Mapping[str, Any]) -> list[str]:
  """Returns the notes as lines, and the steps, for which these tables have no row."""
  lines = [f"{head}: {note}" for head, note in _notes(report)]
  for row in report["runs"]:
    steps = ", ".join(f"{title} {column['step']}" for title, column in row["columns"].items())
    lines.append(f"{row['run']} at steps: {steps}")
  return lines


def markdown(report: Mapping[str, Any]) -> str:
  """Returns a table in GitHub's Markdown, with the notes as a list. Its source is aligned too."""
  escape = lambda s: re.sub(r"([\\|*_`<>\[\]])", r"\\\1", s)
  rows = [[escape(cell) for cell in row] for row in _table(report, lambda s: f"\0{s}\0")]
  rows = [[printable(name), *cells] for name, *cells in rows]
  rows = [[cell.replace("\0", "**") for cell in row] for row in rows]
  widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
  rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
  lines = aligned([rows[0], rule, *rows[1:]], align="<>", gap=" | ")
  lines = [f"| {line} |" for line in lines]
  return "\n".join([*lines, "", *(f"- {escape(printable(line))}" for line in _steps(report))])


_LATEX = str.maketrans(
  {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
  | {c: rf"\{c}" for c in "&%$#_{}"}
)


def latex(report: Mapping[str, Any]) -> str:
  """Returns a LaTeX tabular that needs no package, with the notes as comments."""
  rows = _table(report, lambda s: f"\0{s}\1")
  rows = [[printable(name), *cells] for name, *cells in rows]  # a newline would end a row
  rows = [[cell.translate(_LATEX) for cell in row] for row in rows]
  rows = [[c.replace("\0", r"\textbf{").replace("\1", "}") for c in row] for row in rows]
  rows = [[re.sub(r"^([+-])(?=\d)", r"$\1$", c) for c in row] for row in rows]
  lines = [" & ".join(row) + r" \\" for row in rows]
  return "\n".join(
    [
      *(f"% {printable(line)}" for line in _steps(report)),
      rf"\begin{{tabular}}{{l{'r' * len(TITLES)}}}",
      r"\hline",
      lines[0],
      r"\hline",
      *lines[1:],
      r"\hline",
      r"\end{tabular}",
    ]
  )


def _cell(name: Any) -> Any:
  """Returns a name as a cell that no spreadsheet takes for a formula."""
  if not isinstance(name, str):
    return name
  name = printable(name)
  return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def as_csv(report: Mapping[str, Any]) -> str:
  """Returns CSV of unrounded numbers. A name that begins as a formula does gets a quote before it.

  Each run has a line, and further lines for its steps, the published row and the delta; the column
  `kind` tells them apart.
  """
  heads = ["overall"]
  for c in glue.COLUMNS:
    heads += [c.title, *(f"{c.title} {m}" for m in c.metrics if len(c.metrics) > 1)]
  out = io.StringIO()
  writer = csv.DictWriter(
    out,
    ["run", "kind", "recipe", "pattern", "dense_steps", "checkpoint", *heads],
    lineterminator="\n",
  )
  writer.writeheader()

  def numbers(source) -> dict[str, Any]:
    cells = {title: mean_of(source, title) for title in TITLES}
    for title, column in source["columns"].items():
      cells |= {f"{title} {m}": v for m, v in column["values"].items() if len(column["values"]) > 1}
    return cells

  for row in report["runs"]:
    common = {
      "run": _cell(row["run"]),
      "recipe": _cell(row["recipe"]),
      "pattern": _cell(roles.text_of(row["places"] or {})),
      "dense_steps": row["dense_steps"],
      "checkpoint": report["checkpoint"],
    }
    writer.writerow({**common, "kind": "run", **numbers(row)})
    steps = {title: column["step"] for title, column in row["columns"].items()}
    writer.writerow({**common, "kind": "step", **steps})
    if row["published"]:
      writer.writerow({**common, "kind": "published", **numbers(row["published"])})
      writer.writerow({**common, "kind": "delta", **row["delta"]})
  if report["best"]:
    best = {title: _cell(" ".join(names)) for title, names in report["best"].items()}
    writer.writerow({"kind": "best", **best})
  return out.getvalue().rstrip("\n")
