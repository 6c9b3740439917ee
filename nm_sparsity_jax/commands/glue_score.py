"""Makes a run's row of the paper's Table 12 from seqio's metrics, beside the published row.

Takes folders of runs: t5x.train's MODEL_DIR, t5x.eval's EVAL_OUTPUT_DIR, or any that holds an
inference_eval/ with TASK-metrics.jsonl or TensorBoard events of nm_glue_*, nm_glue_mini_* or T5's
glue_*_v002. Which recipe and pattern were trained is read from the run's config.gin. Each column is
a task; a pair counts with its mean; overall is the mean of nine, and '-' where one is missing.

  nm-sparsity glue score runs/sr_ste runs/sdgf_stepwise --checkpoint last

Runs of one task each, trained alike, are one row by --join NAME DIR...:

  nm-sparsity glue score --join sr_ste runs/sr_ste_* --join stepwise runs/stepwise_*

With several rows '*' (bold in Markdown and LaTeX) marks the best of each column. A delta is the
run's value minus the published one, which is rounded to 0.1.

Exit code: 0 = each run has a row, 1 = one has none.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import glue
from nm_sparsity_jax.runs import results
from nm_sparsity_jax.scores import published

_TITLES = ("overall", *(c.title for c in glue.COLUMNS))
_SHORT = {
  "matthews_corrcoef": "MCC",
  "accuracy": "Acc",
  "f1": "F1",
  "pearson_corrcoef": "P",
  "spearman_corrcoef": "S",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The runs, the checkpoint, what config.gin does not say, and the form of the output."""
  add = parser.add_argument
  add("runs", nargs="*", metavar="DIR", help="folder of a run")
  add(
    "--join", nargs="+", action="append", default=[], metavar=("NAME", "DIR"),
    help="one row, of this name, of runs that were trained alike on tasks of their own; may be "
    "repeated",
  )  # fmt: skip
  add(
    "--checkpoint", type=checkpoint, default="best", metavar="best|last|STEP",
    help="the step of each task: the one with the best mean of its metrics (the default; the "
    "earliest of equals), its last one, or this one (T5X counts from pre-training on)",
  )  # fmt: skip
  unsaid = parser.add_argument_group("where a run's config.gin does not say")
  unsaid.add_argument("--recipe", metavar="NAME", help="such as sdgf_stepwise, or dense")
  unsaid.add_argument(
    "--pattern", type=_places, metavar="N:M", help="of ff; or by place: ff=1:8,qkv=1:4"
  )
  unsaid.add_argument("--dense-steps", type=int, metavar="STEPS", help="length of the dense phase")
  form = parser.add_mutually_exclusive_group()
  for name in _FORMS:
    form.add_argument(
      f"--{name}", dest="form", action="store_const", const=name, default="text",
      help=f"print {_FORMS[name][0]}",
    )  # fmt: skip


def checkpoint(text: str) -> str | int:
  """The value of --checkpoint."""
  if text in ("best", "last"):
    return text
  try:
    return int(text.replace("_", ""))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not best, last or a step") from None


def _places(text: str) -> dict[str, str]:
  try:
    pairs = [part.rpartition("=") for part in text.split(",")]
    return results.single({place or "ff": pattern for place, _, pattern in pairs})
  except ValueError as e:
    raise argparse.ArgumentTypeError(str(e)) from None


def run(args: argparse.Namespace) -> int:
  """Reads, scores, prints."""
  if not args.runs and not args.join:
    raise ValueError("give the folder of a run, or several, or --join NAME DIR...")
  if lone := [name for name, *paths in args.join if not paths]:
    raise ValueError(f"--join {lone[0]}: a name for the row comes first, then the folders of runs")

  def read(path: str) -> results.Run:
    run = results.read(path)
    _told(run, args.recipe, args.pattern, args.dense_steps)
    return run

  runs = [read(path) for path in args.runs]
  runs += [results.join(name, [read(path) for path in paths]) for name, *paths in args.join]
  report = score(runs, args.checkpoint)
  print(_FORMS[args.form][1](report) if args.form != "text" else text(report))
  return 0


