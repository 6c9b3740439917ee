"""nm-sparsity sweep: the grid that a file means, what it refuses, and that nothing is lost."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import sweep_stub
import test_runs
from checkout import ROOT

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import sweep
from nm_sparsity_jax.cli.quickstart import FILES
from nm_sparsity_jax.runs import files
from nm_sparsity_jax.trainer import run as trainer_run
from nm_sparsity_jax.trainer import train

pytest.importorskip("gin", reason="sweep reads gin files: pip install gin-config")

FILE = f"""
out = "out"
gin_files = [
  "gin_configs/runs/local_train.gin", "gin_configs/runs/local_adamw.gin",
  "{ROOT}/tests/local_tiny.gin", "mine.gin",
]
recipes = ["dense", "sr_ste", "idp"]
patterns = ["1:4", "1:8"]
seeds = [0, 3]
baseline = "sr_ste"
[macros]
SPARSE_STEPS = 4
NUM_PARTITIONS = 3  # of a machine with more devices than this one
[start]
SPARSE_STEPS = 2
LEARNING_RATE = 0.5
"""
REFUSE = train.refuse_changed
SMALL = FILE.replace('["dense", "sr_ste", "idp"]', '["sr_ste", "idp"]').replace(', "1:8"]', "]")


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty folder to stand in; runs are stubs, and the task is not looked up."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", sweep_stub.install(tmp_path / "stub", {}))
  monkeypatch.setattr(trainer_run.Run, "check_data", lambda self: None)
  # A stub notes no settings.
  monkeypatch.setattr(train, "refuse_changed", lambda folder, settings: None)
  (tmp_path / "mine.gin").write_text("BETA = None\n")
  return tmp_path


def write(text):
  pathlib.Path("sweep.toml").write_text(text)
  return "sweep.toml"


def call(text, capsys, *flags):
  """Exit code, stdout, stderr of the command with a file of this text."""
  code = cli.main(["sweep", write(text), *flags])
  return code, *capsys.readouterr()


def trace(name):
  return [int(x) for x in pathlib.Path("out", name, "trace").read_text().split()]


# --- the file -------------------------------------------------------------------------------------


def test_the_grid_seed_by_seed_dense_once_a_seed(here):
  grid = sweep.read(write(FILE), ["mine"])
  assert [run.name for run in grid.runs] == [
    f"{name}-seed{seed}"
    for seed in (0, 3)
    for name in ("start", "dense", "sr_ste-1_4", "sr_ste-1_8", "idp-1_4", "idp-1_8")
  ]
  run = grid.runs[-1]
  assert (run.start, run.seed, run.steps, run.start.steps) == (grid.runs[6], 3, 4, 2)
  seeds = {"RANDOM_SEED": 3, "DATA_SEED": 3}
  assert run.macros == seeds | {
    "SPARSE_STEPS": 4, "NUM_PARTITIONS": 3, "RECIPE": "idp",
    "INITIAL_CHECKPOINT_PATH": "out/start-seed3/checkpoint_2", "PATTERN": "1:8",
    "MODEL_DIR": "out/idp-1_8-seed3",
  }  # fmt: skip
  start = {
    "SPARSE_STEPS": 2,
    "LEARNING_RATE": 0.5,
    "RECIPE": "dense",
    "PATTERN": None,
    "BETA": None,
  }
  assert start.items() <= run.start.macros.items()
  words = grid.command(run)
  assert words[:2] == ["train", "--import=mine"] and '--gin.PATTERN="1:8"' in words


@pytest.mark.parametrize(
  "old, new, word",
  [
    ("[0, 3]", "[true]", "seeds=True"),
    ("[0, 3]", "3", "seeds: .*not a list"),
    ("[macros]", "[variant.idp]\nBETA = 1\n[macros]", "variant"),
    ("[macros]", "[macros]\nINITIAL_CHECKPOINT_PATH = 'x'", "INITIAL_CHECKPOINT_PATH: set"),
    # What gin, the rules and the run say.
    ('"idp"]', '"idb"]', "idb-1_4-seed0: .*recipe='idb'"),
    ("[macros]", "[macros]\nSPARSITY_RULES = {ff = '1:2'}", "SPARSITY_RULES"),
  ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_file(old, new, word, here, capsys):
  code, _, error = call(FILE.replace(old, new), capsys)
  assert code == 1 and error.count("\n") == 1
  assert "sweep.toml" in error and re.search(word, error), error
  assert not pathlib.Path("out").exists()  # nothing has been started


def test_the_files_of_examples_and_documentation_are_right(here):
  example = sweep.read(str(ROOT / "examples/sweep_mini_glue.toml"))
  assert len(example.runs) == 3 * (1 + 1 + 8 * 2)
  assert {run.pattern for run in sweep.read(FILES["rebus"]).runs} == {None, "1:16"}
  (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
  steps = {run.name: run.steps for run in sweep.read(write(block)).runs}
  assert (steps["start-seed2"], steps["mdgf_straight-1_32-seed2"]) == (1500, 400)


# --- runs -----------------------------------------------------------------------------------------


def test_runs_are_done_once_and_in_order_and_a_larger_grid_goes_on(here, capsys):
  code, out, err = call(SMALL, capsys)
  assert code == 0 and out.startswith("out, 6 runs, seeds 0, 3\n")
  names = [f"{n}-seed{seed}" for seed in (0, 3) for n in ("start", "sr_ste-1_4", "idp-1_4")]
  done = re.findall(r"^(\d) of 6 runs done  (\S+) took \d+ s$", err, re.MULTILINE)
  assert done == [(str(i + 1), name) for i, name in enumerate(names)]
  assert trace("start-seed0") == [1, 2] and trace("idp-1_4-seed3") == [3, 4, 5, 6]
  code, out, err = call(SMALL.replace("[0, 3]", "[0, 3, 4]"), capsys)
  assert code == 0 and "6 of 9 runs done" in err and out.startswith("out, 9 runs")
  assert trace("idp-1_4-seed3") == [3, 4, 5, 6]


def test_what_fails_is_named_takes_nothing_along(here, capsys):
  fails = {"sr_ste-1_4-seed0": "nan", "idp-1_4-seed0": "killed", "start-seed3": "nan"}
  sweep_stub.install(here / "stub", fails)
  code, out, err = call(SMALL, capsys)
  assert code == 1 and out.startswith("out, partial: 1 of 6 runs")
  assert "failed: sr_ste-1_4-seed0: the loss is not finite" in out
  assert "failed: idp-1_4-seed3: start-seed3, which it starts from, is not done" in out
  assert "1 of 6 runs done  idp-1_4-seed0 failed: it was ended by SIGKILL" in err
  assert call(SMALL, capsys, "--table")[:2] == (0, out)


def test_a_changed_file_is_refused_where_runs_are_there(here, monkeypatch):
  settings = {}
  note = lambda folder, now: settings.update({folder.name: now})
  monkeypatch.setattr(train, "refuse_changed", note)
  sweep.read(write(SMALL))
  monkeypatch.setattr(train, "refuse_changed", REFUSE)
  folder = pathlib.Path("out/sr_ste-1_4-seed0")
  test_runs.checkpoint(folder, 3)
  assert settings[folder.name]["model"]["num_partitions"] == 3  # as the run has it
  files.write_json(folder / "settings.json", settings[folder.name])
  with pytest.raises(ValueError, match=f"{folder.name}.*sparse_steps was 4, and is 5"):
    sweep.read(write(SMALL.replace("SPARSE_STEPS = 4", "SPARSE_STEPS = 5")))
  # When things are looked at is free.
  sweep.read(write(SMALL.replace("[macros]", "[macros]\nEVAL_PERIOD = 1")))


ALONE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nm_sparsity_jax import cli
from nm_sparsity_jax.trainer import run as trainer_run
trainer_run.Run.check_data = lambda self: None
sys.exit(cli.main(["sweep", "sweep.toml"]))
"""


