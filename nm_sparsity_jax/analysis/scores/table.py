"""A run's metrics become a row of the paper's Table 12, beside the published one.

    results.Run -> [choose] the step of each task -> a column each -> the mean of nine -> row
                -> published.match -> the paper's row and the difference
                -> [render] text, Markdown, LaTeX, JSON

A report is plain values, as `nm-sparsity glue score --json` prints them.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.core.text import Strong, columns, format_table, printable
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
  names = [run.name or run.path.resolve().name for run in runs]
  if len(set(names)) < len(names):
    raise ValueError(f"two rows are called the same: {', '.join(names)}. Name them by --join")
  rows = [_row(run, name, checkpoint) for run, name in zip(runs, names, strict=True)]
  best = {}
  for title in TITLES if len(rows) > 1 else ():
    # Rounded as printed: what prints as the same number is marked alike.
    means = {row["run"]: round(m, 1) for row in rows if (m := mean_of(row, title)) is not None}
    best[title] = [n for n, mean in means.items() if mean == max(means.values())]
  return {
    "checkpoint": checkpoint,
    "columns": {c.title: {"task": c.name, "metrics": list(c.metrics)} for c in glue.COLUMNS},
    "runs": rows,
    "best": best,
  }


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
  steps = sorted(series)
  if isinstance(checkpoint, int):
    steps = [step for step in steps if step == checkpoint]
    why = f"no step {checkpoint}, there is {', '.join(map(str, sorted(series)))}"
  elif checkpoint == "last":
    steps, why = steps[-1:], "no step"
  else:
    steps = [step for step in steps if step >= first]
    why = f"no step from {first} on, where the target pattern is certain"
  if not steps:
    return None, why
  means = {s: statistics.fmean(series[s].get(m, math.nan) for m in metrics) for s in steps}
  sound = {step: mean for step, mean in means.items() if math.isfinite(mean)}
  remark = ""
  if faulty := [str(step) for step in steps if step not in sound]:
    remark = f"no finite {' and '.join(metrics)} at step {', '.join(faulty)}"
  if not sound:
    return None, remark
  # Both take the first of equals, and the steps ascend.
  return (min if less_is_better else max)(sound, key=sound.__getitem__), remark


def mean_of(row: Mapping[str, Any], title: str) -> float | None:
  """Returns the value of a run's row in a column of `TITLES`, or None."""
  return row["overall"] if title == "overall" else row["columns"].get(title, {}).get("mean")


def _published_of(row: Mapping[str, Any], title: str) -> float | None:
  if title == "overall":
    return row["overall"]
  return row.get("columns", {}).get(title, [None])[-1]  # of a pair the mean stands last


def _row(run: results.Run, name: str, checkpoint: str | int) -> dict[str, Any]:
  """Returns the row of a run."""
  found, missing, remarks = _columns(run, checkpoint)
  row: dict[str, Any] = {
    "run": name,
    "path": str(run.path),
    "joined": [str(path) for path in run.joined],
    "mini": run.mini,
    "recipe": run.recipe,
    "places": run.places,
    "dense_steps": run.dense_steps,
    "sparse_steps": run.sparse_steps,
    "overall": None if missing else statistics.fmean(c["mean"] for c in found.values()),
    "columns": found,
    "missing": missing,
    "published": None,
    "delta": {},
  }
  first = run.target_from() or 0
  if early := [title for title, column in found.items() if column["step"] < first]:
    remark = (
      f"no published row: {', '.join(early)} of steps before {first}, from which on the target "
      "pattern is certain"
    )
  else:
    row["published"], remark = published.match(run)
  if row["published"]:
    pairs = [(t, mean_of(row, t), _published_of(row["published"], t)) for t in TITLES]
    row["delta"] = {title: a - b for title, a, b in pairs if a is not None and b is not None}
  return row | {"remarks": [*remarks, *filter(None, [remark])]}


