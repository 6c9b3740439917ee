"""What people read is true: each block runs or is parsed, each link leads somewhere.

A block without a language is a picture or an output. Blocks of sh run in bash with stand-ins for
the programs, so quoting is bash's; then each command line is parsed by its own program.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from unittest import mock

import floors
import jax
import numpy as np
import pages
import pytest
import t5x_found
import tasks_found
import test_report
from checkout import ROOT

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import _flags, bench
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("as_users_compute")
BLOCKS = pages.blocks()
RUNS = [b for b in BLOCKS if b.language == "sh" and "--gin_file=" in b.code]
needs_seqio = pytest.mark.skipif(
  importlib.util.find_spec("seqio") is None, reason="seqio: pip install -e '.[local]'"
)


def of(language):
  found = [b for b in BLOCKS if b.language == language]
  return pytest.mark.parametrize("block", found, ids=str)


quiet = functools.partial(warnings.catch_warnings, action="ignore")


def execute(code, names=None):
  """Runs code by itself; a warning is an error."""
  names = {"__name__": "__main__"} if names is None else names
  with warnings.catch_warnings(action="error"):
    exec(compile(code, "a block", "exec"), names)
  return names


# --- blocks of python and gin -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The current folder, with the runs and the sweep that pages name."""
  monkeypatch.chdir(tmp_path)
  for name in ("mdgf", "stepwise", "sr_ste"):
    test_report.write(tmp_path / "runs" / name)
  (sweep,) = [b.code for b in BLOCKS if b.page == "docs/sweep.md" and b.language == "toml"]
  (tmp_path / "sweep.toml").write_text(sweep)
  with mock.patch.dict(RECIPES):  # puts them back
    yield tmp_path


@of("python")
def test_python_runs(block, folder, capsys):
  if "kauldron" in block.code:
    compile(block.code, "a block", "exec")  # tests/integrations/test_gemma.py runs its like
  elif "seqio" in block.code:
    if reason := tasks_found.why_not():
      pytest.skip(reason)
    with quiet():
      import t5x_tasks  # noqa: F401
    try:
      execute(block.code)
    finally:
      tasks_found.register_again()
  else:
    execute(block.code)
    if block.output:
      assert capsys.readouterr().out == block.output


def test_a_run_that_lost_its_last_checkpoints_ends_with_the_same_bits(tmp_path, monkeypatch):
  pytest.importorskip("orbax.checkpoint")
  (code,) = [b.code for b in BLOCKS if "CheckpointManager" in b.code]
  monkeypatch.chdir(tmp_path)
  first = execute(code)
  assert first["loss"](first["run"]["params"]) < 0.5  # the variance of the data is 1
  shards = first["run"]["params"]["mlp"]["wi"]["kernel"].addressable_shards
  assert {s.data.shape for s in shards} == {(32, 32)}  # in two, on the devices of conftest
  for step in (150, 200):
    shutil.rmtree(f"checkpoints/{step}")
  second = execute(code)
  assert second["start"] == 100
  jax.tree.map(np.testing.assert_array_equal, first["run"], second["run"])


@of("gin")
def test_gin_is_read(block, tmp_path):
  pytest.importorskip("gin")
  if reason := tasks_found.why_not():
    pytest.skip(reason)
  (tmp_path / "block.gin").write_text(block.code)
  with quiet():
    config = gin_files.Config([str(tmp_path)], ["block.gin"], ["VOCABULARY = None"])
  assert not [e for e in config.errors if "is not set" not in e]


# --- command lines --------------------------------------------------------------------------------

# Programs of sh blocks: each writes down its arguments, and gin-path prints its folder too.
STAND_IN = r"""#!/bin/bash
printf '%s\0' "${0##*/}" "$@" $'\n' >>"$LOG"
[ "${0##*/} $1" != "nm-sparsity gin-path" ] || echo "$ROOT"
"""
PROGRAMS = ("nm-sparsity", "pip", "make", "python", "python3.11", "gcloud")


