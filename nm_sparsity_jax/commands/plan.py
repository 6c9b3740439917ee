"""Says what a run would do, and what it would stumble over, before it starts.

Takes the gin files and overrides of t5x.train, t5x.eval and t5x.infer, so put `nm-sparsity plan` in
place of `python -m t5x.train` and leave the rest. Shows which kernels become sparse, the schedule,
the cost, what a checkpoint gives, and all errors at once. A model file and gin_configs/sparsity.gin
are enough, and then T5X is not needed. Allocates nothing of the model's size. Devices and the
contents of the data are not looked at.

  nm-sparsity plan --gin_search_paths=$(nm-sparsity gin-path) --gin_file=MODEL.gin \\
    --gin_file=gin_configs/runs/t5x_finetune.gin --gin.RECIPE="'sr_ste'" ...

Exit code: 0 = nothing stands in the way, 1 = there are errors.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.commands import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """T5X's flags, and what is shown."""
  _flags.add(parser, "where gin files are looked for")
  add = parser.add_argument
  add("--checkpoint", metavar="DIR", help="look at this checkpoint, not at the one that gin names")
  add("--plot", metavar="FILE.png", help="draw the schedule (needs matplotlib)")
  add("--json", action="store_true", help="print the report as JSON")
  add("--all", action="store_true", help="list everything, also what is long")


def run(args: argparse.Namespace) -> int:
  """Plans, prints, plots."""
  if not args.gin_file and not args.gin_bindings:
    raise ValueError("no --gin_file: name the files of the run (--help shows an example)")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  from nm_sparsity_jax import gin_files
  from nm_sparsity_jax.plan import planner

  gin_files.see_modules_here()
  with contextlib.nullcontext() if args.debug else gin_files.quiet():
    config = gin_files.Config(_flags.search_paths(args), args.gin_file, args.gin_bindings)
    report = planner.plan(config, args.checkpoint)
    config.close()
  if args.plot:
    plot(report, args.plot)
  if args.json:
    print(json.dumps(planner.as_json(report), indent=2))
  else:
    print(render(report, everything=args.all))
  return 0 if report["ok"] else 1


# --- text ---------------------------------------------------------------------------------------


def render(report: Mapping[str, Any], everything: bool = False) -> str:
  """The report for people: errors last, where the eye is."""
  parts = []
  if kernels := report.get("kernels"):
    parts.append(_render_kernels(kernels, everything))
  if report.get("schedule"):
    parts.append(_render_schedule(report["schedule"]))
  facts = [
    *_loss_lines(report.get("loss")),
    *_cost_lines(report.get("cost")),
    *_restore_lines(report.get("restore"), everything),
    *(("note", note) for note in report["notes"]),
  ]
  if facts:
    parts.append("\n".join(f"{head.ljust(11)} {text}".rstrip() for head, text in facts))
  for kind in ("warnings", "errors"):
    if found := report[kind]:
      head = f"{len(found)} {kind if len(found) > 1 else kind[:-1]}"
      parts.append("\n".join([head, *(f"  - {text}" for text in found)]))
  if report["ok"]:
    parts.append("Nothing stands in the way.")
  return "\n\n".join(parts)


def _render_kernels(kernels: Mapping[str, Any], everything: bool) -> str:
  from nm_sparsity_jax.text import table

  lines = []
  sparse = kernels["sparse"]
  if sparse:
    by_rule = any(k["rule"] != k["role"] for k in sparse)
    head = ["sparse kernels", "", "role", "shape", "axis", "pattern", "groups", "recipe"]
    rows = [
      [
        k["path"],
        f"x{k['count']}",
        k["role"] or "-",
        "x".join(map(str, k["shape"])),
        ",".join(map(str, k["axis"])) if isinstance(k["axis"], list | tuple) else k["axis"],
        k["pattern"],
        f"{k['groups']:,}",
        k["recipe"],
        *([k["rule"]] if by_rule else []),
      ]
      for k in sparse
    ]
    lines += table([*head, *(["rule"] if by_rule else [])], rows)
    for k in sparse:
      lines += [f"  {k['path']}: {remark}" for remark in k["remarks"]]
  for k in kernels["skipped"]:
    lines.append(f"skipped  {k['path']}  x{k['count']}: {k['why']}")
  dense = kernels["dense"]
  shown = dense if everything else dense[:6]
  lines += [f"dense    {k['path']}  x{k['count']}" for k in shown]
  rest = sum(k["count"] for k in dense[len(shown) :])
  if rest:
    lines.append(f"dense    and {rest} more kernels (--all)")
  if kernels["other_dense"]:
    lines.append(f"dense    {kernels['other_dense']} others: norms, embeddings, position biases")
  return "\n".join(lines)


def _render_schedule(schedule: Sequence[Mapping[str, Any]]) -> str:
  from nm_sparsity_jax.text import table

  blocks = []
  for part in schedule:
    kept = "; keeps its mask" if part["keeps_mask"] else ""
    title = f"schedule of {_title(part)}, gradient {part['gradient']}{kept}"
    rows = [
      (
        f"{s['start']:,} .. {s['stop'] - 1:,}",
        f"{s['t5x_start']:,} .. {s['t5x_stop'] - 1:,}",
        s["phase"],
        s["pattern"] or "dense",
        _decay(s),
      )
      for s in part["segments"]
    ]
    head = ("sparse steps", "T5X steps", "phase", "pattern", "D")
    blocks.append("\n".join([title, *(f"  {line}" for line in table(head, rows))]))
  return "\n\n".join(blocks)


