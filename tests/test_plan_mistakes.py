"""What users get wrong before a run: `plan` names the setting, whatever else is wrong."""

import re
import warnings

import hypothesis
import numpy as np
import pytest
import test_plan
from hypothesis import strategies as st
from test_plan import FINETUNE, MODEL, ROOT, SETTINGS, has

from nm_sparsity_jax import cli, runs
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.trainer import train

run, t5x, run_t5x = test_plan.run, test_plan.t5x, test_plan.run_t5x
closed_loops = test_plan.closed_loops

LOCAL = ("model.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin")
TASK = dict(
  MIXTURE_OR_TASK_NAME="nm_glue_mini_rte", MIXTURE_OR_TASK_MODULE="t5x_tasks",
  TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 4}, Z_LOSS=0.0, LABEL_SMOOTHING=0.0,
)  # fmt: skip


# --- evaluations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, where", [("eval", "EVAL_OUTPUT_DIR"), ("infer", "INFER_OUTPUT_DIR")]
)
def test_a_plan_of_an_evaluation_tells_what_an_evaluation_costs(run, tmp_path, name, where):
  """It was refused as a program, and where it was not, it priced a training of guessed lengths."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  files = ("model.gin", f"gin_configs/runs/local_{name}.gin")
  paths = {"CHECKPOINT_PATH": "nowhere", where: str(tmp_path / "found")}
  macros = {**SETTINGS, **TASK, **paths}
  flags = [f"{test_plan.OURS}.vocab_size = 384"]
  for lengths in (None, {"inputs": 8, "targets": 4}) if name == "eval" else ({"inputs": 8},):
    _, report = run(files=files, raw=flags, **macros | {"TASK_FEATURE_LENGTHS": lengths})
    assert report["errors"] == ["there is no checkpoint 'nowhere'"]
    cost = report["cost"]
    assert cost["training"] is None and "loss" not in report and "learning_rate" not in report
    assert (cost["inference"] is None) == (lengths is None) and cost["parameters"]["kept"]
    text = plan.render(report)
    assert "training " not in text and "guessed" not in text and "lambda" not in text
    assert ("FLOPs" in text) == (lengths is not None) and "parameters" in text


def test_a_checkpoint_that_is_not_there_is_said_once(run, tmp_path):
  """Its rules are asked for first, and failed with the same words."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  files = ("model.gin", "gin_configs/runs/local_eval.gin")
  paths = {"CHECKPOINT_PATH": "nowhere", "EVAL_OUTPUT_DIR": str(tmp_path / "found")}
  flags = [f"{test_plan.OURS}.vocab_size = 384"]
  unset = {"RECIPE": None, "PATTERN": None}
  _, report = run(files=files, raw=flags, **{**SETTINGS, **TASK, **paths, **unset})
  (said,) = report["errors"]
  assert said.startswith("there is no checkpoint 'nowhere', so its rules are unknown.")


# --- misspelt arguments -------------------------------------------------------------------------


def test_a_misspelt_argument_of_a_function_is_an_error(run):
  one = test_plan.OURS
  code, report = run(raw=[f"{one}.emb_dims=8", f"{one}.colour=8"], **SETTINGS)
  assert code == 1 and report["errors"] == [
    f"{one}.emb_dims = 8: {one} has no argument 'emb_dims'; did you mean emb_dim?",
    f"{one}.colour = 8: {one} has no argument 'colour'",
  ]


@pytest.mark.t5x
def test_a_misspelt_argument_of_t5x_is_an_error(run_t5x):
  """T5X's run would refuse it too, without a word about what was meant."""
  wrong = {"train_script.train.eval_perod": 3, "utils.SaveCheckpointConfig.perod": 3}
  code, report = run_t5x(**FINETUNE, **wrong)
  assert code == 1
  for name, value in wrong.items():
    function, _, argument = name.rpartition(".")
    meant = argument.replace("perod", "period")
    said = f"{name} = {value}: {function} has no argument {argument!r}; did you mean {meant}?"
    assert said in report["errors"]


# --- any files ---------------------------------------------------------------------------------

# As T5X's own model files: a macro that must be set, and T5X's own model.
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


