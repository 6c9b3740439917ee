"""What a sweep found so far: folders of finished runs in, a table of plain values and its text out.

inference_eval/ -> each task's metrics at the last step -> score, the mean over tasks
                                                        -> metrics of which less is better, each
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, its 95 % interval, standard deviation, seeds
    -> less the baseline, seed by seed: the same, of the pairs
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.report import reading, scored
from nm_sparsity_jax.analysis.sweep.checks import Checked, Run, check
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.core.text import format_table, score_digits
from nm_sparsity_jax.runs import folders

# --- plain values ---------------------------------------------------------------------------------


def table(sweep: Sweep, checked: Checked | None = None) -> dict[str, Any]:
  """Returns all that is known of a sweep, as --json prints it.

      found = sweep.table(sweep.read("sweep.toml"))
      for row in found["rows"]:
        print(row["recipe"], row["pattern"], row["score"]["mean"], row["done"], "of", row["seeds"])

  Args:
    sweep: what `read` returns.
    checked: what `check` returns; None checks it here.

  Returns:
    file, out, done (runs), of (runs), partial, seeds, baseline, tasks; `less_is_better`, those of
    the tasks; `measures`, which each row has; `rows`, one for a recipe and a pattern; `runs`, one
    for each run, with its state and what it scored.
  """
  checked = check(sweep) if checked is None else checked
  runs = [_run(run, sweep.is_start(run.cell)) for run in checked.runs.values()]
  cells = [run for run in runs if not run["start"]]
  tasks = list(dict.fromkeys(task for run in cells for task in run["tasks"]))
  less = [task for task in tasks if any(task in run["less_is_better"] for run in cells)]
  for run in cells:
    values = [run["tasks"].get(task) for task in tasks if task not in less]
    run["score"] = statistics.fmean(values) if values and None not in values else None
  done = sum(run["state"] == "done" for run in runs)
  found = {
    "file": sweep.file, "out": str(sweep.out), "done": done, "of": len(runs),
    "partial": done < len(runs), "seeds": list(sweep.seeds), "baseline": sweep.baseline,
    "tasks": tasks, "less_is_better": less, "measures": ["score", *less, "loss"], "runs": runs,
  }  # fmt: skip
  found["rows"] = [
    _row(sweep, found, recipe, pattern)
    for recipe in sweep.recipes
    for pattern in ([None] if recipe == "dense" else sweep.patterns)
  ]
  return found


def _run(run: Run, is_start: bool) -> dict[str, Any]:
  """Returns what is known of one run; without numbers where it is not done."""
  cell, state = run.cell, run.state()
  found: dict[str, Any] = {
    "run": cell.name, "recipe": cell.recipe, "pattern": cell.pattern, "seed": cell.seed,
    "start": is_start, "tasks": {}, "less_is_better": [], "loss": None, "remarks": [],
    "state": state,
  }  # fmt: skip
  if state == "failed":
    found["remarks"].append(run.why_failed())
  if state != "done":
    return found
  losses = folders.evaluations(cell.folder)[run.last]["loss"]
  found["loss"] = statistics.fmean(losses.values()) if losses else None
  tasks = reading.tasks_of(cell.folder)
  read = reading.Run(cell.folder, cell.name, {}, {}, tasks, "")
  for name, measure in scored.measures(read).items():
    found["less_is_better"] += [name] * measure.less
    step, why = scores.choose(tasks[measure.task], measure.metrics, run.last)
    found["tasks"][name] = None if step is None else measure.at(read, step)
    found["remarks"] += [] if step is not None else [f"{name}: {why}"]
  return found


def _value(run: Mapping[str, Any], measure: str) -> float | None:
  return run.get(measure) if measure in ("score", "loss") else run["tasks"].get(measure)


def _row(
  sweep: Sweep, found: Mapping[str, Any], recipe: str, pattern: str | None
) -> dict[str, Any]:
  """Returns the row of a recipe and a pattern: its spreads, and its differences to the baseline."""
  cells = [run for run in found["runs"] if not run["start"]]
  mine = [run for run in cells if (run["recipe"], run["pattern"]) == (recipe, pattern)]
  row: dict[str, Any] = {
    "recipe": recipe,
    "pattern": pattern,
    "seeds": len(mine),
    "done": sum(run["state"] == "done" for run in mine),
    "tasks": {task: _spread([run["tasks"].get(task) for run in mine]) for task in found["tasks"]},
    **{m: _spread([_value(run, m) for run in mine]) for m in found["measures"]},
    "differences": {},
  }
  if recipe == sweep.baseline:
    return row
  # Dense has no pattern: it is compared with the baseline at each one, or is it for each.
  for at in sweep.patterns if recipe == "dense" else [pattern]:
    base = {
      run["seed"]: run
      for run in cells
      if run["recipe"] == sweep.baseline and run["pattern"] in (at, None)
    }
    row["differences"][at] = {
      m: _spread([_minus(_value(run, m), _value(base[run["seed"]], m)) for run in mine])
      for m in found["measures"]
    }
  return row


def _minus(a: float | None, b: float | None) -> float | None:
  return None if a is None or b is None else a - b


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
    parts.append("\n  ".join([title, *format_table(rows).splitlines()]))
  return "\n\n".join([*parts, "\n".join(notes(found))]).rstrip()


def heading(found: Mapping[str, Any]) -> str:
  """Returns a line that says whether all runs are done."""
  runs = f"partial: {found['done']} of {found['of']}" if found["partial"] else found["of"]
  return f"{found['out']}, {runs} runs, seeds {', '.join(map(str, found['seeds']))}"


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields each table's title and its rows of texts, the header first.

  Args:
    found: what `sweep.table` returns.
  """
  for measure in found["measures"]:
    means = [row[measure]["mean"] for row in found["rows"]]
    if means != [None] * len(means):
      yield from _by_pattern(found, measure, score_digits(means) if measure == "score" else 4)
  if len(found["tasks"]) > 1:
    spreads = [spread for row in found["rows"] for spread in row["tasks"].values()]
    digits = score_digits([spread["mean"] for spread in spreads])
    rows = [["", "", *found["tasks"]]]
    for row in found["rows"]:
      means = [_number(spread["mean"], digits) for spread in row["tasks"].values()]
      rows.append([row["recipe"], row["pattern"] or "", *means])
    yield "by task, means over seeds", rows


