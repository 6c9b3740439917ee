"""What a sweep found so far: folders of finished runs in, a report of plain values out, its text.

inference_eval/ -> each task's metrics at the last step -> score, the mean over tasks
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, standard deviation, seeds
    -> less the baseline, seed by seed: mean, 95 % interval, pairs
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import scores
from nm_sparsity_jax.report import reading, scored
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.sweep import grid
from nm_sparsity_jax.text import columns

MEASURES = ("score", "loss")


def report(sweep: grid.Sweep, known: Mapping[str, grid.Checked]) -> dict[str, Any]:
  """All of it, as --json prints it."""
  starts = {cell.name for cell in sweep.starts.values()}
  runs = [_run(cell, known[cell.name], cell.name in starts) for cell in sweep.runs()]
  cells = [run for run in runs if not run["start"]]
  tasks = list(dict.fromkeys(title for run in cells for title in run["tasks"]))
  for run in cells:
    values = [run["tasks"].get(title) for title in tasks]
    whole = bool(values) and None not in values
    run["score"] = math.fsum(values) / len(values) if whole else None
  rows = []
  for recipe in sweep.recipes:
    for pattern in [None] if recipe == "dense" else sweep.patterns:
      rows.append(_row(sweep, cells, tasks, recipe, pattern))
  done = sum(run["state"] == "done" for run in runs)
  return {
    "file": sweep.file,
    "out": str(sweep.out),
    "done": done,
    "of": len(runs),
    "partial": done < len(runs),
    "seeds": list(sweep.seeds),
    "baseline": sweep.baseline,
    "tasks": tasks,
    "rows": rows,
    "runs": runs,
  }


def _run(cell: grid.Cell, known: grid.Checked, is_start: bool) -> dict[str, Any]:
  """One run; of one that is not done no numbers."""
  found: dict[str, Any] = {
    "run": cell.name, "recipe": cell.recipe, "pattern": cell.pattern, "seed": cell.seed,
    "start": is_start, "tasks": {}, "loss": None, "remarks": [],
  }  # fmt: skip
  if not grid.is_done(cell, known):
    done = grid.steps_done(cell, known)
    failure = grid.failure(cell)
    found["state"] = "failed" if failure.is_file() else "begun" if done else "open"
    if failure.is_file():
      found["remarks"].append(failure.read_text().strip())
    return found
  found["state"] = "done"
  last = known.first + known.steps
  losses = folders.evaluations(cell.folder)[last]["loss"]
  found["loss"] = math.fsum(losses.values()) / len(losses) if losses else None
  tasks = reading.tasks_of(cell.folder)
  run = reading.Run(cell.folder, cell.name, {}, {}, tasks, "")
  for title, (task, metrics) in scored.measures(run).items():
    step, why = scores.choose(tasks[task], metrics, last)
    if step is None:
      found["tasks"][title] = None
      found["remarks"].append(f"{title}: {why}")
    else:
      values = [tasks[task][step][metric] for metric in metrics]
      found["tasks"][title] = math.fsum(values) / len(values)
  return found


def _row(sweep, cells, tasks: Sequence[str], recipe: str, pattern: str | None) -> dict[str, Any]:
  mine = [run for run in cells if (run["recipe"], run["pattern"]) == (recipe, pattern)]
  row: dict[str, Any] = {
    "recipe": recipe,
    "pattern": pattern,
    "seeds": len(mine),
    "done": sum(run["state"] == "done" for run in mine),
    "tasks": {title: _spread([run["tasks"].get(title) for run in mine]) for title in tasks},
  }
  for measure in MEASURES:
    row[measure] = _spread([run.get(measure) for run in mine])
  row["differences"] = {}
  if recipe == sweep.baseline:
    return row
  # Dense has no pattern: it is compared with the baseline at each one, or is it for each.
  for at in sweep.patterns if recipe == "dense" else [pattern]:
    base = {
      run["seed"]: run
      for run in cells
      if run["recipe"] == sweep.baseline and run["pattern"] in (at, None)
    }
    row["differences"][str(at)] = {
      measure: _interval(
        [
          run[measure] - base[run["seed"]][measure]
          for run in mine
          if run.get(measure) is not None and base[run["seed"]].get(measure) is not None
        ]
      )
      for measure in MEASURES
    }
  return row


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
  """Mean and standard deviation (None of one value) of those that are there."""
  there = [v for v in values if v is not None]
  return {
    "mean": statistics.fmean(there) if there else None,
    "sd": statistics.stdev(there) if len(there) > 1 else None,
    "n": len(there),
  }


def _interval(differences: Sequence[float]) -> dict[str, Any]:
  """Mean, and half of its 95 % interval by Student's t (None of one pair)."""
  found = _spread(differences)
  half = None
  if found["sd"] is not None:
    from scipy.special import stdtrit

    half = float(stdtrit(found["n"] - 1, 0.975)) * found["sd"] / math.sqrt(found["n"])
  return {"mean": found["mean"], "half": half, "pairs": found["n"]}


