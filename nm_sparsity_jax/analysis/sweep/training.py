"""A sweep's runs: checked before anything starts, then done one after the other.

    Sweep -> [check]  gin files, macros, rules, the run's own checks -> a Run for each cell
          -> [train]  for each run that is not done: nm-sparsity train -> its folder, its log

Each run is a process of its own, so one that fails takes no other along. A signal lets the run
save, and then the sweep ends; the same call goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from nm_sparsity_jax.analysis.plan.build import Plan
from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files, folders, lock
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.runs.signals import Signals
from nm_sparsity_jax.training import rules_text


@dataclasses.dataclass(frozen=True)
class Run:
  """A cell, and what its configuration and its folder say of it.

  Attributes:
    cell: which one.
    steps: how many it has.
  """

  cell: Cell
  steps: int

  @property
  def failure(self) -> pathlib.Path:
    """Returns the file that says, as JSON, why it failed, until it is tried again."""
    return self.cell.folder / "failed.json"

  @property
  def last(self) -> int:
    """Returns the global step at which it ends, once it has begun."""
    return files.read_json(self.cell.folder / "run.json", {}).get("start", 0) + self.steps

  def why_failed(self) -> str:
    """Returns why it failed; '' if it did not."""
    return files.read_json(self.failure, {}).get("error", "")

  def is_done(self) -> bool:
    """Returns whether it has its last evaluation and checkpoint."""
    return folders.is_done(self.cell.folder, self.last)

  def state(self) -> str:
    """Returns 'done', 'failed', 'begun' or 'open'."""
    if self.is_done():
      return "done"
    if self.why_failed():
      return "failed"
    return "begun" if folders.steps(self.cell.folder) else "open"


def check(sweep: Sweep, data: bool = False) -> dict[str, Run]:
  """Makes every run as its own process will, and asks it what it refuses; starts nothing.

  Args:
    sweep: what `read` returns.
    data: also lets the workload look at its data, such as tasks, which need seqio.

  Returns:
    Name of a cell -> its run, in the order in which they are done.

  Raises:
    ValueError: a setting is wrong, or differs from that of a run that is there. It names the
      sweep's file and the first run that has the mistake.
  """
  gin_files.see_modules_here()
  runs: dict[str, Run] = {}
  seen: dict[tuple, int] = {}  # recipe, pattern -> steps
  patterns: dict[tuple[str, str], str | None] = {}  # recipe, text of rules -> pattern
  for cell in sweep.cells:
    bindings = [f"{name} = {value!r}" for name, value in cell.macros.items()]
    with gin_files.Config([".", gin_files.folder()], sweep.gin_files, bindings) as config:
      try:
        kind = cell.recipe, cell.pattern
        if kind not in seen:  # seeds change nothing of what is looked at here
          run = _made(config)
          _check_pattern(cell, run.model.rules, patterns)
          if data and not seen:  # all runs share them
            run.model.workload.check()
          seen[kind] = run.sparse_steps
        from nm_sparsity_jax.trainer import train

        settings = train.settings_of(config.settings("Run"))
        run_settings.refuse_changed(cell.folder, settings)
      except Exception as e:  # gin calls the code of users
        raise ValueError(f"{sweep.file}: {cell.name}: {gin_files.message(e)}") from e
    runs[cell.name] = Run(cell, seen[kind])
  return runs


def _made(config: gin_files.Config):
  """Returns the run of a configuration."""
  plan = Plan(config, [*config.errors])
  if not config.local or config.program != "train":
    plan.errors.insert(
      0,
      "gin_files: none is a run file of `nm-sparsity train`: add gin_configs/runs/local_train.gin "
      "or local_finetune.gin",
    )
  if not plan.errors:
    plan.build()
  if plan.errors:
    raise ValueError("; ".join(plan.errors))
  plan.run.check()
  return plan.run


def _check_pattern(cell: Cell, rules, patterns: dict[tuple[str, str], str | None]) -> None:
  """Raises where SPARSITY_RULES has patterns of its own, which make the sweep's idle."""
  other = patterns.setdefault((cell.recipe, rules_text.describe(rules)), cell.pattern)
  if other != cell.pattern:
    raise ValueError(
      f"it has the rules of pattern {other}, since SPARSITY_RULES names patterns of its own. Give "
      "places without one, {'ff': None}, in a gin file."
    )


def train(
  sweep: Sweep,
  runs: Mapping[str, Run],
  say: Callable[[str], object] = print,
  environment: Mapping[str, str] | None = None,
) -> tuple[int, str | None]:
  """Does the runs that are not done.

      grid = sweep.read("sweep.toml")
      failed, stopped = sweep.train(grid, sweep.check(grid))

  Args:
    sweep: what `read` returns.
    runs: what `check` returns.
    say: gets each line of progress.
    environment: the variables of the runs; those of this process if None.

  Returns:
    How many runs failed in this call; the signal that ended it, such as 'SIGTERM', or None.

  Raises:
    ValueError: another sweep works in the folder.
  """
  variables = dict(os.environ if environment is None else environment)
  # Half of what a run costs before its first step; runs that differ in the seed compile the same.
  variables.setdefault("JAX_COMPILATION_CACHE_DIR", str((sweep.out / ".xla").absolute()))

  failed = 0
  with lock.hold(sweep.out) as held, Signals() as stop:
    todo = [run for run in runs.values() if not run.is_done()]
    done = f"{len(runs) - len(todo)} of {len(runs)} runs done"
    say(f"{sweep.out}: {done}")
    for run in todo:
      name, begin = run.cell.name, time.monotonic()
      run.cell.folder.mkdir(parents=True, exist_ok=True)
      run.failure.unlink(missing_ok=True)
      start = run.cell.start
      if start is not None and not runs[start.name].is_done():
        why = f"{start.name}, which it starts from, is not done"
      else:
        say(f"  {name}: {_log(run)}")
        why = _train_one(sweep, run, variables, held, stop)
      done = f"{sum(r.is_done() for r in runs.values())} of {len(runs)} runs done"
      if stop.name is not None:
        say(f"{stop.name}: {done}; the same command continues from there")
        break
      if why:
        failed += 1
        run.failure.write_text(json.dumps({"error": why}))
      how = f"failed: {why}" if why else f"took {time.monotonic() - begin:.0f} s"
      say(f"{done}  {name} {how}")
  return failed, stop.name


def _log(run: Run) -> pathlib.Path:
  return run.cell.folder / "log.txt"


def _train_one(
  sweep: Sweep, run: Run, variables: Mapping[str, str], held: int, stop: Signals
) -> str:
  """Trains a run in a process of its own; returns why it is not done, '' where it is."""
  command = [*sweep.command(run.cell), f"--error-file={run.failure}"]
  with _log(run).open("a") as log:
    # A session of its own: ctrl-C reaches the sweep alone, which lets the run save. With the lock:
    # where the sweep is killed, no other one begins before the run that it left behind has ended.
    child = subprocess.Popen(
      [sys.executable, "-m", "nm_sparsity_jax.cli", *command],
      stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
      env=dict(variables), start_new_session=True, pass_fds=[held],
    )  # fmt: skip
    stop.relay(child)
    code = child.wait()
  if code:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return run.why_failed() or f"it was ended {how}; {_log(run)} may say more"
  return "" if run.is_done() else "it was stopped before it was done"
