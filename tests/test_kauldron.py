"""Kauldron with sparse weights: trains, is scored, resumes, is proven; what it refuses.

Kauldron needs an environment of its own (`make kauldron`), so it runs in forks of one process that
has imported it: kauldron_worker.py. Checkpoints are read here, without Kauldron.
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
  command = [kauldron_found.PYTHON, str(ROOT / "tests/kauldron_worker.py")]
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
  def test_the_checkpoint_of_step_n_holds_n_updates_and_is_proven(self, whole, tmp_path):
    """The loop makes one update more, after the last checkpoint."""
    folder, end = whole
    paths = {step: str(folder / f"checkpoints/ckpt_{step}") for step in (0, 4, 8, 12)}
    assert {str(path) for path in (folder / "checkpoints").iterdir()} == {*paths.values()}
    for step, path in paths.items():
      stored = checkpoint.read(path)
      assert (stored.step, stored.sparse_step) == (step, step)
    assert (end["step"], end["count"]) == (13, 13)
    assert runs.verify(str(folder)).ok and not runs.verify(paths[4]).ok
    made = runs.finalize(str(folder), str(tmp_path / "final"))
    assert made.ok and [*made.removed.values()] == [0, 0]
    with pytest.raises(ValueError, match="sparse step 4"):
      runs.finalize(paths[4], str(tmp_path / "early"))

  def test_kauldrons_own_evaluator_scores_what_was_trained(self, whole, call):
    begun, end = call("scores", workdir=str(whole[0]))
    assert end < begun / 2

  def test_it_goes_on_to_the_same_bits(self, whole, call, tmp_path):
    """Stopped after ckpt_8, with stored masks."""
    for after in (9, None):
      call("trained", workdir=str(tmp_path), stop=after)
    expected, found = arrays(whole[0], 12), arrays(tmp_path, 12)
    assert expected.keys() == found.keys() and any("/trace/" in key for key in expected)
    for key, x in expected.items():
      np.testing.assert_array_equal(found[key], x, err_msg=key)

  def test_eight_devices_that_share_the_weights_train_as_one(self, whole, call, tmp_path):
    assert call("trained", devices=8, workdir=str(tmp_path), split=True)["split"]
    found = arrays(tmp_path, 12)
    for key, x in arrays(whole[0], 12).items():
      if "masks/mask" in key or key.startswith("params/"):
        np.testing.assert_allclose(found[key], x, atol=1e-4, err_msg=key)

  def test_while_it_is_dense_it_is_kauldrons_own_step(self, call, tmp_path):
    assert call("of_kauldron_itself", workdir=str(tmp_path)) < 1e-6

  def test_masks_are_made_of_the_weights_that_a_run_starts_from(self, whole, call, tmp_path):
    found = call("started", workdir=str(tmp_path), used=str(whole[0]))
    assert found == {"loaded": True, "masks": True, "sparse": True}

  def test_the_example_makes_a_trainer(self, call):
    recipe, steps = call("resolved", text=(ROOT / "examples/kauldron_vit.py").read_text())
    assert recipe.startswith("MdgfExponential(") and "total=90000" in recipe and steps == 90_000

  def test_mistakes_are_said_before_anything_runs(self, whole, call, tmp_path):
    here = dict(workdir=f"{tmp_path}/a", used=str(whole[0]), dense=f"{tmp_path}/dense")
    said, trained = call("refusals", **here), "was trained with the rules"
    for name, words in {
      "other end": "num_train_steps=16", "other rules": trained, "of a dense run": trained,
    }.items():  # fmt: skip
      assert words in said[name]


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
  kernel = checkpoint.read(made.path).array(f"target/{FF}")
  np.testing.assert_array_equal(kernel, np.where(last, weights, 0))
