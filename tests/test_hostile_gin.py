"""gin files and sweeps that somebody else wrote: `plan` and `sweep --table` look, and run nothing.

Point 24: reading must not execute.
"""

import json
import pathlib
import sys

import pytest

from nm_sparsity_jax import cli, gin_files, plan
from nm_sparsity_jax.gin_files import guard
from nm_sparsity_jax.sweep import grid

pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")

SETTINGS = ["RECIPE = 'sr_ste'", "PATTERN = '1:4'", "SPARSE_STEPS = 10"]
MODEL = "gin_configs/models/t5_1_1/tiny.gin"


@pytest.fixture
def errors(capsys, tmp_path, monkeypatch):
  """What `plan` says of a gin file; nothing may have been executed by then."""
  monkeypatch.chdir(tmp_path)

  def call(text, *flags, name="theirs.gin"):
    (tmp_path / name).write_text(text)
    ours = str(gin_files.folder())
    files = [f"--gin_file={f}" for f in (MODEL, "gin_configs/sparsity.gin", name)]
    settings = [f"--gin_bindings={b}" for b in SETTINGS]
    argv = ["plan", f"--gin_search_paths=.,{ours}", *files, *settings, *flags, "--json"]
    capsys.readouterr()
    code = cli.main(argv)
    out = capsys.readouterr().out
    found = json.loads(out)["errors"]
    assert code == bool(found)
    assert not (tmp_path / "executed").exists()
    assert all("\n" not in error for error in found)
    return found

  return call


TOUCH = "from __gin__ import dynamic_registration\n"
EXECUTE = {
  "a module of Python": TOUCH
  + "import os\nNETWORK = @os.system()\nos.system.command = 'touch executed'\n",
  "without registration": "import os\n",
  "from": TOUCH + "from os import path\n",
  "as": TOUCH + "import subprocess as t5x\n",
  "a file beside it": "import evil\n",
  "through a module that is allowed": TOUCH
  + "from nm_sparsity_jax.runs import files\nNETWORK = @files.os.system()\n"
  + "files.os.system.command = 'touch executed'\n",
  "a method of builtins": TOUCH + "import jax\nNETWORK = @jax.__builtins__.get()\n",
  "a loader": TOUCH + "import jax.numpy as jnp\nNETWORK = @jnp.load()\njnp.load.file = 'x.npy'\n",
  "a program": TOUCH
  + "from nm_sparsity_jax.local import train\nNETWORK = @train.train()\n"
  + "train.train.run = None\n",
  "what writes": TOUCH
  + "from nm_sparsity_jax.runs import files\nNETWORK = @files.write_atomically()\n"
  + "files.write_atomically.path = 'executed'\nfiles.write_atomically.content = 'x'\n",
}  # fmt: skip


@pytest.mark.parametrize("how", EXECUTE)
def test_plan_executes_nothing_that_a_file_says(errors, tmp_path, how):
  """Point 24: `import os` and `@os.system()` in a stranger's file are refused with one line."""
  (tmp_path / "evil.py").write_text("open('executed', 'w').close()\n")
  found = errors(EXECUTE[how])
  assert sum("--import" in e or "makes no value" in e for e in found) == 1, found
  assert "evil" not in sys.modules


def test_a_file_that_is_included_is_looked_at_too(errors, tmp_path):
  """Point 24: the list holds for what a file includes."""
  (tmp_path / "deep.gin").write_text(EXECUTE["a module of Python"])
  found = errors("include 'deep.gin'\n")
  assert any("'os'" in error and "--import os" in error for error in found)


def test_overrides_are_looked_at_too(errors):
  found = errors("", "--gin_bindings=import os")
  assert any("'os'" in error for error in found)


def test_a_module_that_the_user_names_is_imported(errors, tmp_path, monkeypatch):
  """Point 24: modules that you name by --import are yours."""
  (tmp_path / "my_own.py").write_text("def number():\n  return 7\n")
  text = TOUCH + "import my_own\nBATCH_SIZE = @my_own.number()\n"
  assert any("--import my_own" in error for error in errors(text))
  try:
    assert errors(text, "--import=my_own") == []
  finally:
    sys.modules.pop("my_own", None)


