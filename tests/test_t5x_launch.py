"""A run is launched as plain T5X is: one file in place of T5X's, and three flags more.

What a checkpoint holds is read from it, and a flag that says something else is refused.
"""

import pytest
import test_plan
from checkpoint_files import t5x_dense, t5x_sparse, write_orbax
from test_plan import ROOT, T5X_MODEL, has
from test_t5x_thread import TASK  # it skips where T5X is not

from nm_sparsity_jax.training import configure

pytestmark = pytest.mark.t5x

run, t5x, run_t5x = test_plan.run, test_plan.t5x, test_plan.run_t5x
closed_loops = test_plan.closed_loops

SPARSE = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=20)
TRAINED = dict(
  RECIPE="mdgf_linear", PATTERN="1:4", SPARSE_STEPS=20, DENSE_STEPS=2, FINETUNE_STEPS=4,
  SPARSITY_RULES={"ff": None, "encoder/qk": "2:4"},
)  # fmt: skip


@pytest.fixture
def launch(run_t5x, tmp_path):
  """`plan` of a launch with T5X's own model file."""
  (tmp_path / "theirs.gin").write_text(T5X_MODEL)
  here = f"--gin_search_paths={ROOT / 'tests'},{tmp_path}"

  def call(file="finetune", **macros):
    return run_t5x(here, files=("theirs.gin", f"nm_sparsity_jax/{file}.gin"), **TASK | macros)

  return call


def dense(path):
  return str(write_orbax(path, t5x_dense()))


def sparse(path, **changes):
  """A checkpoint of a run of `TRAINED` that began at step 6, after four steps of its own."""
  macros = TRAINED | changes
  places = macros.pop("SPARSITY_RULES")
  rules = configure.rules(places, **{name.lower(): value for name, value in macros.items()})
  return str(write_orbax(path, t5x_sparse(rules)))


def test_three_flags_make_a_launch_of_t5x_sparse_and_it_goes_on_where_it_began(launch, tmp_path):
  where = dict(MODEL_DIR=str(tmp_path / "run"))
  where["INITIAL_CHECKPOINT_PATH"] = dense(tmp_path / "dense/checkpoint_6")
  code, report = launch(**where, **SPARSE)
  assert not code, report["errors"]
  (timeline,) = report["schedule"]
  assert timeline["pattern"] == "1:4"
  assert [s["global_start"] for s in timeline["segments"]] == [6, 8]
  # Its checkpoints know PRETRAINED_STEPS, also where the first one is gone.
  phases = {name + "_STEPS": None for name in ("DENSE", "FINETUNE")}
  sparse(tmp_path / "run/checkpoint_10", **SPARSE | phases, SPARSITY_RULES={"ff": None})
  _, report = launch(**where | {"INITIAL_CHECKPOINT_PATH": str(tmp_path / "gone")}, **SPARSE)
  assert report["schedule"][0]["segments"][0]["global_start"] == 6
  assert not has(report["errors"], "PRETRAINED_STEPS") and not has(report["errors"], "other rules")


def test_evaluation_reads_the_rules_from_the_checkpoint(launch, tmp_path):
  where = dict(CHECKPOINT_PATH=sparse(tmp_path / "run/checkpoint_10"), EVAL_OUTPUT_DIR="out")
  code, report = launch("eval", **where, PATTERN="1:8")
  assert code and has(report["errors"], "PATTERN='1:8'", "leave PATTERN out")
  code, report = launch("eval", **where)
  assert not code, report["errors"]
  assert report["restore"]["sparse_step"] == 4
  assert [part["segments"][0]["global_start"] for part in report["schedule"]] == [6] * 2
