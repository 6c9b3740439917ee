"""Stands for `nm-sparsity train` in the process of a run: its folders, without training.

`install` makes a package of this file. What a run finds, by its folder's name, is in outcomes.json
beside it: [score, loss], or 'nan', 'killed'. The run `hold` waits after its second step.
"""

import ast
import json
import os
import pathlib
import re
import signal
import sys
import time


def install(folder, outcomes, hold=""):
  """A folder for PYTHONPATH."""
  package = folder / "nm_sparsity_jax"
  package.mkdir(parents=True, exist_ok=True)
  (package / "__init__.py").touch()
  (package / "cli.py").write_text(pathlib.Path(__file__).read_text())
  (package / "outcomes.json").write_text(json.dumps({"hold": hold, **outcomes}))
  return str(folder)


def train(arguments):
  words = dict(word.lstrip("-").split("=", 1) for word in arguments if "=" in word)
  macro = lambda name: ast.literal_eval(words[f"gin.{name}"])
  folder = pathlib.Path(macro("MODEL_DIR"))
  outcomes = json.loads(pathlib.Path(__file__).with_name("outcomes.json").read_text())
  outcome = outcomes.get(folder.name, [50.0, 1.0])
  if outcome == "nan":
    pathlib.Path(words["error-file"]).write_text('{"error": "the loss is not finite"}')
    return 1
  if outcome == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
  stop = []
  signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
  start = re.search(r"checkpoint_(\d+)\"?$", words["gin.INITIAL_CHECKPOINT_PATH"])
  first = int(start[1]) if start else 0
  (folder / "run.json").write_text(json.dumps({"start": first}))
  done = [int(p.name.partition("_")[2]) for p in folder.glob("checkpoint_*")]
  for step in range(max(done, default=first) + 1, first + macro("SPARSE_STEPS") + 1):
    with (folder / "trace").open("a") as trace:
      trace.write(f"{step}\n")
    (folder / f"checkpoint_{step}/state").mkdir(parents=True)
    (folder / f"checkpoint_{step}/state/_METADATA").touch()
    end = time.monotonic() + 120  # a test that fails leaves nothing behind
    while outcomes["hold"] == folder.name and step == first + 2 and not stop:
      if time.monotonic() > end:
        return 1
      time.sleep(0.01)
    if stop:
      return 0
  metrics = folder / "inference_eval/nm_glue_mini_rte-metrics.jsonl"
  metrics.parent.mkdir()
  metrics.write_text(json.dumps({"step": step, "accuracy": outcome[0]}) + "\n")
  evaluation = {"step": step, "loss": {"nm_glue_mini_rte": outcome[1]}}
  (folder / "evaluations.json").write_text(json.dumps([evaluation]))
  return 0


if __name__ == "__main__":
  sys.exit(train(sys.argv[2:]))
