"""A report for people: as text for a terminal, its schedule as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.text import table


def render(report: Mapping[str, Any]) -> str:
  """Returns a report as text, its errors last, where the eye is.

  Args:
    report: what `plan` returns.
  """
  blocks = [report["kernels"]["table"]] if "kernels" in report else []
  blocks += [_timeline(part) for part in report.get("schedule", ())]
  facts = [line for name, lines in _FACTS.items() if name in report for line in lines(report[name])]
  facts += [("note", note) for note in report["notes"]]
  blocks.append("\n".join(f"{head.ljust(11)} {text}" for head, text in facts))
  for kind in ("warnings", "errors"):
    if found := report[kind]:
      blocks.append("\n".join([f"{len(found)} {kind}", *(f"  - {text}" for text in found)]))
  if report["ok"]:
    blocks.append("Nothing stands in the way.")
  return "\n\n".join(filter(None, blocks))


def _title(part: Mapping[str, Any]) -> str:
  axes = ", ".join(map(str, part["axis_sizes"]))
  return f"{', '.join(part['rules'])}, axes of {axes}: {part['recipe']} {part['pattern']}"


def _timeline(part: Mapping[str, Any]) -> str:
  steps = lambda s, first: f"{s['start'] + first:,} .. {s['stop'] + first - 1:,}"
  rows = [
    (
      steps(s, 0),
      steps(s, part["offset"]),
      s["pattern"] or "dense",
      _arrows((s["decay_start"], s["decay_stop"])),
    )
    for s in part["segments"]
  ]
  phases = f"dense until {part['dense_until']:,}, fine-tune from {part['finetune_from']:,}"
  kept = "; keeps its mask" if part["keeps_mask"] else ""
  lines = table(("sparse steps", "global steps", "pattern", "D"), rows)
  head = f"schedule of {_title(part)}, gradient {part['gradient']}; {phases}{kept}"
  return "\n".join([head, *(f"  {line}" for line in lines)])


def _arrows(values: Sequence[float]) -> str:
  """Returns values one after the other; those that stay the same once."""
  return " -> ".join(text for text, _ in itertools.groupby(f"{value:.3g}" for value in values))


_Lines = Iterator[tuple[str, str]]  # what a line is about, and its text


def _rate(rate: Mapping[str, float]) -> _Lines:
  yield "rate", _arrows([rate["first"], rate["highest"], rate["last"]])


def _loss(loss: Mapping[str, Any]) -> _Lines:
  over = f" over {loss['mean_over']}" if loss["mean_over"] else ""
  scale = loss.get("t5x_over_mean_at_most")
  if scale is not None:
    text = f"T5X's loss is at most {scale:.6g} times its mean{over}"
    yield "loss", f"LOSS_NORMALIZING_FACTOR = {loss['factor']}: {text}"
  for place, lam in loss["lambda"].items():
    in_t5x = "" if scale is None else f"; in T5X's loss, at most {lam * scale:.3g}"
    yield "lambda", f"{lam:g} of the mean loss{over} ({place}){in_t5x}"


def _cost(cost: Mapping[str, Any]) -> _Lines:
  lengths, whole, params = cost["lengths"], cost["training"], cost["parameters"]
  example = f"{lengths['inputs']} + {lengths['targets']} tokens" if lengths else "one example"
  yield "inference", f"{_flops(cost['inference'])} for {example}"
  if whole:
    yield "training", f"{_flops(whole)} for {whole['steps']:,} steps of {whole['batch_size']}"
  kept = f"{params['kept']:,} of {params['dense']:,} ({params['kept'] / params['dense']:.1%})"
  yield "parameters", f"{kept} kept; {params['in_sparse_kernels']:,} are in sparse kernels"


def _flops(cost: Mapping[str, float]) -> str:
  share = cost["sparse"] / cost["dense"]
  return f"{_scaled(cost['sparse'])} of {_scaled(cost['dense'])}FLOPs ({share:.1%})"


def _scaled(value: float) -> str:
  """Returns a number with the prefix of its unit."""
  power = min(int(math.log10(value)) // 3, 6) if value >= 1 else 0
  return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def _topology(part: Mapping[str, Any]) -> _Lines:
  if "over_dense" not in part:
    return
  over, dense, sparse = part["over_dense"], part["dense"], part["sparse"]
  yield "topology", f"{part['name']}, {part['chips']} chips, a train step over the dense one:"
  yield "", f"memory       {sparse['peak'] / 2**20:,.0f} MiB of each chip, {over['peak'] - 1:+.1%}"
  yield "", f"bytes moved  {over['bytes'] - 1:+.1%}"
  same = dense["collectives"] == sparse["collectives"]
  counts = f"{sparse['collectives']} (dense {dense['collectives']})"
  yield "", f"collectives  {'the same' if same else counts}"
  yield "", "a compiler's account: nobody knows the time before it runs"


def _restore(restore: Mapping[str, Any]) -> _Lines:
  sparse = "dense" if restore["sparse_step"] is None else f"sparse step {restore['sparse_step']:,}"
  yield "restore", f"{restore['path']} ({restore['format']}, step {restore['step']}, {sparse})"
  for name, part in restore["sections"].items():
    words = [f"{kind} {count}" for kind, count in part.items() if count]
    yield "", f"{name.ljust(18)} {', '.join(words)}"


# Part of a report -> its lines, in the order in which they are printed.
_FACTS = {
  "learning_rate": _rate, "loss": _loss, "cost": _cost, "topology": _topology, "restore": _restore,
}  # fmt: skip


def plot(report: Mapping[str, Any], path: str) -> None:
  """Draws D and n / m over the sparse steps of a run.

  Args:
    report: what `plan` returns; it must have a schedule.
    path: the file, such as 'schedule.png'.

  Raises:
    ModuleNotFoundError: matplotlib is not installed.
  """
  schedule = report.get("schedule")
  if not schedule:
    raise ValueError("there is no schedule to draw: the report has none.")
  from matplotlib.figure import Figure

  figure = Figure(figsize=(8, 2.6 * len(schedule)), dpi=120, layout="constrained")
  rows = figure.subplots(len(schedule), 1, squeeze=False, sharex=True)[:, 0]
  for axes, part in zip(rows, schedule, strict=True):
    for s in part["segments"]:
      n, m = map(int, (s["pattern"] or "1:1").split(":"))
      steps, density = (s["start"], s["stop"]), n / m
      axes.plot(steps, (s["decay_start"], s["decay_stop"]), color="tab:orange", label="D")
      axes.plot(steps, (density, density), color="tab:blue", label="n / m")
      axes.annotate(s["pattern"] or "dense", (sum(steps) / 2, density), ha="center", va="bottom")
    axes.set_title(_title(part), fontsize=9)
    axes.legend(handles=axes.lines[:2], loc="upper right", fontsize=8)
    axes.set_xlabel(f"sparse step (the global step is {part['offset']:,} more)")
  figure.savefig(path)
