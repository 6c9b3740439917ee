"""mini-GLUE in T5X by commands: train with evaluation on the way, score, infer on test, submit."""

import json
import zipfile

import pytest
import t5x_found

from nm_sparsity_jax import cli

pytestmark = pytest.mark.t5x

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

from test_t5x_thread import t5x  # noqa: E402  (it skips as well)

# Another size of the data, by gin alone.
TASK = """
from __gin__ import dynamic_registration
import t5x_tasks

MIXTURE_OR_TASK_NAME = @t5x_tasks.register_mini()
t5x_tasks.register_mini:
  name = 'nm_glue_mini_mrpc'
  rows = {'train': 512, 'validation': 40, 'test': 24}
"""
RULES = dict(RECIPE="sdgf_stepwise", PATTERN="1:4", SPARSE_STEPS=20, FINETUNE_STEPS=4)


def test_train_score_infer_submit(tmp_path, capsys):
  model, task = "gin_configs/models/mini.gin", tmp_path / "task.gin"
  task.write_text(TASK)
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
    **RULES,
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
      **{"utils.DatasetConfig.batch_size": 8}, **RULES)  # fmt: skip
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
