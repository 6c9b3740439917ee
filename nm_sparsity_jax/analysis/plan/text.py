"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.text import table


def render(report: Mapping[str, Any], everything: bool = False) -> str:
  """Returns a report as text, its errors last, where the eye is.

  Args:
    report: what `plan` returns.
    everything: lists also what is long.
  """
  parts = []
  if kernels := report.get("kernels"):
    parts.append(_render_kernels(kernels, everything))
  if report.get("schedule"):
    parts.append(_render_schedule(report["schedule"]))
  facts = [
    *_rate_lines(report.get("learning_rate")),
    *_loss_lines(report.get("loss")),
    *_cost_lines(report.get("cost")),
    *_topology_lines(report.get("topology")),
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
  blocks = []
  for part in schedule:
    kept = "; keeps its mask" if part["keeps_mask"] else ""
    head = f"schedule of {title(part)}, gradient {part['gradient']}{kept}"
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
    columns = ("sparse steps", "global steps", "phase", "pattern", "D")
    blocks.append("\n".join([head, *(f"  {line}" for line in table(columns, rows))]))
  return "\n\n".join(blocks)


def title(part: Mapping[str, Any]) -> str:
  """Returns the name of a timeline: its rules, the lengths of their axes, recipe, pattern."""
  where = ", ".join(part["rules"])
  if part["axis_sizes"]:
    where += f", axes of {', '.join(map(str, part['axis_sizes']))}"
  return f"{where}: {part['recipe']}" + (f" {part['pattern']}" if part["pattern"] else "")


def _decay(segment: Mapping[str, Any]) -> str:
  a, b = segment["decay_start"], segment["decay_stop"]
  return f"{a:.3g}" if a == b else f"{a:.3g} -> {b:.3g}"


def _rate_lines(rate: Mapping[str, Any] | None):
  if not rate:
    return
  texts = [f"{rate[name]:.3g}" for name in ("first", "highest", "last")]
  middle = f" -> {texts[1]} at sparse step {rate['highest_at']:,}"
  shown = texts[0] + (middle if texts[1] not in (texts[0], texts[2]) else "")
  shown += f" -> {texts[2]}" if len(set(texts)) > 1 else " throughout"
  how = f" ({rate['factors']}" if rate["factors"] else ""
  how += f", warm-up of {rate['warmup_steps']:,} steps" if rate["warmup_steps"] else ""
  yield "rate", f"{shown}{how}{')' if how else ''}"


def _loss_lines(loss: Mapping[str, Any] | None):
  if not loss:
    return
  if "factor" in loss:
    text = f"LOSS_NORMALIZING_FACTOR = {loss['factor']}: T5X's loss is {loss['meaning']}"
    yield "loss", text
  for place, lam in loss["lambda"].items():
    unit = " per target token"
    if "mean_over" in loss:  # None where the workload could not be made
      unit = f" over {loss['mean_over']}" if loss["mean_over"] else ""
    text = f"{lam:g} of the mean loss{unit} ({place})"
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
  if cost["input_length"] is None:
    tokens = "one example"
  once, whole, params = cost["inference"], cost["training"], cost["parameters"]
  if once:
    yield "inference", f"{_of(once['sparse'], once['dense'], 'FLOPs')} for {tokens}"
  if whole and whole["steps"]:
    run_of = f"{whole['steps']:,} steps of {whole['batch_size']}"
    run_of += "" if whole["batch_known"] else " (BATCH_SIZE is not set: guessed)"
    yield "training", f"{_of(whole['sparse'], whole['dense'], 'FLOPs')} for {run_of}"
  yield (
    "parameters",
    f"{_count(params['kept'])} of {_count(params['dense'])} "
    f"({params['kept'] / params['dense']:.1%}) kept; "
    f"{_count(params['in_sparse_kernels'])} are in sparse kernels",
  )


def _topology_lines(said: Mapping[str, Any] | None):
  if not said or "over_dense" not in said:
    return
  over, dense, sparse = said["over_dense"], said["dense"], said["sparse"]
  unit, name = (2**30, "GiB") if sparse["peak"] >= 2**30 / 10 else (2**20, "MiB")
  change = lambda key: f"{over[key] - 1:+.1%}".replace("-0.0%", "+0.0%")
  size = f"{sparse['peak'] / unit:.2f} {name} of each chip, {change('peak')}"
  yield "topology", f"{said['name']}, {said['chips']} chips, a train step over the dense one:"
  yield "", f"memory       {size}"
  yield "", f"bytes moved  {change('bytes')}"
  kinds = {**dense["collectives"], **sparse["collectives"]}
  same = dense["collectives"] == sparse["collectives"]
  counts = ", ".join(
    f"{sparse['collectives'].get(k, 0)} {k} (dense {dense['collectives'].get(k, 0)})" for k in kinds
  )
  yield "", f"collectives  {'the same' if same else counts}"
  yield "", "a compiler's account: nobody knows the time before it runs"


def _of(part: float, whole: float, unit: str) -> str:
  return f"{_number(part)} of {_number(whole)} {unit}".rstrip() + f" ({part / whole:.1%})"


def _number(value: float) -> str:
  """Returns a number of FLOPs, with the prefixes of units."""
  return _scaled(value, ("E", "P", "T", "G", "M", "k"))


def _count(value: float) -> str:
  """Returns a number of parameters: thousands, millions, billions."""
  return _scaled(value, ("E", "P", "T", "B", "M", "k"))


def _scaled(value: float, names: Sequence[str]) -> str:
  for size, name in zip((1e18, 1e15, 1e12, 1e9, 1e6, 1e3), names, strict=True):
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
