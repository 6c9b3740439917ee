"""Records of the declared study that nobody ran, and what tests read of its page."""

import importlib
import itertools
import math
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
STUDY = importlib.import_module("_study").study()
SEEDS = STUDY.declared["test_seeds"]
CURVE = {
  "step": [0, 800], "loss": [4.0, 2.0], "D": [1.0, 0.0], "density": [1.0, 0.1],
  "noise_loss": [4.5, 2.0], "noise": [1.0, 4.0],
}  # fmt: skip


def records_of(seed=0, spread=0.02, gain=0.5, names=("H1",)):
  """Records of all test runs of H1; challengers have `gain` times the cross-entropy at 1:16."""
  rng = np.random.default_rng(seed)
  luck = {}  # of a seed, shared by all its rows
  records = {}
  for cell in [cell for name in names for cell in STUDY.hypotheses[name].cells]:
    for run in STUDY.runs(cell):
      ce = math.exp(luck.setdefault(run.seed, rng.normal(0, 2)) + rng.normal(0, spread))
      if not cell.row.startswith("sr_ste") and cell.pattern == "1:16":
        ce *= gain
      is_low = "no_ff" if cell.task != "cmudict" else "sr_ste, 10 % dense"  # as a gate asks
      accuracy = 0.5 if cell.row == is_low else 0.9
      about = {"steps": 1600, "flops": 1e12, "seconds": 1.0, "versions": {}, "curve": CURVE}
      about["settings"] = {"constant": "constant" in cell.row}
      about["phoneme_error_rate"] = ce
      records[run] = {"cross_entropy": ce, "accuracy": accuracy, **about}
  return records


def numpy_p(d):
  """Sign-flip max-T p of [seeds, contrasts], all flips."""
  signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
  flipped = signs[:, :, None] * d
  t = np.abs(flipped.mean(1) / (flipped.std(1, ddof=1) / len(d) ** 0.5))
  return (t.max(1)[:, None] >= t[0] * (1 - 1e-9)).mean(0)


def lines_of(page, title):
  """The cells of each line of the table below a title of the page."""
  after = page.partition(f"\n#### {title}")[2].partition("\n| --- ")[2].partition("\n\n")[0]
  return [line.strip("| ").split(" | ") for line in after.splitlines()[1:]]
