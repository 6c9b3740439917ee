"""From nothing to sparse, scored checkpoints in minutes: a tiny T5 or a small ViT, on this machine.

A dense warm-up; from its checkpoint a dense run, and SR-STE, MDGF-Exponential and SDGF-Stepwise at
1:8 of the feed-forward and attention kernels, all of one length; then verify, glue score, report.
Each step is a command that is printed as you would type it, and runs as if you had.
Downloads nothing.

--task rebus trains a ViT on generated images instead: dense, dense without feed-forward layers, and
the same recipes at 1:16 of the feed-forward kernels, each from scratch.

Stopped, the same command goes on where it was. --all in the same folder adds the other recipes.

  nm-sparsity quickstart
  nm-sparsity quickstart --task rebus --out rebus

Exit code: 0 = done, 1 = failed or stopped, 130 = interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from nm_sparsity_jax.cli import quickstart_steps
from nm_sparsity_jax.core import text
from nm_sparsity_jax.runs import folders

_Main = Callable[[Sequence[str]], int]  # words after `nm-sparsity` -> exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds how much to run, and where."""
  add = parser.add_argument
  told = ", ".join(f"{task.steps} of {name}" for name, task in quickstart_steps.TASKS.items())
  add("--all", action="store_true", help=f"every recipe: {', '.join(quickstart_steps.ALL)}")
  add("--out", default="quickstart", metavar="DIR", help="gets all of it (default: quickstart)")
  add(
    "--steps", type=int, metavar="N",
    help=f"of each recipe's run (default: {told}); the dense warm-up of mini-glue has more",
  )  # fmt: skip
  add(
    "--task", choices=list(quickstart_steps.TASKS), default=quickstart_steps.DEFAULT,
    help="text, or generated images (default: %(default)s)",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Types the commands, and has `args.main` run each as the command line does."""
  call: _Main = args.main
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # jax sets another one when it is imported
  begin = time.monotonic(), time.process_time()
  task = quickstart_steps.TASKS[args.task]
  steps = task.steps if args.steps is None else args.steps
  out = os.path.expanduser(args.out).rstrip("/") or "/"
  if "://" in out:
    raise ValueError(f"--out {out}: give a folder of this machine")
  if steps < 10:
    raise ValueError(f"--steps {steps}: give 10 or more, since each phase of a recipe needs some")
  quickstart_steps.claim(pathlib.Path(out), steps, args.task)
  # What one run compiled, such as the evaluation, the next one finds.
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.abspath(f"{out}/.compiled"))
  print(f"{task.opening(steps, args.all)}\nEach command is shown as you would type it.")
  names = task.runs(args.all)
  for i, name in enumerate(names, 1):
    print(f"\n[{i}/{len(names)}] {task.titles[name]}", flush=True)
    argv, last = task.train(out, steps, name), task.last(steps, name)
    if code := _train(call, argv, f"{out}/{name}", last):
      return code

  print("\nExact zeros, and the proof")
  for name in task.proven(names):
    if code := _prove(call, f"{out}/{name}"):
      return code

  print("\nScores on the validation set\n")
  for argv in task.compared(out, names):
    if code := _call(call, argv):
      return code
    print()
  for runs in quickstart_steps.pages(names).values():
    _sum_up(out, runs)
  _close(args, out, steps, begin)
  return 0


# --- the steps ----------------------------------------------------------------------------------


def _call(main: _Main, argv: Sequence[str]) -> int:
  """Shows a command, and runs it."""
  print(f"$ {quickstart_steps.typed(argv)}", flush=True)
  code = main(argv)
  sys.stdout.flush()
  return code


def _train(main: _Main, argv: Sequence[str], folder: str, last: int) -> int:
  """Trains, or goes on, or finds that it has been done."""
  if folders.is_done(folder, last):
    print(f"$ {quickstart_steps.typed(argv)}\n{folder}: done before")
    return 0
  code = _call(main, argv)
  # `train` ends with 0 after SIGTERM, when it has saved.
  if code == 130 or (not code and not folders.is_done(folder, last)):
    print("stopped; start the quickstart again, and it continues from there", file=sys.stderr)
    return code or 1
  return code


def _prove(main: _Main, folder: str) -> int:
  """Verifies one run, and says it in a line."""
  code, found = _asked(main, ["verify", folder])
  if not code:
    places = found["places"]
    patterns = ", ".join(dict.fromkeys(place["pattern"] for place in places))
    groups = sum(place["groups"] for place in places)
    print(f"  {patterns} proven: {groups:,} groups of {len(places)} kernels, none is denser")
  return code


def _asked(main: _Main, argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
  """Returns the exit code and the findings of a command that says much; shows it without --json."""
  print(f"$ {quickstart_steps.typed(argv)}", flush=True)
  with contextlib.redirect_stdout(io.StringIO()) as told:
    code = main([*argv, "--json"])
  if code and told.getvalue():
    print(told.getvalue())
  return code, json.loads(told.getvalue()) if not code else {}


def _sum_up(out: str, names: Sequence[str]) -> None:
  """Prints the summary of a page."""
  from nm_sparsity_jax.analysis.page import Table
  from nm_sparsity_jax.analysis.report import reading, summary

  runs = reading.read([f"{out}/{name}" for name in names])
  for part in summary.summary(runs, "last"):
    if isinstance(part, Table):
      rows = [[getattr(cell, "text", cell) for cell in row] for row in [part.head, *part.rows]]
      print("\n".join(["", *text.columns(rows, align="<><>"), ""]))
    else:
      print(textwrap.fill(str(part), 100))
  print()


def _close(args: argparse.Namespace, out: str, steps: int, begin: tuple[float, float]) -> None:
  """Says how long it took, and where to go from here."""
  task = quickstart_steps.TASKS[args.task]
  wall, cpu = time.monotonic() - begin[0], time.process_time() - begin[1]
  print(
    f"Done in {wall // 60:.0f}:{wall % 60:02.0f} ({cpu:.0f} s of CPU time). Curves are in "
    f"{out}/report.html.\n\nWhat next"
  )
  final = task.proven(task.runs(args.all))[-1]
  nexts = [
    task.harder(out, steps),
    ("a file without the zeros: docs/deploy.md", [quickstart_steps.packed(out, final)]),
    ("your own checkpoint on your own data: docs/local.md; with T5X: docs/t5x.md", []),
  ]
  if not args.all:
    more = ["quickstart", "--all"]
    more += ["--task", args.task] * (args.task != quickstart_steps.DEFAULT)
    more += ["--out", out] * (out != "quickstart") + ["--steps", str(steps)] * (steps != task.steps)
    nexts.insert(0, ("every recipe, in the same folder", [more]))
  activate = pathlib.Path(sys.executable).with_name("activate")
  if shutil.which("nm-sparsity") is None and activate.is_file():
    print(f"\n# once in a shell, which then finds nm-sparsity\n. {os.path.relpath(activate)}")
  for what, lines in nexts:
    print("\n".join([f"\n# {what}", *map(quickstart_steps.typed, lines)]))