def _told(run: results.Run, recipe: str | None, places: Mapping | None, dense: int | None) -> None:
  """Puts in what config.gin does not say."""
  if run.recipe is None and recipe == "dense":
    run.places = {}
  for name, value in (("recipe", recipe), ("places", places), ("dense_steps", dense)):
    known = getattr(run, name)
    if value is not None and known is not None and known != value:
      flag = {"recipe": "--recipe", "places": "--pattern", "dense_steps": "--dense-steps"}[name]
      raise ValueError(f"{run.path}: {flag} says {value}, but the run's config says {known}")
    if value is not None:
      setattr(run, name, value)


# --- scores -------------------------------------------------------------------------------------


def score(runs: Sequence[results.Run], checkpoint: str | int) -> dict[str, Any]:
  """The report: plain values, as --json prints it.

  Args:
    runs: what was read.
    checkpoint: 'best', 'last' or a step.
  """
  if len({run.mini for run in runs}) > 1:
    made_up = ", ".join(str(run.path) for run in runs if run.mini)
    raise ValueError(f"{made_up}: mini-GLUE, which does not compare with GLUE in one table")
  names = [_name(run, runs) for run in runs]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(f"two rows are called {twice[0]}: give each run once, and other names to join")
  rows = [_row(run, name, checkpoint) for run, name in zip(runs, names, strict=True)]
  best = {}
  for title in _TITLES if len(rows) > 1 else ():
    means = {row["run"]: round(m, 1) for row in rows if (m := _mean_of(row, title)) is not None}
    best[title] = [n for n, mean in means.items() if mean == max(means.values())]
  return {
    "checkpoint": checkpoint,
    "columns": {c.title: {"task": c.task, "metrics": list(c.metrics)} for c in glue.COLUMNS},
    "runs": rows,
    "best": best,
  }


def _name(run: results.Run, runs: Sequence[results.Run]) -> str:
  """Its own, else the folder's, else, where another has that too, the path."""

  def short(r: results.Run) -> str:
    path = r.path.resolve()
    return r.name or (path.parent.name if path.name == "inference_eval" else path.name)

  shared = [short(r) for r in runs].count(short(run)) > 1
  return str(run.path) if shared and not run.name else short(run)


def _row(run: results.Run, name: str, checkpoint: str | int) -> dict[str, Any]:
  columns, missing, remarks = {}, {}, list(run.remarks)
  first = run.target_from()
  if unknown := run.target_remark():
    remarks.append(unknown)
  for column in glue.COLUMNS:
    series = run.tasks.get(column.task)
    if not series:
      missing[column.title] = "no metrics"
      continue
    step, why = choose(series, column.metrics, checkpoint, first or 0)
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
  match, remark = published.match(run)
  if early := [t for t, c in columns.items() if c["step"] < (first or 0)]:
    match = None
    remark = (
      f"no published row: {', '.join(early)} {'is' if len(early) == 1 else 'are'} of steps before "
      f"{first}, from which on the target pattern is certain"
    )
  row["published"] = beside = _published_row(match) if match else None
  row["delta"] = {
    title: a - b
    for title in _TITLES
    if beside
    and (a := _mean_of(row, title)) is not None
    and (b := _mean_of(beside, title)) is not None
  }
  row["remarks"] = [*remarks, *([remark] if remark else [])]
  return row


def choose(
  series: results.Series, metrics: Sequence[str], checkpoint: str | int, first: int = 0
) -> tuple[int | None, str]:
  """The step to report, and a remark; (None, why) where there is none.

  Best is the step with the greatest mean of the metrics, of equals the earliest, and never one
  before `first`, where the weights are denser than the pattern says. A step that lacks a metric, or
  has one that is no finite number, is never chosen.
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
  return sound[means.index(max(means))], remark  # the first of equals


def _mean(values: Iterable[float]) -> float:
  values = list(values)
  return math.fsum(values) / len(values)


def _mean_of(row: Mapping[str, Any], title: str) -> float | None:
  if title == "overall":
    return row["overall"]
  column = row["columns"].get(title)
  return column and column["mean"]


def _published_row(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row of published.json in the form of a run's; means as printed."""
  columns = {
    c.title: {
      "values": dict(zip(c.metrics, numbers, strict=False)),  # a pair has its mean behind it
      "mean": numbers[-1],
    }
    for c in glue.COLUMNS
    if (numbers := row.get("columns", {}).get(c.title))
  }
  return {"table": row["table"], "row": row["row"], "overall": row["overall"], "columns": columns}


