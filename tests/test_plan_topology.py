"""`plan --topology`: a run's train step compiled for chips, dense and sparse; libtpu's refusals.

Where no libtpu is, eight virtual processors stand for the chips: the programs are the run's own.
"""

import pathlib

import jax
import pytest
import tasks_found
from test_plan import run, t5x  # noqa: F401  (fixtures)

from nm_sparsity_jax.analysis import plan, topology
from nm_sparsity_jax.analysis.compiled import account
from nm_sparsity_jax.analysis.plan import chips
from nm_sparsity_jax.core import installed

pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")
TESTS = pathlib.Path(__file__).resolve().parent
LOCAL = ("local_tiny.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin")
TINY = ("gin_configs/runs/t5x_finetune.gin", "t5x_tiny.gin")
RULES = dict(
  PATTERN="1:4", SPARSE_STEPS=40, BATCH_SIZE=16, MIXTURE_OR_TASK_NAME="nm_test_sort",
  MIXTURE_OR_TASK_MODULE="t5x_task", TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 8},
)  # fmt: skip
THESE = (f"--gin_search_paths={TESTS.parent},{TESTS}",)


@pytest.fixture
def compiled_for(run, monkeypatch, tmp_path):  # noqa: F811
  """Plans the tiny model for a topology: (exit code, report, the counts asked for)."""
  monkeypatch.setattr(topology, "devices", lambda name: jax.devices()[: int(name[4:])])
  monkeypatch.syspath_prepend(str(TESTS))

  def call(name="made8", files=LOCAL, **macros):
    where = dict(MODEL_DIR=str(tmp_path / "new"))
    with jax.numpy_rank_promotion("allow"):
      return run(*THESE, f"--topology={name}", files=files, **RULES | where | macros)

  return call


def test_the_step_of_a_local_run_over_its_dense_step(compiled_for):
  if reason := tasks_found.why_not():
    pytest.skip(reason)
  code, report = compiled_for(RECIPE="sdgf_stepwise", MICROBATCHES=2)
  assert not code, report["errors"]
  part = report["topology"]
  dense, sparse = part["dense"], part["sparse"]
  assert part["name"] == "made8" and part["chips"] == 8
  assert part["over_dense"]["bytes"] == sparse["bytes"] / dense["bytes"] > 1
  # Devices that share the batch add up gradients, and masks send nothing.
  assert dense["collectives"]["all-reduce"] and sparse["collectives"] == dense["collectives"]
  text = plan.render(report)
  assert "made8, 8 chips, a train step over the dense one" in text
  assert "collectives  the same" in text and "nobody knows the time" in text
  # Twice the batch moves more, in the same program.
  macros = dict(RECIPE="dense", BATCH_SIZE=32)
  assert compiled_for("made1", **macros)[1]["topology"]["dense"]["bytes"] != dense["bytes"]


@pytest.mark.t5x
def test_the_step_of_a_run_of_t5x(compiled_for, tmp_path, t5x):  # noqa: F811
  from test_plan import FINETUNE, WRITERS, t5x_checkpoint

  start = next(iter(WRITERS.values()))(tmp_path / "checkpoint_6", t5x_checkpoint())
  code, report = compiled_for("made4", TINY, **FINETUNE, INITIAL_CHECKPOINT_PATH=str(start))
  assert not code, report["errors"]
  part = report["topology"]
  assert part["chips"] == 4 and part["over_dense"]["flops"] < 2
  assert part["sparse"]["collectives"] == part["dense"]["collectives"]


def test_a_step_that_does_not_fit_is_an_error(compiled_for, monkeypatch):
  if reason := tasks_found.why_not():
    pytest.skip(reason)

  class TooLarge:
    def compile(self):
      raise jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (21.76G) exceeds available HBM (15.75G)."
      )

  lowers = lambda *_: lambda rules: TooLarge()
  monkeypatch.setattr(chips, "_local", lowers)
  code, report = compiled_for(RECIPE="sr_ste")
  assert code == 1 and "over_dense" not in report["topology"]
  for kind in ("dense", "sparse"):
    said = f"made8: the {kind} train step needs 21.76GiB of each chip, which has 15.75GiB"
    assert any(said in error for error in report["errors"])


def test_without_a_run_or_without_libtpu_it_is_one_sentence(run, monkeypatch):  # noqa: F811
  settings = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=100)
  code, report = run("--topology=v5e:2x2", **settings)
  assert code == 1 and report["errors"] == [
    "--topology v5e:2x2: name the files of a training run, with its rules"
  ]
  monkeypatch.setattr(installed, "version", lambda name: None)
  with pytest.raises(topology.NoTopology, match=r"libtpu.*not installed: pip install '.*\[tpu\]'"):
    topology.devices("v5e:2x2")


def test_the_command_says_in_one_sentence_why_there_are_no_chips(compiled_for, monkeypatch):
  if reason := tasks_found.why_not():
    pytest.skip(reason)

  def refuse(name):
    raise topology.NoTopology(f"topology {name!r}: libtpu does not know it")

  monkeypatch.setattr(topology, "devices", refuse)
  code, report = compiled_for("v9e:1x1", RECIPE="sr_ste")
  assert code == 1
  assert report["errors"] == ["topology 'v9e:1x1': libtpu does not know it"]


@pytest.mark.parametrize(
  "raised, said",
  [
    ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "serves one at a ti"),
    ("PJRT C API version 0.80 is newer than the plugin's", "doctor --for tpu"),
    ("INVALID_ARGUMENT: Invalid topology name v9e", r"does not know it .*Invalid.*; it knows v5e"),
  ],
)
def test_what_libtpu_refuses_is_one_sentence(monkeypatch, raised, said):
  from jax.experimental import topologies

  def refuse(*_, **__):
    raise RuntimeError(raised)

  monkeypatch.setattr(installed, "version", lambda name: "0.0.42.1")
  monkeypatch.setattr(topology, "_of_another_jax", lambda: None)
  monkeypatch.setattr(topologies, "get_topology_desc", refuse)
  with pytest.raises(topology.NoTopology, match=f"topology 'v9e:1x1': .*{said}") as found:
    topology.devices("v9e:1x1")
  assert "\n" not in str(found.value)


def test_small_sizes_and_changes_are_readable():
  kinds = {"collectives": {}}
  part = {
    "name": "v5e:2x2",
    "chips": 4,
    "dense": kinds,
    "sparse": {**kinds, "memory": 9 << 20, "peak": 3 << 20},
    "over_dense": {"peak": 1.0002, "bytes": 0.9999},
  }
  text = "\n".join(line for _, line in plan.text._topology_lines(part))
  assert "3.00 MiB of each chip, +0.0%" in text and "bytes moved  +0.0%" in text


def test_a_libtpu_of_another_jax_is_one_sentence(monkeypatch):
  versions = {"jax": "0.10.2", "libtpu": "0.0.20"}
  monkeypatch.setattr(installed, "version", versions.get)
  monkeypatch.setattr(installed, "requires", lambda _: ['libtpu==0.0.42.*; extra == "tpu"'])
  with pytest.raises(topology.NoTopology) as found:
    topology.devices("v5e:2x2")
  assert str(found.value) == (
    "topology 'v5e:2x2': jax 0.10.2 needs libtpu==0.0.42.*, not 0.0.20: pip install "
    "'jax[tpu]==0.10.2'."
  )


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
