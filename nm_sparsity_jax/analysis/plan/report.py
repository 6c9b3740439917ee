"""What a run would do, without running it: gin files in, a report of plain values out."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.plan import (
  checkpoints,
  chips,
  data,
  model,
  places,
  rates,
  schedule,
  settings,
)
from nm_sparsity_jax.analysis.plan.cost import cost
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations.gin_files import Config, folder
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Assignment


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
  where = [*search_paths, folder()]
  found = Config(where, gin_files, bindings, allow_unknown)
  with found as config, warnings.catch_warnings():
    warnings.simplefilter("ignore")  # T5X warns when it is imported
    return _plain(examine(config, checkpoint, topology))


def examine(
  config: Config, checkpoint: str | None = None, topology: str | None = None
) -> dict[str, Any]:
  """Returns the report on a configuration that was read already.

  Args:
    config: gin files and overrides.
    checkpoint: looks at this checkpoint instead of the one that the settings name.
    topology: also compiles the train step for such TPUs.
  """
  found = Findings(config, checkpoint)
  made = model.make(found)
  found.parts["program"] = config.program
  assignment = None
  if made.params is not None and made.rules is not None:
    assigned = found.attempt("places", _assign, found, made, made.rules)
    made, assignment = assigned or (made, None)
  elif made.params is not None and not config.is_set("RULES") and config.complete:
    found.notes.append("there are no rules: this run is dense, and knows nothing of sparsity")
  if not found.whole:
    found.notes.append("places that errors leave without rules are shown as dense, without costs")
  if made.rules is not None and made.rules.places:
    timelines = found.attempt("schedule", schedule.schedule, found, made.rules, assignment)
    found.parts["schedule"] = timelines
    if found.trains:
      found.parts["loss"] = found.attempt("loss", schedule.loss, found, made.rules, made)
  if assignment is not None and found.whole:
    found.parts["cost"] = found.attempt("cost", cost, found, made.network, assignment, made.params)
  if topology is not None and not found.errors:
    found.parts["topology"] = found.attempt("--topology", chips.check, found, made, topology)
  found.parts["learning_rate"] = found.attempt("learning rate", rates.rate, found)
  found.attempt("settings", settings.check, found, made)
  found.attempt("data", data.check, found, made.network)
  found.parts["restore"] = found.attempt("restore", checkpoints.check, found, made)
  return found.report()


def _assign(found: Findings, made: model.Made, rules: Rules) -> tuple[model.Made, Assignment]:
  """Assigns places; then looks at T5X's state and optimizer, if nothing is wrong so far."""
  before = len(found.errors)
  assignment = places.assign(found, rules, made.params)
  found.parts["kernels"] = places.kernels(assignment)
  if made.model is not None and made.state is None and len(found.errors) == before:
    arguments = made.model, found.lengths, found.trains
    state = found.attempt("train state", model.train_state, *arguments)
    made = dataclasses.replace(made, state=state)
  if made.state is not None and found.trains:
    found.attempt("optimizer", _check_optimizer, made.state)
  return made, assignment


def _check_optimizer(state: Any) -> None:
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  state.as_logical_axes()  # raises for an optax state that T5X cannot shard
  t5x_adapter.refuse_in_chain(state)


def _plain(value: Any) -> Any:
  """Returns a value as JSON gives it back: tuples as lists, strange values as text."""
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if value is None or isinstance(value, str | int | float | bool):
    return value
  return str(value)