# T5X's tiny.gin, with an import of its own: another network may be known to this process already.
T5X_TINY = """
from __gin__ import dynamic_registration
from t5x.examples.t5 import network
include 't5x/examples/t5/t5_1_1/base.gin'
network.T5Config:
  emb_dim = 8
  num_heads = 4
  num_encoder_layers = 2
  num_decoder_layers = 2
  head_dim = 3
  mlp_dim = 16
"""


FILES = (
  "model.gin", "gin_configs/sparsity.gin", "gin_configs/runs/local_adamw.gin",
  "gin_configs/runs/local_train.gin", "gin_configs/runs/local_finetune.gin",
  "gin_configs/runs/local_eval.gin", "gin_configs/runs/local_infer.gin",
  "gin_configs/runs/local_workload.gin", "gin_configs/runs/none.gin",
  "gin_configs/paper/table12.gin", "gin_configs/models/t5.gin",
)  # fmt: skip
OF_T5X = (
  "gin_configs/runs/t5x_finetune.gin", "gin_configs/runs/t5x_eval.gin",
  "gin_configs/runs/t5x_adamw.gin", "gin_configs/runs/t5x_pretrain.gin", "theirs.gin",
  "t5x/examples/t5/t5_1_1/small.gin", str(ROOT / "tests/t5x_tiny.gin"), "model.gin",
  "gin_configs/paper/table12.gin",
)  # fmt: skip
OVERRIDES = (
  "RECIPE = 'sr_ste'", "RECIPE = 3", "T5_SIZE = 'tiny'", "ROW = 3", "ROW = 'dense'",
  "PATTERN = '1:4'", "PATTERN = 4", "SPARSE_STEPS = 100",
  "SPARSE_STEPS = -1", "SPARSE_STEPS = 'x'", "SPARSITY_RULES = {'ff': 1}", "BATCH_SIZE = '8'",
  "BATCH_SIZE = 0", "TASK_FEATURE_LENGTHS = 512", "TASK_FEATURE_LENGTHS = {'inputs': 8}",
  "PRETRAINED_STEPS = 'many'", "PRETRAINED_STEPS = 5", "MODEL_DIR = 5", "MODEL_DIR = None",
  "MODEL_DIR = '/nowhere/run'", "INITIAL_CHECKPOINT_PATH = '/nowhere'", "CHECKPOINT_PATH = 7",
  "INITIAL_CHECKPOINT_PATH = ['a', 'b']", "MIXTURE_OR_TASK_NAME = 'nope'", "NETWORK = 3",
  "MIXTURE_OR_TASK_MODULE = 'no_module'", "LEARNING_RATE = 'high'", "OPTIMIZER = None",
  "LEARNING_RATE_FACTORS = 'linear'", "WARMUP_STEPS = None", "DENSE_STEPS = 1.5", "RULES = None",
  "EVAL_PERIOD = 0", "MODEL = None", "MICROBATCHES = 3", "LOSS_NORMALIZING_FACTOR = 'x'",
  "network.T5Config.emb_dim = 30", "network.T5Config.emb_dim = 'x'", "X.y = 1", "DROPOUT_RATE = 1",
)  # fmt: skip
# Python's own errors: a sentence of ours or of T5X's is none of them.
_PYTHONS = re.compile(
  r"\b(Attribute|Key|Type|Index|Name|Assertion|ZeroDivision|Recursion|UnboundLocal|Unicode\w*)Error\b"
  r"|\b(Value|Runtime)Error\(|Traceback|object at 0x"
)


def refuse_pythons(files, overrides, folder):
  """Plans, prints, and fails where an error is Python's."""
  report = plan.plan(files, overrides, [folder, ROOT, ROOT / "tests"])
  plan.render(report, everything=True)
  assert report["ok"] == (not report["errors"])
  wrong = [text for text in report["errors"] if _PYTHONS.search(text)]
  assert not wrong, (files, overrides, wrong)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  found = tmp_path_factory.mktemp("gin")
  (found / "model.gin").write_text(MODEL)
  (found / "theirs.gin").write_text(T5X_MODEL)
  return found


def some(files):
  return st.lists(st.sampled_from(files), unique=True, max_size=5)


@hypothesis.given(files=some(FILES), overrides=some(OVERRIDES))
def test_no_exception_reaches_the_user(folder, files, overrides):
  """Point 2: whatever files come in whatever order, with whatever overrides."""
  refuse_pythons(files, overrides, folder)


