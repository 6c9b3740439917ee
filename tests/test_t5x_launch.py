"""A run is launched as plain T5X is: one file in place of T5X's, and three flags more.

What a checkpoint holds is read from it, and a flag that says something else is refused.
"""

import numpy as np
import pytest
import test_plan
from test_plan import ROOT, T5X_MODEL, has

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
  path = test_plan.write_orbax(tmp_path / "dense/checkpoint_6", test_plan.t5x_checkpoint())
  where = dict(MODEL_DIR=str(tmp_path / "run"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = launch(**where, **SPARSE)
  assert not code, report["errors"]
  assert [k["pattern"] for k in report["kernels"]["sparse"]] == ["1:4"] * 2
  (timeline,) = report["schedule"]
  assert [timeline[key] for key in ("offset", "dense_until", "finetune_from")] == [6, 2, 16]
  assert "dense until 2, fine-tune from 16" in plan.render(report)
  code, report = launch(**where, **SPARSE, PRETRAINED_STEPS=7)
  assert code == 1 and has(report["errors"], "PRETRAINED_STEPS=7", "Set PRETRAINED_STEPS=6")


def test_a_start_that_t5x_would_die_of_is_named(t5x, tmp_path):
  """T5X's KeyError of the item "dataset", and one of a folder that is not there."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  path = test_plan.write_orbax(tmp_path / "dense/checkpoint_6", test_plan.t5x_checkpoint())
  assert t5x_adapter.start(str(path)) == str(path)
  (path / "dataset").rmdir()
  with pytest.raises(ValueError, match=f"mkdir {path}/dataset"):
    t5x_adapter.start(str(path))
  with pytest.raises(FileNotFoundError, match="no such checkpoint"):
    t5x_adapter.start(str(tmp_path / "dense/checkpoint_7"))
  # A run that goes on does not look at its start any more.
  write_sparse(tmp_path / "run/checkpoint_10")
  assert t5x_adapter.start(str(path), run=str(tmp_path / "run"))


def test_a_run_that_goes_on_knows_where_it_began(launch, tmp_path):
  """PRETRAINED_STEPS is in its checkpoints, also where the first one is gone."""
  path, _ = write_sparse(
    tmp_path / "run/checkpoint_10", places={"ff": None}, recipe="sr_ste", finetune_steps=None
  )
  where = dict(MODEL_DIR=str(path.parent), INITIAL_CHECKPOINT_PATH=str(tmp_path / "gone"))
  _, report = launch(**where, **SPARSE)
  assert report["schedule"][0]["offset"] == 6
  assert not has(report["errors"], "PRETRAINED_STEPS") and not has(report["errors"], "other rules")


@pytest.mark.parametrize("program", ["eval", "infer"])
def test_evaluation_reads_the_rules_from_the_checkpoint(launch, tmp_path, program):
  path, text = write_sparse(tmp_path / "run/checkpoint_10")
  names = {"eval": "EVAL_OUTPUT_DIR", "infer": "INFER_OUTPUT_DIR"}
  where = {"CHECKPOINT_PATH": str(path), names[program]: str(tmp_path / "out")}
  code, report = launch(program, **where)
  assert not code, report["errors"]
  assert report["restore"]["rules"] == text and report["restore"]["sparse_step"] == 4
  assert [part["offset"] for part in report["schedule"]] == [6] * 2
  assert not has(report["notes"], "by default")


@pytest.mark.parametrize(
  "flag, value, trained",
  [
    ("PATTERN", "1:8", "'2:4, 1:4'"),
    ("SPARSE_STEPS", 21, "20"),
    ("SPARSITY_RULES", {"ff": "1:4"}, "encoder/qk"),
    ("PRETRAINED_STEPS", 5, "began at step 6"),
  ],
)
def test_a_flag_that_disagrees_with_the_checkpoint_is_refused(
  launch, tmp_path, flag, value, trained
):
  path, _ = write_sparse(tmp_path / "run/checkpoint_10")
  where = dict(CHECKPOINT_PATH=str(path), EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  code, report = launch("eval", **where, **{flag: value})
  assert code == 1 and has(report["errors"], f"{flag}={value!r}", trained, f"leave {flag} out")


def test_flags_that_agree_with_the_checkpoint_are_taken(launch, tmp_path):
  path, _ = write_sparse(tmp_path / "run/checkpoint_10")
  where = dict(CHECKPOINT_PATH=str(path), EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  flags = dict(
    RECIPE="mdgf_linear", PATTERN="1:4", SPARSE_STEPS=20, DENSE_STEPS=2, FINETUNE_STEPS=4,
    SPARSITY_RULES={"ff": None, "encoder/qk": "2:4"}, PRETRAINED_STEPS=6,
  )  # fmt: skip
  code, report = launch("eval", **where, **flags)
  assert not code, report["errors"]


def test_what_cannot_tell_the_rules_is_said(launch, tmp_path):
  dense = test_plan.write_orbax(tmp_path / "checkpoint_6", test_plan.t5x_checkpoint())
  out = dict(EVAL_OUTPUT_DIR=str(tmp_path / "out"))
  _, report = launch("eval", CHECKPOINT_PATH=str(dense), **out)
  assert has(report["errors"], "is dense")
  _, report = launch("eval", CHECKPOINT_PATH="/none", **out)
  assert has(report["errors"], "'/none'", "its rules are unknown")


def test_a_report_of_such_a_run_knows_its_phases(tmp_path):
  """config.gin holds None for phases, and a reference for PRETRAINED_STEPS."""
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


def test_a_run_that_goes_on_evaluates_what_it_goes_on_from(t5x, tmp_path):
  """T5X saves before it evaluates, so a process that ended in between left a hole in the curves."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  owes = lambda period=2: t5x_adapter.owes_evaluation(str(tmp_path), 6, eval_period=period)
  assert not owes() and not t5x_adapter.owes_evaluation(None)  # new runs
  for step in (6, 8):
    test_plan.write_orbax(tmp_path / f"checkpoint_{step}", test_plan.t5x_checkpoint())
    assert owes() == (step == 8)
  assert not owes(0)  # it never evaluates