# --- text ---------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.1f}"


def _signed(value: float | None) -> str:
  return "-" if value is None else f"{round(value, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def _pair(column: Mapping[str, Any] | None) -> str:
  values = list(column["values"].values()) if column else []
  return "/".join(map(_number, values)) if len(values) > 1 else ""


def _measures(column: glue.Column) -> str:
  return "/".join(_SHORT[m] for m in column.metrics)


def text(report: Mapping[str, Any]) -> str:
  """For people: means, pairs beneath; at most 120 columns wide where names are short."""
  lines = [["", *_TITLES], ["", "", *map(_measures, glue.COLUMNS)]]
  blank = " " if report["best"] else ""  # where others have their mark

  def add(name: str, source) -> None:
    best = [t for t in _TITLES if source.get("run") in report["best"].get(t, ())]
    pairs = [_pair(source["columns"].get(c.title)) for c in glue.COLUMNS]
    means = [(_number(_mean_of(source, t)), "*" if t in best else blank) for t in _TITLES]
    lines.append([name, *map("".join, means)])
    if any(pairs):
      lines.append(["", "", *(pair + blank for pair in pairs)])

  for row in report["runs"]:
    add(row["run"], row)
    lines.append(["  at step", *(str(row["columns"].get(t, {}).get("step", "")) for t in _TITLES)])
    if row["published"]:
      add("  published", row["published"])
      lines.append(["  delta", *(_signed(row["delta"].get(t)) + blank for t in _TITLES)])
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  parts = [
    "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
    for line in lines
  ]
  notes = list(_notes(report))
  width = max(len(head) for head, _ in notes)
  heads = [head if head != before else "" for (before, _), (head, _) in itertools.pairwise(
    [("", ""), *notes])]  # fmt: skip
  parts += ["", *(f"{h.ljust(width)}  {note}" for h, (_, note) in zip(heads, notes, strict=True))]
  return "\n".join(parts)


