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
import dataclasses
import os
import pathlib
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.runs import files, folders

TITLES = {
  "warmup": "dense warm-up: the checkpoint that all recipes start from",
  "dense": "dense: as many steps as each recipe has",
  "no_ff": "dense, without feed-forward layers: what they are worth",
  "sr_ste": "SR-STE: a hard mask at once",
  "mdgf_linear": "MDGF-Linear: pruned weights fade out along a line",
  "mdgf_exponential": "MDGF-Exponential: pruned weights fade out",
  "sdgf_stepwise": "SDGF-Stepwise: n falls, m stays",
  "sdgf_geometric": "SDGF-Geometric: groups shrink at equal density",
  "custom": "custom: a path of its own, which fades and then falls",
  "one_shot": "one-shot: one magnitude mask, frozen",
  "snip": "SNIP: the mask of largest |gradient * weight|, frozen",
  "idp": "IDP: the levels of SDGF-Stepwise, each within the one before",
}
RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise")  # without --all


@dataclasses.dataclass(frozen=True)
class Task:
  """What a quickstart trains.

  Attributes:
    about: the network and its data.
    steps: of a recipe's run, by default.
    dense: the names of the runs that are not sparse.
    pattern: of the sparse runs.
    files: gin files of a run; {} is `train` for the warm-up, else `finetune`.
    evaluations: how often a run is evaluated.
    is_glue: whether `glue score` compares the runs too.
  """

  about: str
  steps: int
  dense: tuple[str, ...]
  pattern: str
  files: tuple[str, ...]
  evaluations: int
  is_glue: bool

  def runs(self, is_all: bool) -> list[str]:
    """Returns the names of the runs, in their order."""
    recipes = [name for name in TITLES if name not in ("warmup", "dense", "no_ff")]
    return [*self.dense, *(recipes if is_all else RECIPES)]


TASKS = {
  "mini-glue": Task(
    about="A tiny T5 on mini-GLUE's MNLI, from a dense warm-up of 2.5 times as many steps",
    steps=240,
    dense=("warmup", "dense"),
    pattern="1:8",
    files=("models/mini_small", "runs/local_adamw", "runs/local_{}", "runs/local_mini"),
    evaluations=12,
    is_glue=True,
  ),
  "rebus": Task(
    about="A small ViT on the generated images of 'rebus', each run from scratch",
    steps=540,
    dense=("dense", "no_ff"),
    pattern="1:16",
    files=("runs/local_images", "runs/local_rebus", "runs/local_images_adamw"),
    evaluations=9,
    is_glue=False,
  ),
}


