"""A run is launched as plain T5X is: one file in place of T5X's, and three flags more.

What a checkpoint holds is read from it, and a flag that says something else is refused.
"""

import importlib
import logging
import sys

import numpy as np
import pytest
import test_plan
from test_plan import ROOT, T5X_MODEL, T5X_TINY, has

from nm_sparsity_jax import runs
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.runs import results
from nm_sparsity_jax.training import configure, rules_text

pytestmark = pytest.mark.t5x

run, t5x, run_t5x = test_plan.run, test_plan.t5x, test_plan.run_t5x
closed_loops = test_plan.closed_loops

SPARSE = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=20)
TASK = dict(
  MIXTURE_OR_TASK_NAME="nm_test_sort", MIXTURE_OR_TASK_MODULE="t5x_task",
  TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8},
)  # fmt: skip


@pytest.fixture
def launch(run_t5x, tmp_path):
  """`plan` of a launch with T5X's own model file."""
  (tmp_path / "theirs.gin").write_text(T5X_MODEL)
  here = f"--gin_search_paths={ROOT / 'tests'},{tmp_path}"

  def call(file="finetune", **macros):
    files = macros.pop("files", ("theirs.gin", f"nm_sparsity_jax/{file}.gin"))
    return run_t5x(here, files=files, **TASK | macros)

  return call


def write_sparse(path, step=10, start=6, **changes):
  """A checkpoint of a run that began at step `start`."""
  given = dict(
    places={"ff": None, "encoder/qk": "2:4"}, recipe="mdgf_linear", pattern="1:4", sparse_steps=20,
    dense_steps=2, finetune_steps=4,
  )  # fmt: skip
  text = rules_text.describe(configure.rules(**given | changes))
  mine = {"step": np.int32(step - start), "start": np.int32(start)}
  mine["rules"] = np.asarray(rules_text.pack(text))
  tree = test_plan.t5x_checkpoint(flax_mutables={"nm_sparsity": mine})
  moments = {"count": np.int32(4), "mu": tree["target"], "nu": tree["target"]}
  tree["state"] = {"step": np.int32(step), "param_states": {"0": moments}}
  return test_plan.write_orbax(path, tree), text


