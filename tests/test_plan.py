"""nm-sparsity plan: what it shows of a run, and what it refuses."""

import json
import re
import shlex
import sys
import warnings

import jax
import numpy as np
import pytest
import t5x_found
import tasks_found
from checkout import ROOT, gin_flags
from checkpoint_files import t5x_dense, t5x_sparse, write_orbax, zeros_of

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.trainer import train
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import configure

pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")

SIZES = dict(
  vocab_size=64, emb_dim=32, num_heads=2, num_encoder_layers=1, num_decoder_layers=3, head_dim=8,
  mlp_dim=48, mlp_activations=("gelu", "linear"),
)  # fmt: skip
MODEL = """
from __gin__ import dynamic_registration
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models.t5 import network
NETWORK = @network.Transformer()
network.Transformer.config = @network.T5Config()
network.T5Config:
""" + "".join(f"  {name} = {value!r}\n" for name, value in SIZES.items())
# T5X's may be registered too, by another test.
OURS = "nm_sparsity_jax.models.t5.network.T5Config"
SPARSE = ("model.gin", "gin_configs/sparsity.gin")
SETTINGS = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=100)
LENGTHS = {"inputs": 10, "targets": 6}
LOCAL = ("model.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin")
TASK = dict(
  MIXTURE_OR_TASK_NAME="nm_glue_mini_rte", MIXTURE_OR_TASK_MODULE="t5x_tasks", MODEL_DIR="run",
  TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 4}, Z_LOSS=0.0, LABEL_SMOOTHING=0.0,
)  # fmt: skip


@pytest.fixture
def run(tmp_path, command, monkeypatch, as_users_compute):
  """Plans MODEL with macros: (exit code, report)."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (tmp_path / "model.gin").write_text(MODEL)

  def call(*flags, files=SPARSE, raw=(), **macros):
    argv = [*gin_flags(files, macros, (ROOT, tmp_path)), *(f"--gin.{b}" for b in raw), *flags]
    code, report = command("plan", *argv)
    assert code == (0 if report["ok"] else 1) == bool(report["errors"])
    return code, report

  return call


def has(texts, *words):
  """Whether one text has all the words."""
  return any(all(w in text for w in words) for text in texts)


# --- what it shows ------------------------------------------------------------------------------


def test_a_schedule_for_each_length_of_axis(run):
  wide = [f"{OURS}.emb_dim = 768", f"{OURS}.mlp_dim = 1024"]
  _, report = run(raw=wide, RECIPE="sdgf_geometric", PATTERN="1:32", SPARSE_STEPS=100)
  assert "mlp/wi_{0,1}/kernel" in report["kernels"] and "do not divide 768" in report["kernels"]
  levels = {s["axis_sizes"][0]: s["segments"][0]["pattern"] for s in report["schedule"]}
  assert levels == {768: "8:256", 1024: "16:512"}


def test_schedule_and_cost(run):
  phases = dict(sparse_steps=100, dense_steps=10, finetune_steps=20)
  macros = {name.upper(): value for name, value in phases.items()}
  macros |= dict(RECIPE="mdgf_linear", PATTERN="1:4", PRETRAINED_STEPS=1_000_000)
  _, report = run(**macros, raw=[f"TASK_FEATURE_LENGTHS = {LENGTHS}", "BATCH_SIZE = 7"])
  (part,) = {json.dumps(part["segments"]): part for part in report["schedule"]}.values()
  segments = [(s["start"], s["stop"], s["first_D"]) for s in part["segments"]]
  assert segments == [(0, 10, 1), (10, 70, 1), (70, 100, 0)]
  assert [s["global_start"] for s in part["segments"]] == [1_000_000, 1_000_010, 1_000_070]
  dense = T5(network.Transformer(network.T5Config(**SIZES)), lengths=LENGTHS).cost()
  made = configure.rules({"ff": None}, "mdgf_linear", "1:4", **phases)
  cost, near = report["cost"], lambda x: pytest.approx(x, rel=1e-9)
  once = nms.flops.inference(dense, made).flops
  assert cost["inference"] == {"dense": near(dense.flops), "sparse": near(once)}
  assert cost["training"]["sparse"] == near(nms.flops.training(dense, made, 7).flops)


def test_the_largest_t5_is_not_allocated(run):
  before = {id(a) for a in jax.live_arrays()}
  files = ("gin_configs/models/t5.gin", "gin_configs/sparsity.gin")
  _, report = run(files=files, **SETTINGS, T5_SIZE="xxl", SCAN_LAYERS=True)
  assert report["ok"] and report["cost"]["parameters"]["dense"] > 1e10
  assert all(a.size < 100 for a in jax.live_arrays() if id(a) not in before)


def test_text_json_and_library_say_the_same(run, tmp_path, capsys):
  macros = SETTINGS | {"RECIPE": "mdgf_exponential", "PRETRAINED_STEPS": 1000}
  _, report = run(**macros)
  bindings = [f"{name} = {value!r}" for name, value in macros.items()]
  assert plan.plan(SPARSE, bindings, [tmp_path]) == report
  argv = [f"--gin_file={f}" for f in SPARSE] + [f"--gin.{b}" for b in bindings]
  assert not cli.main(["plan", *argv])  # in a folder with the model file alone
  text = capsys.readouterr().out
  assert text == plan.render(report) + "\n"
  kept = f"kept: {report['cost']['parameters']['kept']:,}"
  for words in ("mlp/wo/kernel", "\n1,000 ", "ends with D = 5.72e-05", kept, "Nothing stands"):
    assert words in text, text


def documented_overrides(of_t5x):
  """The flags in the table of docs/t5x.md, a list a row: T5X's own, or those of rules."""
  text = (ROOT / "docs/t5x.md").read_text().partition("## Overrides")[2].partition("\n## ")[0]
  found = re.findall(r"^\| .*?`(--gin\..*?)`(?: |$)", text, re.MULTILINE)
  rows = [[flag.removeprefix("--gin.") for flag in shlex.split(flags)] for flags in found]
  own = ("t5x_adapter.", "utils.", "partitioning.", "METRICS_EVERY")
  return [row for row in rows if any(flag.startswith(own) for flag in row) is of_t5x]