def _notes(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """(head, text): what a reader of the numbers must know."""
  meaning = {
    "best": "best, for each task the step with the best mean of its metrics",
    "last": "last, of each task",
  }
  yield "checkpoint", meaning.get(report["checkpoint"], f"step {report['checkpoint']}")
  for row in report["runs"]:
    yield row["run"], _what(row)
    if row["joined"]:
      yield row["run"], f"joined: {', '.join(row['joined'])}"
    if published := row["published"]:
      yield row["run"], f"published: Table {published['table']}, {published['row']}"
    if row["missing"]:
      reasons: dict[str, list[str]] = {}
      for title, why in row["missing"].items():
        reasons.setdefault(why, []).append(title)
      missing = "; ".join(f"{', '.join(titles)} ({why})" for why, titles in reasons.items())
      yield row["run"], f"no overall, missing: {missing}"
    for remark in row["remarks"]:
      yield row["run"], f"note: {remark}"


def _what(row: Mapping[str, Any]) -> str:
  words = [row["recipe"] or "recipe not known"]
  if row["places"]:
    words.append(results.text_of(row["places"]))
  if row["places"] != {} and row["dense_steps"] is not None:
    of = f" of {row['sparse_steps']}" if row["sparse_steps"] else ""
    words.append(f"{row['dense_steps']}{of} steps dense")
  return ", ".join(words) + ("; mini-GLUE" if row["mini"] else "")


# --- other forms --------------------------------------------------------------------------------


def _table(report: Mapping[str, Any], bold: Callable[[str], str]) -> list[list[str]]:
  """Rows of a printed table: run, published, delta; a pair with its mean in one cell."""

  def cell(source, title: str) -> str:
    mean, pair = _number(_mean_of(source, title)), _pair(source["columns"].get(title))
    return f"{pair} ({mean})" if pair else mean

  rows = [["", "overall", *(f"{c.title} {_measures(c)}" for c in glue.COLUMNS)]]
  for row in report["runs"]:
    best = [t for t in _TITLES if row["run"] in report["best"].get(t, ())]
    cells = [cell(row, t) for t in _TITLES]
    rows.append(
      [row["run"], *(bold(c) if t in best else c for c, t in zip(cells, _TITLES, strict=True))]
    )
    if published := row["published"]:
      rows.append(["published", *(cell(published, t) for t in _TITLES)])
      rows.append(["delta", *(_signed(row["delta"].get(t)) for t in _TITLES)])
  return rows


def _steps(report: Mapping[str, Any]) -> list[str]:
  """The notes as lines, and the steps, for which these tables have no row."""
  lines = [f"{head}: {note}" for head, note in _notes(report)]
  for row in report["runs"]:
    steps = ", ".join(f"{title} {column['step']}" for title, column in row["columns"].items())
    lines.append(f"{row['run']} at steps: {steps}")
  return lines


def markdown(report: Mapping[str, Any]) -> str:
  """A table of GitHub's Markdown, its source aligned too; notes as a list."""
  escape = lambda s: re.sub(r"([\\|*_`<>\[\]])", r"\\\1", s)
  rows = [[escape(cell) for cell in row] for row in _table(report, lambda s: f"\0{s}\0")]
  rows = [[cell.replace("\0", "**") for cell in row] for row in rows]
  widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
  rule = [":" + "-" * (widths[0] - 1), *("-" * (w - 1) + ":" for w in widths[1:])]
  lines = [
    "| " + " | ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) + " |"
    for r in (rows[0], rule, *rows[1:])
  ]
  return "\n".join([*lines, "", *(f"- {escape(line)}" for line in _steps(report))])


_LATEX = str.maketrans(
  {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
  | {c: rf"\{c}" for c in "&%$#_{}"}
)


def latex(report: Mapping[str, Any]) -> str:
  """A tabular that needs no package; notes as comments."""
  rows = _table(report, lambda s: f"\0{s}\1")
  rows = [[cell.translate(_LATEX) for cell in row] for row in rows]
  rows = [[c.replace("\0", r"\textbf{").replace("\1", "}") for c in row] for row in rows]
  rows = [[re.sub(r"^([+-])(?=\d)", r"$\1$", c) for c in row] for row in rows]
  lines = [" & ".join(row) + r" \\" for row in rows]
  return "\n".join(
    [
      *(f"% {line}" for line in _steps(report)),
      rf"\begin{{tabular}}{{l{'r' * len(_TITLES)}}}",
      r"\hline",
      lines[0],
      r"\hline",
      *lines[1:],
      r"\hline",
      r"\end{tabular}",
    ]
  )


def as_csv(report: Mapping[str, Any]) -> str:
  """One line a run, and by `kind` its steps, the published row and the delta; unrounded."""
  heads = ["overall"]
  for c in glue.COLUMNS:
    heads += [c.title, *(f"{c.title} {m}" for m in c.metrics if len(c.metrics) > 1)]
  out = io.StringIO()
  writer = csv.DictWriter(
    out,
    ["run", "kind", "recipe", "pattern", "dense_steps", "checkpoint", *heads],
    lineterminator="\n",
  )
  writer.writeheader()

  def numbers(source) -> dict[str, Any]:
    cells = {title: _mean_of(source, title) for title in _TITLES}
    for title, column in source["columns"].items():
      cells |= {f"{title} {m}": v for m, v in column["values"].items() if len(column["values"]) > 1}
    return cells

  for row in report["runs"]:
    common = {
      "run": row["run"],
      "recipe": row["recipe"],
      "pattern": results.text_of(row["places"] or {}),
      "dense_steps": row["dense_steps"],
      "checkpoint": report["checkpoint"],
    }
    writer.writerow({**common, "kind": "run", **numbers(row)})
    steps = {title: column["step"] for title, column in row["columns"].items()}
    writer.writerow({**common, "kind": "step", **steps})
    if row["published"]:
      writer.writerow({**common, "kind": "published", **numbers(row["published"])})
      writer.writerow({**common, "kind": "delta", **row["delta"]})
  if report["best"]:
    best = {title: " ".join(names) for title, names in report["best"].items()}
    writer.writerow({"kind": "best", **best})
  return out.getvalue().rstrip("\n")


_FORMS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
  "json": ("the report as JSON", lambda report: json.dumps(report, indent=2)),
  "csv": ("CSV, one line a run, its steps, the published row and the delta", as_csv),
  "markdown": ("a Markdown table", markdown),
  "latex": ("a LaTeX tabular", latex),
}
