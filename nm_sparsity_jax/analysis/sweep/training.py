"""A sweep's runs, one after the other, each a process of its own.

    Checked -> for each run that is not done: nm-sparsity train -> its folder, its log
            -> a line on what is done, and the time left

A run that fails takes no other along. A signal lets the run save, and then the sweep ends; the same
call goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from nm_sparsity_jax.analysis.sweep.checks import Checked, Run
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.runs import lock
from nm_sparsity_jax.runs.signals import Relay


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a call of `train` ended.

  Attributes:
    done: how many runs are done, those of earlier calls too.
    failed: how many runs failed in this call.
    stopped: the signal that ended it, such as 'SIGTERM'; None where nothing did.
  """

  done: int
  failed: int
  stopped: str | None


def train(
  sweep: Sweep,
  checked: Checked,
  say: Callable[[str], object] = print,
  environment: Mapping[str, str] | None = None,
) -> Outcome:
  """Does the runs that are not done.

      grid = sweep.read("sweep.toml")
      outcome = sweep.train(grid, sweep.check(grid))

  Args:
    sweep: what `read` returns.
    checked: what `check` returns.
    say: gets each line of progress.
    environment: the variables of the runs; those of this process if None.

  Raises:
    ValueError: another sweep works in the folder.
  """
  variables = dict(os.environ if environment is None else environment)
  # Half of what a run costs before its first step; runs that differ in the seed compile the same.
  variables.setdefault("JAX_COMPILATION_CACHE_DIR", str((sweep.out / ".xla").absolute()))

  def is_taken(process: str) -> str:
    return (
      f"{sweep.out}: another sweep is at work there, or a run that one left behind (process "
      f"{process or 'not known'}). Wait until it ends, or end it; nothing is lost."
    )

  with lock.hold(sweep.out, is_taken) as held, Relay() as stop:
    return _train_all(sweep, checked, say, variables, held, stop)


def _train_all(
  sweep: Sweep,
  checked: Checked,
  say: Callable[[str], object],
  variables: Mapping[str, str],
  held: lock.Lock,
  stop: Relay,
) -> Outcome:
  of = len(checked.runs)
  lacking = {n: r.steps - r.steps_done() for n, r in checked.runs.items() if not r.is_done()}
  done, failed = of - len(lacking), 0
  steps, seconds = 0, 0.0  # of the runs of this call, which tell the time left
  say(f"{sweep.out}: {done} of {of} runs done")
  for name in list(lacking):
    run, begin = checked.runs[name], time.monotonic()
    why = _train_one(sweep, run, checked, say, variables, held, stop)
    if stop.name is not None:
      say(f"{stop.name}: {done} of {of} runs done; the same command continues from there")
      break
    mine, passed = lacking.pop(name), time.monotonic() - begin
    if why:
      failed += 1
      run.failure.write_text(json.dumps({"error": why}))
      how = f"failed: {why}"
    else:
      done, steps, seconds = done + 1, steps + mine, seconds + passed
      how = f"done in {_clock(passed)}"
    left = steps and sum(lacking.values()) * seconds / steps
    say(f"{done}/{of} done  {name} {how}" + (f"  {_clock(left)} left" if left else ""))
  return Outcome(done, failed, stop.name)


def _train_one(
  sweep: Sweep,
  run: Run,
  checked: Checked,
  say: Callable[[str], object],
  variables: Mapping[str, str],
  held: lock.Lock,
  stop: Relay,
) -> str:
  """Trains a run in a process of its own; returns why it is not done, '' where it is."""
  run.cell.folder.mkdir(parents=True, exist_ok=True)
  run.failure.unlink(missing_ok=True)
  start = run.cell.start
  if start is not None and not checked.runs[start.name].is_done():
    return f"{start.name}, which it starts from, is not done"
  say(f"  {run.cell.name}: {run.log}")
  run.evaluated_with.write_text(run.evaluation)
  command = [*sweep.command(run.cell), f"--error-file={run.failure}"]
  with run.log.open("a") as log:
    # A session of its own: ctrl-C reaches the sweep alone, which lets the run save. With the lock:
    # where the sweep is killed, no other one begins before the run that it left behind has ended.
    child = subprocess.Popen(
      [sys.executable, "-m", "nm_sparsity_jax.cli", *command],
      stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
      env=dict(variables), start_new_session=True, pass_fds=[held.fileno()],
    )  # fmt: skip
    held.note(child.pid)
    with stop.to(child):
      code = child.wait()
  if code:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return run.why_failed() or f"it was ended {how}; {run.log} may say more"
  return "" if run.is_done() else "it was stopped before it was done"


def _clock(seconds: float) -> str:
  from nm_sparsity_jax.trainer import reports

  return reports.clock(seconds)