@pytest.mark.slow
@hypothesis.settings(max_examples=400)
@hypothesis.given(files=some(FILES), overrides=some(OVERRIDES))
def test_no_exception_reaches_the_user_of_many(folder, files, overrides):
  """Point 2: the same, longer."""
  refuse_pythons(files, overrides, folder)


@pytest.mark.t5x
@hypothesis.given(files=some(OF_T5X), overrides=some(OVERRIDES))
def test_no_exception_reaches_the_user_of_t5x(t5x, folder, files, overrides):
  """Point 2: the same with T5X's programs."""
  refuse_pythons(files, overrides, folder)


@pytest.mark.slow
@pytest.mark.t5x
@hypothesis.settings(max_examples=200)
@hypothesis.given(files=some(OF_T5X), overrides=some(OVERRIDES))
def test_no_exception_reaches_the_user_of_t5x_of_many(t5x, folder, files, overrides):
  """Point 2: the same, longer."""
  refuse_pythons(files, overrides, folder)


# --- paths and optimizers of T5X -----------------------------------------------------------------


@pytest.mark.t5x
def test_relative_paths_are_made_absolute_or_refused(run_t5x, tmp_path):
  """Point 1: `plan` let them pass, and the run died at its first save."""
  from t5x import utils

  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  test_plan.write_orbax(tmp_path / "start/checkpoint_6", test_plan.t5x_checkpoint())
  where = dict(MODEL_DIR="new", INITIAL_CHECKPOINT_PATH="start/checkpoint_6")
  files = ["gin_configs/runs/t5x_finetune.gin", str(ROOT / "tests/t5x_tiny.gin")]
  bound = [f"{k} = {v!r}" for k, v in {**FINETUNE, **where}.items()]
  with gin_files.Config([ROOT, ROOT / "tests"], files, bound) as config:
    assert config.argument("model_dir") == str(tmp_path / "new")
    restore = config.argument("checkpoint_cfg").restore
    assert isinstance(restore, utils.RestoreCheckpointConfig)
    assert restore.path == str(tmp_path / "start/checkpoint_6")
    assert config.argument("model_dir", "get_dataset") == str(tmp_path / "new")
  code, report = run_t5x(**FINETUNE, **where)
  assert not code, report["errors"]
  # A run file that takes the macro itself.
  raw = ["train_script.train.model_dir = %MODEL_DIR"]
  raw += ["utils.RestoreCheckpointConfig.path = %INITIAL_CHECKPOINT_PATH"]
  code, report = run_t5x(**FINETUNE, **where, raw=raw)
  assert code == 1 and len(report["errors"]) == 2, report["errors"]
  assert has(report["errors"], "MODEL_DIR='new' is relative", f"{str(tmp_path / 'new')!r}")
  assert has(report["errors"], "INITIAL_CHECKPOINT_PATH='start/checkpoint_6' is relative")
  for path in ("gs://bucket/run", "/run", "", None):
    assert t5x_adapter.absolute(path) == path


@pytest.mark.t5x
def test_the_trainer_refuses_a_relative_folder_before_the_first_step(t5x):
  """Point 1: the run died at its first save."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  class Model(t5x_adapter.SparseEncoderDecoderModel):
    def __init__(self):
      pass

  rest = dict.fromkeys(
    ("partitioner", "eval_names", "train_state_axes", "rng", "learning_rate_fn", "num_microbatches")
  )
  with pytest.raises(ValueError, match="MODEL_DIR='run' is relative"):
    t5x_adapter.SparseTrainer(Model(), object(), summary_dir="run", **rest)


@pytest.mark.t5x
def test_another_optimizer_is_named_where_a_run_goes_on(run_t5x, tmp_path):
  """Point 6: T5X died of a pytree, and `plan` said that 106 of 162 arrays lack."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.training import configure, rules_text

  text = rules_text.pack(
    configure.describe(configure.rules({"ff": None}, "sr_ste", "1:4", 12, 2, 4))
  )
  mine = {"step": np.int32(4), "start": np.int32(6), "rules": np.asarray(text)}
  tree = test_plan.t5x_checkpoint(flax_mutables={"nm_sparsity": mine})
  moments = {"count": np.int32(4), "mu": tree["target"], "nu": tree["target"]}
  tree["state"] = {"step": np.int32(10), "param_states": {"0": moments}}
  path = test_plan.write_orbax(tmp_path / "run/checkpoint_10", tree)
  dense = test_plan.write_orbax(tmp_path / "start/checkpoint_6", test_plan.t5x_checkpoint())
  start = FINETUNE | {"RECIPE": "sr_ste", "INITIAL_CHECKPOINT_PATH": str(dense)}
  said = (
    "MODEL_DIR holds checkpoints of another OPTIMIZER: its state is count, mu, nu, and that of "
  )
  where = str(path.parent)
  code, report = run_t5x(**start, MODEL_DIR=where, raw=["OPTIMIZER = @adafactor.Adafactor()"])
  assert code == 1 and has(report["errors"], said, "OPTIMIZER is m, v, v_col, v_row. Continue with")
  assert not has(report["errors"], "arrays") and len(report["errors"]) == 1
  code, report = run_t5x(**start, MODEL_DIR=where)
  assert not code, report["errors"]
  # As T5X calls it, before it restores anything.
  theirs = {**tree, "state": {"param_states": {"decoder": {"m": np.zeros(1)}}}}
  with pytest.raises(ValueError, match="another OPTIMIZER: its state is count, mu, nu"):
    t5x_adapter.resume_sparse(tree, theirs, is_resuming=True)
  assert t5x_adapter.resume_sparse(tree, theirs) is tree  # what a run starts from may have another


