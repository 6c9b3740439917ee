"""More than one device, by the commands that users type: train, resume to the same bits, predict.

Two processes that find each other, as two hosts do; and weights and masks cut over two devices.
"""

import base64
import json
import sys

import hosts
import pytest
import t5x_found
import test_t5x_thread as thread  # it skips where T5X is not

pytestmark = [pytest.mark.t5x, pytest.mark.slow]

EVAL, INFER = ((f"gin_configs/runs/t5x_{x}.gin", thread.TINY) for x in ("eval", "infer"))
# As docs/t5x.md has it, but for the addresses, which a TPU knows by itself.
LAUNCH = """
import jax, runpy, sys
module, address, index = sys.argv.pop(1), sys.argv.pop(1), int(sys.argv.pop(1))
jax.distributed.initialize(address, 2, index)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def two(folder, command, *files, **macros):
  """Runs `t5x.COMMAND` in two processes of one cluster; the log of the first."""
  gin, env = t5x_found.command_line(files, macros)

  def commands(address):
    if command != "train":
      module = f"t5x.{command}"
      return [[sys.executable, "-c", LAUNCH, module, address, str(i), *gin] for i in range(2)]
    train = [sys.executable, "-m", "t5x.train", "--multiprocess_gpu", "--process_count=2"]
    train += [f"--coordinator_address={address}", *gin]
    return [[*train, f"--process_index={i}"] for i in range(2)]

  return hosts.run(folder, commands, **env)


def test_two_processes_train_resume_and_evaluate(tmp_path):
  thread.train_dense(tmp_path)
  sparse, finetune = thread.sparse_from_dense(tmp_path)
  train = lambda: two(tmp_path, "train", *thread.FINETUNE, **finetune, **thread.RULES)
  train()
  scores, half = thread.last_metric(sparse), sparse / "checkpoint_7"
  thread.goes_on_to_the_same_bits(sparse, train)
  # Each holds half of a batch; together they find what the training found, and predict.
  log = two(tmp_path, "eval", *EVAL, **thread.evaluated(tmp_path, half))
  assert "Process ID: 0" in log
  assert thread.last_metric(tmp_path / "eval") == {7: scores[7]}
  two(tmp_path, "infer", *INFER, **thread.predicted(tmp_path, half))
  assert thread.predictions(tmp_path)


def test_weights_and_masks_over_two_devices_are_saved_and_resumed(tmp_path):
  """Kernels are cut along `mlp`, so stored masks are too; a checkpoint fits any split.

  Two devices: on a CPU, T5X splits weights over all there are, whatever `num_partitions` says.
  """
  thread.train_dense(tmp_path)
  sparse, finetune = thread.sparse_from_dense(tmp_path)
  macros = {**finetune, **thread.RULES, "partitioning.PjitPartitioner.num_partitions": 2}
  train = lambda: thread.t5x("train", *thread.FINETUNE, devices=2, **macros)
  train()
  shards = {
    base64.b64decode(name).decode(): json.loads(text)["partition_spec"]
    for name, text in json.loads((sparse / "checkpoint_10/state/_sharding").read_text()).items()
  }
  for kind in ("target", "flax_mutables.nm_sparsity.mask"):
    assert shards[f"{kind}.decoder.layers_0.mlp.wi_0.kernel"] == [None, "model"]
  thread.goes_on_to_the_same_bits(sparse, train)
  # On one device: the masks of the checkpoint, and the numbers of the training.
  thread.t5x("eval", *EVAL, **thread.evaluated(tmp_path, sparse / "checkpoint_7"))
  assert thread.last_metric(tmp_path / "eval") == {7: thread.last_metric(sparse)[7]}
