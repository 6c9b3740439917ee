"""The whole thread by the commands that users type: dense, sparse, eval, infer; and the proof."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import t5x_found
from test_plan import T5X_MODEL

import nm_sparsity_jax as nms
from nm_sparsity_jax.training import configure

pytestmark = pytest.mark.t5x

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = "tests/t5x_tiny.gin"
RULES = dict(
  RECIPE="idp", PATTERN="1:4", SPARSITY_RULES={"ff": None, "decoder/cross/qkv": "2:4"},
  SPARSE_STEPS=12, DENSE_STEPS=2, FINETUNE_STEPS=4,
)  # fmt: skip


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


def last_metric(folder):
  (path,) = folder.rglob("nm_test_sort-metrics.jsonl")
  return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def saved_arrays(checkpoint):
  """What T5X saved, as numpy, without T5X's train state."""
  reader, path = ocp.PyTreeCheckpointer(), checkpoint / "state"
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  shapes = reader.metadata(path).item_metadata.tree
  return reader.restore(path, restore_args=jax.tree.map(as_numpy, shapes))


def test_dense_then_sparse_then_eval_then_infer_then_verify(tmp_path):
  dense, sparse = tmp_path / "dense", tmp_path / "sparse"
  t5x("train", "tests/t5x_dense.gin", MODEL_DIR=str(dense), TRAIN_STEPS=6)
  finetune = dict(
    MODEL_DIR=str(sparse), INITIAL_CHECKPOINT_PATH=str(dense / "checkpoint_6"), BATCH_SIZE=16,
    EVAL_PERIOD=6, EVAL_STEPS=2,
  )  # fmt: skip
  period = {"utils.SaveCheckpointConfig.period": 6}
  run = "gin_configs/runs/t5x_finetune.gin", TINY
  log = t5x("train", *run, **finetune, **RULES, **period)
  # What becomes sparse is shown once, before anything is restored.
  assert log.index("schedule of ff: idp 1:4") < log.index("Initialize/restore complete")
  assert log.count("schedule of ff") == 1

  # Taken away after half of the way, the same command does the rest again, to the same bits.
  # The evaluation of the checkpoint that it goes on from is made first.
  whole, scores = saved_arrays(sparse / "checkpoint_18"), last_metric(sparse)
  shutil.rmtree(sparse / "checkpoint_18")
  (metrics,) = sparse.rglob("nm_test_sort-metrics.jsonl")
  metrics.write_text("")
  log = t5x("train", *run, **finetune, **RULES, **period)
  assert f"{sparse}/checkpoint_12" in log
  jax.tree.map(np.testing.assert_array_equal, saved_arrays(sparse / "checkpoint_18"), whole)

  # Half of the way, on a checkpoint: the numbers of the in-loop evaluation at that step.
  half = str(sparse / "checkpoint_12")
  common = {"CHECKPOINT_PATH": half, "utils.DatasetConfig.batch_size": 16}
  # What is sparse is read from the checkpoint, in T5X's own model file as in ours.
  t5x("eval", "gin_configs/runs/t5x_eval.gin", TINY, EVAL_OUTPUT_DIR=str(tmp_path / "eval"),
         **common)  # fmt: skip
  in_loop, alone = last_metric(sparse), last_metric(tmp_path / "eval")
  assert set(in_loop) == {12, 18} and in_loop == scores and alone == {12: in_loop[12]}

  split = {"utils.DatasetConfig.split": "validation"}
  (tmp_path / "theirs.gin").write_text(T5X_MODEL)
  t5x("infer", tmp_path / "theirs.gin", "nm_sparsity_jax/infer.gin", **TASK,
         INFER_OUTPUT_DIR=str(tmp_path / "infer"), **common, **split)  # fmt: skip
  (written,) = (tmp_path / "infer").glob("*.jsonl-00000-of-00001")
  lines = [json.loads(line) for line in written.read_text().splitlines()]
  assert len(lines) == 32 and all("prediction" in line for line in lines)

  # The end is n:m: from the files, without T5X's train state.
  saved = saved_arrays(sparse / "checkpoint_18")
  mine = saved["flax_mutables"]["nm_sparsity"]
  assert int(mine["step"]) == 12 and int(saved["state"]["step"]) == 18
  rules = configure.rules(
    RULES["SPARSITY_RULES"], "idp", "1:4", sparse_steps=12, dense_steps=2, finetune_steps=4
  )
  assert set(mine) == {"step", "start", "mask", "made", "renewed", "rules"}
  report = nms.verify(nms.finalize(saved["target"], rules, 0, mine, early=True), rules)
  assert report.ok and {p.pattern: p.density for p in report.places} == {"1:4": 0.25, "2:4": 0.5}
