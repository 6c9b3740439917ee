"""Rows of scores: a run's metrics become a row of the paper's Table 12, beside the published one.

    results.Run -> [choose] the step of each task -> a column each -> the mean of nine -> row
                -> published.match -> the paper's row and the difference

All is plain values, as `nm-sparsity glue score --json` prints them.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.runs import glue, results

TITLES = ("overall", *(c.title for c in glue.COLUMNS))


def score(
  runs: Sequence[str | pathlib.Path | results.Run], checkpoint: str | int = "best"
) -> dict[str, Any]:
  """Returns a report: one row of GLUE scores for each run, and which run is best in each column.

      report = scores.score(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
      report["runs"][0]["overall"], report["best"]["RTE"]

  Args:
    runs: folders of runs, or runs that `results.read` or `results.join` returned.
    checkpoint: the step of each task: 'best', 'last', or a step.

  Raises:
    ValueError: a run has no row, GLUE and mini-GLUE meet, or two rows have one name.
  """
  runs = [run if isinstance(run, results.Run) else results.read(str(run)) for run in runs]
  if len({run.mini for run in runs}) > 1:
    made_up = ", ".join(str(run.path) for run in runs if run.mini)
    raise ValueError(f"{made_up}: mini-GLUE, which does not compare with GLUE in one table")
  names = [_name(run, runs) for run in runs]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(f"two rows are called {twice[0]}: give each run once, and other names to join")
  rows = [_row(run, name, checkpoint) for run, name in zip(runs, names, strict=True)]
  best = {}
  for title in TITLES if len(rows) > 1 else ():
    means = {row["run"]: round(m, 1) for row in rows if (m := mean_of(row, title)) is not None}
    best[title] = [n for n, mean in means.items() if mean == max(means.values())]
  return {
    "checkpoint": checkpoint,
    "columns": {c.title: {"task": c.task, "metrics": list(c.metrics)} for c in glue.COLUMNS},
    "runs": rows,
    "best": best,
  }


def tell(
  run: results.Run,
  recipe: str | None = None,
  places: Mapping[str, str] | None = None,
  dense_steps: int | None = None,
) -> None:
  """Adds to a run what its config.gin does not say.

  Args:
    run: it is changed in place.
    recipe: name of the recipe, or 'dense'; None: nothing to add.
    places: place -> pattern; None: nothing to add.
    dense_steps: length of the dense phase; None: nothing to add.

  Raises:
    ValueError: the config says something else.
  """
  if run.recipe is None and recipe == "dense":
    run.places = {}
  for name, value in (("recipe", recipe), ("places", places), ("dense_steps", dense_steps)):
    known = getattr(run, name)
    if value is not None and known is not None and known != value:
      raise ValueError(f"{run.path}: {name}={value}, but the run's config says {known}")
    if value is not None:
      setattr(run, name, value)


def choose(
  series: results.Series,
  metrics: Sequence[str],
  checkpoint: str | int,
  first: int = 0,
  less_is_better: bool = False,
) -> tuple[int | None, str]:
  """Returns the step to report and a remark; (None, why) if there is none.

  Best is the step with the greatest mean of the metrics. Of equal steps it is the earliest. It is
  never a step before `first`, where the weights are denser than the pattern says. A step that lacks
  a metric, or where one is not finite, is never chosen.

  Args:
    series: step -> metric -> value.
    metrics: the metrics whose mean counts.
    checkpoint: 'best', 'last', or a step.
    first: the first step whose weights have the target pattern.
    less_is_better: the best step has the least mean.

  >>> choose({10: {"f1": 60.0}, 20: {"f1": 70.0}, 30: {"f1": 65.0}}, ["f1"], "best")
  (20, '')
  """
  if isinstance(checkpoint, int):
    steps = [step for step in [checkpoint] if step in series]
    if not steps:
      return None, f"no step {checkpoint}, there is {', '.join(map(str, sorted(series)))}"
  elif checkpoint == "last":
    steps = sorted(series)[-1:]
  else:
    steps = [step for step in sorted(series) if step >= first]
    if not steps:
      return None, f"no step from {first} on, where the target pattern is certain"
  faults = {
    step: f"{metric} is {series[step].get(metric, 'missing')} at step {step}"
    for step in steps
    for metric in metrics
    if not math.isfinite(series[step].get(metric, math.nan))
  }
  sound = [step for step in steps if step not in faults]
  remark = "; ".join([*faults.values()][:2] + ([f"{len(faults)} such steps"] * (len(faults) > 2)))
  if not sound:
    return None, remark
  means = [_mean(series[step][metric] for metric in metrics) for step in sound]
  best = min(means) if less_is_better else max(means)
  return sound[means.index(best)], remark  # the first of equals


def mean_of(row: Mapping[str, Any], title: str) -> float | None:
  """Returns the value of a row (a run's or a published one) in a column of `TITLES`, or None."""
  if title == "overall":
    return row["overall"]
  column = row["columns"].get(title)
  return column and column["mean"]


def _name(run: results.Run, runs: Sequence[results.Run]) -> str:
  """Returns the run's own name, else its folder's, or its path where two folders share a name."""

  def short(r: results.Run) -> str:
    path = r.path.resolve()
    return r.name or (path.parent.name if path.name == "inference_eval" else path.name)

  shared = [short(r) for r in runs].count(short(run)) > 1
  return str(run.path) if shared and not run.name else short(run)


def _row(run: results.Run, name: str, checkpoint: str | int) -> dict[str, Any]:
  """Returns the row of a run."""
  columns, missing, remarks = _columns(run, checkpoint)
  row: dict[str, Any] = {
    "run": name,
    "path": str(run.path),
    "joined": [str(path) for path in run.joined],
    "mini": run.mini,
    "recipe": run.recipe,
    "places": run.places,
    "dense_steps": run.dense_steps,
    "sparse_steps": run.sparse_steps,
    "overall": None if missing else _mean(c["mean"] for c in columns.values()),
    "columns": columns,
    "missing": missing,
  }
  beside, remark = _beside(run, columns)
  row["published"] = beside
  row["delta"] = {
    title: a - b
    for title in TITLES
    if beside
    and (a := mean_of(row, title)) is not None
    and (b := mean_of(beside, title)) is not None
  }
  row["remarks"] = [*remarks, *([remark] if remark else [])]
  return row


def _columns(
  run: results.Run, checkpoint: str | int
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
  """Returns the columns that can be filled, why others cannot, and remarks.

  Raises:
    ValueError: no column can be filled.
  """
  columns, missing, remarks = {}, {}, list(run.remarks)
  if unknown := run.target_remark():
    remarks.append(unknown)
  for column in glue.COLUMNS:
    series = run.tasks.get(column.task)
    if not series:
      missing[column.title] = "no metrics"
      continue
    step, why = choose(series, column.metrics, checkpoint, run.target_from() or 0)
    if step is None:
      missing[column.title] = why
      continue
    if why:
      remarks.append(f"{column.title}: {why}")
    values = {metric: series[step][metric] for metric in column.metrics}
    columns[column.title] = {"step": step, "values": values, "mean": _mean(values.values())}
  if not columns:
    reasons = "; ".join(f"{title}: {why}" for title, why in missing.items() if why != "no metrics")
    raise ValueError(f"{run.path}: no column can be filled ({reasons})")
  return columns, missing, remarks


def _beside(run: results.Run, columns: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
  """Returns the published row to put beside a run's columns, or None; and a remark, or ''."""
  first = run.target_from() or 0
  if early := [title for title, column in columns.items() if column["step"] < first]:
    return None, (
      f"no published row: {', '.join(early)} {'is' if len(early) == 1 else 'are'} of steps before "
      f"{first}, from which on the target pattern is certain"
    )
  match, remark = published.match(run)
  return _published_row(match) if match else None, remark


def _published_row(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row of published.json in the form of a run's row, with the means as printed."""
  columns = {
    c.title: {
      "values": dict(zip(c.metrics, numbers, strict=False)),  # a pair has its mean behind it
      "mean": numbers[-1],
    }
    for c in glue.COLUMNS
    if (numbers := row.get("columns", {}).get(c.title))
  }
  return {"table": row["table"], "row": row["row"], "overall": row["overall"], "columns": columns}


def _mean(values: Iterable[float]) -> float:
  values = list(values)
  return math.fsum(values) / len(values)