def test_a_task_module_of_a_file_is_not_imported(errors, tmp_path):
  """Point 24: MIXTURE_OR_TASK_MODULE names a module as `import` does."""
  config = gin_files.Config([gin_files.folder()], [MODEL], [], imports=())
  with pytest.raises(ValueError, match="--import evil"):
    config.refuse_module("evil")
  config.refuse_module("t5x_tasks")
  config.close()


def test_what_is_trusted_runs_as_before(tmp_path):
  """A program does what its file says; so does plan.plan in Python, unless told otherwise."""
  file = tmp_path / "theirs.gin"
  file.write_text(TOUCH + "import string\nX = @string.capwords()\nstring.capwords.s = 'x'\n")
  for imports, wrong in ((None, False), ((), True), (("string",), False)):
    report = plan.plan([MODEL, str(file)], [], [gin_files.folder()], imports=imports)
    assert any("--import string" in e for e in report["errors"]) == wrong, report["errors"]


def test_every_package_of_ours_is_allowed():
  for module in ("nm_sparsity_jax.local.train", "t5x_tasks", "t5.data.mixtures", "seqio", "optax"):
    guard.refuse_import(module, ())
  for module in ("os", "t5xevil", "numpy", "tensorflow.io"):
    with pytest.raises(ValueError, match=f"--import {module}"):
      guard.refuse_import(module, ())
  guard.refuse_import("my.models.t5", ["my.tasks"])


@pytest.mark.parametrize("files", [["a.gin"], ["a.gin", "b.gin"], ["a.gin", "b.gin", "c.gin"]])
def test_files_that_include_each_other_are_named(errors, tmp_path, files):
  """Point 26: an include cycle ended in Python's words of recursion, without a file's name."""
  for file, following in zip(files, [*files[1:], files[0]], strict=True):
    (tmp_path / file).write_text(f"include '{following}'\n")
  (error,) = errors(f"include '{files[0]}'\n")
  assert f"include each other: theirs.gin -> {' -> '.join(files)} -> {files[0]}" in error


# --- sweeps -------------------------------------------------------------------------------------

SWEEP = """out = '{out}'
gin_files = ['theirs.gin']
recipes = ['sr_ste']
patterns = ['1:4']
seeds = [0]
[macros]
{macros}
"""


@pytest.mark.parametrize(
  "key", ['"X\\nimport os\\nY"', '"a..b"', '"@x"', '"X = 1"', "'é'", '""', '"1X"', '"a.b "']
)
def test_keys_of_a_sweep_are_identifiers(tmp_path, key):
  """Point 24: a key of TOML could bring lines of gin."""
  file = tmp_path / "sweep.toml"
  file.write_text(SWEEP.format(out=tmp_path / "out", macros=f"{key} = 1"))
  with pytest.raises(ValueError, match="is not the name of a gin macro"):
    grid.read(str(file))
  file.write_text(SWEEP.format(out=tmp_path / "out", macros='"evaluation.Evaluation.name" = "x"'))
  assert "evaluation.Evaluation.name = 'x'" in grid.read(str(file)).cells[0].bindings


def test_the_table_of_a_sweep_executes_nothing(tmp_path, capsys, monkeypatch):
  """Point 24: `sweep --table` only looks."""
  monkeypatch.chdir(tmp_path)
  pathlib.Path("evil.py").write_text("open('executed', 'w').close()\n")
  pathlib.Path("theirs.gin").write_text("import evil\n")
  pathlib.Path("sweep.toml").write_text(SWEEP.format(out="out", macros="SPARSE_STEPS = 10"))
  assert cli.main(["sweep", "sweep.toml", "--table"]) == 1
  err = capsys.readouterr().err
  assert err.count("\n") == 1 and "'evil'" in err and "--import evil" in err
  assert not pathlib.Path("executed").exists()
