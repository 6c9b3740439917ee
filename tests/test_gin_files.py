"""gin_files: where files lie, quiet imports, and a configuration that is refused or read."""

import logging
import os
import pathlib
import sys

import pytest

from nm_sparsity_jax.integrations import gin_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = """
from __gin__ import dynamic_registration
from nm_sparsity_jax.local import train
train.train.run = @train.Run()
train.Run:
  model_dir = %MODEL_DIR
  sparse_steps = %SPARSE_STEPS
MODEL_DIR = %gin.REQUIRED
SPARSE_STEPS = 3
"""


def test_the_folder_has_the_files():
  assert gin_files.folder() == ROOT


def test_modules_of_the_current_folder_are_seen_once(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", ["elsewhere"])
  gin_files.see_modules_here()
  gin_files.see_modules_here()
  assert sys.path == [str(tmp_path), "elsewhere"]


def test_quiet_silences_the_descriptor_and_the_loggers_and_puts_both_back(capfd):
  logger = logging.getLogger("nm_sparsity_jax")
  level = logger.level
  with gin_files.quiet():
    os.write(2, b"chatter")
    assert logger.level == logging.ERROR
  os.write(2, b"heard")
  assert capfd.readouterr().err == "heard" and logger.level == level


def test_read_returns_a_run_or_names_every_mistake(tmp_path):
  pytest.importorskip("gin")
  pytest.importorskip("seqio", reason="the local runner needs it")
  (tmp_path / "run.gin").write_text(MODEL)
  read = lambda *bindings, program="train": gin_files.read(
    ["run.gin"], bindings, [tmp_path], program
  )
  config = read("MODEL_DIR = 'here'")
  assert config.local and config.argument("model_dir", "Run") == "here"
  assert "SPARSE_STEPS = 3" in config.text()
  with pytest.raises(ValueError, match="MODEL_DIR is not set.*SPARSE_STEP is set, but nothing"):
    read("SPARSE_STEP = 4")
  with pytest.raises(ValueError, match="no run file of this command: .*local_eval.gin"):
    read("MODEL_DIR = 'here'", program="evaluate")


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_configuration_gives_back_what_gin_held(is_locked):
  """A notebook that calls `nms.plan.plan` keeps the configuration of its own."""
  gin = pytest.importorskip("gin")
  from gin import config as inside

  files, bindings = ["gin_configs/sparsity.gin"], ["RECIPE = 'idp'"]
  gin.clear_config()
  try:
    gin.parse_config("MINE = 7")
    text = gin.config_str()
    inside._set_config_is_locked(is_locked)
    with gin_files.Config([ROOT], files, bindings) as outer:
      with gin_files.Config([ROOT], files, ["RECIPE = 'snip'"]) as inner:
        assert inner.value("RECIPE") == "snip"
      assert outer.value("RECIPE") == "idp" and "'idp'" in outer.text()
      assert "MINE" not in outer.text()
    assert gin.config_str() == text and gin.query_parameter("MINE/macro.value") == 7
    assert gin.config_is_locked() is is_locked
  finally:
    gin.clear_config()


def test_a_running_program_names_flags_that_nothing_reads():
  """gin takes a misspelt macro without a word, and so did a run of T5X."""
  from gin import config as gin

  gin.clear_config()
  try:
    gin.parse_config(["SPARSE_STEPS = 9", "DENSE_STEP = 3", "X = (%SPARSE_STEPS, %DENSE_STEPS)"])
    flags = ["--gin.SPARSE_STEPS=9", "--gin.DENSE_STEP=3", "--gin_file=X = 3", "--gin.train.x=3"]
    said = "DENSE_STEP is set, but nothing reads it; did you mean DENSE_STEPS?"
    assert gin_files.unread_flags(flags) == [said]
    assert gin_files.unread_flags(["--gin_bindings=DENSE_STEP = 3"]) == [said]
  finally:
    gin.clear_config()


def test_files_that_include_each_other_are_named(tmp_path):
  pytest.importorskip("gin")
  (tmp_path / "a.gin").write_text("include 'b.gin'\n")
  (tmp_path / "b.gin").write_text("include 'a.gin'\n")
  with gin_files.Config([tmp_path], ["a.gin"], []) as config:
    (error,) = config.errors
  assert "a.gin: gin files include each other" in error


def test_a_gin_file_is_a_program(tmp_path, monkeypatch):
  """What it imports runs, and what it names is called."""
  pytest.importorskip("gin")
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "my_own_numbers.py").write_text("def number():\n  return 7\n")
  (tmp_path / "a.gin").write_text(
    "from __gin__ import dynamic_registration\nimport my_own_numbers\n"
    "X = @my_own_numbers.number()\n"
  )
  with gin_files.Config([tmp_path], ["a.gin"], []) as config:
    assert not config.errors and config.value("X") == 7
  sys.modules.pop("my_own_numbers")
