"""Kauldron with sparse weights: trains, is scored, resumes, is proven; what it refuses.

Kauldron needs an environment of its own (`make kauldron`), so it runs in forks of one process that
has imported it: kauldron_worker.py. Checkpoints are read here, without Kauldron.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import kauldron_found
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import runs
from nm_sparsity_jax.core import installed, trees
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.integrations import kauldron as kauldron_adapter
from nm_sparsity_jax.integrations.kauldron import launch, release
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
REASON = kauldron_found.why_not()
needs_kauldron = [
  pytest.mark.kauldron,
  pytest.mark.skipif(bool(REASON), reason=REASON),
]


def environment(devices=1):
  """Of a process that runs Kauldron."""
  # A fork has imported jax, which then reads XLA's flags alone.
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
  return {
    "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32", "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    "XLA_FLAGS": flags,
  }  # fmt: skip


@pytest.fixture(scope="module")
def call(tmp_path_factory):
  """Calls a function of kauldron_runs.py in a fork."""
  said, pipe = tmp_path_factory.mktemp("worker") / "said.txt", subprocess.PIPE
  command = [kauldron_found.python(), str(ROOT / "tests/kauldron_worker.py")]
  env = {**os.environ, **environment(), "TF_CPP_MIN_LOG_LEVEL": "3"}
  with (
    said.open("w") as errors,
    subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env) as worker,
  ):

    def ask(name, devices=1, **arguments):
      worker.stdin.write(json.dumps([name, arguments, environment(devices)]) + "\n")
      worker.stdin.flush()
      line = worker.stdout.readline()
      assert line, said.read_text()[-3000:]
      is_fine, value = json.loads(line)
      assert is_fine, value
      return value

    yield ask
    worker.stdin.close()
    worker.wait(60)


@pytest.fixture(scope="module")
def whole(call, tmp_path_factory):
  """The folder of a run that was not stopped, and what is known of its end."""
  folder = tmp_path_factory.mktemp("runs") / "whole"
  return folder, call("trained", workdir=str(folder))


@pytest.fixture(scope="module")
def said(whole, call, tmp_path_factory):
  """mistake -> what is said of it."""
  folder = tmp_path_factory.mktemp("refused")
  return call("refusals", workdir=f"{folder}/a", used=str(whole[0]), dense=f"{folder}/dense")


def arrays(folder, step):
  """Every array of a checkpoint, the optimizer's too, without Kauldron: path -> array."""
  ocp = pytest.importorskip("orbax.checkpoint")
  path, reader = folder / f"checkpoints/ckpt_{step}/default", ocp.PyTreeCheckpointer()
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  args = jax.tree.map(as_numpy, reader.metadata(path).item_metadata.tree)
  return dict(trees.flatten(reader.restore(path, restore_args=args)))


class TestRuns:
  pytestmark = needs_kauldron

  def test_the_checkpoint_of_step_n_holds_n_updates(self, whole):
    """The loop makes one update more, after the last checkpoint."""
    folder, end = whole
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {
      "ckpt_0", "ckpt_4", "ckpt_8", "ckpt_12",
    }  # fmt: skip
    for step in (0, 4, 8, 12):
      stored = checkpoint.read(str(folder / f"checkpoints/ckpt_{step}"))
      assert (stored.step, stored.sparse_step) == (step, step)
    assert (end["step"], end["count"]) == (13, 13)

  def test_kauldrons_own_evaluator_scores_what_was_trained(self, whole, call):
    begun, end = call("scores", workdir=str(whole[0]))
    assert end < begun / 2

  def test_it_is_proven_without_kauldron_and_before_finalize(self, whole, tmp_path):
    folder, _ = whole
    early = folder / "checkpoints/ckpt_4"
    assert runs.verify(str(folder)).ok and not runs.verify(str(early)).ok
    made = runs.finalize(str(folder), str(tmp_path / "final"))
    assert made.ok and made.path.endswith("checkpoint_12")
    assert [*made.removed.values()] == [0, 0]
    with pytest.raises(ValueError, match="sparse step 4"):
      runs.finalize(str(early), str(tmp_path / "early"))

  def test_it_goes_on_to_the_same_bits(self, whole, call, tmp_path):
    """Stopped after ckpt_8, with stored masks."""
    for after in (9, None):
      call("trained", workdir=str(tmp_path), stop=after)
    expected, found = arrays(whole[0], 12), arrays(tmp_path, 12)
    assert expected.keys() == found.keys() and any("/trace/" in key for key in expected)
    for key, x in expected.items():
      np.testing.assert_array_equal(found[key], x, err_msg=key)

  def test_eight_devices_that_share_the_weights_train_as_one(self, whole, call, tmp_path):
    end = call("trained", devices=8, workdir=str(tmp_path), split=True)
    assert (end["devices"], end["split"]) == (8, True)
    found = arrays(tmp_path, 12)
    for key, x in arrays(whole[0], 12).items():
      if "masks/mask" in key or key.startswith("params/"):
        np.testing.assert_allclose(found[key], x, atol=1e-4, err_msg=key)

  def test_while_it_is_dense_it_is_kauldrons_own_step(self, call, tmp_path):
    assert call("of_kauldron_itself", workdir=str(tmp_path)) < 1e-6

  def test_masks_are_made_of_the_weights_that_a_run_starts_from(self, whole, call, tmp_path):
    found = call("started", workdir=str(tmp_path), used=str(whole[0]))
    assert found == {"loaded": True, "masks": True, "sparse": True, "count": 1}

  def test_the_launcher_runs_a_konfig_file(self, call, tmp_path):
    config = f"--cfg={ROOT}/tests/kauldron_tiny.py"
    arguments = [config, f"--cfg.workdir={tmp_path}", "--cfg.stop_after_steps=1"]
    assert call("launched", arguments=arguments) == 0
    assert (tmp_path / "checkpoints/ckpt_0").is_dir()

  def test_the_example_makes_a_trainer(self, call):
    recipe, steps = call("resolved", text=(ROOT / "examples/kauldron_vit.py").read_text())
    assert recipe.startswith("MdgfExponential(") and "total=90000" in recipe and steps == 90_000


