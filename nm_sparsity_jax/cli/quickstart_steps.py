"""The quickstart's runs and commands as data: nothing here runs one.

    Task -> [train, compared] -> words of a command -> [typed] -> a shell's line

`nm-sparsity quickstart` runs what a task says, in this order: its runs, the proofs, scores, pages.
There are two tasks. `MiniGlue` trains a dense warm-up, and each recipe from its checkpoint. `Rebus`
trains each recipe from scratch, and a network without feed-forward layers. One run of each is dense
and as long as the others, so what is lost is compared at equal length.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise")
# These keep a mask. All runs are more than `charts.MAX_RUNS`, so they have their own page.
STATEFUL = ("one_shot", "snip", "idp")
ALL = (
  "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric", "custom",
  *STATEFUL,
)  # fmt: skip
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


class Task:
  """What a quickstart trains, proves and compares.

  Attributes:
    about: the network and its data.
    steps: of a recipe's run, where nobody says another number.
    dense: the names of the runs that are not sparse.
    pattern: of the sparse runs.
    periods: how often a run is evaluated.
  """

  about: str
  steps: int
  dense: tuple[str, ...]
  pattern: str
  periods: int

  def runs(self, is_all: bool) -> list[str]:
    """Returns the names of the runs, in their order."""
    return [*self.dense, *(ALL if is_all else RECIPES)]

  def last(self, steps: int, name: str) -> int:
    """Returns the last step of a run."""
    raise NotImplementedError

  def train(self, out: str, steps: int, name: str) -> list[str]:
    """Returns the command of a run.

    Args:
      out: the folder of the quickstart.
      steps: of a recipe's run.
      name: of the run: a recipe, or one of `dense`.
    """
    macros: dict[str, Any] = {"RECIPE": "dense", "MODEL_DIR": f"{out}/{name}"}
    if name not in self.dense:
      macros |= {"RECIPE": name, "PATTERN": self.pattern}
    macros |= self._macros(out, steps, name)
    macros["WARMUP_STEPS"] = macros["SPARSE_STEPS"] // 10
    files = [f"--gin_file=gin_configs/{file}.gin" for file in self._files(name)]
    return ["train", *files, *(f"--gin.{macro}={value!r}" for macro, value in macros.items())]

  def compared(self, out: str, names: Sequence[str]) -> list[list[str]]:
    """Returns the commands that compare the runs by their last checkpoints, which are proven.

    Each page shows some; the recipes that keep a mask have their own.
    """
    pages = {"report": [n for n in names if n not in STATEFUL]}
    if stateful := [n for n in names if n in STATEFUL]:
      pages["report-masks"] = ["dense", *stateful]
    last = ("--checkpoint", "last")
    return [
      ["report", *(f"{out}/{n}" for n in runs), *last, "--out", f"{out}/{page}.html"]
      for page, runs in pages.items()
    ]

  def _files(self, name: str) -> Sequence[str]:
    raise NotImplementedError

  def _macros(self, out: str, steps: int, name: str) -> dict[str, Any]:
    raise NotImplementedError


class MiniGlue(Task):
  """A tiny T5 on MNLI of mini-GLUE."""

  about = "A tiny T5 on mini-GLUE's MNLI, from a dense warm-up of 2.5 times as many steps"
  steps = 240
  dense = ("warmup", "dense")
  pattern = "1:8"
  periods = 12

  def last(self, steps, name):
    """Returns the last step of a run; the warm-up must leave something to lose."""
    warmup = 5 * steps // 2
    return warmup if name == "warmup" else warmup + steps

  def compared(self, out, names):
    """Returns the table of last scores, and the pages."""
    score = ["glue", "score", *(f"{out}/{name}" for name in names), "--checkpoint", "last"]
    return [score, *super().compared(out, names)]

  def _files(self, name):
    kind = "train" if name == "warmup" else "finetune"
    return "models/mini_small", "runs/local_adamw", f"runs/local_{kind}", "runs/local_mini"

  def _macros(self, out, steps, name):
    warmup = self.last(steps, "warmup")
    if name == "warmup":
      return {"SPARSE_STEPS": warmup, **_periods(2 * warmup // self.periods), "EVAL_STEPS": 0}
    macros = {
      "INITIAL_CHECKPOINT_PATH": f"{out}/warmup/checkpoint_{warmup}",
      "PRETRAINED_STEPS": warmup,
      "SPARSE_STEPS": steps,
      "DENSE_STEPS": steps // 10,
      "FINETUNE_STEPS": steps // 2,
      **_periods(steps // self.periods),
      "EVAL_STEPS": 0,  # no loss, only scores
    }
    if name not in self.dense:
      macros["SPARSITY_RULES"] = {"ff": None, "qkv": None}
    if name == "custom":
      macros["RECIPE_FIELDS"] = {"path": ((steps // 10, "4:8", 1.0), (steps // 4, "1:8", 0.25))}
    return macros


class Rebus(Task):
  """A small ViT on the generated images of 'rebus', at 1:16."""

  about = "A small ViT on the generated images of 'rebus', each run from scratch"
  steps = 540
  dense = ("dense", "no_ff")
  pattern = "1:16"
  periods = 9

  def last(self, steps, name):
    """Returns the steps of a run."""
    return steps

  def _files(self, name):
    return [f"runs/local_{file}" for file in ("images", "rebus", "images_adamw")]

  def _macros(self, out, steps, name):
    macros: dict[str, Any] = {"SPARSE_STEPS": steps, **_periods(steps // self.periods)}
    if name not in self.dense:
      macros |= {"DENSE_STEPS": steps // 10, "FINETUNE_STEPS": steps // 5}
    if name == "no_ff":
      macros |= {"MLP": 0, "SPARSITY_RULES": {"qkv": None}}
    if name == "custom":
      macros["RECIPE_FIELDS"] = {"path": ((steps // 10, "8:16", 1.0), (steps // 2, "1:16", 0.25))}
    return macros


TASKS: dict[str, Task] = {"mini-glue": MiniGlue(), "rebus": Rebus()}


def _periods(steps: int) -> dict[str, int]:
  return dict.fromkeys(("EVAL_PERIOD", "STATS_PERIOD", "METRICS_EVERY"), max(1, steps))


def typed(argv: Sequence[str]) -> str:
  """Returns a command as you would type it, on several lines where it is long.

  >>> typed(["verify", "$a b"])
  "nm-sparsity verify '$a b'"

  Args:
    argv: its words after `nm-sparsity`.
  """
  lines = ["nm-sparsity"]
  for word in map(_quoted, argv):
    if len(lines[-1]) + len(word) + 3 > 100:
      lines.append("   ")
    lines[-1] += f" {word}"
  return " \\\n".join(lines)


def _quoted(word: str) -> str:
  # A gin string keeps its own quotes, within double ones.
  name, _, value = word.partition("=")
  if name.startswith("--gin.") and not re.search(r'["$`\\!]', value):
    return f"{name}={value}" if value.isalnum() else f'{name}="{value}"'
  return shlex.quote(word)
