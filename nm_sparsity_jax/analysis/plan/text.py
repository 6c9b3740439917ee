"""A report as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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


_DENSE_SHOWN = 6


def _render_kernels(kernels: Mapping[str, Any], everything: bool) -> str:
  lines = []
  if kernels["sparse"]:
    head = "sparse kernels", "", "rule", "shape", "axis", "pattern", "groups", "recipe"
    join = lambda value, mark: mark.join(map(str, value)) if isinstance(value, list) else value
    lines = table(head, [
      [
        k["path"], f"x{k['count']}", k["rule"], join(k["shape"], "x"), join(k["axis"], ","),
        k["pattern"], f"{k['groups']:,}", k["recipe"],
      ]
      for k in kernels["sparse"]
    ])  # fmt: skip
    lines += [f"  {k['path']}: {remark}" for k in kernels["sparse"] for remark in k["remarks"]]
  lines += [f"skipped  {k['path']}  x{k['count']}: {k['why']}" for k in kernels["skipped"]]
  shown = kernels["dense"] if everything else kernels["dense"][:_DENSE_SHOWN]
  lines += [f"dense    {k['path']}  x{k['count']}" for k in shown]
  if rest := sum(k["count"] for k in kernels["dense"][len(shown) :]):
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


def _rate_lines(rate: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
  if rate:
    values = [f"{rate[name]:.3g}" for name in ("first", "highest", "last")]
    yield "rate", " -> ".join(text for text, _ in itertools.groupby(values))


def _loss_lines(loss: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
  if not loss:
    return
  over = f" over {loss['mean_over']}" if loss["mean_over"] else ""
  if "factor" in loss:
    scale = f"at most {loss['t5x_over_mean_at_most']:.6g} times its mean{over}"
    yield "loss", f"LOSS_NORMALIZING_FACTOR = {loss['factor']}: T5X's loss is {scale}"
  for place, lam in loss["lambda"].items():
    text = f"{lam:g} of the mean loss{over} ({place})"
    if "factor" in loss:
      text += f"; in T5X's loss, at most {loss['lambda_in_t5x_at_most'][place]:.3g}"
    yield "lambda", text


def _cost_lines(cost: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
  if not cost:
    return
  lengths, whole, params = cost["lengths"], cost["training"], cost["parameters"]
  example = f"{lengths['inputs']} + {lengths['targets']} tokens" if lengths else "one example"
  yield "inference", f"{_flops(cost['inference'])} for {example}"
  if whole:
    yield "training", f"{_flops(whole)} for {whole['steps']:,} steps of {whole['batch_size']}"
  share = params["kept"] / params["dense"]
  yield (
    "parameters",
    f"{params['kept']:,} of {params['dense']:,} ({share:.1%}) kept; "
    f"{params['in_sparse_kernels']:,} are in sparse kernels",
  )


def _flops(cost: Mapping[str, float]) -> str:
  share = cost["sparse"] / cost["dense"]
  return f"{_scaled(cost['sparse'])} of {_scaled(cost['dense'])}FLOPs ({share:.1%})"


def _scaled(value: float) -> str:
  """Returns a number with the prefix of its unit."""
  power = min(int(math.log10(value)) // 3, 6) if value >= 1 else 0
  return f"{value / 1000**power:.3g} {' kMGTPE'[power].strip()}"


def _topology_lines(part: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
  if not part or "over_dense" not in part:
    return
  over, dense, sparse = part["over_dense"], part["dense"], part["sparse"]
  yield "topology", f"{part['name']}, {part['chips']} chips, a train step over the dense one:"
  yield "", f"memory       {sparse['peak'] / 2**20:,.0f} MiB of each chip, {over['peak'] - 1:+.1%}"
  yield "", f"bytes moved  {over['bytes'] - 1:+.1%}"
  same = dense["collectives"] == sparse["collectives"]
  counts = f"{sparse['collectives']} (dense {dense['collectives']})"
  yield "", f"collectives  {'the same' if same else counts}"
  yield "", "a compiler's account: nobody knows the time before it runs"


def _restore_lines(
  restore: Mapping[str, Any] | None, everything: bool
) -> Iterator[tuple[str, str]]:
  if not restore:
    return
  sparse = "dense" if restore["sparse_step"] is None else f"sparse step {restore['sparse_step']:,}"
  yield "restore", f"{restore['path']} ({restore['format']}, step {restore['step']}, {sparse})"
  for name, part in restore["sections"].items():
    words = [f"{kind} {count}" for kind, count in part.items() if count]
    yield "", f"{name.ljust(18)} {', '.join(words)}"
  for kind in ("initialise", "drop") if everything else ():
    for path in restore[kind]:
      yield "", f"  {kind} {path}"