def _columns(
  run: results.Run, checkpoint: str | int
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
  """Returns the columns that can be filled, why others cannot, and remarks.

  Raises:
    ValueError: no column can be filled.
  """
  found, missing, remarks = {}, {}, [*run.remarks, *filter(None, [run.target_remark()])]
  first = run.target_from() or 0
  for column in glue.COLUMNS:
    series = run.tasks.get(column.name)
    step, why = choose(series or {}, column.metrics, checkpoint, first)
    if not series or step is None:
      missing[column.title] = why if series else "no metrics"
      continue
    remarks += [f"{column.title}: {why}"] if why else []
    values = {metric: series[step][metric] for metric in column.metrics}
    mean = statistics.fmean(values.values())
    found[column.title] = {"step": step, "values": values, "mean": mean}
  if not found:
    reasons = "; ".join(f"{title}: {why}" for title, why in missing.items() if why != "no metrics")
    raise ValueError(f"{run.path}: no column can be filled ({reasons})")
  return found, missing, remarks


# --- forms ----------------------------------------------------------------------------------------

_SHORT = {
  "matthews_corrcoef": "MCC", "accuracy": "Acc", "f1": "F1", "pearson_corrcoef": "P",
  "spearman_corrcoef": "S",
}  # fmt: skip


def render(report: Mapping[str, Any], style: str = "text") -> str:
  """Returns a report as text.

      print(scores.render(scores.score(["runs/sr_ste"]), "markdown"))

  Args:
    report: what `score` returned.
    style: 'text', 'markdown' or 'latex': rounded, with the best of several runs marked; 'json': not
      rounded.
  """
  if style == "json":
    return json.dumps(report, indent=2)
  table = format_table(list(_lines(report)), style, align="<>")
  notes = [(name, printable(note)) for name, note in _notes(report)]
  if style == "latex":
    return "\n".join([*(f"% {printable(name)}: {note}" for name, note in notes), table])
  if style == "markdown":
    return "\n".join([table, "", *(f"- {printable(name)}: {note}" for name, note in notes)])
  return "\n".join([table, "", *columns(notes)])


def _lines(report: Mapping[str, Any]) -> Iterator[list[str]]:
  """Yields the lines of each run: its means, pairs and steps, the published row, the delta."""
  number = lambda x, sign="": "-" if x is None else f"{round(x, 1) + 0.0:{sign}.1f}"  # no -0.0
  pairs = lambda values: ["/".join(map(number, v)) if len(v) > 1 else "" for v in values]
  yield ["", *TITLES]
  yield ["", "", *("/".join(_SHORT[m] for m in c.metrics) for c in glue.COLUMNS)]
  for row in report["runs"]:
    found = row["columns"]
    means = {title: number(mean_of(row, title)) for title in TITLES}
    best = {title for title, names in report["best"].items() if row["run"] in names}
    yield [row["run"], *(Strong(text) if t in best else text for t, text in means.items())]
    if any(cells := pairs([[*found.get(t, {}).get("values", {}).values()] for t in TITLES])):
      yield ["", *cells]
    yield ["  at step", *(str(found.get(title, {}).get("step", "")) for title in TITLES)]
    if paper := row["published"]:
      yield ["  published", *(number(_published_of(paper, title)) for title in TITLES)]
      if any(cells := pairs([paper.get("columns", {}).get(title, [])[:2] for title in TITLES])):
        yield ["", *cells]
      yield ["  delta", *(number(row["delta"].get(title), "+") for title in TITLES)]


def _notes(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (name of a run, what a reader of its numbers must know)."""
  meaning = {
    "best": "best, for each task the step with the best mean of its metrics on the set that it is "
    "reported on, which is optimistic",
    "last": "last, of each task",
  }
  yield "checkpoint", meaning.get(report["checkpoint"], f"step {report['checkpoint']}")
  for row in report["runs"]:
    trained = [row["recipe"] or "recipe not known"]
    if row["places"]:
      trained.append(published.text_of(row["places"]))
    if row["places"] and row["dense_steps"] is not None:
      of = f" of {row['sparse_steps']}" if row["sparse_steps"] else ""
      trained.append(f"{row['dense_steps']}{of} steps dense")
    notes = [", ".join(trained) + ("; mini-GLUE" if row["mini"] else "")]
    if row["joined"]:
      notes.append(f"joined: {', '.join(row['joined'])}")
    if paper := row["published"]:
      notes.append(f"published: Table {paper['table']}, {paper['row']}")
    if row["missing"]:
      missing = "; ".join(f"{title} ({why})" for title, why in row["missing"].items())
      notes.append(f"no overall, missing: {missing}")
    yield from ((row["run"], text) for text in (*notes, *row["remarks"]))
