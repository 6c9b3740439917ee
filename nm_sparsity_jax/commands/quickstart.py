"""From nothing to sparse, scored checkpoints in minutes: a tiny T5 on mini-GLUE, on this machine.

A dense warm-up; from its checkpoint SR-STE, MDGF-Exponential and SDGF-Stepwise at 1:8 of the
feed-forward kernels; then finalize, verify, glue score, report. Each step is a command that is
printed as you would type it, and runs as if you had. Downloads nothing.

Stopped, the same command goes on where it was. --all in the same folder adds the other recipes.

  nm-sparsity quickstart

Exit code: 0 = done, 1 = failed or stopped, 130 = interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from nm_sparsity_jax.runs import folders

RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise")
# These keep a mask. A page of the report holds eight runs, so they have one of their own.
_STATEFUL = ("one_shot", "snip", "idp")
ALL = (
  "dense", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric", "custom",
  *_STATEFUL,
)  # fmt: skip
STEPS = 200
_NOTE = "quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """How much, and where."""
  add = parser.add_argument
  add("--all", action="store_true", help=f"every recipe: {', '.join(ALL)}")
  add("--out", default="quickstart", metavar="DIR", help="gets all of it (default: quickstart)")
  add(
    "--steps", type=int, default=STEPS, metavar="N",
    help=f"of each sparse run (default: {STEPS}); the dense warm-up takes twice as many",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Types the commands."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # jax sets another one when it is imported
  begin = time.monotonic(), time.process_time()
  recipes, steps = ALL if args.all else RECIPES, args.steps
  out = os.path.expanduser(args.out).rstrip("/") or "/"
  if "://" in out:
    raise ValueError(f"--out {out}: give a folder of this machine")
  if steps < 10:
    raise ValueError(f"--steps {steps}: give 10 or more, for each phase of a recipe wants some")
  _claim(pathlib.Path(out), steps)
  print(
    f"A tiny T5 on three tasks of mini-GLUE: {2 * steps} dense steps, then {steps} with "
    f"each of {len(recipes)} recipes.\nEach command is shown as you would type it."
  )
  names = ["warmup", *recipes]
  for i, name in enumerate(names, 1):
    print(f"\n[{i}/{len(names)}] {_TELL[name]}", flush=True)
    is_first = name == "warmup"
    argv = warmup(out, steps) if is_first else finetune(out, steps, name)
    if code := _train(argv, out, name, 2 * steps if is_first else 3 * steps):
      return code

  print("\nExact zeros, and the proof")
  for name in recipes:
    if name != "dense" and (code := _prove(out, name, 3 * steps)):
      return code

  print("\nScores on the validation sets\n")
  for argv in [score(out, names), *reports(out, names)]:
    if code := _call(argv):
      return code
    print()
  _close(out, steps, args.all, begin)
  return 0


# --- the commands -------------------------------------------------------------------------------

_MODEL = ("gin_configs/models/mini.gin", "gin_configs/runs/local_adamw.gin")
_TELL = {
  "warmup": "dense warm-up: the checkpoint that all recipes start from",
  "dense": "dense: nothing is sparse, for comparison",
  "sr_ste": "SR-STE: a hard mask from the first step on",
  "mdgf_linear": "MDGF-Linear: pruned weights fade out along a line",
  "mdgf_exponential": "MDGF-Exponential: pruned weights fade out",
  "sdgf_stepwise": "SDGF-Stepwise: 7:8, 4:8, 2:8, 1:8",
  "sdgf_geometric": "SDGF-Geometric: 16:128, 8:64, 4:32, 2:16, 1:8",
  "custom": "custom: 4:8 that fades, then 1:8",
  "one_shot": "one-shot: the magnitude mask of the warm-up, frozen",
  "snip": "SNIP: the mask of largest |gradient * weight|, frozen",
  "idp": "IDP: the levels of SDGF-Stepwise, each within the one before",
}


def warmup(out: str, steps: int) -> list[str]:
  """The command of the dense run that the others start from."""
  files = ("runs/local_train.gin", "runs/local_mini.gin", "recipes/dense.gin")
  return _line(files, MODEL_DIR=f"{out}/warmup", SPARSE_STEPS=2 * steps)


def finetune(
  out: str, steps: int, recipe: str, pattern: str = "ff_1_8", name: str = ""
) -> list[str]:
  """The command of a run of a recipe."""
  files = [f"runs/{run}.gin" for run in ("local_finetune", "local_mini")]
  files += [f"recipes/{recipe}.gin", *([f"patterns/{pattern}.gin"] if recipe != "dense" else [])]
  start = 2 * steps
  macros: dict[str, Any] = {
    "MODEL_DIR": f"{out}/{name or recipe}",
    "INITIAL_CHECKPOINT_PATH": f"{out}/warmup/checkpoint_{start}",
    "PRETRAINED_STEPS": start,
    "SPARSE_STEPS": steps,
    "FINETUNE_STEPS": steps // 5,
  }
  if recipe == "custom":
    macros["RECIPE_FIELDS"] = {"path": ((0, "4:8", 1.0), (steps // 2, "1:8", 0.25))}
  return _line(files, **macros)


def _line(files: Iterable[str], **macros: Any) -> list[str]:
  names = [*_MODEL, *(f"gin_configs/{name}" for name in files)]
  steps = macros["SPARSE_STEPS"]
  macros |= {
    "EVAL_PERIOD": steps,  # at the end only
    "EVAL_STEPS": 0,  # and no loss, only scores
    "STATS_PERIOD": max(1, steps // 4),
    "METRICS_EVERY": max(1, steps // 10),
  }
  overrides = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  return ["train", *(f"--gin_file={name}" for name in names), *overrides]


def score(out: str, names: Iterable[str]) -> list[str]:
  """The command of the table."""
  return ["glue", "score", *(f"{out}/{name}" for name in names)]


def reports(out: str, names: Sequence[str]) -> list[list[str]]:
  """The commands of the pages: one, and one of the recipes that keep a mask."""
  pages = {
    "report.html": [n for n in names if n not in _STATEFUL],
    "report-masks.html": ["dense", *(n for n in names if n in _STATEFUL)],
  }
  if not set(names) & set(_STATEFUL):
    del pages["report-masks.html"]
  return [
    ["report", *(f"{out}/{n}" for n in runs), "--out", f"{out}/{page}"]
    for page, runs in pages.items()
  ]


def typed(argv: Sequence[str], width: int = 100) -> str:
  """A command as one would type it, on several lines where it is long."""
  lines = ["nm-sparsity"]
  for word in map(_quoted, argv):
    if len(lines[-1]) + len(word) + 3 > width:
      lines.append("   ")
    lines[-1] += f" {word}"
  return " \\\n".join(lines)


def _quoted(word: str) -> str:
  """For a shell; a gin string keeps its own quotes, within double ones."""
  name, equals, value = word.partition("=")
  if name.startswith("--gin.") and not re.search(r'["$`\\!]', value):
    return f"{name}={value}" if value.isalnum() else f'{name}="{value}"'
  return shlex.quote(word)


# --- the steps ----------------------------------------------------------------------------------


def _call(argv: Sequence[str]) -> int:
  """Runs a command as the command line does, and shows it."""
  from nm_sparsity_jax import cli

  print(f"$ {typed(argv)}", flush=True)
  code = cli.main(argv)
  sys.stdout.flush()
  return code


def _train(argv: Sequence[str], out: str, name: str, last: int) -> int:
  """Trains, or goes on, or finds that it has been done."""
  if folders.is_done(f"{out}/{name}", last):
    print(f"$ {typed(argv)}\n{out}/{name}: done before")
    return 0
  code = _call(argv)
  # `train` ends with 0 after SIGTERM, when it has saved.
  if code == 130 or (not code and not folders.is_done(f"{out}/{name}", last)):
    print("stopped; start the quickstart again, and it goes on from there", file=sys.stderr)
    return code or 1
  return code


def _prove(out: str, name: str, last: int) -> int:
  """Finalizes and verifies one run, and says it in a line."""
  final = f"{out}/final/{name}"
  if not os.path.isdir(f"{final}/checkpoint_{last}"):
    code, found = _asked(["finalize", f"{out}/{name}", final])
    if code:
      return code
    lost = [place["magnitude"] for place in found["places"]]
    print(f"  removed {min(lost):.0%} to {max(lost):.0%} of the sum of |w|")
  code, found = _asked(["verify", final])
  if not code:
    places = found["places"]
    patterns = ", ".join(dict.fromkeys(place["pattern"] for place in places))
    groups = sum(place["groups"] for place in places)
    print(f"  {patterns} proven: {groups:,} groups of {len(places)} kernels, none is denser")
  return code


def _asked(argv: Sequence[str]) -> tuple[int, dict[str, Any]]:
  """The exit code and the findings of a command that says much; shown without --json."""
  from nm_sparsity_jax import cli

  print(f"$ {typed(argv)}", flush=True)
  with contextlib.redirect_stdout(io.StringIO()) as told:
    code = cli.main([*argv, "--json"])
  if code and told.getvalue():
    print(told.getvalue())
  return code, json.loads(told.getvalue()) if not code else {}


def _close(out: str, steps: int, is_all: bool, begin: tuple[float, float]) -> None:
  """How long it took, and where to go from here."""
  wall, cpu = time.monotonic() - begin[0], time.process_time() - begin[1]
  print(
    f"Done in {wall // 60:.0f}:{wall % 60:02.0f} ({cpu:.0f} s of CPU time). Curves are in "
    f"{out}/report.html,\ncheckpoints with exact zeros in {out}/final. One seed, some hundred "
    "steps, 512 examples a task:\nthat shows how it works, not which recipe is best.\n\nWhat next"
  )
  harder = "mdgf_exponential_1_32"
  argv = finetune(out, steps, "mdgf_exponential", "ff_1_32", harder)
  nexts = [
    ("1:32, and its place in the table", [argv, score(out, ["mdgf_exponential", harder])]),
    ("your own checkpoint on your own data: docs/local.md; with T5X: docs/t5x.md", []),
  ]
  if not is_all:
    more = ["quickstart", "--all"]
    more += ["--out", out] * (out != "quickstart") + ["--steps", str(steps)] * (steps != STEPS)
    nexts.insert(0, ("every recipe, in the same folder", [more]))
  activate = pathlib.Path(sys.executable).with_name("activate")
  if shutil.which("nm-sparsity") is None and activate.is_file():
    print(f"\n# once in a shell, which then finds nm-sparsity\n. {os.path.relpath(activate)}")
  for what, lines in nexts:
    print("\n".join([f"\n# {what}", *map(typed, lines)]))


def _claim(folder: pathlib.Path, steps: int) -> None:
  """Makes the folder, or finds that it is of a quickstart of so many steps."""
  note = folder / _NOTE
  if note.is_file():
    before = json.loads(note.read_text()).get("steps")
    if before != steps:
      raise ValueError(
        f"--out {folder} was begun with --steps {before}, not {steps}: go on with that, or choose "
        "another --out"
      )
    return
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
      raise ValueError(f"--out {folder} holds something else: choose a new or an empty folder")
    note.write_text(json.dumps({"steps": steps}) + "\n")
  except OSError as e:
    raise ValueError(f"--out {folder} cannot be written to: {e.strerror or e}") from e
