"""What a run would do, without running it: gin files in, a report of plain values out."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax.analysis.plan import checks, chips, contents, restore
from nm_sparsity_jax.analysis.plan.build import build
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations.gin_files import Config, folder


def plan(
  gin_files: Sequence[str] = (),
  bindings: Sequence[str] = (),
  search_paths: Sequence[str | os.PathLike[str]] = (".",),
  checkpoint: str | None = None,
  allow_unknown: bool = False,
  topology: str | None = None,
) -> dict[str, Any]:
  """Says what a run would do and what stands in its way, without running it.

  >>> from nm_sparsity_jax.integrations import gin_files
  >>> report = plan(
  ...   ["gin_configs/models/t5.gin", "gin_configs/sparsity.gin"],
  ...   ["T5_SIZE = 'tiny'", "RECIPE = 'sr_ste'", "PATTERN = '1:8'", "SPARSE_STEPS = 100"],
  ...   search_paths=[gin_files.folder()],
  ... )
  >>> report["ok"], [kernel["pattern"] for kernel in report["kernels"]["sparse"]][:2]
  (True, ['1:8', '1:8'])

  Args:
    gin_files: those of t5x.train, t5x.eval, t5x.infer, or of the local runner. A model file and
      gin_configs/sparsity.gin are enough; then T5X is not needed. They are programs: what they
      import runs.
    bindings: overrides such as "PATTERN = '1:8'".
    search_paths: folders to look for gin files in, before the folder of this package.
    checkpoint: looks at this checkpoint instead of the one that the settings name.
    allow_unknown: a macro among the overrides that nothing reads is a warning, not an error.
    topology: also compiles the train step for such TPUs, such as 'v5e:4x4'; needs libtpu.

  Returns:
    Plain values, those of `nm-sparsity plan --json`: 'ok', False if there are errors; 'errors',
    'warnings' and 'notes', texts; and, as far as they can be known, 'program', 'kernels',
    'schedule', 'learning_rate', 'loss', 'cost', 'topology' and 'restore'. `render` makes text of
    it, `plot` a picture.
  """
  config = Config([*search_paths, folder()], gin_files, bindings, allow_unknown)
  with config, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # T5X warns when it is imported
    found = Findings(config, checkpoint, [*config.errors], [*config.warnings])
    parts = _parts(found, topology)
    report = {
      "ok": not found.errors,
      **{name: part for name, part in parts.items() if part is not None},
      "errors": found.errors,
      "warnings": list(dict.fromkeys(found.warnings)),
      "notes": found.notes,
    }
    return json.loads(json.dumps(report, default=str))


def _parts(found: Findings, topology: str | None) -> dict[str, Any]:
  """Returns what is known of a run, part by part; notes what is wrong with each."""
  attempt, built = found.attempt, build(found)
  parts: dict[str, Any] = {"program": found.config.program}
  assignment = None
  if built.params is not None and built.rules is not None:
    assignment = attempt("rules", built.rules.assign, built.params)
  elif built.params is not None and not found.config.is_set("RULES"):
    found.notes.append("there are no rules: this run is dense, and knows nothing of sparsity")
  if assignment is not None:
    parts["kernels"] = contents.kernels(assignment)
    parts["schedule"] = attempt("schedule", contents.schedule, found, assignment)
    parts["cost"] = attempt("cost", contents.cost, found, built, assignment)
  parts["learning_rate"] = attempt("learning rate", contents.rate, found)
  if built.rules is not None and found.trains:
    parts["loss"] = attempt("loss", contents.loss, found, built)
  if topology is not None and not found.errors:  # it takes minutes
    parts["topology"] = attempt("--topology", chips.check, found, built, topology)
  checks.check(found, built)
  parts["restore"] = attempt("restore", restore.check, found, built)
  return parts
