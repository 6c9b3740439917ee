"""Kauldron with sparse weights: trains, is scored, resumes, is proven; what it refuses.

Kauldron needs an environment of its own (`make kauldron`), so one process of it makes all runs:
kauldron_runs.py. Checkpoints are read here, without Kauldron.
"""

import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import kauldron_found
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import runs
from nm_sparsity_jax.core import trees
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text

ROOT = pathlib.Path(__file__).resolve().parents[1]


def environment(devices=1):
  """Of a process that runs Kauldron."""
  return {
    "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32", "JAX_NUM_CPU_DEVICES": str(devices),
    "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/examples",
  }  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  """The folder of all runs, and what the functions of kauldron_runs.py found."""
  folder, found = tmp_path_factory.mktemp("runs"), {}
  one = ("whole", "stopped", "scores", "dense_phase", "started", "example", "refusals")
  for devices, names in ((1, one), (8, ("split",))):
    command = [kauldron_found.PYTHON, ROOT / "tests/kauldron_runs.py", folder, *names]
    env = {**os.environ, **environment(devices), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert not done.returncode, done.stderr[-3000:]
    found |= json.loads(done.stdout.splitlines()[-1])
  return folder, found


def arrays(folder, step):
  """Every array of a checkpoint, the optimizer's too, without Kauldron: path -> array."""
  ocp = pytest.importorskip("orbax.checkpoint")
  path, reader = folder / f"checkpoints/ckpt_{step}/default", ocp.PyTreeCheckpointer()
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  args = jax.tree.map(as_numpy, reader.metadata(path).item_metadata.tree)
  return dict(trees.flatten(reader.restore(path, restore_args=args)))


@pytest.mark.kauldron
@pytest.mark.skipif(bool(kauldron_found.REASON), reason=kauldron_found.REASON)
class TestRuns:
  def test_the_checkpoint_of_step_n_holds_n_updates_and_is_proven(self, ran, tmp_path):
    """The loop makes one update more, after the last checkpoint."""
    folder, found = ran[0] / "whole", ran[1]
    paths = {step: str(folder / f"checkpoints/ckpt_{step}") for step in (0, 4, 8, 12)}
    assert {str(path) for path in (folder / "checkpoints").iterdir()} == {*paths.values()}
    for step, path in paths.items():
      stored = checkpoint.read(path)
      assert (stored.step, stored.sparse_step) == (step, step)
    assert found["whole"] == [13, 13]
    assert runs.verify(str(folder)).ok and not runs.verify(paths[4]).ok
    made = runs.finalize(str(folder), str(tmp_path / "final"))
    assert made.ok and [*made.removed.values()] == [0, 0]
    with pytest.raises(ValueError, match="sparse step 4"):
      runs.finalize(paths[4], str(tmp_path / "early"))

  def test_it_goes_on_to_the_same_bits(self, ran):
    """With stored masks."""
    expected, found = arrays(ran[0] / "whole", 12), arrays(ran[0] / "stopped", 12)
    assert expected.keys() == found.keys() and any("/trace/" in key for key in expected)
    for key, x in expected.items():
      np.testing.assert_array_equal(found[key], x, err_msg=key)

  def test_eight_devices_that_share_the_weights_train_as_one(self, ran):
    assert ran[1]["split"]
    found = arrays(ran[0] / "split", 12)
    for key, x in arrays(ran[0] / "whole", 12).items():
      if "masks/mask" in key or key.startswith("params/"):
        np.testing.assert_allclose(found[key], x, atol=1e-4, err_msg=key)

  def test_what_kauldron_itself_does_stays(self, ran):
    found = ran[1]
    begun, end = found["scores"]
    assert end < begun / 2 and found["dense_phase"] < 1e-6
    assert found["started"] == {"loaded": True, "masks": True, "sparse": True}
    recipe, steps = found["example"]
    assert recipe.startswith("MdgfExponential(") and "total=90000" in recipe and steps == 90_000

  def test_mistakes_are_said_before_anything_runs(self, ran):
    trained = "was trained with the rules"
    for name, words in {
      "other end": "num_train_steps=16", "other rules": trained, "of a dense run": trained,
    }.items():  # fmt: skip
      assert words in ran[1]["refusals"][name]


# --- without Kauldron ---------------------------------------------------------------------------

FF = "encoder/layers_0/mlp/dense_in/kernel"


def test_a_checkpoint_of_kauldron_is_deployed_with_its_stored_mask(tmp_path):
  """The last weight of each group, which magnitudes would not choose."""
  ocp = pytest.importorskip("orbax.checkpoint")
  rules = nms.Rules({"ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=8))})
  weights = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
  state = nms.sparse(optax.sgd(0.1, momentum=0.9), rules).init(nested({FF: weights}))._asdict()
  last = np.broadcast_to(np.arange(16).reshape(16, 1) % 4 == 3, (16, 4))
  state["count"] = jnp.int32(8)
  state["masks"] |= {"mask": nested({FF: jnp.asarray(last)}), "renewed": nested({FF: jnp.int32(1)})}
  text = rules_text.pack(rules_text.describe(rules))
  tree = {"step": jnp.int32(8), "params": nested({FF: weights}), "opt_state": state}
  tree["collections"] = {"nm_sparsity": {"rules": text}}
  with ocp.StandardCheckpointer() as writer:
    writer.save(tmp_path / "checkpoints/ckpt_8/default", tree)
  made = runs.finalize(str(tmp_path), str(tmp_path / "final"))
  kernel = checkpoint.read(made.stored.path).array(f"target/{FF}")
  np.testing.assert_array_equal(kernel, np.where(last, weights, 0))