# --- text ---------------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
  """(title, rows of texts, the header first): means and differences by measure, then tasks."""
  patterns = list(dict.fromkeys(row["pattern"] for row in report["rows"] if row["pattern"]))
  heads = patterns or ["dense"]
  recipes = list(dict.fromkeys(row["recipe"] for row in report["rows"]))
  find = {(row["recipe"], row["pattern"]): row for row in report["rows"]}
  row_of = lambda recipe, at: find[recipe, None if recipe == "dense" else at]
  what = {
    "score": f"score: {_names(report['tasks'])}, more is better",
    "loss": "loss on validation data, less is better",
  }
  for measure in MEASURES:
    values = [row[measure]["mean"] for row in report["rows"] if row[measure]["mean"] is not None]
    if not values:
      continue
    digits = 4 if measure == "loss" else _digits(values)
    means = [
      [recipe, *(_mean(row_of(recipe, at), measure, digits) for at in heads)] for recipe in recipes
    ]
    yield what[measure], [["", *heads], *means]
    others = [recipe for recipe in recipes if recipe != report["baseline"]]
    differences = [
      [recipe, *(_difference(row_of(recipe, at), at, measure, digits) for at in heads)]
      for recipe in others
      if patterns
    ]
    if differences:
      title = f"{measure}, less that of {report['baseline']} with the same seed"
      yield title, [["", *heads], *differences]
  if len(report["tasks"]) > 1:
    digits = _digits([c["mean"] for row in report["rows"] for c in row["tasks"].values()])
    by_task = [
      [
        row["recipe"],
        row["pattern"] or "",
        *(_number(c["mean"], digits) for c in row["tasks"].values()),
      ]
      for row in report["rows"]
    ]
    yield "by task, means over seeds", [["", "", *report["tasks"]], *by_task]


def _names(tasks: Sequence[str]) -> str:
  if len(tasks) > 3:
    return f"mean of the {len(tasks)} tasks below"
  return f"mean of {', '.join(tasks)}" if len(tasks) > 1 else "".join(tasks)


def _digits(values: Sequence[float | None]) -> int:
  """1 for scores from 0 to 100, 3 for scores from 0 to 1."""
  return 1 if max((abs(v) for v in values if v is not None), default=0.0) > 2 else 3


def _number(value: float | None, digits: int) -> str:
  return "-" if value is None else f"{value:.{digits}f}"


def _mean(row: Mapping[str, Any], measure: str, digits: int) -> str:
  """`77.9 +-0.8 (3)`, or `(2 of 3)` where seeds are missing."""
  found = row[measure]
  spread = f" +-{found['sd']:.{digits}f}" if found["sd"] is not None else ""
  return f"{_number(found['mean'], digits)}{spread} {_count(found['n'], row)}"


def _difference(row: Mapping[str, Any], at: str, measure: str, digits: int) -> str:
  """`+1.2 +-0.4 (3)`."""
  found = row["differences"][at][measure]
  mean = "-" if found["mean"] is None else f"{round(found['mean'], digits) + 0.0:+.{digits}f}"
  half = f" +-{found['half']:.{digits}f}" if found["half"] is not None else ""
  return f"{mean}{half} {_count(found['pairs'], row)}"


def _count(n: int, row: Mapping[str, Any]) -> str:
  return f"({n})" if n == row["seeds"] else f"({n} of {row['seeds']})"


def heading(report: Mapping[str, Any]) -> str:
  """Whether it is all, in a line."""
  seeds = "seed" + "s" * (len(report["seeds"]) > 1) + " " + ", ".join(map(str, report["seeds"]))
  done = f"partial: {report['done']} of {report['of']} runs" if report["partial"] else (
    f"{report['of']} runs")  # fmt: skip
  return f"{report['out']}, {done}, {seeds}"


def notes(report: Mapping[str, Any]) -> list[str]:
  """What a reader of the numbers must know."""
  made = []
  if report["done"]:
    made.append("+- of a mean: the standard deviation over seeds; in brackets the seeds.")
    made.append("Of the last checkpoint of each run.")
  pairs = [d[m]["pairs"] for row in report["rows"] for d in row["differences"].values() for m in d]
  compared = sum(n > 1 for n in pairs)
  if compared:
    made.append(
      "+- of a difference: the 95 % interval of its mean by Student's t, not corrected for there "
      f"being {compared}; in brackets the pairs."
    )
  if any(row["recipe"] == "dense" for row in report["rows"]) and len(report["rows"]) > 1:
    made.append("dense is one run a seed, and stands under every pattern.")
  for run in report["runs"]:
    if run["state"] == "failed":
      made.append(f"failed: {run['run']}: {run['remarks'][0]}")
    else:
      made += [f"{run['run']}: {remark}" for remark in run["remarks"]]
  return made


def text(report: Mapping[str, Any]) -> str:
  """For people."""
  parts = [heading(report)]
  for title, rows in tables(report):
    parts.append("\n".join([title, *(f"  {line}" for line in columns(rows))]))
  if remarks := notes(report):
    parts.append("\n".join(remarks))
  return "\n\n".join(parts)
