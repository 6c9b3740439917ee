"""What a run's folder holds: checkpoints, files that are whole, one process at a time, signals."""

import doctest
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import text
from nm_sparsity_jax.runs import checkpoint as reader
from nm_sparsity_jax.runs import files, folders, lock, results, signals, trained
from nm_sparsity_jax.training import configure


@pytest.mark.parametrize("module", [folders, lock, results, text, trained])
def test_doctests(module):
  failed, tried = doctest.testmod(module)
  assert tried and not failed


# --- checkpoints by name ------------------------------------------------------------------------


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
  assert folders.latest(f"{tmp_path}/") == f"{tmp_path}/checkpoint_100"
  monkeypatch.chdir(tmp_path.parent)
  assert folders.latest(tmp_path.name) == f"{tmp_path.name}/checkpoint_100"
  for nothing in (tmp_path / "checkpoint_x", tmp_path / "nowhere"):
    assert folders.latest(nothing) is None and folders.steps(nothing) == []


@pytest.mark.parametrize(
  "name",
  ["checkpoint_0058", "checkpoint_\u0665\u0668", "checkpoint_58 ", "checkpoint_" + "9" * 200],
)
def test_a_name_that_no_run_writes_is_no_checkpoint(tmp_path, name):
  """Point 27: leading zeros, digits of other scripts and endless numbers are no steps."""
  checkpoint(tmp_path, 7)
  (tmp_path / "checkpoint_7").rename(tmp_path / name)
  assert folders.latest(tmp_path) is None and not folders.steps(tmp_path)
  assert folders.named_step(name) is None
  checkpoint(tmp_path, 7)
  assert folders.latest(tmp_path) == f"{tmp_path}/checkpoint_7"


def test_what_holds_nothing_is_no_checkpoint(tmp_path):
  """Point 27: the newest is neither an empty folder nor a file nor a link to nothing."""
  old = checkpoint(tmp_path, 7)
  (tmp_path / "checkpoint_97").write_text("x")
  (tmp_path / "checkpoint_98").mkdir()
  (tmp_path / "checkpoint_99").symlink_to(tmp_path / "nowhere")
  assert folders.latest(tmp_path) == str(old) == reader.find(str(tmp_path))
  (old / "state/_METADATA").unlink()
  with pytest.raises(ValueError, match="is not a checkpoint: .*; nor does checkpoint_99 in it"):
    reader.find(str(tmp_path))
  (old / "checkpoint").write_text("x")  # of T5X's own format
  assert folders.latest(tmp_path) == str(old)


def test_orbax_reads_state_or_the_folder_itself(tmp_path):
  within, alone = checkpoint(tmp_path, 1), checkpoint(tmp_path / "other", 2, "")
  assert folders.orbax_state(within) == within / "state"
  assert folders.orbax_state(alone) == alone
  assert folders.orbax_state(tmp_path) is None


def test_a_run_is_done_when_its_last_step_is_evaluated_and_saved(tmp_path):
  assert not folders.is_done(tmp_path, 10)
  checkpoint(tmp_path, 10)
  assert not folders.is_done(tmp_path, 10)
  noted = [{"step": step, "loss": {"a": 1.0}} for step in (10, 20)]
  (tmp_path / "evaluations.json").write_text(json.dumps(noted))
  assert folders.is_done(tmp_path, 10) and not folders.is_done(tmp_path, 20)  # not saved
  assert folders.evaluations(tmp_path)[10]["loss"] == {"a": 1.0}


def test_the_step_is_in_the_name():
  assert folders.named_step("gs://bucket/run/checkpoint_1000/") == 1000
  assert folders.named_step("gs://bucket/run") is None


# --- what was trained ---------------------------------------------------------------------------


def test_the_rules_are_those_of_the_macros_where_no_checkpoint_tells(tmp_path):
  with pytest.raises(ValueError, match="there is no config.gin"):
    nms.runs.rules_of(tmp_path)
  config = tmp_path / "operative_config.gin"
  config.write_text("PATTERN = '1:4'\n")
  with pytest.raises(ValueError, match="config.gin has no macro RECIPE"):
    nms.runs.rules_of(tmp_path)
  macros = dict(
    RECIPE="mdgf_linear", SPARSITY_RULES={"ff": None, "q": "2:4"}, SPARSE_STEPS=100, DENSE_STEPS=10,
    FINETUNE_STEPS=20, BETA=0.5, GRADIENT="straight_through", INDIVISIBLE="skip",
  )  # fmt: skip
  with config.open("a") as file:
    file.writelines(f"{name} = {value!r}\n" for name, value in macros.items())
  want = configure.rules(
    {"ff": "1:4", "q": "2:4"}, "mdgf_linear", sparse_steps=100, dense_steps=10, finetune_steps=20,
    beta=0.5, gradient="straight_through", indivisible="skip",
  )  # fmt: skip
  assert nms.runs.rules_of(str(tmp_path)) == want
  assert nms.runs.read_settings(tmp_path).values == {"PATTERN": "1:4", **macros}
  config.write_text(config.read_text() + "RECIPE_FIELDS = %FIELDS\n")
  with pytest.raises(ValueError, match="RECIPE_FIELDS is not a plain value in config.gin: %FIELDS"):
    nms.runs.rules_of(tmp_path)


