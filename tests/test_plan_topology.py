"""`plan --topology`: a run's train step compiled for chips, dense and sparse.

Where no libtpu is, virtual processors stand for the chips: the programs are the run's own.
"""

import jax
import pytest
import tasks_found
from test_plan import FINETUNE, ROOT, TINY, run, start, t5x  # noqa: F401  (fixtures)

from nm_sparsity_jax.analysis import plan, topology

LOCAL = ("local_tiny.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin")
RULES = dict(
  PATTERN="1:4", SPARSE_STEPS=40, BATCH_SIZE=16, MIXTURE_OR_TASK_NAME="nm_test_sort",
  MIXTURE_OR_TASK_MODULE="t5x_task", TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8},
)  # fmt: skip


@pytest.fixture
def compiled_for(run, monkeypatch, tmp_path):  # noqa: F811
  """Plans the tiny model for a topology: (exit code, report)."""
  if reason := tasks_found.why_not():
    pytest.skip(reason)
  monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[: int(name[4:])])
  monkeypatch.syspath_prepend(str(ROOT / "tests"))

  def call(name, files=LOCAL, **macros):
    search = f"--gin_search_paths={ROOT},{ROOT / 'tests'}"
    where = dict(MODEL_DIR=str(tmp_path / "new"))
    return run(search, f"--topology={name}", files=files, **RULES | where | macros)

  return call


def test_the_step_of_a_local_run_over_its_dense_step(compiled_for):
  code, report = compiled_for("made8", RECIPE="sdgf_stepwise", MICROBATCHES=2)
  assert not code, report["errors"]
  part = report["topology"]
  dense, sparse = part["dense"], part["sparse"]
  assert part["name"] == "made8" and part["chips"] == 8
  assert part["over_dense"]["bytes"] == sparse["bytes"] / dense["bytes"] > 1
  # Devices that share the batch add up gradients, and masks send nothing.
  assert dense["collectives"]["all-reduce"] and sparse["collectives"] == dense["collectives"]
  assert "over_dense" in plan.render(report)


@pytest.mark.t5x
def test_the_step_of_a_run_of_t5x(compiled_for, start):  # noqa: F811
  code, report = compiled_for("made4", TINY, **FINETUNE, **start)
  assert not code, report["errors"]
  part = report["topology"]
  assert part["chips"] == 4 and part["over_dense"]["flops"] < 2
  assert part["sparse"]["collectives"] == part["dense"]["collectives"]
