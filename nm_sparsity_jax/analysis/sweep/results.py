"""What a sweep found so far: folders of finished runs in; a table, its text and its page out.

inference_eval/  -> each task's metrics at the last step -> score, the mean over tasks
evaluations.json -> validation loss at the last step
    -> by recipe and pattern: mean, its 95 % interval, standard deviation, seeds
    -> less the baseline, seed by seed: the same, of the pairs
"""

from __future__ import annotations

import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts, run_folder
from nm_sparsity_jax.analysis import page as page_of
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part, Section, Table
from nm_sparsity_jax.analysis.scores.table import measures as measures_of
from nm_sparsity_jax.analysis.sweep.grid import Run, Sweep
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.runs import folders


def table(sweep: Sweep) -> dict[str, Any]:
  """Returns all that is known of a sweep, as --json prints it.

      found = sweep.table(grid)
      for row in found["rows"]:
        print(row["recipe"], row["pattern"], row["score"]["mean"], row["done"], "of", row["seeds"])

  Args:
    sweep: what `read` returns.

  Returns:
    file, out, done (runs), of (runs), seeds, baseline, tasks; `measures`, which each row has, and
    `less_is_better`, some of them; `rows`, one for a recipe and a pattern; `runs`, one for each
    run, with its state and what it scored.
  """
  found = [_run(run) for run in sweep.runs]
  cells = [run for run in found if run["recipe"] in sweep.recipes]
  tasks = list(dict.fromkeys(name for run in cells for name in run["values"] if name != "loss"))
  less = list(dict.fromkeys(task for run in cells for task in run["less_is_better"]))
  more = [task for task in tasks if task not in less]
  for run in cells:
    scores = [run["values"].get(task) for task in more]
    if scores and None not in scores:
      run["values"]["score"] = statistics.fmean(scores)
  measures = [*["score"] * bool(more), *(tasks if len(tasks) > 1 or less else []), "loss"]
  grid = itertools.product(sweep.recipes, sweep.patterns)
  rows = [_row(sweep, cells, measures, *place) for place in grid]
  return {
    "file": sweep.file, "out": str(sweep.out), "of": len(found),
    "done": sum(run["state"] == "done" for run in found), "seeds": list(sweep.seeds),
    "baseline": sweep.baseline, "tasks": tasks, "less_is_better": [*less, "loss"],
    "measures": measures, "rows": rows, "runs": found,
  }  # fmt: skip


def _run(run: Run) -> dict[str, Any]:
  """Returns what is known of one run; without numbers where it is not done."""
  why = run.why_failed()
  state = "done" if run.is_done() else "failed" if why else "open"
  found: dict[str, Any] = {
    "run": run.name, "recipe": run.recipe, "pattern": run.pattern, "seed": run.seed,
    "values": {}, "less_is_better": [], "remarks": [], "state": state,
  }  # fmt: skip
  if state != "done":
    found["remarks"] += [why] if why else []
    return found
  if losses := folders.evaluations(run.folder)[run.last]["loss"]:
    found["values"]["loss"] = statistics.fmean(losses.values())
  read = run_folder.Run(run.folder)
  for name, measure in measures_of(read).items():
    found["less_is_better"] += [name] * measure.less
    at = measure.at(read, run.last)
    found["values"][name] = at and at[1]
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
  if n > 1:  # one value has no spread
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
  parts = ["\n".join([title, *columns(rows)]) for title, rows in tables(found)]
  return "\n\n".join([heading(found), *parts, "\n".join(notes(found))]).rstrip()


