"""What a sweep found so far: folders of finished runs in, a table of plain values and its text out.

inference_eval/  -> each task's metrics at the last step -> score, the mean over tasks
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, its 95 % interval, standard deviation, seeds
    -> less the baseline, seed by seed: the same, of the pairs
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import run_folder, scores
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.analysis.sweep.training import Run
from nm_sparsity_jax.core.text import columns, score_digits
from nm_sparsity_jax.runs import folders


def table(sweep: Sweep, runs: Mapping[str, Run]) -> dict[str, Any]:
  """Returns all that is known of a sweep, as --json prints it.

      found = sweep.table(grid, sweep.check(grid))
      for row in found["rows"]:
        print(row["recipe"], row["pattern"], row["score"]["mean"], row["done"], "of", row["seeds"])

  Args:
    sweep: what `read` returns.
    runs: what `check` returns.

  Returns:
    file, out, done (runs), of (runs), seeds, baseline, tasks; `less_is_better`, those of the tasks;
    `measures`, which each row has; `rows`, one for a recipe and a pattern; `runs`, one for each
    run, with its state and what it scored.
  """
  found = [_run(run) for run in runs.values()]
  cells = [run for run in found if run["recipe"] in sweep.recipes]
  tasks = list(dict.fromkeys(task for run in cells for task in run["tasks"]))
  less = list(dict.fromkeys(task for run in cells for task in run["less_is_better"]))
  more = [task for task in tasks if task not in less]
  for run in cells:
    run["values"] = {**run["tasks"], "score": _score(run["tasks"], more), "loss": run["loss"]}
  measures = [*["score"] * bool(more), *(tasks if len(tasks) > 1 or less else []), "loss"]
  grid = itertools.product(sweep.recipes, sweep.patterns or [None])
  rows = [_row(sweep, cells, measures, *place) for place in grid]
  return {
    "file": sweep.file, "out": str(sweep.out), "of": len(found),
    "done": sum(run["state"] == "done" for run in found), "seeds": list(sweep.seeds),
    "baseline": sweep.baseline, "tasks": tasks, "less_is_better": less, "measures": measures,
    "rows": rows, "runs": found,
  }  # fmt: skip


def _score(values: Mapping[str, float | None], tasks: Sequence[str]) -> float | None:
  """Returns the mean over tasks; None where one of them is not known."""
  known = [value for task in tasks if (value := values.get(task)) is not None]
  return statistics.fmean(known) if known and len(known) == len(tasks) else None


def _run(run: Run) -> dict[str, Any]:
  """Returns what is known of one run; without numbers where it is not done."""
  cell, state = run.cell, run.state()
  found: dict[str, Any] = {
    "run": cell.name, "recipe": cell.recipe, "pattern": cell.pattern, "seed": cell.seed,
    "tasks": {}, "less_is_better": [], "loss": None, "remarks": [], "state": state,
  }  # fmt: skip
  if state == "failed":
    found["remarks"].append(run.why_failed())
  if state != "done":
    return found
  losses = folders.evaluations(cell.folder)[run.last]["loss"]
  found["loss"] = statistics.fmean(losses.values()) if losses else None
  read = run_folder.Run(cell.folder)
  for name, measure in scores.table.measures(read).items():
    found["less_is_better"] += [name] * measure.less
    at = measure.at(read, run.last)
    found["tasks"][name] = at and at[1]
    found["remarks"] += [] if at else [f"{name}: no finite value at step {run.last}"]
  return found


def _row(
  sweep: Sweep, cells: Sequence[Any], measures: Sequence[str], recipe: str, pattern: str | None
) -> dict[str, Any]:
  """Returns the row of a recipe and a pattern: its spreads, and its differences to the baseline."""
  # A dense run has no pattern, and stands at each.
  of = lambda name: {
    run["seed"]: run for run in cells if run["recipe"] == name and run["pattern"] in (pattern, None)
  }
  mine, base = of(recipe), of(sweep.baseline)
  value = lambda run, measure: run["values"].get(measure)
  row: dict[str, Any] = {
    "recipe": recipe,
    "pattern": pattern,
    "seeds": len(mine),
    "done": sum(run["state"] == "done" for run in mine.values()),
    **{m: _spread([value(run, m) for run in mine.values()]) for m in measures},
    "differences": {},
  }
  for measure in measures if recipe != sweep.baseline else ():
    pairs = [(value(run, measure), value(base[seed], measure)) for seed, run in mine.items()]
    row["differences"][measure] = _spread([a - b for a, b in pairs if None not in (a, b)])
  return row


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
  """Returns mean, half of its 95 % interval, standard deviation and number of what is known.

  The interval is Student's t; it and the standard deviation are None of one value.
  """
  known = [v for v in values if v is not None]
  n = len(known)
  sd = half = None
  if n > 1:
    from scipy.special import stdtrit

    sd = statistics.stdev(known)
    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
  return {"mean": statistics.fmean(known) if known else None, "half": half, "sd": sd, "n": n}


# --- text -----------------------------------------------------------------------------------------


def text(found: Mapping[str, Any]) -> str:
  """Returns all of it as text for people.

  Args:
    found: what `sweep.table` returns.
  """
  parts = [heading(found)]
  for title, rows in tables(found):
    parts.append("\n  ".join([title, *columns(rows)]))
  return "\n\n".join([*parts, "\n".join(notes(found))]).rstrip()


def heading(found: Mapping[str, Any]) -> str:
  """Returns a line that says whether all runs are done."""
  done, of = found["done"], found["of"]
  runs = of if done == of else f"partial: {done} of {of}"
  return f"{found['out']}, {runs} runs, seeds {', '.join(map(str, found['seeds']))}"


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields of each measure a table of means and one of differences: a title, and rows of texts.

  A row is a recipe, and a column a pattern; the header comes first.

  Args:
    found: what `sweep.table` returns.
  """
  less, rows = found["less_is_better"], found["rows"]
  more = [task for task in found["tasks"] if task not in less]
  for measure in found["measures"]:
    means = [row[measure]["mean"] for row in rows]
    if means == [None] * len(means):
      continue
    digits = 4 if measure in (*less, "loss") else score_digits(means)
    what = "less is better" if measure in (*less, "loss") else "more is better"
    of = f"mean of {', '.join(more)}, " if measure == "score" else ""
    title = f"{measure}: {of}{what}; mean +- half of its 95 % interval (seeds)"
    yield title, _pivot(rows, lambda row, m=measure: row[m], digits)
    others = [row for row in rows if row["differences"]]
    if others:
      title = f"{measure}, difference from {found['baseline']} with the same seed"
      cell = lambda row, m=measure: row["differences"][m]
      yield f"{title}; mean +- half (pairs)", _pivot(others, cell, digits, "+")


