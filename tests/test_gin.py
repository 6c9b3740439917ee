"""gin_configs: every file is read, and what it describes is made, without T5X and with it."""

import dataclasses

import pytest
from checkout import ROOT
from test_plan import t5x  # noqa: F401  (a fixture)

from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models.t5 import T5Config

pytest.importorskip("gin", reason="pip install gin-config")
T5 = "gin_configs/models/t5.gin"


def config(files, bindings=()):
  return gin_files.Config([ROOT], files, bindings)


# --- without T5X ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "version, size", [("t5_1_1", "tiny"), ("t5_1_0", "11B"), ("wmt", "table_16")]
)
def test_a_model_is_made(version, size):
  is_wmt = version == "wmt"
  files = ["gin_configs/models/wmt.gin" if is_wmt else T5]
  names = [] if is_wmt else [f"T5_VERSION = {version!r}", f"T5_SIZE = {size!r}"]
  with config(files, [*names, "SCAN_LAYERS = True", "REMAT_POLICY = 'minimal'"]) as c:
    assert not c.errors and c.value("Z_LOSS") == 0.0001
    assert c.value("LABEL_SMOOTHING") == (0.1 if is_wmt else 0.0)
    made = c.value("NETWORK").config
  changes = dict(scan_layers=True, remat_policy="minimal", dtype="bfloat16")
  want = T5Config.preset(version, size, **changes)
  assert dataclasses.replace(made, dropout_rate=want.dropout_rate) == want


# --- with T5X -------------------------------------------------------------------------------------

SIMPLE = [
  "T5_SIZE = 'tiny'", "VOCABULARY_FILE = 'bytes'", "VOCAB_SIZE = 384", "RECIPE = 'sr_ste'",
  "PATTERN = '1:8'", "SPARSE_STEPS = 1000",
]  # fmt: skip
TASK = {
  "MIXTURE_OR_TASK_NAME": "'nm_glue_rte'", "MIXTURE_OR_TASK_MODULE": "'t5x_tasks'",
  "TASK_FEATURE_LENGTHS": "{'inputs': 16, 'targets': 8}",
}  # fmt: skip
TRAINS, START = {"MODEL_DIR": "'m'"}, {"INITIAL_CHECKPOINT_PATH": "'/'"}
EVALUATES, INFERS = {"CHECKPOINT_PATH": "'c'"}, {"INFER_OUTPUT_DIR": "'i'"}
# Run file -> the macros that it needs.
RUNS = {
  "pretrain": TRAINS | TASK,
  "finetune": TRAINS | START | TASK,
  "wmt": TRAINS,
  "mini": TRAINS,
  "eval": EVALUATES | TASK | {"EVAL_OUTPUT_DIR": "'e'"},
  "infer": EVALUATES | TASK | INFERS,
  "infer_glue_test": EVALUATES | INFERS | {"MIXTURE_OR_TASK_NAME": "'nm_glue_rte'"},
}
# Learning rate at steps 0, 500 and 4000; batch; packed; the loss.
TRAINED = {
  "pretrain": ([0.01, 0.01, 0.01], 128, True, None),
  "finetune": ([1e-8, 0.0005, 0.001], 128, False, None),
  "wmt": ([1e-8, 0.0625 / 2 / 1000**0.5, 0.0625 / 4000**0.5], 512, True, 233472),
  "mini": ([1e-8, 0.002, 0.002], 64, False, None),
}


def bind(macros):
  return [f"{k} = {v}" for k, v in macros.items()]


@pytest.mark.t5x
@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_made_and_names_what_it_misses(t5x, run):  # noqa: F811
  optimizer = "adafactor" if run in ("finetune", "mini") else "adamw"
  files = [f"gin_configs/runs/t5x_{optimizer}.gin"] if run in TRAINED else []
  files = [T5, *files, f"gin_configs/runs/t5x_{run}.gin"]
  with config(files, SIMPLE) as c:
    asked = {error.split()[0] for error in c.errors}
  # T5X does without a module; in its evaluation it takes the longest example.
  optional = {"MIXTURE_OR_TASK_MODULE"} | ({"TASK_FEATURE_LENGTHS"} if run == "eval" else set())
  assert RUNS[run].keys() - asked <= optional
  macros = RUNS[run] | ({"PRETRAINED_STEPS": 7000} if run == "finetune" else {})
  with config(files, [*SIMPLE, *bind(macros)]) as c:
    assert not c.errors
    model = c.argument("model")
    assert str(model.rules.places["ff"].pattern) == "1:8"
    assert type(model.input_vocabulary).__name__ == "ByteVocabulary"
    assert model.module.config.dropout_rate == (0.1 if run in ("finetune", "wmt") else 0.0)
    if run not in TRAINED:
      assert model.optimizer_def is None
      return
    rates, batch, packed, factor = TRAINED[run]
    start = 7_000 if run == "finetune" else 0
    data, saves = c.argument("train_dataset_cfg"), c.argument("checkpoint_cfg").save
    assert (data.batch_size, data.pack, data.seed) == (batch, packed, 0)
    assert model._loss_normalizing_factor == factor
    assert c.argument("total_steps") == start + 1000 and saves.dtype == "float32"
    # All schedules start with the sparse run, whatever the step of the checkpoint.
    rate = c.argument("learning_rate_fn", "SparseTrainer")
    assert [float(rate(start + j)) for j in (0, 500, 4000)] == pytest.approx(rates, rel=1e-5)
    if optimizer == "adafactor":
      assert model.optimizer_def.hyper_params.step_offset == start
    if run == "finetune":
      restore = c.argument("checkpoint_cfg").restore
      assert (restore.dtype, restore.fallback_to_scratch) == ("float32", True)