class TestRefused:
  pytestmark = needs_kauldron

  @pytest.mark.parametrize(
    "mistake, words",
    [
      ("in memory", "train_ds"),
      ("no end", "save_interval_steps=5"),
      ("other end", "num_train_steps=16"),
      ("other rules", "was trained with the rules"),
      ("of a dense run", "dense run"),
      ("fused kernel", "split"),
      ("twice", "bare"),
    ],
  )
  def test_a_mistake_is_said_before_anything_runs(self, said, mistake, words):
    assert words in said[mistake], said[mistake]


# --- without Kauldron ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "1.4.4"])
def test_kauldron_is_missing_or_unsupported(monkeypatch, capsys, version):
  monkeypatch.setattr(installed, "version", lambda name: version)
  with pytest.raises(ImportError, match="Kauldron 1.4.2"):
    kauldron_adapter.SparseTrainStep  # noqa: B018
  assert launch.main(["--cfg=x.py"]) == 1
  assert "pip install" in capsys.readouterr().err


def test_the_release_is_said_once():
  setup = (ROOT / "setup.py").read_text()
  constraints = (ROOT / "constraints-kauldron.txt").read_text()
  assert f'"kauldron=={release.VERSION}"' in setup
  assert f"\nkauldron=={release.VERSION}\n" in constraints


def test_importing_the_adapter_imports_no_kauldron():
  code = "import sys, nm_sparsity_jax.integrations.kauldron; assert 'kauldron' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


FF = "encoder/layers_0/mlp/dense_in"


def test_a_checkpoint_of_kauldron_is_deployed_with_its_stored_mask(tmp_path):
  """The last weight of each group, which magnitudes would not choose."""
  ocp = pytest.importorskip("orbax.checkpoint")
  rules = nms.Rules({"ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=8))})
  weights = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
  params = nested({f"{FF}/kernel": weights})
  state = nms.sparse(optax.sgd(0.1, momentum=0.9), rules).init(params)._asdict()
  last = np.broadcast_to(np.arange(16).reshape(16, 1) % 4 == 3, (16, 4))
  state["count"] = jnp.int32(8)
  state["masks"]["mask"] = nested({f"{FF}/kernel": jnp.asarray(last)})
  state["masks"]["renewed"] = nested({f"{FF}/kernel": jnp.int32(1)})
  text = rules_text.pack(rules_text.describe(rules))
  tree = {"step": jnp.int32(8), "params": params, "opt_state": state}
  tree["collections"] = {"nm_sparsity": {"rules": text}}
  with ocp.StandardCheckpointer() as writer:
    writer.save(tmp_path / "checkpoints/ckpt_8/default", tree)
  stored = checkpoint.read(checkpoint.find(str(tmp_path)))
  assert (stored.step, stored.sparse_step) == (8, 8) and stored.rules.startswith("ff: one_shot")
  made = runs.finalize(str(tmp_path), str(tmp_path / "final"))
  kernel = checkpoint.read(made.path).array(f"target/{FF}/kernel")
  np.testing.assert_array_equal(kernel, np.where(last, weights, 0))
