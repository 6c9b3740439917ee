"""What is wrong with a sweep, found before anything starts; and what is known of each run.

    Sweep -> [check] gin files, macros, rules on the network's shapes, settings of what is there
          -> Checked: a Run for each cell, the tasks
          -> [check_tasks] seqio, and the workload's own check

An error names the sweep's file and the first run that has the mistake.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.recipes import Dense
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.trainer import workloads


@dataclasses.dataclass(frozen=True)
class Run:
  """A cell, and what its configuration and its folder say of it.

  Attributes:
    cell: which one.
    first: the global step before its first one.
    steps: how many it has.
    evaluation: the settings of its evaluations, as text.
  """

  cell: Cell
  first: int
  steps: int
  evaluation: str

  @property
  def last(self) -> int:
    """Returns the global step at which it ends."""
    return self.first + self.steps

  @property
  def failure(self) -> pathlib.Path:
    """Returns the file that says, as JSON, why it failed, until it is tried again."""
    return self.cell.folder / "failed.json"

  @property
  def evaluated_with(self) -> pathlib.Path:
    """Returns the file that says how it is evaluated."""
    return self.cell.folder / "evaluation.txt"

  @property
  def log(self) -> pathlib.Path:
    """Returns the file that gets what it prints."""
    return self.cell.folder / "log.txt"

  def why_failed(self) -> str:
    """Returns why it failed; '' if it did not."""
    return json.loads(self.failure.read_text())["error"] if self.failure.is_file() else ""

  def steps_done(self) -> int:
    """Returns how many steps it would not do again."""
    found = folders.steps(self.cell.folder)
    return found[-1] - self.first if found else 0

  def is_done(self) -> bool:
    """Returns whether it has its last evaluation and checkpoint."""
    return folders.is_done(self.cell.folder, self.last)

  def state(self) -> str:
    """Returns 'done', 'failed', 'begun' or 'open'."""
    if self.is_done():
      return "done"
    return "failed" if self.why_failed() else "begun" if self.steps_done() else "open"


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
  network = _Network()
  runs: dict[str, Run] = {}
  seen = set()
  for cell in sweep.runs():
    with gin_files.Config([".", gin_files.folder()], sweep.gin_files, cell.bindings) as config:
      try:
        kind = cell.recipe, cell.pattern, sweep.is_start(cell)
        if kind not in seen:  # seeds change nothing of what is looked at here
          seen.add(kind)
          network.check(cell, config)
        runs[cell.name] = _run(cell, config, runs)
        _check_unchanged(runs[cell.name], config)
      except Exception as e:  # gin calls the code of users
        raise ValueError(f"{sweep.file}: {cell.name}: {gin_files.message(e)}") from e
  return Checked(runs, frozenset(network.tasks), network.workload)


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
  try:
    if checked.workload is not None:
      checked.workload.check()
    if not checked.tasks:
      return
    from nm_sparsity_jax.trainer import data

    for name, module, rows in sorted(checked.tasks, key=str):
      data.import_seqio(module)
      data.mixture_or_task(name, module)
      data.check_vocabulary(name, rows)
  except (ValueError, ImportError) as e:
    raise ValueError(f"{sweep.file}: macros: {e}") from e


class _Network:
  """The network of all runs, with which each run's rules must agree."""

  def __init__(self):
    self.tasks: set[tuple[str, str | None, int]] = set()
    self.workload: workloads.Workload | None = None
    self._shapes: Any = None
    self._patterns: dict[tuple[str, str], str | None] = {}  # recipe, text of rules -> pattern

  def check(self, cell: Cell, config: gin_files.Config) -> None:
    """Raises where files, macros or rules are wrong, or do not fit the network."""
    wrong = list(config.errors)
    if not config.local or config.program != "train":
      wrong.insert(
        0,
        "gin_files: none is a run file of `nm-sparsity train`: add "
        "gin_configs/runs/local_train.gin or local_finetune.gin",
      )
    if wrong:
      raise ValueError("; ".join(wrong))
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
    self._check_pattern(cell, rules)

  def _check_pattern(self, cell: Cell, rules: Any) -> None:
    """Raises where SPARSITY_RULES has patterns of its own, which make the sweep's idle."""
    from nm_sparsity_jax.training import rules_text

    if cell.pattern is None:
      sparse = [p for p, recipe in rules.places.items() if not isinstance(recipe, Dense)]
      if sparse:
        raise ValueError(
          f"SPARSITY_RULES makes {sparse[0]!r} sparse, whatever RECIPE is, so this run would not "
          "be dense. Give the place a pattern or None."
        )
      return
    # A variant may differ from its recipe in what is none of the rules'.
    other = self._patterns.setdefault((cell.recipe, rules_text.describe(rules)), cell.pattern)
    if other != cell.pattern:
      raise ValueError(
        f"it has the rules of pattern {other}, since SPARSITY_RULES names patterns of its own. "
        "Give places without one, {'ff': None}, in a gin file."
      )


def _tasks(config: gin_files.Config, rows: int) -> set[tuple[str, str | None, int]]:
  """Returns the tasks that a run trains on and is evaluated on."""
  names = {config.value("MIXTURE_OR_TASK_NAME")}
  if "name" in config.settings("Evaluation"):
    names.add(config.argument("name", "Evaluation"))
  module = config.get("MIXTURE_OR_TASK_MODULE")
  return {(name, module, rows) for name in names}


def _run(cell: Cell, config: gin_files.Config, before: Mapping[str, Run]) -> Run:
  steps = config.get("SPARSE_STEPS")
  if not isinstance(steps, int) or steps < 1:
    raise ValueError(f"SPARSE_STEPS={steps!r}: give a whole number, 1 or more.")
  evaluation = run_settings.text(config.settings("Run").get("evaluation"))
  if cell.start is not None:
    return Run(cell, before[cell.start.name].steps, steps, evaluation)
  initial = config.get("INITIAL_CHECKPOINT_PATH")
  try:
    return Run(cell, _step_of(initial) if initial else 0, steps, evaluation)
  except (OSError, ValueError) as e:
    # A run that is done needs its checkpoint no more: the name says the step.
    run = Run(cell, folders.named_step(str(initial)) or 0, steps, evaluation)
    if run.is_done():
      return run
    raise ValueError(
      f"INITIAL_CHECKPOINT_PATH: {e}. Name one that is there, or use [start]."
    ) from e


@functools.cache
def _step_of(path: str) -> int:
  """Returns the step of a checkpoint; a file of timm's weights has none."""
  from nm_sparsity_jax.runs import checkpoint

  return checkpoint.read(path).step or 0


def _check_unchanged(run: Run, config: gin_files.Config) -> None:
  """Raises where a run differs from what is in its folder."""
  from nm_sparsity_jax.trainer import train

  changed = run_settings.changed(run.cell.folder, train.settings_of(config.settings("Run")))
  # A run may go on with another evaluation. Runs of one table may not differ in it.
  if not changed and run.evaluated_with.is_file():
    before = run.evaluated_with.read_text()
    changed = f"its evaluation was {before}" if before != run.evaluation else ""
  if changed:
    raise ValueError(
      f"{run.cell.folder} was started with other settings: {changed}. Keep the old settings, or "
      "take another `out`."
    )
