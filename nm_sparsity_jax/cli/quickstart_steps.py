"""The quickstart's runs and commands as data: nothing here runs one.

    Task -> [train, compared] -> words of a command -> [typed] -> a shell's line

`nm-sparsity quickstart` runs what a task says, in this order: its runs, the proofs, scores, pages.
There are two tasks. `MiniGlue` trains a dense warm-up, and each recipe from its checkpoint. `Rebus`
trains each recipe from scratch, and a network without feed-forward layers. One run of each is dense
and as long as the others, so what is lost is compared at equal length.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RECIPES = ("dense", "sr_ste", "mdgf_exponential", "sdgf_stepwise")
# These keep a mask. All runs are more than `charts.MAX_RUNS`, so they have their own page.
STATEFUL = ("one_shot", "snip", "idp")
ALL = (
  "dense", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric", "custom",
  *STATEFUL,
)  # fmt: skip
STEPS = 240
_EVALUATIONS = 12  # of each recipe's run; half as many of the warm-up
_LAST = ("--checkpoint", "last")  # what is proven; the best one would flatter
_NOTE = "quickstart.json"

_PERIODS = ("EVAL_PERIOD", "STATS_PERIOD", "METRICS_EVERY")
_MODEL = ("models/mini_small.gin", "runs/local_adamw.gin")
_PATTERN = {"SPARSITY_RULES": {"ff": None, "qkv": None}, "PATTERN": "1:8"}
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
  files = ("runs/local_train.gin", "runs/local_mini.gin")
  length = start(steps)
  period = 2 * length // _EVALUATIONS
  macros = {
    "RECIPE": "dense",
    "MODEL_DIR": f"{out}/warmup",
    "SPARSE_STEPS": length,
    "WARMUP_STEPS": length // 10,
  }
  return _line(files, period, **macros)


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
  macros: dict[str, Any] = {
    "RECIPE": recipe,
    **(_PATTERN if recipe != "dense" else {}),
    "MODEL_DIR": f"{out}/{name or recipe}",
    "INITIAL_CHECKPOINT_PATH": f"{out}/warmup/checkpoint_{start(steps)}",
    "PRETRAINED_STEPS": start(steps),
    "SPARSE_STEPS": steps,
    "WARMUP_STEPS": steps // 10,
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
  macros |= dict.fromkeys(_PERIODS, max(1, period)) | {"EVAL_STEPS": 0}  # no loss, only scores
  return _command([*_MODEL, *files], macros)


def _command(files: Iterable[str], macros: Mapping[str, Any]) -> list[str]:
  """Returns a command of `train`: gin files of gin_configs/, and macros."""
  names = [f"gin_configs/{name}" for name in files]
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


# --- tasks --------------------------------------------------------------------------------------


class Task:
  """What a quickstart trains, proves and compares.

  Attributes:
    steps: of a recipe's run, where nobody says another number.
    titles: name of a run -> what it is.
  """

  steps: int = STEPS
  titles: Mapping[str, str] = TITLES

  def runs(self, is_all: bool) -> list[str]:
    """Returns the names of the runs, in their order."""
    raise NotImplementedError

  def opening(self, steps: int, is_all: bool) -> str:
    """Returns what is said first."""
    raise NotImplementedError

  def train(self, out: str, steps: int, name: str) -> list[str]:
    """Returns the command of a run."""
    raise NotImplementedError

  def last(self, steps: int, name: str) -> int:
    """Returns the last step of a run."""
    raise NotImplementedError

  def proven(self, names: Iterable[str]) -> list[str]:
    """Returns which runs are sparse."""
    raise NotImplementedError

  def compared(self, out: str, names: Sequence[str]) -> list[list[str]]:
    """Returns the commands that compare the runs."""
    return reports(out, names)

  def harder(self, out: str, steps: int) -> tuple[str, list[list[str]]]:
    """Returns what to try next: its title and commands."""
    raise NotImplementedError


class MiniGlue(Task):
  """A tiny T5 on MNLI of mini-GLUE."""

  def runs(self, is_all):
    """Returns the warm-up and the recipes."""
    return ["warmup", *(ALL if is_all else RECIPES)]

  def opening(self, steps, is_all):
    """Returns how much is trained."""
    recipes = len(self.runs(is_all)) - 1
    return (
      f"A tiny T5 on mini-GLUE's MNLI: {start(steps)} dense steps, then {steps} with each of "
      f"{recipes} recipes."
    )

  def train(self, out, steps, name):
    """Returns the command of the warm-up, or of a recipe's run."""
    return warmup(out, steps) if name == "warmup" else finetune(out, steps, name)

  def last(self, steps, name):
    """Returns the step of the warm-up's checkpoint, or of the last one of a recipe's run."""
    return start(steps) + (0 if name == "warmup" else steps)

  def proven(self, names):
    """Returns all but the dense ones."""
    return [name for name in names if name not in ("warmup", "dense")]

  def compared(self, out, names):
    """Returns the table of scores, and the pages."""
    return [score(out, names), *reports(out, names)]

  def harder(self, out, steps):
    """Returns a sparser run, and its row."""
    name = "mdgf_exponential_1_32"
    argv = finetune(out, steps, "mdgf_exponential", "1:32", name)
    return "1:32, and its place in the table", [argv, score(out, ["mdgf_exponential", name])]


