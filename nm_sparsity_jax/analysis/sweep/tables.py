"""What a sweep found so far: folders of finished runs in, a table of plain values out.

inference_eval/ -> each task's metrics at the last step -> score, the mean over tasks
                                                        -> metrics of which less is better, each
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, its 95 % interval, standard deviation, seeds
    -> less the baseline, seed by seed: mean, its 95 % interval, pairs
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.report import reading, scored
from nm_sparsity_jax.analysis.sweep.checks import Checked, check
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.analysis.sweep.states import Run
from nm_sparsity_jax.runs import folders


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
  tasks = list(dict.fromkeys(title for run in cells for title in run["tasks"]))
  less = [title for title in tasks if any(title in run["less_is_better"] for run in cells)]
  measures = ["score", *less, "loss"]
  for run in cells:
    values = [run["tasks"].get(title) for title in tasks if title not in less]
    whole = bool(values) and None not in values
    run["score"] = math.fsum(values) / len(values) if whole else None
  rows = [
    _row(sweep, cells, tasks, measures, recipe, pattern)
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
    "less_is_better": less,
    "measures": measures,
    "rows": rows,
    "runs": runs,
  }


def _run(run: Run, is_start: bool) -> dict[str, Any]:
  """Returns what is known of one run; without numbers where it is not done."""
  cell = run.cell
  found: dict[str, Any] = {
    "run": cell.name, "recipe": cell.recipe, "pattern": cell.pattern, "seed": cell.seed,
    "start": is_start, "tasks": {}, "less_is_better": [], "loss": None, "remarks": [],
    "state": run.state(),
  }  # fmt: skip
  if found["state"] != "done":
    if run.failure.is_file():
      found["remarks"].append(run.failure.read_text().strip())
    return found
  losses = folders.evaluations(cell.folder)[run.last]["loss"]
  found["loss"] = math.fsum(losses.values()) / len(losses) if losses else None
  tasks = reading.tasks_of(cell.folder)
  scored_run = reading.Run(cell.folder, cell.name, {}, {}, tasks, "")
  for title, measure in scored.measures(scored_run).items():
    found["less_is_better"] += [title] * measure.less
    step, why = scores.choose(tasks[measure.task], measure.metrics, run.last)
    if step is None:
      found["tasks"][title] = None
      found["remarks"].append(f"{title}: {why}")
    else:
      found["tasks"][title] = measure.at(scored_run, step)
  return found


def _value(run: Mapping[str, Any], measure: str) -> float | None:
  """Returns what a run has of a measure: its score, its loss, or a metric by itself."""
  return run.get(measure) if measure in ("score", "loss") else run["tasks"].get(measure)


def _row(
  sweep: Sweep,
  cells: Sequence[Mapping[str, Any]],
  tasks: Sequence[str],
  measures: Sequence[str],
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
  for measure in measures:
    row[measure] = _spread([_value(run, measure) for run in mine])
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
      measure: _interval(_paired(mine, base, measure)) for measure in measures
    }
  return row


def _paired(
  mine: Sequence[Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], measure: str
) -> list[float]:
  """Returns the difference to the baseline for each seed that both have."""
  pairs = [(_value(run, measure), _value(base[run["seed"]], measure)) for run in mine]
  return [x - y for x, y in pairs if x is not None and y is not None]


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
  """Returns mean, half of its 95 % interval, and standard deviation of the values that are there.

  The interval is Student's t; it and the standard deviation are None of one value.
  """
  there = [v for v in values if v is not None]
  n = len(there)
  sd = statistics.stdev(there) if n > 1 else None
  half = None
  if sd is not None:
    from scipy.special import stdtrit

    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
  return {"mean": statistics.fmean(there) if there else None, "half": half, "sd": sd, "n": n}


def _interval(differences: Sequence[float]) -> dict[str, Any]:
  """Returns the mean of differences, half of its 95 % interval, and how many pairs there are."""
  found = _spread(differences)
  return {"mean": found["mean"], "half": found["half"], "pairs": found["n"]}
