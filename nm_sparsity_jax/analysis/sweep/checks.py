"""What is wrong with a sweep, found before anything starts.

    Sweep -> [check] gin files, macros, rules on the network's shapes, settings of what is there
          -> Checked: a Run for each cell, the tasks
          -> [check_tasks] seqio, and the workload's own check

Every mistake is one line that names the file and its key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep
from nm_sparsity_jax.analysis.sweep.states import Run
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.recipes import Dense
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.trainer import workloads


@dataclasses.dataclass(frozen=True)
class Checked:
  """A sweep whose settings are right.

  Attributes:
    runs: name of a cell -> what is known of its run, in the order in which they are done.
    tasks: name, module, and rows of the embedding: what `check_tasks` looks at.
    workload: that of the first run, whose data it looks at; None = T5's, which has tasks.
  """

  runs: Mapping[str, Run]
  tasks: frozenset[tuple[str, str | None, int]]
  workload: workloads.Workload | None = None

  def all_done(self) -> bool:
    """Returns whether nothing is left to train."""
    return all(run.is_done() for run in self.runs.values())


def check(sweep: Sweep) -> Checked:
  """Reads the configuration of every run; starts nothing.

  Args:
    sweep: what `read` returns.

  Raises:
    ValueError: a setting is wrong, or differs from that of a run that is there.
  """
  gin_files.see_modules_here()
  found = _Findings()
  runs: dict[str, Run] = {}
  changed: list[str] = []
  seen: set[tuple[str, str | None, bool]] = set()
  for cell in sweep.runs():
    with gin_files.Config([".", gin_files.folder()], sweep.gin_files, cell.bindings) as config:
      kind = cell.recipe, cell.pattern, sweep.is_start(cell)
      if kind not in seen:  # seeds change nothing of what is looked at here
        seen.add(kind)
        found.look(cell, config, is_start=kind[2])
        if found.wrong and len(seen) == 1:  # wrong files, which the others have too
          break
      if not found.wrong and not found.refused:
        runs[cell.name] = run = _run(sweep, cell, config, runs)
        changed += _changed(run, config)
  wrong = found.wrong + [f"{_of(cells)}: {text}" for text, cells in found.refused.items()]
  if changed and not wrong:
    more = f" So were {len(changed) - 1} more runs." if len(changed) > 1 else ""
    wrong = [f"{changed[0]}.{more} Keep the old settings, or take another `out`."]
  if wrong:
    raise ValueError(f"{sweep.file}: " + "; ".join(dict.fromkeys(wrong)))
  return Checked(runs, frozenset(found.tasks), found.workload)


def check_tasks(sweep: Sweep, checked: Checked) -> None:
  """Refuses tasks that are not registered or do not fit the embedding, and data that do not fit.

  Tasks need seqio, which this imports.

  Args:
    sweep: what `read` returns.
    checked: what `check` returns.

  Raises:
    ValueError: a task is not there, the vocabulary is larger than the embedding, or the workload
      refuses its data.
  """
  if checked.workload is not None:
    try:
      checked.workload.check()
    except ValueError as e:
      raise ValueError(f"{sweep.file}: macros: {e}") from e
  if not checked.tasks:
    return
  from nm_sparsity_jax.trainer import data

  for name, module, rows in sorted(checked.tasks, key=str):
    try:
      data.import_seqio(module)
      data.mixture_or_task(name, module)
      data.check_vocabulary(name, rows)
    except ImportError as e:
      raise ValueError(f"{sweep.file}: MIXTURE_OR_TASK_MODULE={module!r}: {e}") from e
    except ValueError as e:
      raise ValueError(f"{sweep.file}: macros: {e}") from e


class _Findings:
  """What is wrong with the configurations that were looked at.

  Attributes:
    wrong: mistakes, each with its key.
    refused: what is said of rules -> of which runs.
    tasks: name, module, and rows of the embedding.
    workload: of the first run that has one.
  """

  def __init__(self):
    self.wrong: list[str] = []
    self.refused: dict[str, list[Cell]] = {}
    self.tasks: set[tuple[str, str | None, int]] = set()
    self.workload: workloads.Workload | None = None
    self._described: dict[tuple[str, str], str] = {}  # recipe, text of rules -> the cell
    self._shapes: Any = None  # of all runs, which have one network

  def look(self, cell: Cell, config: gin_files.Config, is_start: bool) -> None:
    """Notes what is wrong with files, macros, rules, and where the rules do not fit the network."""
    section = "macros or start" if is_start else "macros"
    wrong = [f"gin_files, {section}: {text}" for text in config.errors]
    if not config.settings("Run"):
      wrong.append(
        "gin_files: none is a run file of `nm-sparsity train`: gin_configs/runs/local_train.gin or "
        "local_finetune.gin"
      )
    self.wrong += wrong
    if wrong:
      return
    try:
      rules = config.value("RULES")
      network = plan.network_of(config)
      if not isinstance(network, workloads.Workload):
        self.tasks |= _tasks(config, network.config.vocab_size)
      elif self.workload is None:
        self.workload = network
      if self._shapes is None:
        self._shapes = plan.shapes(network)
      params, axes = self._shapes
      (rules.with_logical_axes(axes) if axes else rules).assign(params)
      if cell.pattern is None:
        _refuse_sparse(rules)
    except Exception as e:
      self.refused.setdefault(gin_files.message(e), []).append(cell)
      return
    if cell.pattern is not None:
      self._tell_apart(cell, rules)

  def _tell_apart(self, cell: Cell, rules: Any) -> None:
    """Notes a run that has the rules of one with another pattern."""
    from nm_sparsity_jax.training import rules_text

    # A variant may differ from its recipe in what is none of the rules'.
    key = cell.recipe, rules_text.describe(rules)
    other = self._described.setdefault(key, cell.name)
    if other != cell.name:
      self.wrong.append(
        f"patterns: {cell.name} has the rules of {other}: SPARSITY_RULES names patterns of its "
        "own. Give places without one, {'ff': None}, in a gin file"
      )


def _tasks(config: gin_files.Config, rows: int) -> set[tuple[str, str | None, int]]:
  """Returns the tasks that a run trains on and is evaluated on."""
  names = {config.value("MIXTURE_OR_TASK_NAME")}
  if "name" in config.settings("Evaluation"):
    names.add(config.argument("name", "Evaluation"))
  module = config.get("MIXTURE_OR_TASK_MODULE")
  return {(name, module, rows) for name in names}


def _of(cells: Sequence[Cell]) -> str:
  """Returns the key that runs with one mistake have in common, and what they are."""
  names = [c.name.rpartition("-")[0] for c in cells]
  if names == ["start"]:
    return "start"
  patterns, recipes = {c.pattern for c in cells}, {c.recipe for c in cells}
  one_pattern = len(patterns) == 1 and None not in patterns
  key = "patterns" if one_pattern else "recipes" if len(recipes) == 1 else "macros"
  return f"{key}: {', '.join(names)}"


# --- what is known of a run ---------------------------------------------------------------------


def _run(sweep: Sweep, cell: Cell, config: gin_files.Config, before: Mapping[str, Run]) -> Run:
  """Returns what is known of a run: from which step it starts, and how many it has.

  Args:
    sweep: whose run it is.
    cell: which one.
    config: its configuration.
    before: those before it, its start among them.
  """
  steps = config.get("SPARSE_STEPS")
  if not isinstance(steps, int) or steps < 1:
    raise ValueError(f"{sweep.file}: SPARSE_STEPS is {steps!r}: give whole steps.")
  evaluation = run_settings.text(config.settings("Run").get("evaluation"))
  if cell.start is not None:
    return Run(cell, before[cell.start.name].steps, steps, evaluation)
  initial = config.get("INITIAL_CHECKPOINT_PATH")
  try:
    return Run(cell, _step_of(initial) if initial else 0, steps, evaluation)
  except (OSError, ValueError) as e:
    # What is done needs its checkpoint no more: the name says the step.
    step = folders.named_step(str(initial))
    known = None if step is None else Run(cell, step, steps, evaluation)
    if known and known.is_done():
      return known
    raise ValueError(
      f"{sweep.file}: INITIAL_CHECKPOINT_PATH: {e}. Name one that is there, or use [start]."
    ) from e


@functools.cache
def _step_of(path: str) -> int:
  """Reads the step of a checkpoint; a file of timm's weights has none."""
  from nm_sparsity_jax.runs import checkpoint

  return checkpoint.read(path).step or 0


def _changed(run: Run, config: gin_files.Config) -> list[str]:
  """Returns how a run differs from what is in its folder, as one sentence or none."""
  from nm_sparsity_jax.trainer import train

  folder, settings = run.cell.folder, train.settings_of(config.settings("Run"))
  if what := run_settings.changed(folder, settings):
    return [f"{folder} was started with other settings: {what}"]
  # A run may go on with another evaluation. Runs of one table may not differ in it.
  file, now = run.evaluated_with, run.evaluation
  before = file.read_text() if file.exists() else now
  return [f"{folder} was evaluated by {before}, not by {now}"] if before != now else []


def _refuse_sparse(rules: Any) -> None:
  """Raises ValueError where the rules of a dense run make something sparse."""
  for place, recipe in rules.places.items():
    if not isinstance(recipe, Dense):
      raise ValueError(
        f"SPARSITY_RULES gives {place!r} the recipe {recipe.name}, whatever RECIPE is, so this run "
        "would not be dense. Give the place a pattern or None."
      )
