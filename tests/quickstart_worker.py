"""Runs a small quickstart, one that is stopped, and its continuation, in a given folder.

A process of its own, since seqio keeps the tasks that it registers small.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import sys


def main(folder):
  from nm_sparsity_jax import cli
  from nm_sparsity_jax.cli import quickstart
  from nm_sparsity_jax.models.t5 import T5Config
  from nm_sparsity_jax.trainer import data, reports

  data.import_seqio("t5x_tasks")
  import t5x_tasks

  # A fraction of the work: jax's for each layer, and of the evaluations.
  small = {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "num_encoder_layers": 1}
  preset = T5Config.preset.__func__
  smaller = functools.wraps(preset)(lambda *args, **fields: preset(*args, **(fields | small)))
  T5Config.preset = classmethod(smaller)
  t5x_tasks.register_mini(rows={"train": 256, "validation": 64})
  task = quickstart.TASKS["mini-glue"]
  quickstart.TASKS["mini-glue"] = dataclasses.replace(task, evaluations=2, dense=("warmup",))
  quickstart.RECIPES = ("sdgf_stepwise",)
  codes = []

  def run(name):
    os.makedirs(folder / name, exist_ok=True)
    os.chdir(folder / name)
    with open("said.txt", "w") as said, contextlib.redirect_stdout(said):
      with contextlib.redirect_stderr(said):
        codes.append(cli.main(["quickstart", "--steps", "12"]))
    os.rename("said.txt", f"said_{len(codes)}.txt")

  run("whole")
  # As one that is stopped in its last run: what comes before it is the first one's.
  gone = shutil.ignore_patterns("sdgf_stepwise", "report.html", "said*")
  shutil.copytree(folder / "whole", folder / "cut", ignore=gone)
  show = reports.Progress.show

  def show_and_stop(self, step, *rest):
    show(self, step, *rest)
    if step == 36:
      os.kill(os.getpid(), signal.SIGTERM)

  reports.Progress.show = show_and_stop
  run("cut")
  reports.Progress.show = show
  run("cut")
  print(json.dumps(codes))


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
