"""Trains a grid of recipes x patterns x seeds from one small file, and makes a table and a report.

Each run is one `nm-sparsity train` in a folder of its own. Stopped or killed, the same command
goes on where it was, days later too; a run that failed is tried again. All settings are checked
before anything starts. docs/sweep.md describes the file.

  nm-sparsity sweep examples/sweep_mini_glue.toml             # in a checkout
  nm-sparsity sweep examples/sweep_mini_glue.toml --table     # of what is done, runs nothing

Exit code: 0 = done, or stopped by SIGTERM and saved; 1 = a setting is wrong or a run failed; 130 =
interrupted and saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nm_sparsity_jax.runs import lock
from nm_sparsity_jax.runs.lock import Lock
from nm_sparsity_jax.runs.signals import Relay

if TYPE_CHECKING:
  from nm_sparsity_jax.sweep import grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The file, and what is shown."""
  add = parser.add_argument
  add("file", metavar="FILE", help="a TOML file: out, gin_files, recipes, patterns, seeds, macros")
  add("--table", action="store_true", help="print the table of what is done, and run nothing")
  add("--json", action="store_true", help="print the table as JSON, every run with its scores")


def run(args: argparse.Namespace) -> int:
  """Checks, trains, prints, reports."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  environment = dict(os.environ)  # of the runs, which use the devices that there are
  os.environ["JAX_PLATFORMS"] = "cpu"
  from nm_sparsity_jax import gin_files
  from nm_sparsity_jax.sweep import grid, page, table

  sweep = grid.read(args.file)
  # Half of what a run costs before its first step; runs that differ in the seed compile the same.
  environment.setdefault("JAX_COMPILATION_CACHE_DIR", str((sweep.out / ".xla").absolute()))
  with contextlib.nullcontext() if args.debug else gin_files.quiet():
    check = grid.Check(sweep)
    if not args.table and not _all_done(sweep, check.runs):
      check.check_tasks()
  code, stopped = 0, None
  if not args.table:
    with lock.hold(sweep.out, lambda pid: _taken(sweep.out, pid)) as held, Relay() as stop:
      code = _train(sweep, check.runs, environment, held, stop)
    stopped = stop.name
  report = table.report(sweep, check.runs)
  if not args.table and not stopped and (written := page.write(sweep, check.runs, report)):
    _say(str(written))
  print(json.dumps(report, indent=2) if args.json else table.text(report))
  return code


def _all_done(sweep: grid.Sweep, known: Mapping[str, grid.Checked]) -> bool:
  from nm_sparsity_jax.sweep import grid

  return all(grid.is_done(cell, known[cell.name]) for cell in sweep.runs())


# --- running ------------------------------------------------------------------------------------


def _train(
  sweep: grid.Sweep,
  known: Mapping[str, grid.Checked],
  environment: Mapping[str, str],
  held: Lock,
  stop: Relay,
) -> int:
  """Does what is not done, one run after the other; the exit code."""
  from nm_sparsity_jax.sweep import grid

  cells = list(sweep.runs())
  done = {cell.name for cell in cells if grid.is_done(cell, known[cell.name])}
  lacking = {c.name: known[c.name].steps - grid.steps_done(c, known[c.name]) for c in cells}
  clock = _Clock({name: steps for name, steps in lacking.items() if name not in done})
  failed = 0
  _say(f"{sweep.out}: {len(done)} of {len(cells)} runs done")
  for cell in cells:
    if stop.name is not None:
      break
    if cell.name in done:
      continue
    begin = time.monotonic()
    if cell.start is not None and cell.start.name not in done:
      why = f"{cell.start.name}, which it starts from, is not done"
    else:
      _say(f"  {cell.name}: {cell.folder / 'log.txt'}")
      cell.folder.mkdir(parents=True, exist_ok=True)
      grid.evaluated_with(cell).write_text(known[cell.name].evaluation)
      why = _run(sweep.command(cell), cell, environment, held, stop)
      if why is None and not grid.is_done(cell, known[cell.name]):
        why = "it was stopped before it was done"
    if stop.name is not None:
      break
    if why is None:
      done.add(cell.name)
    else:
      failed += 1
      cell.folder.mkdir(parents=True, exist_ok=True)
      grid.failure(cell).write_text(why + "\n")
    passed = time.monotonic() - begin
    left = clock.left(cell.name, passed if why is None else None)
    words = f"done in {_time(passed)}" if why is None else f"failed: {why}"
    _say(f"{len(done)}/{len(cells)} done  {cell.name} {words}" + (f"  {left} left" if left else ""))
  if stop.name is not None:
    _say(f"{stop.name}: {len(done)} of {len(cells)} runs done; the same command goes on from there")
    return 130 if stop.name == "SIGINT" else 0
  return 1 if failed else 0


def _run(
  command: list[str], cell: grid.Cell, environment: Mapping[str, str], held: Lock, stop: Relay
) -> str | None:
  """Trains in a process of its own; None, or why it failed."""
  from nm_sparsity_jax.sweep import grid

  grid.failure(cell).unlink(missing_ok=True)
  log = cell.folder / "log.txt"
  with log.open("a") as file:
    where = file.tell()
    # A session of its own: ctrl-C reaches the sweep alone, which lets the run save. With the lock:
    # where the sweep is killed, no other one begins before the run that it left behind has ended.
    child = subprocess.Popen(
      [sys.executable, "-m", "nm_sparsity_jax.cli", *command],
      stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
      env=dict(environment), start_new_session=True, pass_fds=[held.fileno()],
    )  # fmt: skip
    held.note(child.pid)
    with stop.to(child):
      code = child.wait()
  if not code:
    return None
  with log.open(errors="replace") as file:
    file.seek(where)
    said = [line.strip() for line in file if line.startswith("nm-sparsity train: ")]
  if said:
    return said[-1].removeprefix("nm-sparsity train: ")
  how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
  return f"it was ended {how}; {log} may say more"


def _taken(out: pathlib.Path, process: str) -> str:
  """Says that another sweep works in a folder."""
  return (
    f"{out}: another sweep is at work there, or a run that one left behind (process "
    f"{process or 'not known'}). Wait until it ends, or end it; nothing is lost."
  )


class _Clock:
  """Estimates the time left from the steps that runs lack, and how long those of this call took."""

  def __init__(self, lacking: Mapping[str, int]):
    self._lacking = dict(lacking)
    self._steps, self._seconds = 0, 0.0

  def left(self, name: str, seconds: float | None) -> str:
    """After a run (None: it failed), the time that the others will take; '' if nothing tells."""
    mine = self._lacking.pop(name)
    if seconds is not None:
      self._steps += mine
      self._seconds += seconds
    steps = sum(self._lacking.values())
    return _time(self._seconds / self._steps * steps) if steps and self._steps else ""


def _time(seconds: float) -> str:
  from nm_sparsity_jax.local import reports

  return reports.clock(seconds)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
