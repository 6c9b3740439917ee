"""A run's metrics become a row of the paper's Table 12, beside the published one.

    results.Run -> [choose] the step of each task -> a column each -> the mean of nine -> row
                -> published.match -> the paper's row and the difference
                -> [render] text, Markdown, LaTeX, CSV, JSON

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
from nm_sparsity_jax.training import roles

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
    if value is not None and known not in (None, value):
      raise ValueError(f"{run.path}: {name}={value!r}, but the run's config says {known!r}.")
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
  means = [math.fsum(series[step][m] for m in metrics) / len(metrics) for step in sound]
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
  }
  published_row, remark = _published(run, found)
  row["published"] = published_row
  row["delta"] = {
    title: a - b
    for title in TITLES
    if published_row
    and (a := mean_of(row, title)) is not None
    and (b := mean_of(published_row, title)) is not None
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
    columns[column.title] = {
      "step": step,
      "values": values,
      "mean": statistics.fmean(values.values()),
    }
  if not columns:
    reasons = "; ".join(f"{title}: {why}" for title, why in missing.items() if why != "no metrics")
    raise ValueError(f"{run.path}: no column can be filled ({reasons})")
  return columns, missing, remarks


def _published(run: results.Run, columns: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
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


# --- forms ----------------------------------------------------------------------------------------

STYLES = ("text", "markdown", "latex", "csv", "json")
_SHORT = {
  "matthews_corrcoef": "MCC", "accuracy": "Acc", "f1": "F1", "pearson_corrcoef": "P",
  "spearman_corrcoef": "S",
}  # fmt: skip


def render(report: Mapping[str, Any], style: str = "text") -> str:
  """Returns a report as text.

      print(scores.render(scores.score(["runs/sr_ste"]), "markdown"))

  Args:
    report: what `score` returned.
    style: 'text', 'markdown' or 'latex': rounded, with the best of several runs marked; 'csv' or
      'json': not rounded.
  """
  if style == "json":
    return json.dumps(report, indent=2)
  if style == "csv":
    return format_table(list(_exact_rows(report)), "csv")
  table = format_table(list(table_rows(report)), style, align="<>")
  said = [(name, printable(note)) for name, note in notes(report)]
  if style == "latex":
    return "\n".join([*(f"% {printable(name)}: {note}" for name, note in said), table])
  if style == "markdown":
    return "\n".join([table, "", *(f"- {printable(name)}: {note}" for name, note in said)])
  return "\n".join([table, "", *columns(said)])


def table_rows(report: Mapping[str, Any]) -> Iterator[list[str]]:
  """Yields the table as people read it: of each run its means, pairs, steps, published row, delta.

  Args:
    report: what `score` returned.
  """
  yield ["", *TITLES]
  yield ["", "", *("/".join(_SHORT[m] for m in c.metrics) for c in glue.COLUMNS)]
  for row in report["runs"]:
    best = [title for title, names in report["best"].items() if row["run"] in names]
    yield from _means(row["run"], row, best)
    steps = {title: str(column["step"]) for title, column in row["columns"].items()}
    yield ["  at step", *(steps.get(title, "") for title in TITLES)]
    if row["published"]:
      yield from _means("  published", row["published"])
      delta = row["delta"]
      yield ["  delta", *(_number(delta.get(title), "+") for title in TITLES)]


def _means(name: str, row: Mapping[str, Any], best: Sequence[str] = ()) -> Iterator[list[str]]:
  """Yields a line of means, and one of pairs where there are any."""
  cells = [(title, _number(mean_of(row, title))) for title in TITLES]
  yield [name, *(Strong(text) if title in best else text for title, text in cells)]
  values = [row["columns"].get(title, {}).get("values", {}).values() for title in TITLES]
  pairs = ["/".join(map(_number, pair)) if len(pair) > 1 else "" for pair in values]
  if any(pairs):
    yield ["", *pairs]


def _number(value: float | None, sign: str = "") -> str:
  return "-" if value is None else f"{round(value, 1) + 0.0:{sign}.1f}"  # + 0.0: no -0.0


def notes(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields (name of a run, what a reader of its numbers must know).

  Args:
    report: what `score` returned.
  """
  meaning = {
    "best": "best, for each task the step with the best mean of its metrics on the set that it is "
    "reported on, which is optimistic",
    "last": "last, of each task",
  }
  yield "checkpoint", meaning.get(report["checkpoint"], f"step {report['checkpoint']}")
  for row in report["runs"]:
    said = [_trained(row)]
    if row["joined"]:
      said.append(f"joined: {', '.join(row['joined'])}")
    if published := row["published"]:
      said.append(f"published: Table {published['table']}, {published['row']}")
    reasons: dict[str, list[str]] = {}
    for title, why in row["missing"].items():
      reasons.setdefault(why, []).append(title)
    if reasons:
      missing = "; ".join(f"{', '.join(titles)} ({why})" for why, titles in reasons.items())
      said.append(f"no overall, missing: {missing}")
    yield from ((row["run"], text) for text in (*said, *row["remarks"]))


def _trained(row: Mapping[str, Any]) -> str:
  words = [row["recipe"] or "recipe not known"]
  if row["places"]:
    words.append(roles.text_of(row["places"]))
  if row["places"] != {} and row["dense_steps"] is not None:
    of = f" of {row['sparse_steps']}" if row["sparse_steps"] else ""
    words.append(f"{row['dense_steps']}{of} steps dense")
  return ", ".join(words) + ("; mini-GLUE" if row["mini"] else "")


def _exact_rows(report: Mapping[str, Any]) -> Iterator[list[Any]]:
  """Yields lines of unrounded numbers; `kind` tells what a line holds of its run."""
  pairs = [f"{c.title} {m}" for c in glue.COLUMNS if len(c.metrics) > 1 for m in c.metrics]
  heads = [*TITLES, *pairs]
  yield ["run", "kind", "recipe", "pattern", "dense_steps", "checkpoint", *heads]

  def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {title: mean_of(row, title) for title in TITLES}
    for title, column in row["columns"].items():
      found |= {f"{title} {metric}": value for metric, value in column["values"].items()}
    return found

  for row in report["runs"]:
    kinds = {
      "run": numbers(row),
      "step": {title: column["step"] for title, column in row["columns"].items()},
    }
    if row["published"]:
      kinds |= {"published": numbers(row["published"]), "delta": row["delta"]}
    pattern = roles.text_of(row["places"] or {})
    own = [row["recipe"], pattern, row["dense_steps"], report["checkpoint"]]
    for kind, values in kinds.items():
      yield [row["run"], kind, *own, *(values.get(head) for head in heads)]
  if best := report["best"]:
    yield ["", "best", "", "", "", "", *(" ".join(best.get(head, ())) for head in heads)]
