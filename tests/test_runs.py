"""What a run's folder holds: which checkpoints, which is whole, which is the newest."""

import json

from nm_sparsity_jax.runs import folders


def checkpoint(folder, step, state="state"):
  path = folder / f"checkpoint_{step}"
  (path / state).mkdir(parents=True)
  (path / state / "_METADATA").write_text("{}")
  return path


def test_the_newest_is_of_the_highest_number_and_half_ones_do_not_count(tmp_path, monkeypatch):
  for step in (9, 10, 100):
    checkpoint(tmp_path, step)
  for name in ("checkpoint_200", "checkpoint_0300", "checkpoint_400.removed", "checkpoint_x"):
    (tmp_path / name).mkdir()
  assert folders.named_steps(tmp_path) == [9, 10, 100, 200]
  assert folders.steps(tmp_path) == [9, 10, 100]
  assert folders.latest(f"{tmp_path}/") == f"{tmp_path}/checkpoint_200"
  monkeypatch.chdir(tmp_path.parent)
  assert folders.latest(tmp_path.name) == f"{tmp_path.name}/checkpoint_200"
  for nothing in (tmp_path / "checkpoint_x", tmp_path / "nowhere"):
    assert folders.latest(nothing) is None and folders.steps(nothing) == []


def test_orbax_reads_state_or_the_folder_itself(tmp_path):
  within, alone = checkpoint(tmp_path, 1), checkpoint(tmp_path / "other", 2, "")
  assert folders.orbax_state(within) == within / "state"
  assert folders.orbax_state(alone) == alone
  assert folders.orbax_state(tmp_path) is None


def test_a_run_is_done_when_its_last_step_is_evaluated_and_saved(tmp_path):
  assert not folders.is_done(tmp_path, 10)
  checkpoint(tmp_path, 10)
  assert not folders.is_done(tmp_path, 10)
  (tmp_path / "evaluations.json").write_text(json.dumps([{"step": 10, "loss": {"a": 1.0}}]))
  assert folders.is_done(tmp_path, 10) and not folders.is_done(tmp_path, 20)
  assert folders.evaluations(tmp_path)[10]["loss"] == {"a": 1.0}


def test_the_step_is_in_the_name():
  assert folders.named_step("gs://bucket/run/checkpoint_1000/") == 1000
  assert folders.named_step("gs://bucket/run") is None
