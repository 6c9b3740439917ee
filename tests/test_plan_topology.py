"""`plan --topology`: a run's train step compiled for chips, dense and sparse; libtpu's refusals.

Where no libtpu is, virtual processors stand for the chips: the programs are the run's own.
"""

import jax
import pytest
import tasks_found
from test_plan import FINETUNE, ROOT, TINY, run, start, t5x  # noqa: F401  (fixtures)

from nm_sparsity_jax.analysis import plan, topology
from nm_sparsity_jax.analysis.compiled import account
from nm_sparsity_jax.analysis.plan import chips
from nm_sparsity_jax.core import installed

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
    with jax.numpy_rank_promotion("allow"):
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
  text = plan.render(report)
  assert "made8, 8 chips" in text and "collectives  the same" in text


@pytest.mark.t5x
def test_the_step_of_a_run_of_t5x(compiled_for, start):  # noqa: F811
  code, report = compiled_for("made4", TINY, **FINETUNE, **start)
  assert not code, report["errors"]
  part = report["topology"]
  assert part["chips"] == 4 and part["over_dense"]["flops"] < 2
  assert part["sparse"]["collectives"] == part["dense"]["collectives"]


def test_a_step_that_does_not_fit_is_an_error(compiled_for, monkeypatch):
  class TooLarge:
    def compile(self):
      raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (21.76G) exceeds available HBM (15.75G)."
      )

  monkeypatch.setattr(chips, "_local", lambda *_: TooLarge())
  _, report = compiled_for("made8", RECIPE="sr_ste")
  assert "over_dense" not in report["topology"]
  for kind, error in zip(("dense", "sparse"), report["errors"], strict=True):
    assert f"the {kind} train step needs 21.76GiB" in error and "15.75GiB" in error


def test_without_a_run_or_without_libtpu_it_is_one_error(run, monkeypatch):  # noqa: F811
  _, report = run("--topology=v5e:2x2", RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=100)
  (error,) = report["errors"]
  assert "training run" in error
  monkeypatch.setattr(installed, "version", lambda name: None)
  with pytest.raises(topology.NoTopology, match="libtpu"):
    topology.devices("v5e:2x2")


@pytest.mark.parametrize(
  "raised, said",
  [
    ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "one at a time"),
    ("PJRT C API version 0.80 is newer than the plugin's", "doctor --for tpu"),
    ("INVALID_ARGUMENT: Invalid topology name v9e", "it knows v5e"),
  ],
)
def test_what_libtpu_refuses_is_one_sentence(monkeypatch, raised, said):
  from jax.experimental import topologies

  def refuse(*_, **__):
    raise RuntimeError(raised)

  monkeypatch.setattr(installed, "version", lambda name: "0.0.42.1")
  monkeypatch.setattr(topology, "_of_another_jax", lambda: None)
  monkeypatch.setattr(topologies, "get_topology_desc", refuse)
  with pytest.raises(topology.NoTopology, match=f"v9e:1x1.*{said}"):
    topology.devices("v9e:1x1")


def test_a_libtpu_of_another_jax_is_one_sentence(monkeypatch):
  versions = {"jax": "0.10.2", "libtpu": "0.0.20"}
  monkeypatch.setattr(installed, "version", versions.get)
  monkeypatch.setattr(installed, "requires", lambda _: ['libtpu==0.0.42.*; extra == "tpu"'])
  with pytest.raises(topology.NoTopology, match=r"needs libtpu==0.0.42.*pip install"):
    topology.devices("v5e:2x2")


@pytest.mark.skipif(installed.version("libtpu") is None, reason="libtpu is not installed")
def test_a_compiler_of_tpus_gives_chips():
  try:
    chip = topology.devices("v5e:2x2")[0]
  except topology.NoTopology as e:
    if "another process holds libtpu" not in str(e):
      raise
    pytest.skip(str(e))
  assert chip.platform == "tpu"
  on_it = jax.sharding.SingleDeviceSharding(chip)
  x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=on_it)
  assert account(jax.jit(lambda x: x @ x).lower(x).compile()).flops >= 2 * 256**3