def train(task: Task, out: str, steps: int, name: str) -> tuple[list[str], int]:
  """Returns the command that trains a run, and the last step of the run.

  Args:
    task: one of `TASKS`.
    out: the folder of the quickstart.
    steps: of a recipe's run.
    name: of the run: a recipe, or one of `Task.dense`.
  """
  is_sparse, warmup = name not in task.dense, 5 * steps // 2  # which must leave something to lose
  macros: dict[str, Any] = {"RECIPE": name if is_sparse else "dense", "MODEL_DIR": f"{out}/{name}"}
  macros["SPARSE_STEPS"] = warmup if name == "warmup" else steps
  if is_sparse:
    macros |= {"PATTERN": task.pattern, "DENSE_STEPS": steps // 10}
    macros["FINETUNE_STEPS"] = steps // 2 if task.is_glue else steps // 5
  if task.is_glue:
    macros["EVAL_STEPS"] = 0  # no loss, only scores
    if name != "warmup":
      start = f"{out}/warmup/checkpoint_{warmup}"
      macros |= {"INITIAL_CHECKPOINT_PATH": start, "PRETRAINED_STEPS": warmup}
    if is_sparse:
      macros["SPARSITY_RULES"] = {"ff": None, "qkv": None}
  if name == "no_ff":
    macros |= {"MLP": 0, "SPARSITY_RULES": {"qkv": None}}
  if name == "custom":
    half, whole = ("4:8", steps // 4) if task.is_glue else ("8:16", steps // 2)
    macros["RECIPE_FIELDS"] = {"path": ((steps // 10, half, 1.0), (whole, task.pattern, 0.25))}
  period = max(1, macros["SPARSE_STEPS"] // task.evaluations)
  macros |= dict.fromkeys(("EVAL_PERIOD", "STATS_PERIOD", "METRICS_EVERY"), period)
  macros["WARMUP_STEPS"] = macros["SPARSE_STEPS"] // 10
  kind = "train" if name == "warmup" else "finetune"
  gin_files = [f"--gin_file=gin_configs/{file.format(kind)}.gin" for file in task.files]
  bindings = [f"--gin.{macro}={value!r}" for macro, value in macros.items()]
  return ["train", *gin_files, *bindings], macros.get("PRETRAINED_STEPS", 0) + macros[
    "SPARSE_STEPS"
  ]


def compare(task: Task, out: str, names: Sequence[str]) -> list[list[str]]:
  """Returns the commands that compare runs by their last checkpoints, which are proven.

  Args:
    task: one of `TASKS`.
    out: the folder of the quickstart.
    names: of the runs.
  """
  from nm_sparsity_jax import recipes  # imports jax

  last = ("--checkpoint", "last")
  found = [["glue", "score", *(f"{out}/{n}" for n in names), *last]] if task.is_glue else []
  # All of them are more than a page has colours for.
  stateful = [n for n in names if n in recipes.RECIPES and recipes.RECIPES[n].stateful]
  pages = {"report": [n for n in names if n not in stateful]}
  if stateful:
    pages["report-masks"] = ["dense", *stateful]
  for page, runs in pages.items():
    found.append(["report", *(f"{out}/{n}" for n in runs), *last, "--out", f"{out}/{page}.html"])
  return found


def typed(argv: Sequence[str]) -> str:
  """Returns a command as you would type it, on several lines where it is long.

  >>> typed(["verify", "$a b"])
  "nm-sparsity verify '$a b'"

  Args:
    argv: its words after `nm-sparsity`.
  """

  def quoted(word: str) -> str:
    # A gin string keeps its own quotes, within double ones.
    name, _, value = word.partition("=")
    if name.startswith("--gin.") and not re.search(r'["$`\\!]', value):
      return f"{name}={value}" if value.isalnum() else f'{name}="{value}"'
    return shlex.quote(word)

  lines = ["nm-sparsity"]
  for word in map(quoted, argv):
    if len(lines[-1]) + len(word) + 3 > 100:
      lines.append("   ")
    lines[-1] += f" {word}"
  return " \\\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds how much to run, and where."""
  add = parser.add_argument
  steps = ", ".join(f"{task.steps} of {name}" for name, task in TASKS.items())
  add("--all", action="store_true", help="every recipe")
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
  begin = time.monotonic()
  task, out = TASKS[args.task], args.out.rstrip("/")
  steps = task.steps if args.steps is None else args.steps
  names = task.runs(args.all)
  _check(task, pathlib.Path(out), steps)
  # What one run compiled, such as the evaluation, the next one finds.
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.abspath(f"{out}/.compiled"))
  print(f"{task.about}: {steps} steps a recipe.\nEach command is shown as you would type it.")
  for i, name in enumerate(names, 1):
    print(f"\n[{i}/{len(names)}] {TITLES[name]}", flush=True)
    argv, last = train(task, out, steps, name)
    if folders.is_done(f"{out}/{name}", last):
      print(f"$ {typed(argv)}\n{out}/{name}: done before")
      continue
    code = _call(argv)
    # `train` ends with 0 after SIGTERM, when it has saved.
    if code == 130 or (not code and not folders.is_done(f"{out}/{name}", last)):
      print("stopped; start the quickstart again, and it continues from there", file=sys.stderr)
      return code or 1
    if code:
      return code
  sparse = [name for name in names if name not in task.dense]
  print("\nExact zeros, and the proof")
  if not all([_prove(f"{out}/{name}") for name in sparse]):
    return 1
  print("\nScores on the validation set\n")
  for argv in compare(task, out, names):
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


def _check(task: Task, out: pathlib.Path, steps: int) -> None:
  # All before anything is made: what fails here leaves nothing behind.
  _flags.require("gin", "clu", "jinja2", "matplotlib", *(["seqio"] if task.is_glue else []))
  if steps < 10:
    raise ValueError(f"--steps {steps}: give 10 or more, since each phase of a recipe needs some")
  files.check_folder("--out", out)
  found = os.listdir(out) if out.is_dir() else []
  if task.dense[0] not in found and any(not file.startswith(".") for file in found):
    raise ValueError(f"--out {out} holds something else: choose a new or an empty folder")


def _call(argv: Sequence[str]) -> int:
  print(f"$ {typed(argv)}", flush=True)
  code = cli.main(argv)
  sys.stdout.flush()
  return code


def _prove(folder: str) -> bool:
  # `verify` prints a table; a line is enough where all is well.
  from nm_sparsity_jax import runs

  print(f"$ {typed(['verify', folder])}", flush=True)
  proof = runs.verify(folder)
  places = proof.report.places
  patterns = ", ".join(dict.fromkeys(str(place.pattern) for place in places))
  groups = sum(place.groups for place in places)
  proven = f"  {patterns} proven: {groups:,} groups of {len(places)} kernels, none is denser"
  print(proven if proof.ok else proof)
  return proof.ok


def _sum_up(folders_of_runs: Sequence[str]) -> None:
  from nm_sparsity_jax.analysis import run_folder
  from nm_sparsity_jax.analysis.page import Table
  from nm_sparsity_jax.analysis.report import sections

  for part in sections.summary(run_folder.read(folders_of_runs), "last"):
    if isinstance(part, Table):
      print("\n".join(["", *columns([part.head, *part.rows]), ""]))
    else:
      print(textwrap.fill(str(part), 100))
  print()
