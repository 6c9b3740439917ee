"""What a sweep found so far: folders of finished runs in, a table of plain values out.

inference_eval/ -> each task's metrics at the last step -> score, the mean over tasks
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, standard deviation, seeds
    -> less the baseline, seed by seed: mean, 95 % interval, pairs
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax import scores
from nm_sparsity_jax.report import reading, scored
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.sweep.checks import Checked, check
from nm_sparsity_jax.sweep.grid import Sweep
from nm_sparsity_jax.sweep.states import Run

MEASURES = ("score", "loss")


def table(sweep: Sweep, checked: Checked | None = None) -> dict[str, Any]:
  """Returns all that is known of a sweep, as --json prints it.

      found = sweep.table(sweep.read("sweep.toml"))
      for row in found["rows"]:
        print(row["recipe"], row["pattern"], row["score"]["mean"], row["done"], "of", row["seeds"])

  Args:
    sweep: what `read` returns.
    checked: what `check` returns; None checks it here.

  Returns:
    file, out, done (runs), of (runs), partial, seeds, baseline, tasks; `rows`, one for a recipe and
    a pattern; `runs`, one for each run, with its state and what it scored.
  """
  checked = check(sweep) if checked is None else checked
  runs = [_run(run, sweep.is_start(run.cell)) for run in checked.runs.values()]
  cells = [run for run in runs if not run["start"]]
  tasks = list(dict.fromkeys(title for run in cells for title in run["tasks"]))
  for run in cells:
    values = [run["tasks"].get(title) for title in tasks]
    whole = bool(values) and None not in values
    run["score"] = math.fsum(values) / len(values) if whole else None
  rows = [
    _row(sweep, cells, tasks, recipe, pattern)
    for recipe in sweep.recipes
    for pattern in ([None] if recipe == "dense" else sweep.patterns)
  ]
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


def _run(run: Run, is_start: bool) -> dict[str, Any]:
  """Returns what is known of one run; without numbers where it is not done."""
  cell = run.cell
  found: dict[str, Any] = {
    "run": cell.name, "recipe": cell.recipe, "pattern": cell.pattern, "seed": cell.seed,
    "start": is_start, "tasks": {}, "loss": None, "remarks": [], "state": run.state(),
  }  # fmt: skip
  if found["state"] != "done":
    if run.failure.is_file():
      found["remarks"].append(run.failure.read_text().strip())
    return found
  losses = folders.evaluations(cell.folder)[run.last]["loss"]
  found["loss"] = math.fsum(losses.values()) / len(losses) if losses else None
  tasks = reading.tasks_of(cell.folder)
  scored_run = reading.Run(cell.folder, cell.name, {}, {}, tasks, "")
  for title, (task, metrics) in scored.measures(scored_run).items():
    step, why = scores.choose(tasks[task], metrics, run.last)
    if step is None:
      found["tasks"][title] = None
      found["remarks"].append(f"{title}: {why}")
    else:
      values = [tasks[task][step][metric] for metric in metrics]
      found["tasks"][title] = math.fsum(values) / len(values)
  return found


def _row(
  sweep: Sweep,
  cells: Sequence[Mapping[str, Any]],
  tasks: Sequence[str],
  recipe: str,
  pattern: str | None,
) -> dict[str, Any]:
  """Returns the row of a recipe and a pattern: its spreads, and its differences to the baseline."""
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
      measure: _interval(_paired(mine, base, measure)) for measure in MEASURES
    }
  return row


def _paired(
  mine: Sequence[Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], measure: str
) -> list[float]:
  """Returns the difference to the baseline for each seed that both have."""
  pairs = [(run.get(measure), base[run["seed"]].get(measure)) for run in mine]
  return [x - y for x, y in pairs if x is not None and y is not None]


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
  """Returns mean and standard deviation (None of one value) of the values that are there."""
  there = [v for v in values if v is not None]
  return {
    "mean": statistics.fmean(there) if there else None,
    "sd": statistics.stdev(there) if len(there) > 1 else None,
    "n": len(there),
  }


def _interval(differences: Sequence[float]) -> dict[str, Any]:
  """Returns the mean, and half of its 95 % interval by Student's t (None of one pair)."""
  found = _spread(differences)
  half = None
  if found["sd"] is not None:
    from scipy.special import stdtrit

    half = float(stdtrit(found["n"] - 1, 0.975)) * found["sd"] / math.sqrt(found["n"])
  return {"mean": found["mean"], "half": half, "pairs": found["n"]}