@pytest.mark.t5x
def test_a_start_from_a_sparse_run_that_is_not_finalized_is_said(run_t5x, tmp_path):
  """Point 5: its stored weights are dense, and its network never saw them that way."""
  import jax

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.training import configure, rules_text

  rules = configure.rules({"ff": None}, "sr_ste", "1:4", 12, 2, 4)
  text = rules_text.pack(configure.describe(rules))
  mine = {"step": np.int32(4), "start": np.int32(2), "rules": np.asarray(text)}
  tree = test_plan.t5x_checkpoint(flax_mutables={"nm_sparsity": mine})
  ones = jax.tree.map(np.ones_like, tree["target"])
  said = "is of a sparse run and not finalized, so it holds dense weights"
  for name, target in ("sparse", ones), ("final", nms.finalize(ones, rules, 0, early=True)):
    tree["target"] = jax.tree.map(np.asarray, target)
    path = str(test_plan.write_orbax(tmp_path / f"{name}/checkpoint_6", tree))
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      assert t5x_adapter.start(path) == path
    start = FINETUNE | {"RECIPE": "sr_ste", "INITIAL_CHECKPOINT_PATH": path, "MODEL_DIR": "/new"}
    code, report = run_t5x(**start)
    assert not code, report["errors"]
    for texts in ([str(w.message) for w in caught], report["warnings"]):
      assert has(texts, said, "nm-sparsity finalize") == (name == "sparse"), texts
  page = " ".join((ROOT / "docs/t5x.md").read_text().split())
  assert "**T5X's own model does not. It would run an unfinalized checkpoint with dense" in page


def test_the_local_runner_names_another_optimizer(run, tmp_path):
  """Point 6: in `plan` and before the run, which both read settings.json."""
  folder = tmp_path / "run"
  settings = SETTINGS | TASK | {"MODEL_DIR": str(folder)}
  files = ["model.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin"]
  where, bound = [tmp_path, ROOT], [f"{k} = {v!r}" for k, v in settings.items()]
  with gin_files.Config(where, files, bound) as config:
    folder.mkdir()
    runs.settings.write(folder, train.settings_of(config.settings("Run")))
  (folder / "checkpoint_3/state").mkdir(parents=True)
  (folder / "checkpoint_3/state/_METADATA").write_text("{}")
  (folder / "checkpoint_3/_CHECKPOINT_METADATA").write_text("{}")
  files[1] = "gin_configs/runs/local_adafactor.gin"
  _, report = run(files=files, **settings)
  assert has(report["errors"], "other settings: optimizer was ", "adamw", "adafactor")


# --- where files are looked for -----------------------------------------------------------------


def test_plan_finds_our_gin_files_as_train_does(tmp_path, monkeypatch, capsys):
  """Point 14: outside a checkout, `plan` looked into the current folder alone."""
  monkeypatch.chdir(tmp_path)
  argv = ["--gin_file=gin_configs/models/mini.gin", "--gin_file=gin_configs/sparsity.gin"]
  argv += [f"--gin.{k}={v!r}" for k, v in SETTINGS.items()]
  assert cli.main(["plan", *argv]) == 0
  assert "Nothing stands in the way." in capsys.readouterr().out
  # A file of one's own comes first.
  own = tmp_path / "gin_configs/models/mini.gin"
  own.parent.mkdir(parents=True)
  own.write_text(f"include '{gin_files.folder()}/gin_configs/models/mini.gin'\nX = %Y")
  assert cli.main(["plan", *argv]) == 0


