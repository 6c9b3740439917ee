"""The tables of a sweep as text.

what `sweep.table` returns -> [tables] rows of texts, for the terminal and the page
                           -> [text] all of it, for people
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.text import columns, score_digits


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields each table's title and its rows of texts, the header first.

  Args:
    found: what `sweep.table` returns.
  """
  for measure in found["measures"]:
    values = [row[measure]["mean"] for row in found["rows"] if row[measure]["mean"] is not None]
    if values:
      yield from _by_measure(found, measure, _digits_of(measure, values))
  if len(found["tasks"]) > 1:
    yield _by_task(found)


_MEANING = "mean +- half of its 95 % interval"


def _by_measure(
  found: Mapping[str, Any], measure: str, digits: int
) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields the means of a measure, then its differences to the baseline."""
  patterns = list(dict.fromkeys(row["pattern"] for row in found["rows"] if row["pattern"]))
  heads = patterns or ["dense"]
  recipes = list(dict.fromkeys(row["recipe"] for row in found["rows"]))
  find = {(row["recipe"], row["pattern"]): row for row in found["rows"]}
  row_of = lambda recipe, at: find[recipe, None if recipe == "dense" else at]
  of_score = [task for task in found["tasks"] if task not in found["less_is_better"]]
  what = {
    "score": f"score: {_names(of_score)}, more is better",
    "loss": "loss on validation data, less is better",
  }.get(measure, f"{measure}, less is better")
  means = [
    [recipe, *(_mean(row_of(recipe, at), measure, digits) for at in heads)] for recipe in recipes
  ]
  yield f"{what}; {_MEANING} (seeds)", [["", *heads], *means]
  others = [recipe for recipe in recipes if recipe != found["baseline"]]
  if patterns and others:
    differences = [
      [recipe, *(_difference(row_of(recipe, at), at, measure, digits) for at in heads)]
      for recipe in others
    ]
    title = f"{measure}, difference from {found['baseline']} with the same seed"
    yield f"{title}; {_MEANING} (pairs)", [["", *heads], *differences]


def _by_task(found: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
  """Returns the table of tasks."""
  digits = score_digits([c["mean"] for row in found["rows"] for c in _cells(row)])
  rows = [
    [row["recipe"], row["pattern"] or "", *(_number(c["mean"], digits) for c in _cells(row))]
    for row in found["rows"]
  ]
  less = f"; less is better: {', '.join(found['less_is_better'])}" * bool(found["less_is_better"])
  return f"by task, means over seeds{less}", [["", "", *found["tasks"]], *rows]


def _cells(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
  """Returns the spreads of a row's tasks."""
  return row["tasks"].values()


def _names(tasks: Sequence[str]) -> str:
  """Says what a score is the mean of."""
  if len(tasks) > 3:
    return f"mean of the {len(tasks)} tasks below"
  return f"mean of {', '.join(tasks)}" if len(tasks) > 1 else "".join(tasks)


def _digits_of(measure: str, values: Sequence[float]) -> int:
  """Returns the digits to show of a measure: 4 of a loss and of what is counted as one."""
  return score_digits(values) if measure == "score" else 4


def _number(value: float | None, digits: int) -> str:
  """Returns a number, `-` for None."""
  return "-" if value is None else f"{value:.{digits}f}"


def _mean(row: Mapping[str, Any], measure: str, digits: int) -> str:
  """Returns a mean such as `77.9 +-2.0 (3)`, or `(2 of 3)` where seeds are missing."""
  found = row[measure]
  spread = f" +-{found['half']:.{digits}f}" if found["half"] is not None else ""
  return f"{_number(found['mean'], digits)}{spread} {_count(found['n'], row)}"


def _difference(row: Mapping[str, Any], at: str, measure: str, digits: int) -> str:
  """Returns a difference such as `+1.2 +-0.4 (3)`."""
  found = row["differences"][at][measure]
  mean = "-" if found["mean"] is None else f"{round(found['mean'], digits) + 0.0:+.{digits}f}"
  half = f" +-{found['half']:.{digits}f}" if found["half"] is not None else ""
  return f"{mean}{half} {_count(found['pairs'], row)}"


def _count(n: int, row: Mapping[str, Any]) -> str:
  """Returns in brackets how many seeds a number is from."""
  return f"({n})" if n == row["seeds"] else f"({n} of {row['seeds']})"


def heading(found: Mapping[str, Any]) -> str:
  """Returns a line that says whether all runs are done."""
  seeds = "seed" + "s" * (len(found["seeds"]) > 1) + " " + ", ".join(map(str, found["seeds"]))
  done = f"partial: {found['done']} of {found['of']} runs" if found["partial"] else (
    f"{found['of']} runs")  # fmt: skip
  return f"{found['out']}, {done}, {seeds}"


def notes(found: Mapping[str, Any]) -> list[str]:
  """Returns what a reader of the numbers must know, a line each."""
  made = []
  if found["done"]:
    made.append("Each run counts with its last checkpoint. The 95 % intervals are Student's t.")
  pairs = [d[m]["pairs"] for row in found["rows"] for d in row["differences"].values() for m in d]
  compared = sum(n > 1 for n in pairs)
  if compared:
    made.append(
      f"The intervals of the {compared} differences are not corrected for multiple comparisons."
    )
  if any(row["recipe"] == "dense" for row in found["rows"]) and len(found["rows"]) > 1:
    made.append("A dense run has no pattern. Each seed has one, which every column shows.")
  for run in found["runs"]:
    if run["state"] == "failed":
      made.append(f"failed: {run['run']}: {run['remarks'][0]}")
    else:
      made += [f"{run['run']}: {remark}" for remark in run["remarks"]]
  return made


def text(found: Mapping[str, Any]) -> str:
  """Returns all of it as text for people.

  Args:
    found: what `sweep.table` returns.
  """
  parts = [heading(found)]
  for title, rows in tables(found):
    parts.append("\n".join([title, *(f"  {line}" for line in columns(rows))]))
  if remarks := notes(found):
    parts.append("\n".join(remarks))
  return "\n\n".join(parts)
