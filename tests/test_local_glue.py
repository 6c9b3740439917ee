"""mini-GLUE in the local runner by commands: train, score, infer on the test sets."""

import json
import warnings

import pytest
import tasks_found

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.scores import submission

pytestmark = pytest.mark.filterwarnings("ignore")  # seqio, TensorFlow, clu and Orbax, on their own

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(action="ignore"):
  from test_local import command as flags  # (it skips as well)

# Another size of the data, by gin alone; two tasks of the mixture's, since each costs a second.
TASK = """
from __gin__ import dynamic_registration
import seqio
import t5x_tasks

MIXTURE_OR_TASK_NAME = @t5x_tasks.register_mini()
t5x_tasks.register_mini:
  name = 'nm_glue_mini_mnli_and_dev'
  rows = {'train': 64, 'validation': 12, 'test': 10}
VOCAB_SIZE = 256
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 4}
"""
RULES = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4)


@pytest.fixture(autouse=True)
def as_imported():
  """The task's file registers mini-GLUE anew; this puts back what the import registered."""
  yield
  tasks_found.register_again()


def test_train_score_infer(tmp_path, command):
  task, run, out = tmp_path / "task.gin", tmp_path / "run", tmp_path / "predictions"
  task.write_text(TASK)
  call = lambda name, *files, **macros: cli.main(
    [name, *flags(*files, **macros), f"--gin_file={task}"]
  )
  few = dict(BATCH_SIZE=8, EVAL_PERIOD=4, EVAL_STEPS=0, METRICS_EVERY=None)
  assert (
    call("train", "local_train.gin", "local_adamw.gin", MODEL_DIR=str(run), **RULES, **few) == 0
  )

  _, found = command("glue", "score", run, "--checkpoint", "last")
  (row,) = found["runs"]
  last = json.loads((run / "evaluations.json").read_text())[-1]["metrics"]
  assert {task: c["values"] for task, c in row["columns"].items()} == last
  assert {c["step"] for c in row["columns"].values()} == {4}

  where = dict(CHECKPOINT_PATH=str(run / "checkpoint_4"), INFER_OUTPUT_DIR=str(out))
  assert call("infer", "local_infer.gin", **where) == 0
  for task in last:
    file = out / f"{task}-predict.jsonl-00000-of-00001"
    assert [i for i, _ in submission.read(file)] == list(range(10))