# --- what the report says -----------------------------------------------------------------------


def test_the_learning_rate_is_shown_and_a_warm_up_that_never_ends_is_told(run, tmp_path):
  """Point 10: 240 steps under a warm-up of 1000 never reach the learning rate."""
  settings = SETTINGS | TASK | {"MODEL_DIR": str(tmp_path / "run"), "SPARSE_STEPS": 240}
  code, report = run(files=LOCAL, **settings, WARMUP_STEPS=1000)
  rate = report["learning_rate"]
  assert rate["last"] == rate["highest"] == pytest.approx(0.001 * 239 / 1000)
  assert rate["factors"] == "constant * linear_warmup" and rate["warmup_steps"] == 1000
  said = "SPARSE_STEPS=240, and the learning rate warms up for WARMUP_STEPS=1,000: it ends at"
  assert has(report["warnings"], said, "0.000239 of LEARNING_RATE=0.001. Lower WARMUP_STEPS")
  assert "rate        1e-08 -> 0.000239 (constant * linear_warmup, warm-up of 1,000" in plan.render(
    report
  )
  code, report = run(files=LOCAL, **settings, WARMUP_STEPS=100)
  assert not has(report["warnings"], "warms up")
  assert report["learning_rate"]["last"] == pytest.approx(0.001)
  text = plan.render(report)
  assert "rate        1e-08 -> 0.001 (constant * linear_warmup, warm-up of 100 steps)" in text
  factors = "constant * linear_warmup * rsqrt_decay"
  _, report = run(files=LOCAL, **settings, WARMUP_STEPS=100, LEARNING_RATE_FACTORS=factors)
  rate = report["learning_rate"]
  assert rate["first"] < rate["highest"] > rate["last"] and abs(rate["highest_at"] - 100) <= 1
  assert re.search(r"rate +1e-08 -> 0.0001 at sparse step \d+ -> ", plan.render(report))


@pytest.mark.t5x
def test_a_learning_rate_that_the_optimizer_ignores_is_told(run_t5x, tmp_path):
  """LEARNING_RATE=0.5 did nothing, and nobody said so."""
  _, report = run_t5x(**FINETUNE, MODEL_DIR=str(tmp_path / "run"), LEARNING_RATE=0.5)
  assert has(report["warnings"], "a learning rate of its own, 0.01: LEARNING_RATE, WARMUP_STEPS")


def test_a_batch_that_was_guessed_is_told_and_parameters_are_counted_in_billions(run):
  """Point 10: one example was taken without a word, and 11 G parameters are 11 B."""
  xxl = ("gin_configs/models/t5.gin", "gin_configs/sparsity.gin")
  text = plan.render(run(files=xxl, **SETTINGS, T5_SIZE="xxl")[1])
  assert "100 steps of 1 (BATCH_SIZE is not set: guessed)" in text
  assert re.search(r"parameters  [\d.]+ B of 11.1 B \([\d.]+%\) kept; [\d.]+ B are in", text), text
  text = plan.render(run(**SETTINGS, raw=["BATCH_SIZE = 7"])[1])
  assert "100 steps of 7" in text and "guessed" not in text.split("training")[1].splitlines()[0]


def test_a_checkpoint_of_another_size_is_one_error(run, tmp_path):
  """Point 10: each array was an error of its own."""
  path = test_plan.write_orbax(tmp_path / "checkpoint_6", test_plan.dense_checkpoint())
  wider = [f"{test_plan.OURS}.mlp_dim = 64", f"{test_plan.OURS}.vocab_size = 128"]
  code, report = run(f"--checkpoint={path}", **SETTINGS, raw=wider)
  (error,) = report["errors"]
  assert code == 1 and f"{path} is of a model of another size: 17 of " in error
  assert "mlp/wi_{0,1}/kernel has shape (32, 48) there and (32, 64) here" in error
  assert error.endswith("Take the model file that it was made with") and error.count(" there") == 3
