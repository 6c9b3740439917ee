"""What a run's folder holds: checkpoints by name, whole files, settings, one process, signals."""

import math
import os
import signal
import subprocess
import sys
from unittest import mock

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import run_folder
from nm_sparsity_jax.runs import events, files, folders, lock, signals, trained
from nm_sparsity_jax.trainer import train
from nm_sparsity_jax.training import configure

# --- checkpoints by name ------------------------------------------------------------------------


def checkpoint(folder, step):
  path = folder / f"checkpoint_{step}/state"
  path.mkdir(parents=True)
  (path / "_METADATA").write_text("{}")


def test_the_newest_is_of_the_highest_number_and_half_ones_do_not_count(tmp_path):
  for step in (9, 10, 100):
    checkpoint(tmp_path, step)
  for name in ("checkpoint_200", "checkpoint_0300", "checkpoint_400.removed", "checkpoint_x"):
    (tmp_path / name).mkdir()
  (tmp_path / "checkpoint_500").symlink_to(tmp_path / "nowhere")
  assert folders.steps(tmp_path) == [9, 10, 100]
  assert folders.latest(tmp_path) == f"{tmp_path}/checkpoint_100"
  (tmp_path / "checkpoint_200/checkpoint").write_text("x")  # of T5X's own format
  assert folders.latest(tmp_path) == f"{tmp_path}/checkpoint_200"
  assert folders.latest(tmp_path / "nowhere") is None


# --- what was trained ---------------------------------------------------------------------------


def macros(folder, **values):
  (folder / "config.gin").write_text("".join(f"{k} = {value!r}\n" for k, value in values.items()))
  return values


def test_the_rules_are_those_of_the_macros_where_no_checkpoint_tells(tmp_path):
  with pytest.raises(ValueError, match="config.gin"):
    nms.runs.rules_of(tmp_path)
  written = macros(
    tmp_path,
    RECIPE="mdgf_linear", PATTERN="1:4", SPARSITY_RULES={"ff": None, "q": "2:4"}, SPARSE_STEPS=100,
    DENSE_STEPS=10, FINETUNE_STEPS=20, BETA=0.5, GRADIENT="straight_through", INDIVISIBLE="skip",
  )  # fmt: skip
  want = configure.rules(
    {"ff": "1:4", "q": "2:4"}, "mdgf_linear", sparse_steps=100, dense_steps=10, finetune_steps=20,
    beta=0.5, gradient="straight_through", indivisible="skip",
  )  # fmt: skip
  assert nms.runs.rules_of(str(tmp_path)) == want
  assert trained.read_settings(tmp_path) == written
  (tmp_path / "config.gin").write_text("RECIPE = 'sr_ste'\nRECIPE_FIELDS = %FIELDS\n")
  with pytest.raises(ValueError, match="RECIPE_FIELDS"):
    nms.runs.rules_of(tmp_path)


@pytest.mark.parametrize("recipe, target", [("dense", 0), ("sr_ste", 1010), ("mdgf_linear", 1070)])
def test_from_which_step_on_a_run_has_its_target_pattern(recipe, target, tmp_path):
  macros(
    tmp_path, RECIPE=recipe, PATTERN="1:8", SPARSITY_RULES={"ff": None}, SPARSE_STEPS=100,
    DENSE_STEPS=10, FINETUNE_STEPS=20, PRETRAINED_STEPS=1000,
  )  # fmt: skip
  run = run_folder.Run(tmp_path)
  assert (run.recipe, run.target) == (recipe, target)


# --- settings that a resumed run must share -------------------------------------------------------


def test_a_run_with_checkpoints_keeps_its_settings(tmp_path):
  first = {"seed": 0, "rate": math.nan, "list": [1, 2], "model": {"": "M", "size": 8}}
  other = {"seed": 3, "rate": math.nan, "list": [True, 2], "model": {"": "N"}}
  train.refuse_changed(tmp_path, other)  # there is no checkpoint yet: it may begin anew
  files.write_json(tmp_path / "settings.json", first)
  checkpoint(tmp_path, 3)
  train.refuse_changed(tmp_path, first)
  with pytest.raises(
    ValueError,
    match=": list/0 was 1, and is True; model was 'M', and is 'N'; model/size was 8, and is not "
    "set; seed was 0, and is 3. ",
  ):
    train.refuse_changed(tmp_path, other)
  (tmp_path / "settings.json").unlink()
  with pytest.raises(ValueError, match="another program"):
    train.refuse_changed(tmp_path, first)


# --- one process at a time ----------------------------------------------------------------------


def test_a_child_that_inherits_the_lock_holds_it_and_a_kill_ends_it(tmp_path):
  def refused():
    with pytest.raises(ValueError, match="another process"), lock.hold(tmp_path):
      pass

  command = [sys.executable, "-c", "import time; time.sleep(60)"]
  with lock.hold(tmp_path) as held:
    child = subprocess.Popen(command, pass_fds=[held])
    refused()
  try:
    refused()
  finally:
    child.kill()
    child.wait()
  with lock.hold(tmp_path):
    pass


# --- signals ------------------------------------------------------------------------------------


def send(*numbers):
  for number in numbers:
    os.kill(os.getpid(), number)


def test_the_first_signal_is_noted_and_ctrl_c_after_it_interrupts():
  before = signal.getsignal(signal.SIGINT)
  with signals.Signals() as stop:
    send(signal.SIGTERM, signal.SIGTERM)
    assert stop.name == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) == before


def test_signals_are_passed_to_the_child_of_the_moment():
  first, second = mock.Mock(), mock.Mock()
  with signals.Signals() as stop:
    stop.relay(first)
    send(signal.SIGINT)
    stop.relay(second)
    send(signal.SIGTERM, signal.SIGINT)
  assert first.mock_calls == [mock.call.terminate()] and stop.name == "SIGINT"
  assert second.mock_calls == [mock.call.terminate(), mock.call.terminate(), mock.call.kill()]


# --- events -------------------------------------------------------------------------------------


def test_what_one_process_writes_twice_in_a_second_is_kept(tmp_path, monkeypatch):
  """By tensorboard's own records: (step, tag, value) come back, those of both writers."""
  monkeypatch.setattr(events.time, "time", lambda: 1.5)
  written = [(1, "loss", 0.5), (2, "loss", 0.25)]
  for step, tag, value in written:
    writer = events.Writer(tmp_path)
    writer.write(step, {tag: value})
    writer.close()
  (file,) = tmp_path.iterdir()
  assert [*events.scalars(file)] == written
