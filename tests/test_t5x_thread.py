"""The whole thread by the commands that users type: dense, sparse, eval, infer; and the proof.

Then mini-GLUE, as far as the file that is handed in.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import t5x_found
from test_plan import T5X_MODEL

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
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


def t5x(command, *files, check=True, devices=1, **macros):
  """Runs `python -m t5x.COMMAND` with gin files and macros; what it says, in order."""
  args, env = t5x_found.command_line(files, macros, devices)
  command = [sys.executable, "-m", f"t5x.{command}", *args]
  both = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  done = subprocess.run(command, env=env, text=True, check=False, **both)
  assert bool(done.returncode) != check, done.stdout[-3000:]
  return done.stdout


def last_metric(folder):
  (path,) = folder.rglob("nm_test_sort-metrics.jsonl")
  return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def forget_metrics(folder):
  """As if the run had been killed before any evaluation of decoded text."""
  (path,) = folder.rglob("nm_test_sort-metrics.jsonl")
  path.write_text("")


def saved_arrays(checkpoint):
  """What T5X saved, as numpy, without T5X's train state."""
  reader, path = ocp.PyTreeCheckpointer(), checkpoint / "state"
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  shapes = reader.metadata(path).item_metadata.tree
  return reader.restore(path, restore_args=jax.tree.map(as_numpy, shapes))


def test_dense_then_sparse_then_eval_then_infer_then_verify(tmp_path):
  dense, sparse = tmp_path / "dense", tmp_path / "sparse"
  plain = t5x("train", "tests/t5x_dense.gin", MODEL_DIR=str(dense), TRAIN_STEPS=6)
  finetune = dict(
    MODEL_DIR=str(sparse), INITIAL_CHECKPOINT_PATH=str(dense / "checkpoint_6"), BATCH_SIZE=16,
    EVAL_PERIOD=6, EVAL_STEPS=2,
  )  # fmt: skip
  period = {"utils.SaveCheckpointConfig.period": 6}
  run = "gin_configs/runs/t5x_finetune.gin", TINY
  log = t5x("train", *run, **finetune, **RULES, **period)
  # Point 9: once, before anything is restored and compiled; nothing that looks like a failure.
  told = log.index("parameter "), log.index("schedule of ff: idp 1:4")
  assert told[0] < told[1] < log.index("Initialize/restore complete")
  assert log.count("schedule of ff") == log.count("parameter  ") == 1
  assert "Not restoring param=" not in log and "Initializing param=" not in log
  # And no more warnings than T5X's own of a dense run.
  warned = [re.findall(r"^W\d{4} .*|^.*Warning: .*", text, re.MULTILINE) for text in (plain, log)]
  assert len(warned[1]) <= len(warned[0]) + 1, warned[1]

  # Taken away after half of the way, the same command does the rest again, to the same bits.
  # Point 11: the evaluation that is not there is made first.
  whole, scores = saved_arrays(sparse / "checkpoint_18"), last_metric(sparse)
  shutil.rmtree(sparse / "checkpoint_18")
  forget_metrics(sparse)
  log = t5x("train", *run, **finetune, **RULES, **period)
  assert f"{sparse}/checkpoint_12" in log
  jax.tree.map(np.testing.assert_array_equal, saved_arrays(sparse / "checkpoint_18"), whole)

  # Half of the way, on a checkpoint: the numbers of the in-loop evaluation at that step.
  half = str(sparse / "checkpoint_12")
  common = {"CHECKPOINT_PATH": half, "utils.DatasetConfig.batch_size": 16}
  # Point 4: what is sparse is read from the checkpoint, in T5X's own model file as in ours.
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

  # Other rules are refused, by name; a dense checkpoint and bfloat16 too.
  other = {**RULES, "PATTERN": "2:4"}
  error = t5x("train", *run, check=False, **finetune, **other, **period)
  assert "ff: idp 1:4, total=12, dense=2, finetune=4" in error and "ff: idp 2:4" in error
  error = t5x("eval", "gin_configs/runs/t5x_eval.gin", TINY, check=False,
                 EVAL_OUTPUT_DIR=str(tmp_path / "no"), **common, **other)  # fmt: skip
  assert f"PATTERN='2:4', but {half} was trained with '1:4': leave PATTERN out." in error

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


