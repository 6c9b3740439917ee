"""More than one device, by the commands that users type: train, resume to the same bits, predict.

Two processes that find each other, as two hosts do; and weights and masks cut over two devices.
"""

import base64
import json
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import t5x_found

pytestmark = [pytest.mark.t5x, pytest.mark.slow]

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

from test_t5x_thread import (  # noqa: E402  (it skips as well)
  TINY,
  last_metric,
  saved_arrays,
  t5x,
)

RULES = dict(
  RECIPE="idp", PATTERN="1:4", SPARSITY_RULES={"ff": None, "decoder/cross/qkv": "2:4"},
  SPARSE_STEPS=6, DENSE_STEPS=1, FINETUNE_STEPS=2,
)  # fmt: skip
# As docs/t5x.md has it, but for the addresses, which a TPU knows by itself.
LAUNCH = """
import jax, runpy, sys
module, address, index = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
jax.distributed.initialize(address, 2, index)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def two(folder, command, *files, **macros):
  """Runs `t5x.COMMAND` in two processes of one cluster; their logs."""
  gin, env = t5x_found.command_line(files, macros)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"

  def start(index):
    args = ["-c", LAUNCH, f"t5x.{command}", address, str(index)]
    if command == "train":
      cluster = [f"--coordinator_address={address}", "--process_count=2"]
      args = ["-m", "t5x.train", "--multiprocess_gpu", *cluster, f"--process_index={index}"]
    log = folder / f"{command}{index}.log"
    with log.open("w") as out:
      return log, subprocess.Popen([sys.executable, *args, *gin], env=env, stdout=out, stderr=out)

  started = [start(index) for index in range(2)]
  try:
    for log, process in started:
      code = process.wait(timeout=600)  # one whose partner died waits for it
      assert not code, log.read_text()[-3000:]
  finally:
    for _, process in started:
      process.kill()
      process.wait()
  return [log.read_text() for log, _ in started]


def dense_and_sparse(folder):
  """Trains four dense steps; the folder of a sparse run, and what it is given."""
  t5x("train", "tests/t5x_dense.gin", MODEL_DIR=f"{folder}/dense", TRAIN_STEPS=4)
  finetune = dict(
    MODEL_DIR=f"{folder}/sparse", INITIAL_CHECKPOINT_PATH=f"{folder}/dense/checkpoint_4",
    PRETRAINED_STEPS=4, BATCH_SIZE=16, EVAL_PERIOD=3, EVAL_STEPS=1,
    **{"utils.SaveCheckpointConfig.period": 3},
  )  # fmt: skip
  return folder / "sparse", finetune


def test_two_processes_train_resume_and_evaluate(tmp_path):
  sparse, finetune = dense_and_sparse(tmp_path)
  files = "gin_configs/runs/t5x_finetune.gin", TINY
  two(tmp_path, "train", *files, **finetune, **RULES)
  whole = saved_arrays(sparse / "checkpoint_10")
  mine = whole["flax_mutables"]["nm_sparsity"]
  assert int(mine["step"]) == 6 and int(whole["state"]["step"]) == 10

  shutil.rmtree(sparse / "checkpoint_10")
  logs = two(tmp_path, "train", *files, **finetune, **RULES)
  assert all(f"{sparse}/checkpoint_7" in log for log in logs)
  jax.tree.map(np.testing.assert_array_equal, saved_arrays(sparse / "checkpoint_10"), whole)

  # Each holds half of a batch; together they find what the training found, and predict.
  common = {"CHECKPOINT_PATH": str(sparse / "checkpoint_7"), "utils.DatasetConfig.batch_size": 16}
  logs = two(
    tmp_path, "eval", "gin_configs/runs/t5x_eval.gin", TINY, **common, **RULES,
    EVAL_OUTPUT_DIR=str(tmp_path / "eval"),
  )  # fmt: skip
  assert "Process ID: 0" in logs[0] and "Process ID: 1" in logs[1]
  assert last_metric(tmp_path / "eval") == {7: last_metric(sparse)[7]}
  two(
    tmp_path, "infer", "gin_configs/runs/t5x_infer.gin", TINY, **common, **RULES,
    INFER_OUTPUT_DIR=str(tmp_path / "infer"), **{"utils.DatasetConfig.split": "validation"},
  )  # fmt: skip
  (written,) = (tmp_path / "infer").glob("*.jsonl-00000-of-00001")
  lines = [json.loads(line) for line in written.read_text().splitlines()]
  assert len(lines) == 32 and all("prediction" in line for line in lines)


def test_weights_and_masks_over_two_devices_are_saved_and_resumed(tmp_path):
  """Kernels are cut along `mlp`, so stored masks are too; a checkpoint fits any split.

  Two devices: on a CPU, T5X splits weights over all there are, whatever `num_partitions` says.
  """
  sparse, finetune = dense_and_sparse(tmp_path)
  cut = {"partitioning.PjitPartitioner.num_partitions": 2}
  files = "gin_configs/runs/t5x_finetune.gin", TINY
  t5x("train", *files, devices=2, **finetune, **RULES, **cut)
  whole = saved_arrays(sparse / "checkpoint_10")
  shards = {
    base64.b64decode(name).decode(): json.loads(text)["partition_spec"]
    for name, text in json.loads((sparse / "checkpoint_10/state/_sharding").read_text()).items()
  }
  ends = "decoder.layers_0.mlp.wi_0.kernel"
  for kind in ("target", "flax_mutables.nm_sparsity.mask"):
    assert shards[f"{kind}.{ends}"] == [None, "model"]

  shutil.rmtree(sparse / "checkpoint_10")
  log = t5x("train", *files, devices=2, **finetune, **RULES, **cut)
  assert f"{sparse}/checkpoint_7" in log
  jax.tree.map(np.testing.assert_array_equal, saved_arrays(sparse / "checkpoint_10"), whole)

  # On one device: the masks of the checkpoint, and the numbers of the training.
  t5x(
    "eval", "gin_configs/runs/t5x_eval.gin", TINY, **RULES, EVAL_OUTPUT_DIR=str(tmp_path / "eval"),
    CHECKPOINT_PATH=str(sparse / "checkpoint_7"), **{"utils.DatasetConfig.batch_size": 16},
  )  # fmt: skip
  assert last_metric(tmp_path / "eval") == {7: last_metric(sparse)[7]}