@pytest.fixture(scope="module")
def arrived(tmp_path_factory):
  """Says which command lines bash makes of a block: lists of words."""

  @functools.cache
  def lines_of(block):
    folder = tmp_path_factory.mktemp("typed")
    (folder / "nm/bin").mkdir(parents=True)
    (folder / "nm/bin/activate").touch()
    (folder / "bin").mkdir()
    (folder / "work").mkdir()
    for program in PROGRAMS:
      (folder / "bin" / program).write_text(STAND_IN)
      (folder / "bin" / program).chmod(0o755)
    above = "".join(b.code for b in BLOCKS if b.page == block.page and b.line < block.line)
    variables = re.findall(r"^[A-Z]+=.*", above, re.MULTILINE)
    env = dict(PATH=f"{folder}/bin", HOME=str(folder), LOG=f"{folder}/log", ROOT=str(ROOT))
    env |= dict(NAME="a-vm", ZONE="a-zone")  # docs/t5x.md leaves them to the reader
    done = subprocess.run(
      ["/bin/bash", "-euc", "\n".join([*variables, block.code])],
      env=env, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode and not done.stderr, done.stderr
    lines = (folder / "log").read_text().split("\0\n\0")[:-1]
    return [line.split("\0") for line in lines if line != "nm-sparsity\0gin-path"]

  return lines_of


def check(program, argv):
  if program == "nm-sparsity":
    cli.parse(argv)
  elif program == "make":
    assert re.search(rf"^{argv[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
  elif program == "pip":
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(argv)):
      assert extra in floors.EXTRAS
  elif argv[0].endswith(".py") and not argv[1:]:
    assert (ROOT / argv[0]).is_file()
  elif argv[0].endswith(".py"):  # a script of ours: it knows all flags but the last
    done = subprocess.run(
      [sys.executable, ROOT / argv[0], *argv[1:], "--nope"],
      capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    absent = "No module named '(coreai|coremltools|tensorflow|torch)'$"
    assert re.search(rf"arguments: --nope$|{absent}", done.stderr.strip())


@of("sh")
def test_sh_is_parsed_by_its_programs(block, arrived):
  lines = arrived(block)
  assert lines
  for program, *argv in lines:
    check(program, argv)
    for file in re.findall(r"--gin_file=(\S+)", " ".join(argv)):
      found = [ROOT / file, (ROOT / block.page).parent / file]
      is_here = any(path.is_file() for path in found)
      assert is_here or file.startswith("t5x/"), file  # T5X's own: the plans below read them


@pytest.mark.slow  # tests/test_plan.py has the mistakes that a plan finds
@pytest.mark.t5x
@pytest.mark.parametrize("block", [b for b in RUNS if " t5x." in b.code], ids=str)
def test_runs_of_t5x_are_planned(block, arrived, tmp_path, capsys, monkeypatch):
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "my_tasks.py").touch()
  for _, _, program, *argv in arrived(block):
    # A bucket is a folder that is not there, and `...` is what the reader fills in.
    flags = [a.replace("gs://", f"{tmp_path}/").replace("'...'", f"'{tmp_path}'") for a in argv]
    flags = [f for f in flags if f != "..."]
    if "--gin_search_paths" not in " ".join(flags):
      flags.append(f"--gin_search_paths={ROOT}")
    with quiet(), t5x_found.closed_loops():
      cli.main(["plan", *flags, "--json"])
    report = json.loads(capsys.readouterr().out)
    expected = r"/checkpoint_|'my_task'" + r"|is not set" * ("..." in argv)
    assert not [e for e in report["errors"] if not re.search(expected, e)]
    assert not report["warnings"]
    if program == "t5x.train":  # the others read their rules from the checkpoint
      assert report["kernels"] and report["schedule"]


@needs_seqio
@pytest.mark.parametrize("block", [b for b in RUNS if " t5x." not in b.code], ids=str)
def test_local_runs_are_made(block, arrived, tmp_path, monkeypatch):
  if block.page.startswith("examples/"):  # its blocks are typed in its folder
    shutil.copytree((ROOT / block.page).parent, tmp_path, dirs_exist_ok=True)
  monkeypatch.chdir(tmp_path)
  # The task of an example is nowhere.
  monkeypatch.setattr(gin_files, "refuse_missing_module", lambda _: None)
  arguments = {"train": ["run"]}
  for _, command, *argv in arrived(block):
    if not any(a.startswith("--gin_file=") for a in argv):
      continue
    if command == "plan":
      assert cli.main([command, *argv]) == 0
      continue
    args = cli.parse([command, *argv])[-1]
    with quiet():
      if command == "bench":
        bench.workload_of(args)
        continue
      config = _flags.read(args, {"eval": "evaluate"}.get(command, command))
      for name in arguments.get(command, ["evaluation", "checkpoint", "output_dir"]):
        config.argument(name)


# --- pages that are typed whole -------------------------------------------------------------------


def in_bash(code, folder):
  """Runs what a reader would type, in a folder, with our own command on the path."""
  (folder / "nm-sparsity").write_text(
    f'#!/bin/bash\nexec {sys.executable} -m nm_sparsity_jax.cli "$@"\n'
  )
  (folder / "nm-sparsity").chmod(0o755)
  path = f"{folder}{os.pathsep}{os.environ['PATH']}"
  env = os.environ | dict(PATH=path, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
  done = subprocess.run(
    ["/bin/bash", "-euc", code], env=env, cwd=folder, capture_output=True, text=True, check=False
  )
  assert not done.returncode, done.stderr
  return done.stdout + done.stderr


@needs_seqio
@pytest.mark.slow
@pytest.mark.parametrize("page, said", [
  ("docs/local.md", "step 500/500  loss"),
  ("docs/your_task.md", "largest_digit: accuracy 100"),
  ("examples/own_workload/README.md", "Nothing stands in the way."),
])  # fmt: skip
def test_a_page_runs_as_typed(page, said, folder):
  typed = lambda language: [b.code for b in BLOCKS if (b.page, b.language) == (page, language)]
  (folder / "my_task.py").write_text("".join(typed("python")))
  code = [c for c in typed("sh") if "my_recipes" not in c]  # tests/test_own_recipe.py types that
  if page.startswith("examples/"):  # 20 steps in place of 2000
    shutil.copytree((ROOT / page).parent, folder, dirs_exist_ok=True)
    sweep = folder / "sweep.toml"
    sweep.write_text(re.sub(r"= (\d+)00$", r"= \1", sweep.read_text(), flags=re.MULTILINE))
    code = [c.replace("/tmp/own/", f"{folder}/").replace("2000", "20") for c in code]
  out = in_bash("\n".join(code), folder)
  assert said in out and "\nok\n" in out


# --- tables: links are MkDocs' (tests/test_site.py) ---------------------------------------------


@pytest.mark.parametrize("page, row, names", [
  ("README.md", r"^\| (`\w+`) \| .* \|$", RECIPES),
  ("README.md", r"^\| (`nm-sparsity .*?) \|", cli.COMMANDS.keys() - {"gin-path"}),
  ("docs/install.md", r"^\| (`.*?) \|", floors.EXTRAS),
  ("docs/names.md", r"^\| (`.*?) \|", nms.__all__),
])  # fmt: skip
def test_a_table_is_complete(page, row, names):
  cells = re.findall(row, (ROOT / page).read_text("utf-8"), re.MULTILINE)
  found = re.findall(r"`(?:nm-sparsity )?([^`]+)`", " ".join(cells))
  assert sorted(found) == sorted(names)


# --- the notebook ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_runs_and_its_outputs_are_true(capsys):
  assert pages.run_notebook(pages.NOTEBOOK, execute, capsys)[1] == 3
