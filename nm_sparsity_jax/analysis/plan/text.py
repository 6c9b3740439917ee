"""A report as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.text import table

_Line = tuple[str, str]  # what it is about, and the text


def render(report: Mapping[str, Any]) -> str:
  """Returns a report as text, its errors last, where the eye is.

  Args:
    report: what `plan` returns.
  """
  blocks = [_kernels(report["kernels"])] if "kernels" in report else []
  blocks += [_timeline(part) for part in report.get("schedule", ())]
  facts: list[_Line] = []
  for name, lines in _FACTS.items():
    facts += lines(report[name]) if name in report else ()
  facts += [("note", note) for note in report["notes"]]
  blocks.append("\n".join(f"{head.ljust(11)} {text}" for head, text in facts))
  for kind in ("warnings", "errors"):
    if found := report[kind]:
      head = f"{len(found)} {kind if len(found) > 1 else kind[:-1]}"
      blocks.append("\n".join([head, *(f"  - {text}" for text in found)]))
  if report["ok"]:
    blocks.append("Nothing stands in the way.")
  return "\n\n".join(filter(None, blocks))


def _kernels(kernels: Mapping[str, Any]) -> str:
  head = "sparse kernels", "", "rule", "shape", "axis", "pattern", "groups", "recipe"
  join = lambda value, mark: mark.join(map(str, value)) if isinstance(value, list) else value
  rows = [
    [
      k["path"], f"x{k['count']}", k["rule"], join(k["shape"], "x"), join(k["axis"], ","),
      k["pattern"], f"{k['groups']:,}", k["recipe"],
    ]
    for k in kernels["sparse"]
  ]  # fmt: skip
  lines = table(head, rows) if rows else []
  lines += [f"  {k['path']}: {remark}" for k in kernels["sparse"] for remark in k["remarks"]]
  lines += [f"skipped  {k['path']}  x{k['count']}: {k['why']}" for k in kernels["skipped"]]
  lines += [f"dense    {k['path']}  x{k['count']}" for k in kernels["dense"]]
  lines.append(f"dense    {kernels['other_dense']} others: norms, embeddings, position biases")
  return "\n".join(lines)


def _timeline(part: Mapping[str, Any]) -> str:
  rows = [
    (
      f"{s['start']:,} .. {s['stop'] - 1:,}",
      f"{s['t5x_start']:,} .. {s['t5x_stop'] - 1:,}",
      s["phase"],
      s["pattern"] or "dense",
      _arrows((s["decay_start"], s["decay_stop"])),
    )
    for s in part["segments"]
  ]
  kept = "; keeps its mask" if part["keeps_mask"] else ""
  lines = table(("sparse steps", "global steps", "phase", "pattern", "D"), rows)
  head = f"schedule of {title(part)}, gradient {part['gradient']}{kept}"
  return "\n".join([head, *(f"  {line}" for line in lines)])


def title(part: Mapping[str, Any]) -> str:
  """Returns the name of a timeline: its rules, the lengths of their axes, recipe, pattern."""
  sizes = part["axis_sizes"]
  axes = f", axes of {', '.join(map(str, sizes))}" if sizes else ""
  return f"{', '.join(part['rules'])}{axes}: {part['recipe']} {part['pattern'] or ''}".rstrip()


def _arrows(values: Sequence[float]) -> str:
  """Returns values one after the other; those that stay the same once."""
  return " -> ".join(text for text, _ in itertools.groupby(f"{value:.3g}" for value in values))


def _rate(rate: Mapping[str, float]) -> Iterator[_Line]:
  yield "rate", _arrows([rate["first"], rate["highest"], rate["last"]])


def _loss(loss: Mapping[str, Any]) -> Iterator[_Line]:
  over = f" over {loss['mean_over']}" if loss["mean_over"] else ""
  if "factor" in loss:
    scale = f"at most {loss['t5x_over_mean_at_most']:.6g} times its mean{over}"
    yield "loss", f"LOSS_NORMALIZING_FACTOR = {loss['factor']}: T5X's loss is {scale}"
  for place, lam in loss["lambda"].items():
    text = f"{lam:g} of the mean loss{over} ({place})"
    if "factor" in loss:
      text += f"; in T5X's loss, at most {loss['lambda_in_t5x_at_most'][place]:.3g}"
    yield "lambda", text


def _cost(cost: Mapping[str, Any]) -> Iterator[_Line]:
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


def _topology(part: Mapping[str, Any]) -> Iterator[_Line]:
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


def _restore(restore: Mapping[str, Any]) -> Iterator[_Line]:
  sparse = "dense" if restore["sparse_step"] is None else f"sparse step {restore['sparse_step']:,}"
  yield "restore", f"{restore['path']} ({restore['format']}, step {restore['step']}, {sparse})"
  for name, part in restore["sections"].items():
    words = [f"{kind} {count}" for kind, count in part.items() if count]
    yield "", f"{name.ljust(18)} {', '.join(words)}"


# Part of a report -> its lines, in the order in which they are printed.
_FACTS = {
  "learning_rate": _rate, "loss": _loss, "cost": _cost, "topology": _topology, "restore": _restore,
}  # fmt: skip
