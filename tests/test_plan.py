"""nm-sparsity plan: what it shows of a run, and what it refuses."""

import json
import pathlib
import re
import shlex
import sys
import warnings

import hypothesis
import jax
import numpy as np
import pytest
import t5x_found
import tasks_found
from checkpoint_files import t5x_dense, t5x_sparse, write_orbax, zeros_of
from hypothesis import strategies as st

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import configure

pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
def run(tmp_path, capsys, monkeypatch):
  """Plans MODEL with macros: (exit code, report)."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (tmp_path / "model.gin").write_text(MODEL)

  def call(*flags, files=SPARSE, raw=(), **macros):
    argv = ["plan", f"--gin_search_paths={ROOT},{tmp_path}", *flags]
    argv += [f"--gin_file={f}" for f in files]
    argv += [f"--gin.{k}={v!r}" for k, v in macros.items()] + [f"--gin.{b}" for b in raw]
    capsys.readouterr()
    with jax.numpy_dtype_promotion("standard"):
      code = cli.main([*argv, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1) == bool(report["errors"])
    return code, report

  return call


def has(texts, *words):
  """Whether one text has all the words."""
  return any(all(w in text for w in words) for text in texts)


# --- what it shows ------------------------------------------------------------------------------


def test_kernels_alike_are_shown_together_and_nothing_is_lost(run):
  _, report = run(**SETTINGS, SPARSITY_RULES={"ff": None, "decoder/cross/qk": "2:8"})
  part = report["kernels"]
  found = {k["path"]: k for k in part["sparse"]}
  wi = found["decoder/layers_{0..2}/mlp/wi_{0,1}/kernel"]
  want = dict(count=6, rule="ff", shape=[32, 48], axis=0, pattern="1:4", groups=384)
  assert wi.items() >= (want | {"recipe": "sr_ste"}).items()
  assert found["decoder/layers_{0..2}/encoder_decoder_attention/{key,query}/kernel"]["groups"] == 64
  paths = [p for kind in ("sparse", "dense") for k in part[kind] for p in k["paths"]]
  assert len(set(paths)) == len(paths) == 7 + 3 * 11 + 1


def test_what_is_dropped_skipped_or_scanned(run):
  wide = [f"{OURS}.emb_dim = 768", f"{OURS}.mlp_dim = 1024"]
  _, report = run(raw=wide, RECIPE="sdgf_geometric", PATTERN="1:32", SPARSE_STEPS=100)
  remarks = {k["path"].split("/")[-2]: k["remarks"] for k in report["kernels"]["sparse"]}
  assert remarks == {"wi_{0,1}": ["levels 16:512 do not divide 768: dropped"], "wo": []}
  levels = {s["axis_sizes"][0]: s["segments"][0]["pattern"] for s in report["schedule"]}
  assert levels == {768: "8:256", 1024: "16:512"}
  scan = [f"{OURS}.mlp_dim = 50", f"{OURS}.scan_layers = True"]
  _, report = run(raw=scan, **SETTINGS, INDIVISIBLE="skip")
  assert "decoder/decoder/mlp/wo/kernel" in {k["path"] for k in report["kernels"]["skipped"]}
  shapes = {tuple(k["shape"]): k["axis"] for k in report["kernels"]["sparse"]}
  assert shapes == {(32, 1, 50): 0, (32, 3, 50): 0}


def test_schedule_and_cost(run):
  phases = dict(sparse_steps=100, dense_steps=10, finetune_steps=20)
  macros = {name.upper(): value for name, value in phases.items()}
  macros |= dict(RECIPE="mdgf_linear", PATTERN="1:4", PRETRAINED_STEPS=1_000_000)
  _, report = run(**macros, raw=[f"TASK_FEATURE_LENGTHS = {LENGTHS}", "BATCH_SIZE = 7"])
  (part,) = {json.dumps(part["segments"]): part for part in report["schedule"]}.values()
  assert (part["dense_until"], part["finetune_from"], part["offset"]) == (10, 80, 1_000_000)
  segments = [(s["start"], s["stop"], s["decay_start"]) for s in part["segments"]]
  assert segments == [(0, 10, 1), (10, 70, 1), (70, 100, 0)]
  dense = T5(network.Transformer(network.T5Config(**SIZES)), lengths=LENGTHS).cost()
  made = configure.rules({"ff": None}, "mdgf_linear", "1:4", **phases)
  once, cost = nms.flops.inference(dense, made), report["cost"]
  near = lambda x: pytest.approx(x, rel=1e-9)
  assert cost["inference"] == {"dense": near(dense.flops), "sparse": near(once.flops)}
  assert cost["training"]["sparse"] == near(nms.flops.training(dense, made, 7).flops)
  assert cost["training"]["dense"] == near(3 * 7 * 100 * dense.flops)
  assert cost["parameters"]["kept"] == once.params and cost["lengths"] == LENGTHS


def test_the_largest_t5_is_not_allocated(run):
  before = {id(a) for a in jax.live_arrays()}
  files = ("gin_configs/models/t5.gin", "gin_configs/sparsity.gin")
  _, report = run(files=files, **SETTINGS, T5_SIZE="xxl", SCAN_LAYERS=True)
  assert report["ok"] and report["cost"]["parameters"]["dense"] > 1e10
  assert all(a.size < 100 for a in jax.live_arrays() if id(a) not in before)


def test_a_warm_up_that_never_ends_is_warned_of(run):
  _, report = run(files=LOCAL, **SETTINGS | TASK | {"SPARSE_STEPS": 240}, WARMUP_STEPS=1000)
  rate = report["learning_rate"]
  assert has(report["warnings"], "WARMUP_STEPS=1,000")
  assert rate["first"] < rate["last"] == rate["highest"] == pytest.approx(0.001 * 0.239)


def test_text_json_and_library_say_the_same(run, tmp_path, capsys):
  macros = SETTINGS | {"RECIPE": "mdgf_exponential", "PRETRAINED_STEPS": 1000}
  _, report = run(**macros)
  bindings = [f"{name} = {value!r}" for name, value in macros.items()]
  assert plan.plan(SPARSE, bindings, [tmp_path]) == report
  argv = [f"--gin_file={f}" for f in SPARSE] + [f"--gin.{b}" for b in bindings]
  assert not cli.main(["plan", *argv])  # in a folder with the model file alone
  text = capsys.readouterr().out
  assert text == plan.render(report) + "\n"
  for words in (
    "decoder/layers_{0..2}/mlp/wo/kernel", "1,000 .. 1,099", "1 -> 5.18e-05", "FLOPs",
    "ends with D = 5.18e-05", "kept", "Nothing stands in the way",
  ):  # fmt: skip
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
    (dict(SPARSITY_RULES={"nope": None}), ["nope"]),
    (dict(PATERN="1:8"), ["PATERN", "did you mean PATTERN?"]),
    (dict(raw=["PATTERN=1:8"]), ["PATTERN = 1:8", "quotes"]),
    (dict(raw=[f"{OURS}.emb_dims = 8"]), ["emb_dims"]),
    (dict(files=["gin_configs/models/t5.gin", "gin_configs/sparsity.gin"]), ["T5_SIZE is not set"]),
    (dict(files=LOCAL, MICROBATCHES=7, **TASK), ["7 microbatches"]),
    (dict(files=LOCAL, **TASK | {"MIXTURE_OR_TASK_NAME": "no"}), ["'no'"]),
    (dict(files=LOCAL, **TASK), ["VOCAB_SIZE=256"]),
  ],
)
def test_a_wrong_setting_is_named(run, changes, words):
  _, report = run(**SETTINGS | changes)
  assert len(report["errors"]) < 3 and has(report["errors"], *words), report["errors"]
  assert not has(report["errors"], "In call to configurable")


def test_a_run_file_without_t5x_says_so(run, monkeypatch):
  for name in [name for name in sys.modules if name.split(".")[0] == "t5x"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.delitem(sys.modules, "nm_sparsity_jax.integrations.t5x", raising=False)
  monkeypatch.delattr("nm_sparsity_jax.integrations.t5x", raising=False)
  monkeypatch.setitem(sys.modules, "t5x", None)
  _, report = run(files=["model.gin", "gin_configs/runs/t5x_finetune.gin"], **SETTINGS)
  assert has(report["errors"], "t5x", "nm-sparsity doctor")


@pytest.mark.parametrize("name", ["eval", "infer"])
def test_a_plan_of_an_evaluation(run, name):
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  macros = SETTINGS | TASK | {"CHECKPOINT_PATH": "nowhere", f"{name.upper()}_OUTPUT_DIR": "found"}
  del macros["MODEL_DIR"]
  files, raw = ("model.gin", f"gin_configs/runs/local_{name}.gin"), [f"{OURS}.vocab_size = 384"]
  _, report = run(files=files, raw=raw, **macros)
  assert report["errors"] == ["there is no checkpoint 'nowhere'"]
  assert report["cost"]["training"] is None and "loss" not in report
  assert "training " not in plan.render(report)


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
FILES = [
  "model.gin", "gin_configs/sparsity.gin", "gin_configs/models/t5.gin", "no.gin",
  *(f"gin_configs/runs/local_{x}.gin" for x in ("adamw", "train", "eval", "workload")),
]  # fmt: skip
OVERRIDES = [
  "RECIPE = 'sr_ste'", "RECIPE = 3", "T5_SIZE = 'tiny'", "PATTERN = '1:4'", "PATTERN = 4",
  "SPARSE_STEPS = 100", "SPARSE_STEPS = 'x'", "SPARSITY_RULES = {'ff': 1}", "BATCH_SIZE = 0",
  "TASK_FEATURE_LENGTHS = 512", "MODEL_DIR = 5", "NETWORK = 3", "MODEL = None", "RULES = None",
  "INITIAL_CHECKPOINT_PATH = '/nowhere'", "LEARNING_RATE = 'high'", "X.y = 1",
]  # fmt: skip


def some(choices):
  return st.lists(st.sampled_from(choices), unique=True, max_size=5)


@hypothesis.given(files=some(FILES), overrides=some(OVERRIDES))
def test_no_files_and_overrides_raise(tmp_path_factory, files, overrides):
  folder = tmp_path_factory.mktemp("gin")
  (folder / "model.gin").write_text(MODEL)
  report = plan.plan(files, overrides, [folder, ROOT, ROOT / "tests"])
  assert report["ok"] == (not report["errors"]) and plan.render(report)


def test_a_checkpoint_fits_or_does_not(run, tmp_path):
  tree = {"target": zeros_of(network.Transformer(network.T5Config(**SIZES)))}
  tree["state"] = {"step": np.int32(6), "param_states": {"v": np.zeros((3, 2), np.float32)}}
  path = write_orbax(tmp_path / "checkpoint_6", tree)
  code, report = run(f"--checkpoint={path}", **SETTINGS)
  assert not code, report["errors"]
  found = report["restore"]
  assert (found["format"], found["step"], found["sparse_step"]) == ("Orbax", 6, None)
  count = len(jax.tree.leaves(tree["target"]))
  assert found["sections"] == {"parameters": dict(load=count, initialise=0, drop=0)}
  _, report = run(f"--checkpoint={path}", **SETTINGS, raw=[f"{OURS}.mlp_dim = 64"])
  (error,) = report["errors"]
  assert "12 of another shape" in error and "(32, 48) there and (32, 64) here" in error
  mlp = tree["target"]["encoder"]["layers_0"]["mlp"]
  mlp["wi"] = mlp.pop("wi_1")
  path = write_orbax(tmp_path / "checkpoint_7", tree)
  _, report = run(f"--checkpoint={path}", **SETTINGS)
  (error,) = report["errors"]
  assert "1 of 57 missing (target/encoder/layers_0/mlp/wi_1/kernel)" in error
  assert report["restore"]["sections"]["parameters"]["drop"] == 1


# --- with T5X -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5x():
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import t5x.train

    sys.path.insert(0, str(ROOT / "tests"))
    yield t5x
    sys.path.remove(str(ROOT / "tests"))


@pytest.fixture
def run_t5x(t5x, run):
  def call(*flags, **macros):
    with jax.numpy_rank_promotion("allow"):
      return run(*flags, files=macros.pop("files", TINY), **macros)

  return call


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
  where = dict(MODEL_DIR="new", INITIAL_CHECKPOINT_PATH="start/checkpoint_6")  # made absolute
  code, report = run_t5x(**FINETUNE | where | {"RECIPE": "idp"})
  assert not code, report["errors"]
  assert report["program"] == "train"
  assert report["restore"]["path"] == start["INITIAL_CHECKPOINT_PATH"]
  sections = report["restore"]["sections"]
  assert sections["parameters"] == dict(load=29, initialise=0, drop=0)
  # Moments start afresh, the step is loaded. Of the run step, start and rules, and of each kernel
  # a mask and its stamps.
  assert sections["step and optimizer"] == dict(load=1, initialise=2 * 29 + 1, drop=29)
  assert sections["mutables"]["initialise"] == 3 + 3 * 6
  assert report["schedule"][0]["offset"] == 6
  assert report["cost"]["training"]["batch_size"] == 16


@pytest.mark.t5x
@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(PRETRAINED_STEPS=7), ["PRETRAINED_STEPS=7", "global step 6"]),
    (dict(TRAIN_STEPS_RELATIVE=5), ["TRAIN_STEPS_RELATIVE"]),
    (dict(TRAIN_STEPS=40), ["TRAIN_STEPS=40", "18"]),
    (dict(MIXTURE_OR_TASK_NAME="nope"), ["'nope'"]),
    (dict(PATTERN="1:3"), ["1:3", "kernel"]),
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
  assert all(not s["initialise"] + s["drop"] for s in report["restore"]["sections"].values())
  _, report = run_t5x(**macros | {"PATTERN": "2:4"})
  assert has(report["errors"], "sr_ste 1:4", "sr_ste 2:4")
  _, report = run_t5x(**macros, raw=["OPTIMIZER = @adafactor.Adafactor()"])
  (error,) = report["errors"]
  assert "another optimizer" in error


@pytest.mark.t5x
@pytest.mark.parametrize("name", ["eval", "infer_glue_test"])
def test_t5xs_evaluation_of_a_dense_checkpoint_is_refused(run_t5x, start, name):
  macros = dict(CHECKPOINT_PATH=start["INITIAL_CHECKPOINT_PATH"], **SETTINGS)
  macros[f"{name.partition('_')[0].upper()}_OUTPUT_DIR"] = "/x"
  _, report = run_t5x(files=(f"gin_configs/runs/t5x_{name}.gin", TINY[1]), **macros)
  assert report["program"] == ("evaluate" if name == "eval" else "infer")
  assert has(report["errors"], "checkpoint is dense")


@pytest.mark.t5x
def test_a_start_from_a_sparse_run_that_is_not_finalized_is_said(run_t5x, start, tmp_path):
  """Its stored weights are dense, and its network never saw them that way."""
  tree = t5x_sparse(TRAINED, start=2)
  tree["target"] = jax.tree.map(np.ones_like, tree["target"])
  path = str(write_orbax(tmp_path / "sparse/checkpoint_6", tree))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("warnings.warn", lambda *_, **__: None)  # the run warns too
    _, report = run_t5x(**FINETUNE | start | {"INITIAL_CHECKPOINT_PATH": path})
  assert report["ok"] and has(report["warnings"], "not finalized")


@pytest.mark.t5x
def test_what_t5x_makes_of_lambda_and_of_documented_overrides(run_t5x, start):
  flags = sum(documented_overrides(of_t5x=True), [])
  macros = FINETUNE | start | {"LOSS_NORMALIZING_FACTOR": 64}
  code, report = run_t5x(**macros, LEARNING_RATE=0.5, raw=flags)
  assert len(flags) == 4 and not code, report["errors"]
  assert report["loss"]["lambda"] == {"ff": 2e-4}
  assert report["loss"]["t5x_over_mean_at_most"] == 16 * 8 / 64
  assert "in T5X's loss, at most 0.0004" in plan.render(report)
  assert has(report["warnings"], "a learning rate of its own, 0.01")
  assert report["learning_rate"]["last"] == 0.01


@pytest.fixture
def tasks():
  """`t5x_tasks`; what a test registers again is as it was afterwards."""
  t5x_tasks = pytest.importorskip("t5x_tasks")
  yield t5x_tasks
  tasks_found.register_again()


@pytest.mark.t5x
def test_splits_files_and_vocabulary_of_a_task(run_t5x, start, tasks, tmp_path):
  import seqio

  def of_data(name, **more):
    macros = FINETUNE | start | dict(MIXTURE_OR_TASK_MODULE="t5x_tasks", MIXTURE_OR_TASK_NAME=name)
    _, report = run_t5x(**macros, **more)
    return [x for x in report["errors"] + report["warnings"] if "nm_glue" in x or "GLUE" in x]

  (said,) = of_data("nm_glue_mini_mnli")
  assert "no split 'validation'" in said and "evaluated" in said
  (said,) = of_data("nm_glue_mini_ax")
  assert "no split 'train'" in said
  folder, raw = tmp_path / "glue", ["t5x.examples.t5.network.T5Config.vocab_size = 256"]
  tasks.register_glue(vocabulary=seqio.ByteVocabulary(), data_dir=str(folder))
  (said,) = of_data("nm_glue_rte")
  assert "RTE/train.tsv" in said
  (folder / "RTE").mkdir(parents=True)
  for name in ("train", "dev"):
    (folder / f"RTE/{name}.tsv").touch()  # what is in it is not looked at
  (said,) = of_data("nm_glue_rte", raw=raw)
  assert "259 ids" in said and "VOCAB_SIZE=384" in said
  tasks.register_glue()  # T5's own lies in a bucket, which is not asked
  assert of_data("nm_glue_cola", USE_CACHED_TASKS=True, raw=raw) == []
