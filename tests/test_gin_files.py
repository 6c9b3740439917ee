"""gin_files: modules here, quiet imports, and a configuration that is refused or read."""

import logging
import os
import sys

import pytest

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.integrations import gin_files

gin = pytest.importorskip("gin")
MODEL = """
from __gin__ import dynamic_registration
from nm_sparsity_jax.trainer import train
import my_own_numbers
train.train.run = @train.Run()
train.Run:
  model_dir = %MODEL_DIR
  sparse_steps = %SPARSE_STEPS
MODEL_DIR = %gin.REQUIRED
SPARSE_STEPS = 3
X = @my_own_numbers.number()
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
  pytest.importorskip("seqio", reason="the local runner needs it")
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "my_own_numbers.py").write_text("def number():\n  return 7\n")
  (tmp_path / "run.gin").write_text(MODEL)
  yield lambda *bindings, program="train": gin_files.read(
    ["run.gin"], bindings, [tmp_path], program
  )
  gin.clear_config()
  sys.modules.pop("my_own_numbers", None)


def test_a_run_is_read_or_every_mistake_is_named(read):
  config = read("MODEL_DIR = 'here'")
  assert config.local and config.argument("model_dir", "Run") == "here"
  assert "SPARSE_STEPS = 3" in config.text()
  assert config.value("X") == 7  # a gin file is a program: what it names is called
  with pytest.raises(gin_files.Unset, match="NO_SUCH"):
    config.value("NO_SUCH")
  with pytest.raises(ValueError, match="MODEL_DIR is not set.*SPARSE_STEP is set, but nothing"):
    read("SPARSE_STEP = 4")
  # A program of T5X asks for the flags alone.
  for flag in "--gin.SPARSE_STEP=4", "--gin_bindings=SPARSE_STEP = 4":
    (said,) = gin_files.unread_flags([flag, "--gin.SPARSE_STEPS=9", "--gin_file=x = 3"])
    assert "did you mean SPARSE_STEPS?" in said
  with pytest.raises(ValueError, match="local_eval.gin"):
    read("MODEL_DIR = 'here'", program="evaluate")


def test_modules_of_the_current_folder_are_seen(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", ["elsewhere"])
  gin_files.see_modules_here()
  gin_files.see_modules_here()
  assert sys.path == [str(tmp_path), "elsewhere"]


def test_quiet_silences_the_descriptor_and_the_loggers_and_puts_both_back(capfd, caplog):
  logger = logging.getLogger("nm_sparsity_jax")
  with quiet():
    os.write(2, b"chatter")
    logger.warning("chatter")
  os.write(2, b"heard")
  logger.warning("heard")
  assert capfd.readouterr().err == "heard" and caplog.messages == ["heard"]
