"""Every python block of the README runs as it stands, and stops and goes on as it says."""

import pathlib
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp

import nm_sparsity_jax as nms

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(?:python|py)\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
TRAIN = next(code for code in BLOCKS if "CheckpointManager" in code)
FLAX = next(code for code in BLOCKS if "nms.layers" in code)


def execute(code):
  """Runs a block by itself, in the promotion modes that a user has."""
  names = {"__name__": "__main__"}
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    exec(compile(code, str(README), "exec"), names)
  return names


def test_the_other_blocks_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for code in BLOCKS:
    if code not in (TRAIN, FLAX):
      execute(code)


def test_the_flax_model_trains(capsys):
  names = execute(FLAX)
  out = capsys.readouterr().out.splitlines()
  assert out[-1] == "ok" and "sdgf_stepwise" in out[1]
  done = nms.finalize(names["params"], names["rules"])
  y = names["Mlp"]().apply({"params": done}, names["x"])  # the dense twin
  assert np.mean((y - np.sort(names["x"])) ** 2) < 0.5


def test_the_run_trains_and_goes_on_from_a_checkpoint(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  first = execute(TRAIN)
  assert capsys.readouterr().out.splitlines()[-1] == "ok"
  shards = first["run"]["params"]["mlp"]["wi"]["kernel"].addressable_shards
  assert {s.data.shape for s in shards} == {(32, 32)}  # in two, on the devices of conftest
  # A model that says nothing has a loss of about 1, the variance of the data.
  assert first["loss"](first["params"]) < 0.5

  # Taken away after step 100: the rest is done again, to the same bits.
  kept = sorted(int(p.name) for p in pathlib.Path("checkpoints").iterdir() if p.name.isdigit())
  assert kept == [50, 100, 150, 200]
  for step in (150, 200):
    shutil.rmtree(f"checkpoints/{step}")
  restored, restore = [], ocp.CheckpointManager.restore

  def spy(self, step, *args, **kwargs):
    restored.append(step)
    return restore(self, step, *args, **kwargs)

  monkeypatch.setattr(ocp.CheckpointManager, "restore", spy)
  second = execute(TRAIN)
  assert restored == [100]
  jax.tree.map(np.testing.assert_array_equal, first["run"], second["run"])

  # And once more with nothing left to do.
  third = execute(TRAIN)
  assert restored == [100, 200]
  jax.tree.map(np.testing.assert_array_equal, first["params"], third["params"])


def test_the_run_shows_all_of_it():
  for word in ("optax", "NamedSharding", "ocp.", "nms.finalize(", "nms.verify("):
    assert word in TRAIN


def test_the_recipe_table_is_complete():
  from nm_sparsity_jax.recipes import RECIPES

  rows = re.findall(r"^\| `(\w+)` \| .* \| (yes)? ?\|$", README.read_text(), re.MULTILINE)
  assert {name: bool(yes) for name, yes in rows} == {n: c.stateful for n, c in RECIPES.items()}