def _pivot(rows: Sequence[Any], spread: Any, digits: int, sign: str = "") -> list[list[str]]:
  """Returns a line for each recipe with a cell for each pattern."""
  lines: dict[str, list[str]] = {}
  for row in rows:
    cell = _cell(spread(row), row["seeds"], digits, sign)
    lines.setdefault(row["recipe"], [row["recipe"]]).append(cell)
  head = dict.fromkeys(row["pattern"] or "dense" for row in rows)
  return [["", *head], *lines.values()]


def _cell(spread: Mapping[str, Any], seeds: int, digits: int, sign: str) -> str:
  """Returns a spread such as `77.9 +-2.0 (3)`, or `(2 of 3)` where seeds are missing."""
  mean, half, n = spread["mean"], spread["half"], spread["n"]
  mean = "-" if mean is None else f"{round(mean, digits) + 0.0:{sign}.{digits}f}"  # no -0.0
  half = "" if half is None else f" +-{half:.{digits}f}"
  return f"{mean}{half} ({n if n == seeds else f'{n} of {seeds}'})"


def notes(found: Mapping[str, Any]) -> list[str]:
  """Returns what a reader of the numbers must know, a line each."""
  made = []
  if found["done"]:
    made.append(
      "Each run counts with its last checkpoint. The 95 % intervals are Student's t, not corrected "
      "for multiple comparisons."
    )
  if any(row["recipe"] == "dense" for row in found["rows"]) and len(found["rows"]) > 1:
    made.append("A dense run has no pattern. Each seed has one, which every column shows.")
  for run in found["runs"]:
    failed = "failed: " * (run["state"] == "failed")
    made += [f"{failed}{run['run']}: {remark}" for remark in run["remarks"]]
  return made
