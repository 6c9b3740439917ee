"""Does a sweep's runs, one after the other.

    Sweep -> [train]  for each run that is not done: nm-sparsity train -> its folder, its log

Each run is a process of its own, so one that fails takes no other along. A signal lets the run
save, and then the sweep ends; the same call goes on from there.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from nm_sparsity_jax.analysis.sweep.grid import Run, Sweep
from nm_sparsity_jax.runs import files, lock
from nm_sparsity_jax.runs.signals import Signals
from nm_sparsity_jax.trainer.reports import say


def train(sweep: Sweep, environment: Mapping[str, str] | None = None) -> tuple[int, str | None]:
  """Does the runs that are not done; says on stderr how far it is.

      failed, stopped = sweep.train(sweep.read("sweep.toml"))

  Args:
    sweep: what `read` returns.
    environment: the variables of the runs; those of this process if None.

  Returns:
    How many runs failed in this call; the signal that ended it, such as 'SIGTERM', or None.

  Raises:
    ValueError: another sweep works in the folder.
  """
  variables = dict(os.environ if environment is None else environment)
  # Half of what a run costs before its first step; runs that differ in the seed compile the same.
  variables.setdefault("JAX_COMPILATION_CACHE_DIR", str((sweep.out / ".xla").absolute()))
  count = lambda: f"{sum(run.is_done() for run in sweep.runs)} of {len(sweep.runs)} runs done"
  failed = 0
  with lock.hold(sweep.out) as held, Signals() as stop:
    say(f"{sweep.out}: {count()}")
    for run in sweep.runs:
      if run.is_done():  # by an earlier call
        continue
      begin = time.monotonic()
      run.folder.mkdir(parents=True, exist_ok=True)
      run.failure.unlink(missing_ok=True)
      if run.start is not None and not run.start.is_done():
        why = f"{run.start.name}, which it starts from, is not done"
      else:
        say(f"  {run.name}: {run.folder / 'log.txt'}")
        why = _train_one(sweep, run, variables, held, stop)
      if stop.name is not None:
        say(f"{stop.name}: {count()}; the same command continues from there")
        break
      if why:
        failed += 1
        files.write_json(run.failure, {"error": why})
      how = f"failed: {why}" if why else f"took {time.monotonic() - begin:.0f} s"
      say(f"{count()}  {run.name} {how}")
  return failed, stop.name


def _train_one(
  sweep: Sweep, run: Run, variables: Mapping[str, str], held: int, stop: Signals
) -> str:
  """Trains a run in a process of its own; returns why it is not done, '' where it is."""
  command = [*sweep.command(run), f"--error-file={run.failure}"]
  with (run.folder / "log.txt").open("a") as log:
    print("$ nm-sparsity", shlex.join(sweep.command(run)), file=log, flush=True)
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
    return run.why_failed() or f"it was ended {how}; {log.name} may say more"
  return "" if run.is_done() else "it was stopped before it was done"