@pytest.mark.parametrize("recipe", nms.recipes.RECIPES)
def test_the_target_holds_from_the_dense_phase_on_where_nothing_comes_between(recipe):
  run = results.Run(pathlib.Path("run"), {}, False, recipe, {"ff": "1:8"}, 10, 100, 20, 1000)
  at_once = results.masks_at_once(recipe)  # which these are: test_registry.py
  assert run.target_from() == {True: 1010, False: 0 if recipe == "dense" else 1080}[at_once]
  assert not run.target_remark()


# --- whole or not at all ------------------------------------------------------------------------


def killed(code, *argv):
  """Runs code that prints a line in the middle of its work, and is killed there: SIGKILL."""
  code = f"import sys, time\nfrom nm_sparsity_jax.runs import files, lock\n{code}"
  command = [sys.executable, "-c", code, *map(str, argv)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
    said = child.stdout.readline()
    child.kill()
  assert said == "half\n" and child.returncode == -signal.SIGKILL


HALF = """
with files.whole_file(sys.argv[1]) as path, path.open("w") as file:
  file.write("new" * 1000)
  file.flush()
  print("half", flush=True)
  time.sleep(60)
"""


def test_a_kill_in_the_middle_leaves_the_file_before(tmp_path):
  path = tmp_path / "settings.json"
  killed(HALF, path)
  assert not path.exists()
  files.write_atomically(path, "one")
  killed(HALF, path)
  assert path.read_text() == "one" and len(list(tmp_path.iterdir())) == 2
  files.write_atomically(path, b"two")  # takes what the kill left
  assert path.read_text() == "two" and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_error_in_the_middle_leaves_the_file_before_and_nothing_else(tmp_path):
  path = tmp_path / "file"
  path.write_text("one")
  with pytest.raises(KeyboardInterrupt), files.whole_file(path) as unfinished:
    unfinished.write_text("two")
    raise KeyboardInterrupt
  assert path.read_text() == "one" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_kill_in_the_middle_leaves_no_folder_of_that_name(tmp_path):
  code = """
with files.whole_folder(sys.argv[1]) as folder:
  (folder / "first").write_text("x")
  print("half", flush=True)
  time.sleep(60)
"""
  os.umask(umask := os.umask(0))
  path = tmp_path / "deep/folder"
  killed(code, path)
  assert not path.exists()
  with files.whole_folder(str(path)) as folder:
    (folder / "second").write_text("x")
    assert not path.exists()
  assert [p.name for p in path.iterdir()] == ["second"]
  assert path.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_folder_that_fails_takes_what_was_made_above_it(tmp_path):
  with pytest.raises(ValueError, match="deep/folder' could not be written: no room"):
    with files.whole_folder(str(tmp_path / "a/deep/folder")) as folder:
      (folder / "first").write_text("x")
      raise OSError("no room\nand more")
  assert not list(tmp_path.iterdir())
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="file/folder' cannot be made: "):
    with files.whole_folder(str(tmp_path / "file/folder")):
      pass
  with pytest.raises(ValueError, match="cannot be made: File name too long"):
    with files.whole_folder(str(tmp_path / "a/deep" / ("x" * 250))):
      pass
  assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_probe_leaves_nothing(tmp_path):
  files.probe(tmp_path)
  assert not list(tmp_path.iterdir())
  with pytest.raises(OSError, match="No such file"):
    files.probe(tmp_path / "nowhere")


# --- one process at a time ----------------------------------------------------------------------


def refused(folder):
  with pytest.raises(ValueError) as error, lock.hold(folder, "held by {}".format):
    pass
  return str(error.value)


def test_a_held_lock_refuses_and_names_its_holder(tmp_path):
  folder = tmp_path / "new"
  with lock.hold(folder, str) as held:
    assert refused(folder) == "held by "
    held.note("first, a long one")
    held.note(42)
    assert refused(folder) == "held by 42"
  with lock.hold(folder, str):  # again
    pass


def test_a_child_that_inherits_the_lock_holds_it_and_a_kill_ends_it(tmp_path):
  command = [sys.executable, "-c", "import time; time.sleep(60)"]
  with lock.hold(tmp_path, str) as held:
    child = subprocess.Popen(command, pass_fds=[held.fileno()])
    held.note(child.pid)
  try:
    assert refused(tmp_path) == f"held by {child.pid}"
  finally:
    child.kill()
    child.wait()
  with lock.hold(tmp_path, str):
    pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
  import fcntl

  def no_locks(*args):
    raise OSError(37, "No locks available")

  monkeypatch.setattr(fcntl, "flock", no_locks)
  with lock.hold(tmp_path, str):
    pass


# --- signals ------------------------------------------------------------------------------------


def send(*numbers):
  for number in numbers:
    os.kill(os.getpid(), number)


def test_the_first_signal_is_noted_and_a_second_ctrl_c_interrupts():
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with signals.Signals() as stop:
    assert stop.name is None
    send(signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert stop.name == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_handlers_outside_of_the_main_thread():
  failed = []

  def enter():
    try:
      with signals.Signals():
        pass
    except BaseException as e:
      failed.append(e)

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert not failed


class Child:
  def __init__(self):
    self.said = []

  def terminate(self):
    self.said.append("terminate")

  def kill(self):
    self.said.append("kill")


def test_a_relay_tells_the_child_of_the_moment():
  first, second = Child(), Child()
  with signals.Relay() as stop:
    with stop.to(first):
      pass
    send(signal.SIGINT)  # between two
    with stop.to(second):
      assert second.said == ["terminate"]
      send(signal.SIGTERM, signal.SIGINT)
    send(signal.SIGINT)  # nobody is there
  assert not first.said and second.said == ["terminate", "terminate", "kill"]
  assert stop.name == "SIGINT"