def test_documented_overrides_make_rules(run):
  del run  # makes model.gin
  base = SETTINGS | dict(RECIPE="mdgf_exponential", FINETUNE_STEPS=20)
  rows = documented_overrides(of_t5x=False)
  assert len(rows) >= 6
  for row in rows:
    bindings = [f"{k} = {v!r}" for k, v in base.items()] + row
    with gin_files.Config([ROOT], SPARSE, bindings) as config:
      assert not config.errors and config.value("RULES"), row


# --- what it refuses ----------------------------------------------------------------------------


def test_each_part_notes_its_error(run):
  rules = {"ff": "1:5", "decodr/ff": None}
  _, report = run("--checkpoint=nowhere", **SETTINGS, SPARSITY_RULES=rules, raw=["X.y=1"])
  for words in (["X.y"], ["1:5", "mlp/wi"], ["nowhere"]):
    assert has(report["errors"], *words), report["errors"]


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(PATERN="1:8"), ["PATERN", "did you mean PATTERN?"]),
    (dict(files=LOCAL, MICROBATCHES=7, **TASK), ["7 microbatches"]),
  ],
)
def test_a_wrong_setting_is_named(run, changes, words):
  _, report = run(**SETTINGS | changes)
  assert len(report["errors"]) < 3 and has(report["errors"], *words), report["errors"]
  assert not has(report["errors"], "In call to configurable")


# T5X's own model.
T5X_MODEL = """
from __gin__ import dynamic_registration
from t5x import models
from t5x.examples.t5 import network
include 't5x_tiny.gin'
DROPOUT_RATE = %gin.REQUIRED
network.T5Config.dropout_rate = %DROPOUT_RATE
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = %NETWORK
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
"""


def test_a_checkpoint_fits_or_does_not(run, tmp_path):
  tree = {"target": zeros_of(network.Transformer(network.T5Config(**SIZES)))}
  tree["state"] = {"step": np.int32(6), "param_states": {"v": np.zeros((3, 2), np.float32)}}
  path = write_orbax(tmp_path / "checkpoint_6", tree)
  code, report = run(f"--checkpoint={path}", **SETTINGS)
  assert not code, report["errors"]
  found = report["restore"]
  assert (found["format"], found["step"], found["sparse_step"]) == ("Orbax", 6, None)
  _, report = run(f"--checkpoint={path}", **SETTINGS, raw=[f"{OURS}.mlp_dim = 64"])
  (error,) = report["errors"]
  assert "12 of another shape" in error and "(32, 48) there and (32, 64) here" in error


def test_settings_are_compared_as_the_run_has_them(run, monkeypatch):
  """This process has other devices than the run, and a run that resumes must have its settings."""
  seen = []
  monkeypatch.setattr(train, "check", lambda _, settings: seen.append(settings))
  run(files=LOCAL, **SETTINGS, **TASK, NUM_PARTITIONS=3)
  assert seen[0]["model"]["num_partitions"] == 3


# --- with T5X -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5x():
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  with warnings.catch_warnings(action="ignore"):
    import t5x.train

    sys.path.insert(0, str(ROOT / "tests"))
    yield t5x
    sys.path.remove(str(ROOT / "tests"))


@pytest.fixture
def run_t5x(t5x, run):
  return lambda *flags, **macros: run(*flags, **dict(files=TINY) | macros)


@pytest.fixture(autouse=True)
def closed_loops():
  with t5x_found.closed_loops():
    yield


TINY = ("gin_configs/runs/t5x_finetune.gin", str(ROOT / "tests/t5x_tiny.gin"))
FINETUNE = dict(
  RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=12, DENSE_STEPS=2, FINETUNE_STEPS=4,
  PRETRAINED_STEPS=6, BATCH_SIZE=16, EVAL_PERIOD=5000,
)  # fmt: skip
TRAINED = configure.rules({"ff": None}, "sr_ste", "1:4", 12, 2, 4)  # those of FINETUNE


