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

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import sweep
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.trainer.workloads import t5

pytest.importorskip("gin", reason="sweep reads gin files: pip install gin-config")

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
[start]
SPARSE_STEPS = 2
LEARNING_RATE = 0.5
"""
REFUSE = run_settings.refuse_changed
SMALL = FILE.replace('["dense", "sr_ste", "idp"]', '["sr_ste", "idp"]').replace(', "1:8"]', "]")


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty folder to stand in; runs are stubs, and the task is not looked up."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", sweep_stub.install(tmp_path / "stub", {}))
  monkeypatch.setattr(t5.T5, "check", lambda self: None)
  # A stub notes no settings.
  monkeypatch.setattr(run_settings, "refuse_changed", lambda folder, settings: None)
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
    "SPARSE_STEPS": 4, "INITIAL_CHECKPOINT_PATH": "out/start-seed3/checkpoint_2", "RECIPE": "idp",
    "PATTERN": "1:8", "MODEL_DIR": "out/idp-1_8-seed3",
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
  # Without [start] and a baseline; a dense run is dense whatever the gin files say.
  pathlib.Path("mine.gin").write_text("BETA = 0.25\n")
  text = FILE.partition("[start]")[0].replace('"sr_ste", "idp"', '"mdgf_linear"')
  alone = sweep.read(write(text.replace('baseline = "sr_ste"', "")))
  assert alone.baseline == "dense" and alone.runs[0].name == "dense-seed0"
  assert alone.runs[0].start is None
  dense = SMALL.replace('["sr_ste", "idp"]', '["dense"]').replace('patterns = ["1:4"]', "")
  dense = sweep.read(write(dense.replace('baseline = "sr_ste"', "")))
  assert [run.name for run in dense.runs][1::2] == ["dense-seed0", "dense-seed3"]


@pytest.mark.parametrize(
  "old, new, word",
  [
    ("seeds =", "seedz =", "seedz"),
    ("[0, 3]", "[true]", "SEED"),
    ("[0, 3]", "3", "seeds: .*not a list"),
    ("[macros]", "[variants.idq]\nBETA = 1\n[macros]", "idq"),
    ('["1:4", "1:8"]', "[]", "patterns"),
    ('baseline = "sr_ste"', 'baseline = "snip"', "baseline"),
    ("[macros]", "[macros]\nINITIAL_CHECKPOINT_PATH = 'x'", "INITIAL_CHECKPOINT_PATH: set"),
    # What gin, the rules and the run say.
    ('"idp"]', '"idb"]', "idb-1_4-seed0: .*no recipe 'idb'"),
    ("[macros]", "[macros]\nBATCHSIZE = 9", "BATCHSIZE"),
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
  (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
  steps = {run.name: run.steps for run in sweep.read(write(block)).runs}
  assert (steps["start-seed2"], steps["mdgf_straight-1_32-seed2"]) == (1500, 400)


def test_the_task_is_looked_up_before_anything_starts(here, monkeypatch, capsys):
  pytest.importorskip("seqio", reason="runs need seqio: pip install -e '.[local]'")
  monkeypatch.undo()
  os.chdir(here)
  code, _, error = call(SMALL.replace("[macros]", "[macros]\nVOCAB_SIZE = 128"), capsys)
  assert code == 1 and "VOCAB_SIZE=384" in error and not pathlib.Path("out").exists()


# --- runs -----------------------------------------------------------------------------------------


def test_runs_are_done_once_and_in_order_and_a_larger_grid_goes_on(here, capsys):
  assert call(SMALL, capsys, "--table")[1].startswith("out, partial: 0 of 6 runs, seeds 0, 3\n")
  code, out, err = call(SMALL, capsys)
  assert code == 0 and out.startswith("out, 6 runs, seeds 0, 3\n")
  names = [f"{n}-seed{seed}" for seed in (0, 3) for n in ("start", "sr_ste-1_4", "idp-1_4")]
  done = re.findall(r"^(\d) of 6 runs done  (\S+) took \d+ s$", err, re.MULTILINE)
  assert done == [(str(i + 1), name) for i, name in enumerate(names)]
  assert trace("start-seed0") == [1, 2] and trace("idp-1_4-seed3") == [3, 4, 5, 6]
  code, out, err = call(SMALL.replace("[0, 3]", "[0, 3, 4]"), capsys)
  assert code == 0 and "6 of 9 runs done" in err and out.startswith("out, 9 runs")
  assert trace("idp-1_4-seed3") == [3, 4, 5, 6]


def test_what_fails_is_named_takes_nothing_along_and_is_tried_again(here, capsys):
  fails = {"sr_ste-1_4-seed0": "nan", "idp-1_4-seed0": "killed", "start-seed3": "nan"}
  sweep_stub.install(here / "stub", fails)
  code, out, err = call(SMALL, capsys)
  assert code == 1 and out.startswith("out, partial: 1 of 6 runs")
  assert "failed: sr_ste-1_4-seed0: the loss is not finite" in out
  assert "failed: idp-1_4-seed3: start-seed3, which it starts from, is not done" in out
  assert "1 of 6 runs done  idp-1_4-seed0 failed: it was ended by SIGKILL" in err
  assert call(SMALL, capsys, "--table")[:2] == (0, out)
  sweep_stub.install(here / "stub", {})
  code, out, err = call(SMALL, capsys)
  assert code == 0 and "failed" not in out and "1 of 6 runs done" in err


def test_a_changed_file_is_refused_where_runs_are_there(here, monkeypatch):
  settings = {}
  note = lambda folder, now: settings.update({folder.name: now})
  monkeypatch.setattr(run_settings, "refuse_changed", note)
  sweep.read(write(SMALL))
  monkeypatch.setattr(run_settings, "refuse_changed", REFUSE)
  folder = pathlib.Path("out/sr_ste-1_4-seed0")
  (folder / "checkpoint_3/state").mkdir(parents=True)
  (folder / "checkpoint_3/state/_METADATA").touch()
  run_settings.write(folder, settings[folder.name])
  for old, new, word in (
    ("SPARSE_STEPS = 4", "SPARSE_STEPS = 5", "sparse_steps was 4, and is 5"),
    ("SPARSE_STEPS = 2", "SPARSE_STEPS = 3", "initial_checkpoint"),
  ):
    with pytest.raises(ValueError, match=f"{folder.name}.*{word}"):
      sweep.read(write(SMALL.replace(old, new)))
  # When things are looked at is free.
  sweep.read(write(SMALL.replace("[macros]", "[macros]\nEVAL_PERIOD = 1")))


ALONE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nm_sparsity_jax import cli
from nm_sparsity_jax.trainer.workloads import t5
t5.T5.check = lambda self: None
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
  # A dense baseline is compared at every pattern.
  text = FILE.replace('baseline = "sr_ste"', 'baseline = "dense"')
  rows = json.loads(call(text, capsys, "--table", "--json")[1])["rows"]
  assert rows[-2]["differences"]["score"]["mean"] == -8.5 and not rows[0]["differences"]


def test_a_score_needs_every_metric_and_an_error_has_a_table_of_its_own(here, capsys):
  assert call(SMALL, capsys)[0] == 0
  for i, folder in enumerate(sorted(pathlib.Path("out").glob("*-1_4-seed*"))):  # idp, then sr_ste
    metrics = {"far": 0.25 if i < 2 else 0.5, **({"r2": 0.5} if i else {})}
    entry = {"step": 6, "loss": {"v": 1.0}, "less_is_better": ["far"], "metrics": {"v": metrics}}
    (folder / "evaluations.json").write_text(json.dumps([entry]))
    (folder / "inference_eval/nm_glue_mini_rte-metrics.jsonl").unlink()
  found = json.loads(call(SMALL, capsys, "--table", "--json")[1])
  assert found["measures"] == ["score", "v", "v far", "loss"]
  assert found["less_is_better"] == ["v far", "loss"]
  row = found["rows"][1]
  assert row["v far"]["mean"] == 0.25 and row["differences"]["v far"]["mean"] == -0.25
  assert (row["score"]["n"], found["rows"][0]["score"]["n"]) == (1, 2)