def begin(found, hold):
  """A sweep in a process of its own, when the run `hold` waits after its second step."""
  write(SMALL)
  sweep_stub.install(pathlib.Path("stub"), found, hold)
  process = subprocess.Popen(
    [sys.executable, "-c", ALONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  end = time.monotonic() + 120
  while not pathlib.Path("out", hold, "checkpoint_4/state/_METADATA").is_file():
    assert process.poll() is None and time.monotonic() < end, process.communicate()
    time.sleep(0.01)
  return process


def test_killed_and_resumed_is_the_table_of_one_that_was_not(here, capsys):
  found = {f"{r}-1_4-seed{s}": [70 + 3 * i + s, 1 / (i + s + 1)]
           for i, r in enumerate(("sr_ste", "idp")) for s in (0, 3)}  # fmt: skip
  sweep_stub.install(here / "stub", found)
  whole = call(SMALL.replace('"out"', '"whole"'), capsys, "--json")[1]
  process = begin(found, hold="idp-1_4-seed0")
  process.kill()
  process.communicate()
  # The run that it left behind goes on, and nobody else begins one.
  code, out, err = call(SMALL, capsys)
  assert code == 1 and not out and "another process" in err
  child = subprocess.check_output(["pgrep", "-f", "error-file=.*/idp-1_4-seed0/"])
  os.kill(int(child), signal.SIGKILL)
  time.sleep(0.2)
  assert "partial: 2 of 6 runs" in call(SMALL, capsys, "--table")[1]
  sweep_stub.install(here / "stub", found)
  code, out, _ = call(SMALL, capsys, "--json")
  assert code == 0 and json.loads(out) == json.loads(whole.replace("whole", "out"))
  assert trace("idp-1_4-seed0") == trace("sr_ste-1_4-seed0") == [3, 4, 5, 6]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_the_run_save_and_stops(number, code, here):
  process = begin({}, hold="sr_ste-1_4-seed0")
  process.send_signal(number)
  out, err = process.communicate(timeout=60)
  assert process.returncode == code and "partial: 1 of 6 runs" in out
  assert f"{signal.Signals(number).name}: 1 of 6 runs done; the same command continues" in err
  assert "failed" not in out + err and trace("sr_ste-1_4-seed0") == [3, 4]


# --- the table and the page -----------------------------------------------------------------------


def test_means_intervals_differences_by_seed_and_the_page(here, capsys):
  found = {
    "dense-seed0": [90, 0.1], "dense-seed3": [92, 0.1], "sr_ste-1_4-seed0": [80, 0.5],
    "sr_ste-1_4-seed3": [84, 0.5], "sr_ste-1_8-seed0": [70, 0.5], "sr_ste-1_8-seed3": [70, 0.5],
    "idp-1_4-seed0": [81, 0.25], "idp-1_4-seed3": [84, 1.5], "idp-1_8-seed0": [60, 0.5],
    "idp-1_8-seed3": "nan",
  }  # fmt: skip
  sweep_stub.install(here / "stub", found)
  code, out, _ = call(FILE, capsys)
  assert code == 1
  for words in (  # t of 1 degree of freedom is 12.706
    "dense 1:8 2 of 2 91.0 +-12.7 +21.0 +-12.7", "idp 1:4 2 of 2 82.5 +-19.1 +0.5 +-6.4",
    "idp 1:8 1 of 2 60.0 -10.0",
  ):  # fmt: skip
    assert words in re.sub(" +", " ", out), out
  report = json.loads(call(FILE, capsys, "--table", "--json")[1])
  assert (report["done"], report["of"]) == (11, 12)
  (failed,) = [run for run in report["runs"] if run["state"] != "done"]
  assert failed["remarks"] == ["the loss is not finite"]
  page = pathlib.Path("out/report.html").read_text()
  assert "difference from sr_ste" in page and 'id="chart-score_by_pattern"' in page