def test_three_flags_make_a_launch_of_t5x_sparse(launch, tmp_path):
  """Point 4: it took a model file of one's own, search paths, PRETRAINED_STEPS and phases."""
  path = test_plan.write_orbax(tmp_path / "dense/checkpoint_6", test_plan.t5x_checkpoint())
  where = dict(MODEL_DIR=str(tmp_path / "run"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = launch(**where, **SPARSE)
  assert not code, report["errors"]
  assert [k["pattern"] for k in report["kernels"]["sparse"]] == ["1:4"] * 2
  (timeline,) = report["schedule"]
  phases = [(s["t5x_start"], s["phase"]) for s in timeline["segments"]]
  assert phases == [(6, "dense"), (8, "sparsify, fine-tune from 16")]
  assert timeline["segments"][-1]["t5x_stop"] == 26
  assert "sparsify, fine-tune from 16" in plan.render(report)
  code, report = launch(**where, **SPARSE, PRETRAINED_STEPS=7)
  assert code == 1 and has(report["errors"], "PRETRAINED_STEPS=7", "set PRETRAINED_STEPS=6")


def test_a_start_that_t5x_would_die_of_is_named(launch, tmp_path):
  """T5X's KeyError of the item "dataset", and one of a folder that is not there."""
  path = test_plan.write_orbax(tmp_path / "dense/checkpoint_6", test_plan.t5x_checkpoint())
  (path / "dataset").rmdir()
  where = dict(MODEL_DIR=str(tmp_path / "run"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = launch(**where, **SPARSE)
  assert code == 1 and has(report["errors"], f"INITIAL_CHECKPOINT_PATH='{path}' has no folder")
  assert has(report["errors"], f"mkdir {path}/dataset")
  where["INITIAL_CHECKPOINT_PATH"] = str(tmp_path / "dense/checkpoint_7")
  _, report = launch(**where, **SPARSE)
  (error,) = report["errors"]
  assert "dense/checkpoint_7': there is no such checkpoint. Name a folder that is there" in error


def test_rounded_checkpoints_and_samples_at_no_step_are_refused(launch, tmp_path):
  """The first was silent and the second a TypeError of Python's, both in `plan` and in the run."""
  path = test_plan.write_orbax(tmp_path / "dense/checkpoint_6", test_plan.t5x_checkpoint())
  where = dict(MODEL_DIR=str(tmp_path / "run"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = launch(**where, **SPARSE, raw=["utils.SaveCheckpointConfig.dtype = 'bfloat16'"])
  assert code == 1 and has(report["errors"], "SaveCheckpointConfig.dtype='bfloat16'", "'float32'")
  for wrong in (-5, "x"):
    code, report = launch(**where, **SPARSE, METRICS_EVERY=wrong)
    assert code == 1 and has(report["errors"], f"METRICS_EVERY={wrong!r}: give a whole number")
  assert not launch(**where, **SPARSE, METRICS_EVERY=0)[0]


def test_kernels_are_shown_before_the_checkpoint_is_named(launch, tmp_path):
  """T5X's model files have no NETWORK, and their optimizer waits for PRETRAINED_STEPS."""
  (tmp_path / "tiny.gin").write_text(T5X_TINY)
  files = ("tiny.gin", "nm_sparsity_jax/finetune.gin")
  code, report = launch(files=files, MODEL_DIR=str(tmp_path / "run"), **SPARSE)
  assert code == 1 and has(report["errors"], "INITIAL_CHECKPOINT_PATH is not set")
  assert {kernel["pattern"] for kernel in report["kernels"]["sparse"]} == {"1:4"}
  assert report["schedule"] and report["cost"]


def test_a_run_that_goes_on_knows_where_it_began(launch, tmp_path):
  """Point 4: PRETRAINED_STEPS is in its checkpoints, also where the first one is gone."""
  path, _ = write_sparse(
    tmp_path / "run/checkpoint_10", places={"ff": None}, recipe="sr_ste", finetune_steps=None
  )
  where = dict(MODEL_DIR=str(path.parent), INITIAL_CHECKPOINT_PATH=str(tmp_path / "gone"))
  _, report = launch(**where, **SPARSE)
  assert report["schedule"][0]["segments"][-1]["t5x_stop"] == 26
  assert not has(report["errors"], "PRETRAINED_STEPS") and not has(report["errors"], "other rules")


def test_gin_finds_the_files_without_search_paths_and_without_a_word(t5x, monkeypatch, caplog):
  """Points 4 and 9: gin logged an error of a path for each include of ours that it found."""
  from gin import config as gin
  from gin import selector_map

  monkeypatch.setattr(gin, "_LOCATION_PREFIXES", [""])
  monkeypatch.setitem(sys.modules, "__main__", importlib.import_module("t5x.train"))
  monkeypatch.delitem(sys.modules, "nm_sparsity_jax.integrations.gin_files.search", raising=False)
  monkeypatch.chdir("/")
  # As in a new process: other tests make gin know our own T5Config, which T5X's files do not mean.
  known = selector_map.SelectorMap()
  for name, value in gin._REGISTRY.items():
    if not name.startswith("nm_sparsity_jax.models."):
      known[name] = value
  monkeypatch.setattr(gin, "_REGISTRY", known)
  gin.clear_config()
  root = logging.getLogger()
  filters = root.filters[:]
  try:
    with caplog.at_level(logging.ERROR):
      gin.parse_config_file("t5x/examples/t5/t5_1_1/small.gin")
      gin.parse_config_file("nm_sparsity_jax/finetune.gin")
      gin.parse_config_file("gin_configs/runs/t5x_model.gin")
    assert gin.query_parameter("NUM_DECODES/gin.macro.value") == 1
    assert not caplog.records
  finally:
    root.filters[:] = filters
    gin.clear_config()


@pytest.mark.parametrize("program", ["eval", "infer"])
def test_evaluation_reads_the_rules_from_the_checkpoint(launch, tmp_path, program):
  """Point 4: each rule flag of the training was asked for again."""
  path, text = write_sparse(tmp_path / "run/checkpoint_10")
  names = {"eval": "EVAL_OUTPUT_DIR", "infer": "INFER_OUTPUT_DIR"}
  where = {"CHECKPOINT_PATH": str(path), names[program]: str(tmp_path / "out")}
  code, report = launch(program, **where)
  assert not code, report["errors"]
  assert report["restore"]["rules"] == text and report["restore"]["sparse_step"] == 4
  segments = [part["segments"][-1] for part in report["schedule"]]
  assert [(s["stop"], s["t5x_stop"]) for s in segments] == [(20, 26)] * 2
  assert not has(report["notes"], "by default")
  if program == "eval":  # a file of ours with a model of ours reads it too
    more = dict(places={"ff": None}, recipe="mdgf_linear")
    write_sparse(tmp_path / "ours/checkpoint_10", **more)
    assert {"ff"} == {*runs.trained.stored_rules(str(tmp_path / "ours")).places}


WRONG = {
  "RECIPE='sr_ste'": "'mdgf_linear'", "PATTERN='1:8'": "'2:4, 1:4'", "SPARSE_STEPS=21": "20",
  "DENSE_STEPS=0": "2", "FINETUNE_STEPS=0": "4", "GRADIENT='straight_through'": "'masked'",
  "BETA=0.5": "None", "INDIVISIBLE='skip'": "'error'", "SPARSITY_RULES={'ff': '1:4'}":
  "{'encoder/qk': '2:4', 'ff': '1:4'}",
}  # fmt: skip


@pytest.mark.parametrize("flag", WRONG)
def test_a_flag_that_disagrees_with_the_checkpoint_is_refused(launch, tmp_path, flag):
  """Point 4: in one sentence, with both values."""
  path, _ = write_sparse(tmp_path / "run/checkpoint_10")
  where = dict(CHECKPOINT_PATH=str(path), EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  name, _, value = flag.partition("=")
  code, report = launch("eval", **where, **{name: eval(value)})
  (error,) = report["errors"]
  assert code == 1 and error == (
    f"{flag}, but {path} was trained with {WRONG[flag]}: leave {name} out. Where a file sets it, "
    "None counts as left out."
  )
  other = dict(PRETRAINED_STEPS=5)
  _, report = launch("eval", **where, **other)
  assert has(report["errors"], "PRETRAINED_STEPS=5, but the run of", "began at step 6")


def test_flags_that_agree_with_the_checkpoint_are_taken(launch, tmp_path):
  """Point 4: a command that names them all serves as before."""
  path, _ = write_sparse(tmp_path / "run/checkpoint_10")
  where = dict(CHECKPOINT_PATH=str(path), EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  flags = dict(
    RECIPE="mdgf_linear", PATTERN="1:4", SPARSE_STEPS=20, DENSE_STEPS=2, FINETUNE_STEPS=4,
    SPARSITY_RULES={"ff": None, "encoder/qk": "2:4"}, PRETRAINED_STEPS=6,
  )  # fmt: skip
  code, report = launch("eval", **where, **flags)
  assert not code, report["errors"]


def test_what_cannot_tell_the_rules_is_said(launch, tmp_path):
  """Point 4: a checkpoint that is dense, or not there."""
  dense = test_plan.write_orbax(tmp_path / "checkpoint_6", test_plan.t5x_checkpoint())
  out = dict(EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  _, report = launch("eval", CHECKPOINT_PATH=str(dense), **out)
  assert has(report["errors"], "is dense: it has no sparse step. Evaluate it with T5X's own model")
  _, report = launch("eval", CHECKPOINT_PATH="/none", **out)
  assert has(report["errors"], "there is no checkpoint '/none', so its rules are unknown.")
  assert not has(report["errors"], "The settings do not tell them")  # none was given


def test_a_report_of_such_a_run_knows_its_phases(tmp_path):
  """Point 4: config.gin holds None for phases, and a reference for PRETRAINED_STEPS."""
  (tmp_path / "config.gin").write_text(
    "RECIPE = 'sr_ste'\nPATTERN = '1:4'\nSPARSITY_RULES = {'ff': None}\nSPARSE_STEPS = 100\n"
    "DENSE_STEPS = None\nFINETUNE_STEPS = None\nPRETRAINED_STEPS = @t5x_adapter.first_step()\n"
    "INITIAL_CHECKPOINT_PATH = '/gone/checkpoint_6'\n"
  )
  found = results.settings(tmp_path)
  assert (found.start, found.dense_steps, found.finetune_steps) == (6, 10, 20)
  assert not [text for text in found.remarks if "PRETRAINED" in text]
  (phases,) = {recipe.phases for recipe in runs.rules_of(tmp_path).places.values()}
  assert (phases.dense, phases.finetune) == (10, 20)


def note_losses(folder, *steps):
  """What T5X writes of its teacher-forced evaluation at these steps."""
  from clu import metric_writers

  writer = metric_writers.SummaryWriter(str(folder / "training_eval/task"))
  writer.write_scalars(steps[-1] + 1, {"timing/compilation_seconds": 1.0})
  for step in steps:
    writer.write_scalars(step, {"loss": 1.0})
  writer.close()


def test_a_step_that_was_saved_and_not_evaluated_is_evaluated_on_resuming(t5x, tmp_path):
  """Point 11: a process that ended between the two left a hole in the curves."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  owes = lambda: t5x_adapter.owes_evaluation(str(tmp_path), 6, 26, eval_period=2)
  assert not owes()  # a new run
  for step, is_owed in ((6, False), (7, False), (8, True), (26, True)):
    folder = tmp_path / f"checkpoint_{step}"
    (folder / "state").mkdir(parents=True)
    (folder / "state/_METADATA").write_text("{}")
    assert owes() == is_owed
  lines = tmp_path / "inference_eval/task-metrics.jsonl"
  lines.parent.mkdir()
  lines.write_text('{"step": 8, "accuracy": 1}\n{"step": 26, "acc')
  note_losses(tmp_path, 8, 26)
  assert owes()  # the last line is half of one
  lines.write_text('{"step": 8, "accuracy": 1}\n{"step": 26, "accuracy": 1}\n')
  assert not owes()
  assert not t5x_adapter.owes_evaluation(None)


def test_no_evaluation_is_lost_where_checkpoints_come_more_often(t5x, tmp_path):
  """T5X counts the period from the step that a process started at: two kills skipped a step."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  owes = lambda period=4: t5x_adapter.owes_evaluation(str(tmp_path), 6, 100, eval_period=period)
  note_losses(tmp_path, 10)
  # A kill at 12: T5X is due at 16, no multiple of 4 from step 6 on. A kill after it saved.
  for step, is_owed in ((12, False), (14, True), (16, True)):
    (tmp_path / f"checkpoint_{step}/state").mkdir(parents=True)
    (tmp_path / f"checkpoint_{step}/state/_METADATA").write_text("{}")
    assert owes() == is_owed
  assert not owes(period=0)  # never
  note_losses(tmp_path, 10, 16)
  assert not owes()