# --- mini-GLUE: train with evaluation on the way, score, infer on test, submit --------------------

# Another size of the data and of the network, by gin alone.
MINI_TASK = """
from __gin__ import dynamic_registration
import t5x_tasks
from nm_sparsity_jax.models.t5 import network

network.T5Config.preset.num_encoder_layers = 1
network.T5Config.preset.num_decoder_layers = 1
MIXTURE_OR_TASK_NAME = @t5x_tasks.register_mini()
t5x_tasks.register_mini:
  name = 'nm_glue_mini_mrpc'
  rows = {'train': 512, 'validation': 40, 'test': 24}
"""
MINI_RULES = dict(RECIPE="sdgf_stepwise", PATTERN="1:4", SPARSE_STEPS=20, FINETUNE_STEPS=4)


@pytest.mark.slow  # test_gin.py runs T5X's infer on a GLUE test set; test_local_glue.py hands it in
def test_train_score_infer_submit(tmp_path, capsys):
  model, task = "gin_configs/models/mini.gin", tmp_path / "task.gin"
  task.write_text(MINI_TASK)
  runs = "gin_configs/runs/t5x_"
  t5x(
    "train",
    model,
    f"{runs}adamw.gin",
    f"{runs}mini.gin",
    task,
    MODEL_DIR=str(tmp_path / "m"),
    EVAL_PERIOD=10,
    EVAL_STEPS=1,
    **{"utils.SaveCheckpointConfig.period": 20},
    **MINI_RULES,
  )
  (path,) = (tmp_path / "m").rglob("nm_glue_mini_mrpc-metrics.jsonl")
  found = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["step"] for line in found] == [10, 20]
  assert all(set(line) == {"step", "f1", "accuracy"} for line in found)
  assert all(0 <= line["accuracy"] <= 100 for line in found)

  assert cli.main(["glue", "score", str(tmp_path / "m"), "--checkpoint", "last", "--json"]) == 0
  (run,) = json.loads(capsys.readouterr().out)["runs"]
  last = {name: found[-1][name] for name in ("f1", "accuracy")}
  assert run["columns"]["MRPC"]["step"] == 20 and run["columns"]["MRPC"]["values"] == last
  assert run["recipe"] == "sdgf_stepwise" and run["mini"]

  t5x("infer", model, f"{runs}infer_glue_test.gin", task, INFER_OUTPUT_DIR=str(tmp_path / "i"),
      CHECKPOINT_PATH=str(tmp_path / "m/checkpoint_20"),
      TASK_FEATURE_LENGTHS={"inputs": 24, "targets": 4},
      **{"utils.DatasetConfig.batch_size": 8}, **MINI_RULES)  # fmt: skip
  (path,) = (tmp_path / "i").glob("nm_glue_mini_mrpc-predict.jsonl-00000-of-00001")
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["inputs"]["idx"] for line in lines] == list(range(24))
  assert all(line["inputs"]["inputs_pretokenized"].startswith("mrpc s") for line in lines)
  assert {line["inputs"]["targets_pretokenized"] for line in lines} == {"<unk>"}
  assert all(isinstance(line["prediction"], str) for line in lines)

  zipped = tmp_path / "mini.zip"
  submit = ["glue", "submit", str(tmp_path / "i"), "--mini", "--fill", "mrpc", "--out", str(zipped)]
  assert cli.main(submit) == 0
  with zipfile.ZipFile(zipped) as z:
    rows = z.read("MRPC.tsv").decode().splitlines()
  labels = {"equivalent": "1"}  # the other one, or no label at all, is 0
  assert rows == ["index\tprediction"] + [
    f"{i}\t{labels.get(line['prediction'], '0')}" for i, line in enumerate(lines)
  ]
