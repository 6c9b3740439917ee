"""What runs scored, next to the published rows.

Run -> [measures] the columns of GLUE, or its tasks -> [Measure.at] the step that counts
    -> published.match -> the paper's row
    -> [score] a report of plain values -> [rows] cells for people
"""

from __future__ import annotations

import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nm_sparsity_jax.analysis import run_folder
from nm_sparsity_jax.analysis.run_folder import Run
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.core.text import columns as aligned
from nm_sparsity_jax.core.text import printable
from nm_sparsity_jax.runs import glue

Checkpoint = str | int  # 'best', 'last' or a step


class Measure(NamedTuple):
  """What a run is judged by.

  Attributes:
    task: of which task.
    metrics: those whose mean counts.
    less: whether less is better.
  """

  task: str
  metrics: tuple[str, ...]
  less: bool = False

  def means(self, run: Run) -> dict[int, float]:
    """Returns step -> mean of the metrics, where it is finite."""
    series = run.tasks.get(self.task, {}).items()
    found = {s: statistics.fmean(x.get(m, math.nan) for m in self.metrics) for s, x in series}
    return {step: mean for step, mean in found.items() if math.isfinite(mean)}

  def at(self, run: Run, checkpoint: Checkpoint) -> tuple[int, float] | None:
    """Returns the step that counts, and the mean of the metrics there; None if there is none.

    Best is the step with the best mean, and of equal steps the earliest. It is never a step before
    the target pattern, where the weights are denser than the pattern says.
    """
    means, steps = self.means(run), run.tasks.get(self.task, {})
    if checkpoint == "best":
      counting = [step for step in steps if step >= (run.target or 0)]
    else:
      counting = [max(steps, default=None) if checkpoint == "last" else checkpoint]
    # Both take the first of equals, and the steps ascend.
    choose = min if self.less else max
    step = choose((s for s in counting if s in means), key=means.__getitem__, default=None)
    return None if step is None else (step, means[step])


def measures(run: Run) -> dict[str, Measure]:
  """Returns what a run is judged by, by name.

  These are the columns of GLUE if it has any. Else they are all its tasks, each with the metrics of
  every step of which more is better, and each metric by itself of which less is better.
  """
  of_glue = {glue.config_of(task): task for task in run.tasks}
  if columns := {
    column.title: Measure(of_glue[column.name], column.metrics)
    for column in glue.COLUMNS
    if column.name in of_glue
  }:
    return columns
  found = {}
  for task, series in run.tasks.items():
    names = sorted(set.intersection(*map(set, series.values())))
    # accuracy_top5 is a laxer accuracy, so their mean is no score.
    strict = lambda name: re.sub(r"_top\d+$", "", name)
    names = [name for name in names if strict(name) == name or strict(name) not in names]
    less = [name for name in names if run.less_is_better(name)]
    if more := [name for name in names if name not in less]:
      found[task] = Measure(task, tuple(more))
    found |= {f"{task} {name}": Measure(task, (name,), less=True) for name in less}
  return found


def common(runs: Sequence[Run]) -> dict[str, Measure]:
  """Returns the measures of which more is better that all runs have, of those that have any.

  Errors are in units of their own, so they have no mean, and no share of one is kept.
  """
  first, *others = [found for run in runs if (found := measures(run))] or [{}]
  in_all = lambda name: all(name in found for found in others)
  return {name: m for name, m in first.items() if in_all(name) and not m.less}


def score(paths: Sequence[str | pathlib.Path], checkpoint: Checkpoint = "best") -> dict[str, Any]:
  """Returns a report of plain values: what each run scored, and the published row next to it.

      report = scores.score(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
      report["runs"][0]["columns"]["RTE"]["mean"]

  Args:
    paths: folders of runs.
    checkpoint: the step of each task: 'best', 'last', or a step.

  Raises:
    ValueError: a folder holds no metrics, or a file in it is broken.
  """
  return of_runs(run_folder.read(paths), checkpoint)