def heading(found: Mapping[str, Any]) -> str:
  """Returns a line that says whether all runs are done."""
  done, of = found["done"], found["of"]
  runs = of if done == of else f"partial: {done} of {of}"
  return f"{found['out']}, {runs} runs, seeds {', '.join(map(str, found['seeds']))}"


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
  """Yields a table of each measure: a title, and a row of texts for each recipe and pattern.

  Args:
    found: what `sweep.table` returns.
  """
  less, rows, baseline = found["less_is_better"], found["rows"], found["baseline"]
  more = [task for task in found["tasks"] if task not in less]
  for measure in found["measures"]:
    means = [row[measure]["mean"] for row in rows]
    if means == [None] * len(means):
      continue
    # Losses and errors differ in their last digits, and so do scores on a scale up to 1.
    largest = max(abs(mean) for mean in means if mean is not None)
    digits = 4 if measure in less else 3 if largest <= 2 else 1
    what = "less is better" if measure in less else "more is better"
    of = f"mean of {', '.join(more)}, " if measure == "score" else ""
    head = ["recipe", "pattern", "seeds", measure, f"difference from {baseline}"]
    cells = [
      [
        row["recipe"], row["pattern"] or "-", f"{row[measure]['n']} of {row['seeds']}",
        _cell(row[measure], digits), _cell(row["differences"].get(measure), digits, "+"),
      ]
      for row in rows
    ]  # fmt: skip
    yield f"{measure}: {of}{what}", [head, *cells]


def _cell(spread: Mapping[str, Any] | None, digits: int, sign: str = "") -> str:
  """Returns a spread such as `77.9 +-2.0`; '' where there is none."""
  if spread is None or spread["mean"] is None:
    return ""
  mean = round(spread["mean"], digits) + 0.0  # no -0.0
  half = "" if spread["half"] is None else f" +-{spread['half']:.{digits}f}"
  return f"{mean:{sign}.{digits}f}{half}"


def notes(found: Mapping[str, Any]) -> list[str]:
  """Returns what a reader of the numbers must know, a line each."""
  made = [
    "Each run counts with its last checkpoint. +- is half of the 95 % interval of a mean, by "
    "Student's t, not corrected for multiple comparisons. Differences are of runs with the same "
    "seed. A dense run has no pattern: it stands at each of them."
  ]
  for run in found["runs"]:
    failed = "failed: " * (run["state"] == "failed")
    made += [f"{failed}{run['run']}: {remark}" for remark in run["remarks"]]
  return made


# --- page -----------------------------------------------------------------------------------------


def page(found: Mapping[str, Any]) -> pathlib.Path | None:
  """Writes out/report.html and returns its path; writes nothing where no run is done.

  Args:
    found: what `table` returns.
  """
  if not found["done"]:
    return None
  recipes = list(dict.fromkeys(row["recipe"] for row in found["rows"]))
  recipes = recipes[: charts.MAX_RUNS]  # more have no colours; the tables have all
  section = Section("results", "Results", list(_parts(found, recipes)))
  path = pathlib.Path(found["out"], "report.html")
  return page_of.write(path, f"N:M sparsity: {', '.join(recipes)}", recipes, [section], {})


def _parts(found: Mapping[str, Any], drawn: Sequence[str]) -> Iterator[Part]:
  """Yields the tables, the notes, and the means over the patterns (figure 4a of the paper)."""
  yield heading(found)
  for title, (head, *rows) in tables(found):
    yield f"{title}."
    yield Table(head, rows)
  yield from notes(found)
  patterns = {row["pattern"] for row in found["rows"]} - {None}
  labels = sorted(patterns, key=lambda p: (-NM.parse(p).density, NM.parse(p).m))
  for measure in found["measures"] if len(labels) > 1 else ():
    mean = {(row["recipe"], row["pattern"]): row[measure]["mean"] for row in found["rows"]}
    lines = []
    for i, recipe in enumerate(drawn):
      ys = [mean[recipe, label] for label in labels]
      # A pattern that is missing is NaN: the line stops there.
      points = [(float(x), math.nan if y is None else y) for x, y in enumerate(ys)]
      lines.append(Line(i, points))
    yield Chart(
      f"{measure}_by_pattern".replace(" ", "_"),
      f"{measure}, against pattern",
      "pattern, from dense to sparse",
      lines,
      labels=labels,
      note="Means over the seeds that are done.",
    )
