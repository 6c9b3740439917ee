"""The whole thread by the commands that users type: sparse, eval, infer; and the proof."""

import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import t5x_found
from checkout import read_lines
from checkpoint_files import read, t5x_dense, write_orbax
from reference_arrays import drawn
from test_plan import T5X_MODEL

from nm_sparsity_jax import runs

pytestmark = pytest.mark.t5x

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

TINY = "tests/t5x_tiny.gin"
FINETUNE = "gin_configs/runs/t5x_finetune.gin", TINY, "tests/t5x_rules.gin"
RULES = dict(RECIPE="idp", PATTERN="1:4", SPARSE_STEPS=6, DENSE_STEPS=1, FINETUNE_STEPS=2)
TASK = dict(
  MIXTURE_OR_TASK_NAME="nm_test_sort", MIXTURE_OR_TASK_MODULE="t5x_task",
  TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8},
)  # fmt: skip


def t5x(command, *files, devices=1, **macros):
  """Runs `python -m t5x.COMMAND` with gin files and macros; what it says, in order."""
  args, env = t5x_found.command_line(files, macros, devices)
  command = [sys.executable, "-m", f"t5x.{command}", *args]
  both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  done = subprocess.run(command, env=env, text=True, check=False, **both)
  assert not done.returncode, done.stdout[-3000:]
  return done.stdout


def train_dense(folder):
  """Four dense steps."""
  t5x("train", "tests/t5x_dense.gin", MODEL_DIR=f"{folder}/dense", TRAIN_STEPS=4)


def sparse_from_dense(folder):
  """The folder of a sparse run, and its macros but for its rules."""
  return folder / "sparse", {
    "MODEL_DIR": f"{folder}/sparse", "INITIAL_CHECKPOINT_PATH": f"{folder}/dense/checkpoint_4",
    "BATCH_SIZE": 16, "EVAL_PERIOD": 3, "EVAL_STEPS": 1, "utils.SaveCheckpointConfig.period": 3,
  }  # fmt: skip


def evaluated(folder, checkpoint):
  """Macros of an evaluation; what is sparse is read from the checkpoint."""
  return {
    "CHECKPOINT_PATH": str(checkpoint), "utils.DatasetConfig.batch_size": 16,
    "EVAL_OUTPUT_DIR": str(folder / "eval"),
  }  # fmt: skip


def predicted(folder, checkpoint):
  return {
    "CHECKPOINT_PATH": str(checkpoint), "utils.DatasetConfig.batch_size": 16,
    "INFER_OUTPUT_DIR": str(folder / "infer"), "utils.DatasetConfig.split": "validation",
  }  # fmt: skip


def predictions(folder):
  (written,) = (folder / "infer").glob("*.jsonl-00000-of-00001")
  lines = read_lines(written)
  assert len(lines) == 32 and all("prediction" in line for line in lines)
  return lines


def last_metric(folder):
  (path,) = folder.rglob("nm_test_sort-metrics.jsonl")
  return {line["step"]: line for line in read_lines(path)}


def goes_on_to_the_same_bits(sparse, train):
  """Takes the end of a run away and trains again: the same command does the rest."""
  whole = read(sparse, 10)
  assert whole["flax_mutables/nm_sparsity/step"] == 6 and whole["state/step"] == 10
  assert any("param_states" in key for key in whole)
  shutil.rmtree(sparse / "checkpoint_10")
  log = train()
  assert f"{sparse}/checkpoint_7" in log
  jax.tree.map(np.testing.assert_array_equal, read(sparse, 10), whole)


def write_dense(folder):
  """A dense checkpoint of drawn weights. test_t5x_hosts.py trains one."""
  dense = t5x_dense(step=4)
  dense["target"] = drawn(dense["target"], 1 / 4)
  write_orbax(folder / "dense/checkpoint_4", dense)


def test_sparse_then_eval_then_infer_then_verify(tmp_path):
  write_dense(tmp_path)
  sparse, finetune = sparse_from_dense(tmp_path)
  log = t5x("train", *FINETUNE, **finetune, **RULES)
  # What becomes sparse is shown once, before anything is restored.
  (shown,) = re.finditer(r"parameter +shape +axis +pattern", log)
  assert shown.start() < log.index("Initialize/restore complete")

  # A run that goes on first evaluates the checkpoint that it goes on from.
  scores = last_metric(sparse)
  (metrics,) = sparse.rglob("nm_test_sort-metrics.jsonl")
  metrics.write_text("")
  goes_on_to_the_same_bits(sparse, lambda: t5x("train", *FINETUNE, **finetune, **RULES))
  assert last_metric(sparse) == scores and set(scores) == {7, 10}

  # Half of the way, on a checkpoint: the numbers of the in-loop evaluation at that step.
  half = sparse / "checkpoint_7"
  (tmp_path / "theirs.gin").write_text(T5X_MODEL)
  theirs = tmp_path / "theirs.gin", "nm_sparsity_jax/eval.gin"
  t5x("eval", *theirs, **TASK, **evaluated(tmp_path, half))
  assert last_metric(tmp_path / "eval") == {7: scores[7]}
  # As for a submission to GLUE, with the number of each example.
  files = "gin_configs/runs/t5x_infer_glue_test.gin", TINY
  t5x("infer", *files, MIXTURE_OR_TASK_NAME="tests_idx", **predicted(tmp_path, half))
  inputs = [line["inputs"] for line in predictions(tmp_path)]
  assert [x["idx"] for x in inputs] == [*range(32)] and "inputs_pretokenized" in inputs[0]

  # The end is n:m: from the files, without T5X.
  assert not runs.verify(str(sparse)).ok
  assert runs.finalize(str(sparse), str(tmp_path / "final")).ok