def of_runs(runs: Sequence[Run], checkpoint: Checkpoint) -> dict[str, Any]:
  """Returns what `score` returns, of runs that were read."""
  steps = {step for run in runs for series in run.tasks.values() for step in series}
  if checkpoint not in {"best", "last", *steps}:
    raise ValueError(f"no run has scores of step {checkpoint}: choose one of {sorted(steps)}.")
  return {"checkpoint": checkpoint, "runs": [_row(run, checkpoint) for run in runs]}


def _row(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
  """Returns what `score` says of one run.

  Its `columns` are name -> step, mean, values, less (is better), published; None where no step
  counts. `overall` is the mean of GLUE's nine columns, where the run has all of them.
  """
  judged, titles = measures(run), [column.title for column in glue.COLUMNS]
  paper, remarks = None, []
  if judged.keys() & {*titles} or published.image_network(run.gin):
    paper, remarks = published.match(run)
  if checkpoint == "best" and run.recipe and run.target is None:
    remarks.append("it is not known from which step on the weights have the target pattern")

  found = {name: measure.at(run, checkpoint) for name, measure in judged.items()}
  if any(at[0] < (run.target or 0) for at in found.values() if at):
    paper = None  # the paper's scores are of the target pattern
  columns: dict[str, Any] = {}
  for name, at in found.items():
    task, metrics, less = judged[name]
    columns[name] = at and {
      "step": at[0], "mean": at[1], "less": less, "published": _published(paper, name),
      "values": {metric: run.tasks[task][at[0]][metric] for metric in metrics},
    }  # fmt: skip
  nine: list[Any] = [columns.get(title) for title in titles]
  if all(nine):
    overall = {
      "step": None, "mean": statistics.fmean(column["mean"] for column in nine), "less": False,
      "published": _published(paper, "overall"), "values": {},
    }  # fmt: skip
    columns = {"overall": overall, **columns}
  places = run.sparse and {place: str(recipe.pattern) for place, recipe in run.sparse.items()}
  return {
    "run": run.name, "path": str(run.path), "recipe": run.recipe, "places": places,
    "columns": columns, "published": paper, "remarks": remarks,
  }  # fmt: skip


def _published(row: Mapping[str, Any] | None, name: str) -> float | None:
  """Returns the paper's score of a measure; None where the row has none."""
  if row is None:
    return None
  if "top1" in row and name in ("validation", "test"):  # ImageNet's set, CIFAR-10's
    return row["top1"] / 100
  if name == "overall":
    return row["overall"]
  return row.get("columns", {}).get(name, [None])[-1]  # of a pair of metrics the mean stands last


def cells(report: Mapping[str, Any]) -> list[list[str]]:
  """Returns a line for each column of a report, a cell for each run; the first line is the head.

  Args:
    report: what `score` returned.
  """
  rows = report["runs"]
  lines = [["", *(row["run"] for row in rows)]]
  for name in dict.fromkeys(name for row in rows for name in row["columns"]):
    found = [row["columns"].get(name) for row in rows]
    less = any(column["less"] for column in found if column)
    lines.append([f"{name}, less is better" if less else name, *map(_cell, found)])
  return lines


def _cell(column: Mapping[str, Any] | None) -> str:
  if column is None:
    return "-"
  mean, paper = column["mean"], column["published"]
  text = f"{mean:.4g}" + (f" @ {column['step']:,}" if column["step"] is not None else "")
  return text + ("" if paper is None else f", published {paper:.5g} ({mean - paper:+.3g})")


def notes(report: Mapping[str, Any]) -> list[str]:
  """Returns what a reader of `cells` must know, a sentence each."""
  checkpoint = report["checkpoint"]
  if checkpoint == "best":
    at_target = " at the target pattern" * any(row["places"] for row in report["runs"])
    checkpoint = f"the best one{at_target}, which is optimistic"
  remarks = [f"{row['run']}: {remark}." for row in report["runs"] for remark in row["remarks"]]
  return [f"The number after @ is the step. Checkpoint: {checkpoint}.", *remarks]


def render(report: Mapping[str, Any]) -> str:
  """Returns a report as text.

      print(scores.render(scores.score(["runs/sr_ste"])))

  Args:
    report: what `score` returned.
  """
  return "\n".join([*aligned(cells(report)), "", *map(printable, notes(report))])