class Rebus(Task):
  """A small ViT on the generated images of 'rebus', at 1:16."""

  steps = 540
  titles = TITLES | {
    "dense": "dense: what the network can do",
    "no_ff": "dense, without feed-forward layers: what they are worth",
    "sdgf_stepwise": "SDGF-Stepwise: 15:16, 8:16, 4:16, 2:16, 1:16",
    "sdgf_geometric": "SDGF-Geometric: groups that shrink at equal density, to 1:16",
    "custom": "custom: 8:16 that fades, then 1:16",
    "idp": "IDP: the levels of SDGF-Stepwise, each within the one before",
  }

  def runs(self, is_all):
    """Returns the recipes, and the network without feed-forward layers after the dense one."""
    first, *rest = ALL if is_all else RECIPES
    return [first, "no_ff", *rest]

  def opening(self, steps, is_all):
    """Returns how much is trained."""
    runs = len(self.runs(is_all))
    return (
      f"A small ViT on the generated images of 'rebus': {runs} runs of {steps} steps, each from "
      "scratch."
    )

  def train(self, out, steps, name, pattern="1:16", folder=""):
    """Returns the command of a run; `pattern` and `folder` are of a sparser one."""
    recipe = "dense" if name == "no_ff" else name
    files = [f"runs/local_{run}.gin" for run in ("images", "rebus", "images_adamw")]
    macros: dict[str, Any] = {
      "RECIPE": recipe,
      "MODEL_DIR": f"{out}/{folder or name}",
      "SPARSE_STEPS": steps,
      "WARMUP_STEPS": steps // 10,
    }
    if recipe != "dense":
      phases = {"DENSE_STEPS": steps // 10, "FINETUNE_STEPS": steps // 5}
      macros |= {"PATTERN": pattern, **phases}
    if name == "no_ff":
      macros |= {"MLP": 0, "SPARSITY_RULES": {"qkv": None}}
    if name == "custom":
      macros["RECIPE_FIELDS"] = {"path": ((steps // 10, "8:16", 1.0), (steps // 2, "1:16", 0.25))}
    macros |= dict.fromkeys(_PERIODS, max(1, steps // 9))
    return _command(files, macros)

  def last(self, steps, name):
    """Returns the steps of a run."""
    return steps

  def proven(self, names):
    """Returns all but the dense ones."""
    return [name for name in names if name not in ("dense", "no_ff")]

  def harder(self, out, steps):
    """Returns a sparser run."""
    argv = self.train(out, steps, "mdgf_exponential", "1:32", "mdgf_exponential_1_32")
    return "1:32", [argv]


def packed(out: str, name: str) -> list[str]:
  """Returns the command that writes the last checkpoint of a run without its zeros.

  >>> packed("quickstart", "sr_ste")
  ['pack', 'quickstart/sr_ste', 'quickstart/model.safetensors']

  Args:
    out: the folder of the quickstart.
    name: of a sparse run.
  """
  return ["pack", f"{out}/{name}", f"{out}/model.safetensors"]


TASKS: dict[str, Task] = {"mini-glue": MiniGlue(), "rebus": Rebus()}
DEFAULT = "mini-glue"


# --- what is printed, and where it is done ------------------------------------------------------


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


def claim(folder: pathlib.Path, steps: int, task: str = DEFAULT) -> None:
  """Makes the folder of a quickstart, or finds one of the same task with the same steps.

  Args:
    folder: where all runs go.
    steps: of a sparse run.
    task: one of `TASKS`.

  Raises:
    ValueError: it holds something else, or cannot be written to.
  """
  note = folder / _NOTE
  if note.is_file():
    noted = json.loads(note.read_text())
    before, other = noted.get("steps"), noted.get("task", DEFAULT)
    if other != task:
      raise ValueError(
        f"--out {folder} was begun with --task {other}, not {task}: choose another --out"
      )
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
    told = {"steps": steps} | ({"task": task} if task != DEFAULT else {})
    note.write_text(json.dumps(told) + "\n")
  except OSError as e:
    raise ValueError(f"--out {folder} cannot be written to: {e.strerror or e}") from e
