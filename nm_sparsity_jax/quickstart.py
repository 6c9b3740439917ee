"""The quickstart's runs and commands as data: nothing here runs one.

    recipe -> [warmup, finetune, score, reports] -> words of a command -> [typed] -> a shell's line

`nm-sparsity quickstart` runs them in this order: the dense warm-up, a run for each recipe from its
checkpoint, scores, pages. One of these is dense too, so what is lost is compared at equal length.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

RECIPES = ("dense", "sr_ste", "mdgf_exponential", "sdgf_stepwise")
# These keep a mask. All runs are more than `report.charts.MAX_RUNS`, so they have their own page.
STATEFUL = ("one_shot", "snip", "idp")
ALL = (
  "dense", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric", "custom",
  *STATEFUL,
)  # fmt: skip
STEPS = 240
_EVALUATIONS = 12  # of each recipe's run; half as many of the warm-up
_LAST = ("--checkpoint", "last")  # what is finalized; the best one would flatter
_NOTE = "quickstart.json"

_MODEL = ("gin_configs/models/mini_small.gin", "gin_configs/runs/local_adamw.gin")
_PATTERN = "patterns/ff_qkv_1_8.gin"
TITLES = {
  "warmup": "dense warm-up: the checkpoint that all recipes start from",
  "dense": "dense: as many steps more, to compare with",
  "sr_ste": "SR-STE: a hard mask at once",
  "mdgf_linear": "MDGF-Linear: pruned weights fade out along a line",
  "mdgf_exponential": "MDGF-Exponential: pruned weights fade out",
  "sdgf_stepwise": "SDGF-Stepwise: 7:8, 4:8, 2:8, 1:8",
  "sdgf_geometric": "SDGF-Geometric: 16:128, 8:64, 4:32, 2:16, 1:8",
  "custom": "custom: 4:8 that fades, then 1:8",
  "one_shot": "one-shot: one magnitude mask, frozen",
  "snip": "SNIP: the mask of largest |gradient * weight|, frozen",
  "idp": "IDP: the levels of SDGF-Stepwise, each within the one before",
}


def warmup(out: str, steps: int) -> list[str]:
  """Returns the command of the dense run that the others start from.

  Args:
    out: the folder of the quickstart.
    steps: of a recipe's run; this one has `start(steps)`.
  """
  files = ("runs/local_train.gin", "runs/local_mini.gin", "recipes/dense.gin")
  period = 2 * start(steps) // _EVALUATIONS
  return _line(files, period, MODEL_DIR=f"{out}/warmup", SPARSE_STEPS=start(steps))


def start(steps: int) -> int:
  """Returns the steps of the warm-up: the dense network must have something to lose.

  Args:
    steps: of a recipe's run.
  """
  return 5 * steps // 2


def finetune(out: str, steps: int, recipe: str, pattern: str = "", name: str = "") -> list[str]:
  """Returns the command of a run of a recipe.

  Args:
    out: the folder of the quickstart.
    steps: how many the run has.
    recipe: its name.
    pattern: another one than 1:8.
    name: of the run's folder; the recipe's if it is "".
  """
  files = [f"runs/{run}.gin" for run in ("local_finetune", "local_mini")]
  files += [f"recipes/{recipe}.gin", *([_PATTERN] if recipe != "dense" else [])]
  macros: dict[str, Any] = {
    "MODEL_DIR": f"{out}/{name or recipe}",
    "INITIAL_CHECKPOINT_PATH": f"{out}/warmup/checkpoint_{start(steps)}",
    "PRETRAINED_STEPS": start(steps),
    "SPARSE_STEPS": steps,
    "DENSE_STEPS": steps // 10,
    "FINETUNE_STEPS": steps // 2,
  }
  if pattern:
    macros["PATTERN"] = pattern
  if recipe == "custom":
    macros["RECIPE_FIELDS"] = {"path": ((steps // 10, "4:8", 1.0), (steps // 4, "1:8", 0.25))}
  return _line(files, steps // _EVALUATIONS, **macros)


def _line(files: Iterable[str], period: int, **macros: Any) -> list[str]:
  """Returns a command of `train`: gin files of gin_configs/, steps of each period, and macros."""
  names = [*_MODEL, *(f"gin_configs/{name}" for name in files)]
  periods = ("EVAL_PERIOD", "STATS_PERIOD", "METRICS_EVERY")
  macros |= dict.fromkeys(periods, max(1, period)) | {"EVAL_STEPS": 0}  # no loss, only scores
  overrides = [f"--gin.{name}={value!r}" for name, value in macros.items()]
  return ["train", *(f"--gin_file={name}" for name in names), *overrides]


def score(out: str, names: Iterable[str]) -> list[str]:
  """Returns the command of the table of last scores of the named runs."""
  return ["glue", "score", *(f"{out}/{name}" for name in names), *_LAST]


def pages(names: Sequence[str]) -> dict[str, list[str]]:
  """Returns which runs each page shows; those of the recipes that keep a mask have their own."""
  found = {
    "report.html": [n for n in names if n not in STATEFUL],
    "report-masks.html": ["dense", *(n for n in names if n in STATEFUL)],
  }
  if not set(names) & set(STATEFUL):
    del found["report-masks.html"]
  return found


def reports(out: str, names: Sequence[str]) -> list[list[str]]:
  """Returns the commands of the pages of the named runs."""
  return [
    ["report", *(f"{out}/{n}" for n in runs), *_LAST, "--out", f"{out}/{page}"]
    for page, runs in pages(names).items()
  ]


def typed(argv: Sequence[str], width: int = 100) -> str:
  """Returns a command as you would type it, on several lines where it is long.

  >>> typed(["verify", "$a b"])
  "nm-sparsity verify '$a b'"

  Args:
    argv: its words after `nm-sparsity`.
    width: of a line.
  """
  lines = ["nm-sparsity"]
  for word in map(_quoted, argv):
    if len(lines[-1]) + len(word) + 3 > width:
      lines.append("   ")
    lines[-1] += f" {word}"
  return " \\\n".join(lines)


def _quoted(word: str) -> str:
  """Quotes a word for a shell; a gin string keeps its own quotes, within double ones."""
  name, equals, value = word.partition("=")
  if name.startswith("--gin.") and not re.search(r'["$`\\!]', value):
    return f"{name}={value}" if value.isalnum() else f'{name}="{value}"'
  return shlex.quote(word)


def claim(folder: pathlib.Path, steps: int) -> None:
  """Makes the folder of a quickstart, or finds one with the same steps.

  Args:
    folder: where all runs go.
    steps: of a sparse run.

  Raises:
    ValueError: it holds something else, or cannot be written to.
  """
  note = folder / _NOTE
  if note.is_file():
    before = json.loads(note.read_text()).get("steps")
    if before != steps:
      raise ValueError(
        f"--out {folder} was begun with --steps {before}, not {steps}: use {before}, or choose "
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
