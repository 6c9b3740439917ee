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
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Sequence

from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.cli.quickstart_steps import ALL, TASKS, TITLES, Task, typed
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.runs import files, folders


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds how much to run, and where."""
  add = parser.add_argument
  steps = ", ".join(f"{task.steps} of {name}" for name, task in TASKS.items())
  add("--all", action="store_true", help=f"every recipe: {', '.join(ALL)}")
  add("--out", default="quickstart", metavar="DIR", help="gets all of it (default: quickstart)")
  add(
    "--steps", type=int, metavar="N",
    help=f"of each recipe's run (default: {steps}); the dense warm-up of mini-glue has more",
  )  # fmt: skip
  add(
    "--task", choices=list(TASKS), default="mini-glue",
    help="text, or generated images (default: %(default)s)",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Types the commands, and runs each as the command line does."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # jax sets another one when it is imported
  begin = time.monotonic()
  task, out = TASKS[args.task], args.out.rstrip("/")
  steps = task.steps if args.steps is None else args.steps
  names = task.runs(args.all)
  _check(args.task, pathlib.Path(out), steps)
  # What one run compiled, such as the evaluation, the next one finds.
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.abspath(f"{out}/.compiled"))
  print(f"{task.about}: {steps} steps a recipe.\nEach command is shown as you would type it.")
  for i, name in enumerate(names, 1):
    print(f"\n[{i}/{len(names)}] {TITLES[name]}", flush=True)
    if code := _train(task, out, steps, name):
      return code
  sparse = [name for name in names if name not in task.dense]
  print("\nExact zeros, and the proof")
  for name in sparse:
    if code := _prove(f"{out}/{name}"):
      return code
  print("\nScores on the validation set\n")
  for argv in task.compared(out, names):
    if code := _call(argv):
      return code
    print()
  _sum_up([f"{out}/{name}" for name in names])
  seconds = time.monotonic() - begin
  print(f"Done in {seconds // 60:.0f}:{seconds % 60:02.0f}. Curves are in {out}/report.html.")
  every = ["quickstart", "--all", "--task", args.task, "--out", out, "--steps", str(steps)]
  pack = ["pack", f"{out}/{sparse[-1]}", f"{out}/model.safetensors"]
  print(f"\nWhat next\n\n# every recipe, in the same folder\n{typed(every)}")
  print(f"\n# a file without the zeros: docs/deploy.md\n{typed(pack)}")
  print("\n# your own checkpoint on your own data: docs/local.md; with T5X: docs/t5x.md")
  return 0


def _check(name: str, out: pathlib.Path, steps: int) -> None:
  # All before anything is made: what fails here leaves nothing behind.
  _flags.require("gin", "clu", "jinja2", "matplotlib", *(["seqio"] if name == "mini-glue" else []))
  if steps < 10:
    raise ValueError(f"--steps {steps}: give 10 or more, since each phase of a recipe needs some")
  files.check_folder("--out", out)
  first, found = TASKS[name].dense[0], os.listdir(out) if out.is_dir() else []
  if first not in found and any(not file.startswith(".") for file in found):
    raise ValueError(f"--out {out} holds something else: choose a new or an empty folder")


def _call(argv: Sequence[str]) -> int:
  print(f"$ {typed(argv)}", flush=True)
  code = cli.main(argv)
  sys.stdout.flush()
  return code


def _train(task: Task, out: str, steps: int, name: str) -> int:
  argv, last = task.train(out, steps, name), task.last(steps, name)
  folder = f"{out}/{name}"
  if folders.is_done(folder, last):
    print(f"$ {typed(argv)}\n{folder}: done before")
    return 0
  code = _call(argv)
  # `train` ends with 0 after SIGTERM, when it has saved.
  if code == 130 or (not code and not folders.is_done(folder, last)):
    print("stopped; start the quickstart again, and it continues from there", file=sys.stderr)
    return code or 1
  return code


def _prove(folder: str) -> int:
  # `verify` prints a table; a line is enough where all is well.
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.runs import orbax

  print(f"$ {typed(['verify', folder])}", flush=True)
  with orbax.quiet():
    proof = runs.verify(folder)
  if not proof.ok:
    print(proof)
    return 1
  places = proof.report.places
  patterns = ", ".join(dict.fromkeys(str(place.pattern) for place in places))
  groups = sum(place.groups for place in places)
  print(f"  {patterns} proven: {groups:,} groups of {len(places)} kernels, none is denser")
  return 0


def _sum_up(folders_of_runs: Sequence[str]) -> None:
  from nm_sparsity_jax.analysis.page import Table
  from nm_sparsity_jax.analysis.report import reading, scored

  for part in scored.summary(reading.read(folders_of_runs), "last"):
    if isinstance(part, Table):
      rows = [[getattr(cell, "text", cell) for cell in row] for row in [part.head, *part.rows]]
      print("\n".join(["", *columns(rows, align="<><>"), ""]))
    else:
      print(textwrap.fill(str(part), 100))
  print()