def _by_pattern(
  found: Mapping[str, Any], measure: str, digits: int
) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields the means of a measure and its differences: a row for a recipe, a column a pattern."""
  by_name: dict[str, dict[Any, Mapping[str, Any]]] = {}
  for row in found["rows"]:
    by_name.setdefault(row["recipe"], {})[row["pattern"]] = row
  patterns = list(dict.fromkeys(row["pattern"] for row in found["rows"] if row["pattern"]))
  columns = patterns or ["dense"]
  of = lambda name, column: by_name[name].get(column) or by_name[name][None]  # dense has one row
  scored_tasks = [task for task in found["tasks"] if task not in found["less_is_better"]]
  meaning = {
    "score": f"mean of {', '.join(scored_tasks)}, more is better",
    "loss": "on validation data, less is better",
  }
  rows = [["", *columns]]
  for name in by_name:
    rows.append([name, *(_cell(of(name, c)[measure], of(name, c), digits) for c in columns)])
  what = meaning.get(measure, "less is better")
  yield f"{measure}: {what}; mean +- half of its 95 % interval (seeds)", rows
  rows = [["", *columns]]
  for name in by_name if patterns else ():
    if name != found["baseline"]:
      spreads = [(of(name, c)["differences"][c][measure], of(name, c)) for c in columns]
      rows.append([name, *(_cell(spread, row, digits, "+") for spread, row in spreads)])
  if len(rows) > 1:
    title = f"{measure}, difference from {found['baseline']} with the same seed"
    yield f"{title}; mean +- half (pairs)", rows


def _cell(spread: Mapping[str, Any], row: Mapping[str, Any], digits: int, sign: str = "") -> str:
  """Returns a spread such as `77.9 +-2.0 (3)`, or `(2 of 3)` where seeds are missing."""
  half = "" if spread["half"] is None else f" +-{spread['half']:.{digits}f}"
  n, seeds = spread["n"], row["seeds"]
  count = f"{n}" if n == seeds else f"{n} of {seeds}"
  return f"{_number(spread['mean'], digits, sign)}{half} ({count})"


def _number(value: float | None, digits: int, sign: str = "") -> str:
  return "-" if value is None else f"{round(value, digits) + 0.0:{sign}.{digits}f}"  # no -0.0


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