@pytest.fixture
def start(tmp_path, t5x):
  path = write_orbax(tmp_path / "start/checkpoint_6", t5x_dense())
  return dict(MODEL_DIR=str(tmp_path / "new"), INITIAL_CHECKPOINT_PATH=str(path))


@pytest.mark.t5x
def test_a_fine_tune_from_a_dense_checkpoint(run_t5x, start):
  where = dict(MODEL_DIR="new", INITIAL_CHECKPOINT_PATH="start/checkpoint_6")
  code, report = run_t5x(**FINETUNE | where | {"RECIPE": "idp"})
  assert not code, report["errors"]
  assert report["program"] == "train"
  assert report["restore"]["path"] == where["INITIAL_CHECKPOINT_PATH"]
  sections = report["restore"]["sections"]
  assert sections["load"] == {"target": 29, "state": 1}
  # Moments start afresh, the step is loaded. Of the run step, start and rules, and of each kernel
  # a mask and its stamps.
  assert sections["initialise"] == {"state": 2 * 29 + 1, "flax_mutables": 3 + 3 * 6}
  assert sections["drop"] == {"state": 29}
  assert report["schedule"][0]["segments"][0]["global_start"] == 6
  assert report["cost"]["training"]["batch_size"] == 16


@pytest.mark.t5x
@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(TRAIN_STEPS_RELATIVE=5), ["TRAIN_STEPS_RELATIVE"]),
    (dict(MIXTURE_OR_TASK_NAME="nope"), ["'nope'"]),
    (dict(raw=["utils.RestoreCheckpointConfig.dtype = 'bfloat16'"]), ["bfloat16"]),
  ],
)
def test_a_wrong_setting_of_t5x_is_named(run_t5x, start, changes, words):
  _, report = run_t5x(**FINETUNE | start | changes)
  assert has(report["errors"], *words) and len(report["errors"]) < 3, report["errors"]


@pytest.mark.t5x
def test_a_model_dir_with_checkpoints_is_resumed_or_refused(run_t5x, start, tmp_path):
  macros = FINETUNE | start
  _, report = run_t5x(**macros | {"MODEL_DIR": str(tmp_path / "start")})
  assert has(report["errors"], "dense run")
  path = write_orbax(tmp_path / "sparse/checkpoint_10", t5x_sparse(TRAINED))
  macros["MODEL_DIR"] = str(path.parent)
  code, report = run_t5x(**macros)
  assert not code, report["errors"]
  assert has(report["notes"], "would resume from", "checkpoint_10")
  assert report["restore"]["sparse_step"] == 4
  assert not report["restore"]["sections"]["initialise"]
  assert not report["restore"]["sections"]["drop"]
  _, report = run_t5x(**macros | {"PATTERN": "2:4"})
  assert has(report["errors"], "sr_ste 1:4", "sr_ste 2:4")


@pytest.mark.t5x
def test_t5xs_evaluation_of_a_dense_checkpoint_is_refused(run_t5x, start):
  macros = dict(CHECKPOINT_PATH=start["INITIAL_CHECKPOINT_PATH"], INFER_OUTPUT_DIR="/x", **SETTINGS)
  _, report = run_t5x(files=("gin_configs/runs/t5x_infer_glue_test.gin", TINY[1]), **macros)
  assert report["program"] == "infer"
  assert has(report["errors"], "checkpoint is dense")


@pytest.mark.t5x
def test_documented_overrides_of_t5x_are_reported(run_t5x, start):
  flags = sum(documented_overrides(of_t5x=True), [])
  code, report = run_t5x(**FINETUNE, **start, LEARNING_RATE=0.5, raw=flags)
  assert len(flags) == 4 and not code, report["errors"]
  assert report["schedule"][0]["lambda"] == 2e-4
  assert has(report["warnings"], "a learning rate of its own, 0.01")
  assert report["learning_rate"]["last"] == 0.01


@pytest.mark.t5x
def test_splits_and_files_of_a_task(run_t5x, start, request, tmp_path):
  import seqio

  tasks = pytest.importorskip("t5x_tasks")
  request.addfinalizer(tasks_found.register_again)

  def of_data(name, **more):
    macros = FINETUNE | start | dict(MIXTURE_OR_TASK_MODULE="t5x_tasks", MIXTURE_OR_TASK_NAME=name)
    _, report = run_t5x(**macros, **more)
    return [x for x in report["errors"] + report["warnings"] if "nm_glue" in x or "GLUE" in x]

  (said,) = of_data("nm_glue_mini_mnli")
  assert "no split 'validation'" in said and "evaluated" in said
  tasks.register_glue(vocabulary=seqio.ByteVocabulary(), data_dir=str(tmp_path))
  (said,) = of_data("nm_glue_rte")
  assert "RTE/train.tsv" in said
  tasks.register_glue()  # T5's own lies in a bucket, which is not asked
  assert of_data("nm_glue_cola", USE_CACHED_TASKS=True) == []
