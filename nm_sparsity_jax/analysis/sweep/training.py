"""A sweep's runs, one after the other, each a process of its own.

    Checked -> for each run that is not done: nm-sparsity train -> its folder, its log
            -> a line on what is done, and the time left

A run that fails takes no other along. A signal lets the run save, and then the sweep ends; the same
call goes on from there.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from nm_sparsity_jax.analysis.sweep.checks import Checked
from nm_sparsity_jax.analysis.sweep.grid import Sweep
from nm_sparsity_jax.analysis.sweep.states import Run
from nm_sparsity_jax.runs import lock
from nm_sparsity_jax.runs.signals import Relay

_PROGRAM = "nm-sparsity train: "  # what its errors begin with


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
  with lock.hold(sweep.out, lambda pid: _taken(sweep.out, pid)) as held, Relay() as stop:
    return _all(sweep, checked, say, _Process(sweep, variables, held, stop))


def _taken(out: pathlib.Path, process: str) -> str:
  """Says that another sweep works in a folder."""
  return (
    f"{out}: another sweep is at work there, or a run that one left behind (process "
    f"{process or 'not known'}). Wait until it ends, or end it; nothing is lost."
  )


def _all(
  sweep: Sweep, checked: Checked, say: Callable[[str], object], process: _Process
) -> Outcome:
  """Does one run after the other, and prints the progress."""
  of = len(checked.runs)
  done = {name for name, run in checked.runs.items() if run.is_done()}
  left = {name: run.steps - run.steps_done() for name, run in checked.runs.items()}
  clock = Clock({name: steps for name, steps in left.items() if name not in done})
  failed, stop = 0, process.stop
  say(f"{sweep.out}: {len(done)} of {of} runs done")
  for name, run in checked.runs.items():
    if stop.name is not None:
      break
    if name in done:
      continue
    begin = time.monotonic()
    why = _why_not(run, done, say, process)
    if stop.name is not None:
      break
    passed = time.monotonic() - begin
    if why is None:
      done.add(name)
      words = f"done in {_time(passed)}"
    else:
      failed += 1
      run.cell.folder.mkdir(parents=True, exist_ok=True)
      run.failure.write_text(why + "\n")
      words = f"failed: {why}"
    rest = clock.left(name, passed if why is None else None)
    say(f"{len(done)}/{of} done  {name} {words}" + (f"  {rest} left" if rest else ""))
  if stop.name is not None:
    say(f"{stop.name}: {len(done)} of {of} runs done; the same command continues from there")
  return Outcome(len(done), failed, stop.name)


def _why_not(
  run: Run, done: set[str], say: Callable[[str], object], process: _Process
) -> str | None:
  """Trains a run; returns why it is not done, None where it is."""
  start = run.cell.start
  if start is not None and start.name not in done:
    return f"{start.name}, which it starts from, is not done"
  say(f"  {run.cell.name}: {run.log}")
  run.cell.folder.mkdir(parents=True, exist_ok=True)
  run.evaluated_with.write_text(run.evaluation)
  why = process(run)
  if why is None and not run.is_done():
    return "it was stopped before it was done"
  return why


@dataclasses.dataclass(frozen=True)
class _Process:
  """Trains a run in a process of its own.

  Attributes:
    sweep: whose runs.
    environment: their variables.
    held: the lock of the sweep's folder.
    stop: what passes signals on to them.
  """

  sweep: Sweep
  environment: Mapping[str, str]
  held: lock.Lock
  stop: Relay

  def __call__(self, run: Run) -> str | None:
    """Returns None, or why it failed."""
    run.failure.unlink(missing_ok=True)
    with run.log.open("a") as file:
      where = file.tell()
      # A session of its own: ctrl-C reaches the sweep alone, which lets the run save. With the
      # lock: where the sweep is killed, no other one begins before the run that it left behind
      # has ended.
      child = subprocess.Popen(
        [sys.executable, "-m", "nm_sparsity_jax.cli", *self.sweep.command(run.cell)],
        stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        env=dict(self.environment), start_new_session=True, pass_fds=[self.held.fileno()],
      )  # fmt: skip
      self.held.note(child.pid)
      with self.stop.to(child):
        code = child.wait()
    return _why(code, run.log, where) if code else None


def _why(code: int, log: pathlib.Path, where: int) -> str:
  """Says why a process failed.

  Args:
    code: its exit code; below 0 the signal that ended it.
    log: what it printed.
    where: the position in the log at which it began.
  """
  with log.open(errors="replace") as file:
    file.seek(where)
    said = [line.strip() for line in file if line.startswith(_PROGRAM)]
  if said:
    return said[-1].removeprefix(_PROGRAM)
  how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
  return f"it was ended {how}; {log} may say more"


class Clock:
  """Estimates the time left from the steps that runs lack, and how long those of this call took.

  Args:
    lacking: name of a run -> the steps that it lacks.
  """

  def __init__(self, lacking: Mapping[str, int]):
    self._lacking = dict(lacking)
    self._steps, self._seconds = 0, 0.0

  def left(self, name: str, seconds: float | None) -> str:
    """Returns, after a run, the time that the others will take; '' if nothing tells.

    Args:
      name: of the run that has ended.
      seconds: how long it took; None if it failed.
    """
    mine = self._lacking.pop(name)
    if seconds is not None:
      self._steps += mine
      self._seconds += seconds
    steps = sum(self._lacking.values())
    return _time(self._seconds / self._steps * steps) if steps and self._steps else ""


def _time(seconds: float) -> str:
  """Returns a time as the local runner shows it."""
  from nm_sparsity_jax.trainer import reports

  return reports.clock(seconds)