def _title(part: Mapping[str, Any]) -> str:
  where = ", ".join(part["rules"])
  if part["axis_sizes"]:
    where += f", axes of {', '.join(map(str, part['axis_sizes']))}"
  return f"{where}: {part['recipe']}" + (f" {part['pattern']}" if part["pattern"] else "")


def _decay(segment: Mapping[str, Any]) -> str:
  a, b = segment["decay_start"], segment["decay_stop"]
  return f"{a:.3g}" if a == b else f"{a:.3g} -> {b:.3g}"


def _loss_lines(loss: Mapping[str, Any] | None):
  if not loss:
    return
  if "factor" in loss:
    text = f"LOSS_NORMALIZING_FACTOR = {loss['factor']}: T5X's loss is {loss['meaning']}"
    yield "loss", text
  for place, lam in loss["lambda"].items():
    text = f"{lam:g} of the mean loss per target token ({place})"
    if place in loss.get("lambda_in_t5x_at_most", ()):
      scaled = loss["lambda_in_t5x_at_most"][place]
      text += f"; beside T5X's loss, at most {scaled:.3g}"
      if loss["factor"] is None or isinstance(loss["factor"], int | float):
        text += f" (a batch of {loss['target_tokens_at_most']:,} target tokens)"
    yield "lambda", text


def _cost_lines(cost: Mapping[str, Any] | None):
  if not cost:
    return
  guess = "" if cost["lengths_known"] else " (TASK_FEATURE_LENGTHS is not set: guessed)"
  tokens = f"{cost['input_length']} + {cost['target_length']} tokens{guess}"
  once, whole, params = cost["inference"], cost["training"], cost["parameters"]
  yield "inference", f"{_of(once['sparse'], once['dense'], 'FLOPs')} for {tokens}"
  if whole["steps"]:
    run_of = f"{whole['steps']:,} steps of {whole['batch_size']}"
    yield "training", f"{_of(whole['sparse'], whole['dense'], 'FLOPs')} for {run_of}"
  yield (
    "parameters",
    f"{_of(params['kept'], params['dense'], '')} kept; "
    f"{_number(params['in_sparse_kernels'])} are in sparse kernels",
  )


def _of(part: float, whole: float, unit: str) -> str:
  return f"{_number(part)} of {_number(whole)} {unit}".rstrip() + f" ({part / whole:.1%})"


def _number(value: float) -> str:
  for size, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= size:
      return f"{value / size:.3g} {name}" if value < 100 * size else f"{value / size:.0f} {name}"
  return f"{value:.0f}"


def _restore_lines(restore: Mapping[str, Any] | None, everything: bool):
  if not restore:
    return
  what = "dense" if restore["sparse_step"] is None else f"sparse step {restore['sparse_step']:,}"
  step = "unknown step" if restore["step"] is None else f"step {restore['step']:,}"
  yield "restore", f"{restore['path']} ({restore['format']}, {step}, {what})"
  for name, part in restore["sections"].items():
    words = []
    if part["load"]:
      words.append(f"load {part['load']} as {', '.join(map(str, part['dtypes']))}")
    words += [f"{kind} {part[kind]}" for kind in ("initialise", "drop") if part[kind]]
    yield "", f"{name.ljust(12)} {', '.join(words)}"
  if everything:
    for kind in ("initialise", "drop"):
      for path in restore[kind]:
        yield "", f"  {kind} {path}"


# --- plot ---------------------------------------------------------------------------------------


def plot(report: Mapping[str, Any], path: str) -> None:
  """Draws D and density over the steps of the run."""
  try:
    import matplotlib
  except ImportError as e:
    raise ModuleNotFoundError("--plot needs matplotlib: pip install matplotlib") from e
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  schedule = report.get("schedule") or []
  if not schedule:
    raise ValueError("--plot: there is no schedule to draw")
  figure, rows = plt.subplots(
    len(schedule), 1, figsize=(8, 2.6 * len(schedule)), squeeze=False, sharex=True
  )
  for axes, part in zip(rows[:, 0], schedule, strict=True):
    segments = part["segments"]
    for s in segments:
      n, m = map(int, s["pattern"].split(":")) if s["pattern"] else (1, 1)
      steps = (s["start"], s["stop"])
      axes.plot(steps, (s["decay_start"], s["decay_stop"]), color="tab:orange")
      axes.plot(steps, (n / m, n / m), color="tab:blue", linewidth=2)
      axes.annotate(
        s["pattern"] or "dense", (sum(steps) / 2, n / m), ha="center", va="bottom", fontsize=8
      )
    offset = segments[0]["t5x_start"] - segments[0]["start"]
    axes.set_title(_title(part), fontsize=9)
    axes.set_ylim(-0.03, 1.15)
    axes.plot([], [], color="tab:blue", label="n / m")
    axes.plot([], [], color="tab:orange", label="D")
    axes.legend(loc="upper right", fontsize=8)
  rows[-1, 0].set_xlabel(f"sparse step (T5X's step is {offset:,} more)")
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)
