"""What a run would do, without running it: gin files in, a report of plain values or text out."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.plan import checks, chips, contents
from nm_sparsity_jax.analysis.plan.build import Plan
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.integrations.gin_files import Config


def plan(
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str | os.PathLike] = (".",),
  checkpoint: str | None = None,
  topology: str | None = None,
) -> dict[str, Any]:
  """Says what a run would do and what stands in its way, without running it.

  Each part of the run has its first error noted, and the others go on.

  >>> from nm_sparsity_jax.integrations import gin_files
  >>> report = plan(
  ...   ["gin_configs/models/t5.gin", "gin_configs/sparsity.gin"],
  ...   ["T5_SIZE = 'tiny'", "RECIPE = 'sr_ste'", "PATTERN = '1:8'", "SPARSE_STEPS = 100"],
  ...   search_paths=[gin_files.folder()],
  ... )
  >>> report["ok"], report["schedule"][0]["pattern"]
  (True, '1:8')

  Args:
    gin_files: those of t5x.train, t5x.eval, t5x.infer, or of the local runner. A model file and
      gin_configs/sparsity.gin are enough; then T5X is not needed. They are programs: what they
      import runs.
    bindings: overrides such as "PATTERN = '1:8'".
    search_paths: folders to look for gin files in, before the folder of this package.
    checkpoint: looks at this checkpoint instead of the one that the settings name.
    topology: also compiles the train step for such TPUs, such as 'v5e:4x4'; needs libtpu.

  Returns:
    Plain values, those of `nm-sparsity plan --json`: 'ok', False if there are errors; 'errors',
    'warnings' and 'notes', texts; and, as far as they can be known, 'program', 'kernels',
    'schedule', 'learning_rate', 'cost', 'topology' and 'restore'.
  """
  config = Config(search_paths, gin_files, bindings)
  with config, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # T5X warns when it is imported
    made = Plan(config, [*config.errors])
    made.build()
    parts = _parts(made, checkpoint, topology)
    report = {
      "ok": not made.errors,
      **{name: part for name, part in parts.items() if part is not None},
      "errors": made.errors,
      "warnings": list(dict.fromkeys(made.warnings)),  # data sets may share a split
      "notes": made.notes,
    }
    # Patterns and paths become text, so that --json and Python give the same.
    return json.loads(json.dumps(report, default=str))


def _parts(made: Plan, checkpoint: str | None, topology: str | None) -> dict[str, Any]:
  """Returns what is known of a run, part by part; notes what is wrong with each."""
  attempt, assignment = made.attempt, None
  parts: dict[str, Any] = {"program": made.config.program}
  if made.params is not None and made.rules is not None:
    assignment = attempt(made.rules.assign, made.params)
  elif made.params is not None and not made.config.is_set("RULES"):
    made.notes.append("there are no rules: this run is dense, and knows nothing of sparsity")
  if assignment is not None:
    parts["kernels"] = str(assignment)
    parts["schedule"] = contents.schedule(assignment, made.config.get("PRETRAINED_STEPS") or 0)
    for timeline in parts["schedule"]:
      if (d := timeline["segments"][-1]["last_D"]) > 0:
        made.warnings.append(
          f"{', '.join(timeline['rules'])}: the run ends with D = {d:.3g}, so weights are n:m only "
          "after nms.finalize; set FINETUNE_STEPS to train them as n:m"
        )
    parts["cost"] = attempt(contents.cost, made, assignment)
  parts["learning_rate"] = attempt(contents.rate, made)
  if topology is not None and not made.errors:  # it takes minutes
    parts["topology"] = attempt(chips.check, made, topology)
  attempt(checks.check, made)
  parts["restore"] = attempt(checks.restore, made, checkpoint)
  return parts


def render(report: Mapping[str, Any]) -> str:
  """Returns a report as text, its errors last, where the eye is.

  Args:
    report: what `plan` returns.
  """
  blocks = [report.get("kernels", "")]
  for part in report.get("schedule", ()):
    title = ", ".join(f"{name}: {part[name]}" for name in part if name != "segments")
    rows = [[*part["segments"][0]], *(map(_text, s.values()) for s in part["segments"])]
    blocks.append("\n".join([title, *columns(rows)]))
  apart = ("ok", "kernels", "schedule", "errors", "warnings")
  blocks.append("\n".join(_lines({k: v for k, v in report.items() if k not in apart})))
  for kind in ("warnings", "errors"):
    if found := report[kind]:
      blocks.append("\n".join([f"{len(found)} {kind}", *(f"  - {text}" for text in found)]))
  if report["ok"]:
    blocks.append("Nothing stands in the way.")
  return "\n\n".join(filter(None, blocks))


def _lines(part: Mapping[str, Any], indent: str = "") -> Iterator[str]:
  """Yields each value with its name; a part of a part is indented."""
  for name, value in part.items():
    if isinstance(value, Mapping):
      yield f"{indent}{name}"
      yield from _lines(value, f"{indent}  ")
    elif value not in (None, []):
      yield f"{indent}{name}: {_text(value)}"


def _text(value: Any) -> str:
  """Returns a number with as many digits as are of use, and anything else as it is."""
  if isinstance(value, float):
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"
  return f"{value:,}" if isinstance(value, int) else str(value)
