"""nm-sparsity sweep: the grid that a file means, what it refuses, and that nothing is lost."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import browser
import pytest
import sweep_stub

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.report import charts, sections
from nm_sparsity_jax.analysis.sweep import checks, grid, pages, training
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.runs.signals import Relay

pytest.importorskip("gin", reason="sweep reads gin files: pip install gin-config")

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE = f"""
out = "out"
gin_files = [
  "gin_configs/runs/local_train.gin", "gin_configs/runs/local_adamw.gin",
  "{ROOT}/tests/local_tiny.gin",
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
SMALL = FILE.replace('["dense", "sr_ste", "idp"]', '["sr_ste", "idp"]').replace(', "1:8"]', "]")
SMALL = SMALL.replace("[macros]", "dense = false\n[macros]")


@pytest.fixture
def here(tmp_path, monkeypatch):
  """An empty folder to stand in; runs are stubs, and the task is not looked up."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", sweep_stub.install(tmp_path / "stub", {}))
  monkeypatch.setattr(checks, "check_tasks", lambda sweep, checked: None)
  return tmp_path


def write(text, name="sweep.toml"):
  pathlib.Path(name).write_text(text)
  return name


def outcomes(**found):
  """By folder, '-' and ':' written '_'."""
  named = {}
  for name, outcome in found.items():
    recipe, pattern, seed = name.rpartition("_s")[0].partition("__")[::2] + (name[-1],)
    named[f"{recipe}-{pattern}-seed{seed}" if pattern else f"{recipe}-seed{seed}"] = outcome
  sweep_stub.install(pathlib.Path("stub"), named)


# --- the file ----------------------------------------------------------------------------------


def test_the_grid_seed_by_seed_dense_once_a_seed(here):
  sweep = grid.read(write(FILE))
  assert [cell.name for cell in sweep.runs()] == [
    f"{name}-seed{seed}"
    for seed in (0, 3)
    for name in ("start", "dense", "sr_ste-1_4", "sr_ste-1_8", "idp-1_4", "idp-1_8")
  ]
  start, cell = sweep.starts[3], sweep.cells[-1]
  assert cell.start is start and cell.seed == 3
  assert cell.macros == {
    "SPARSE_STEPS": 4, "INITIAL_CHECKPOINT_PATH": "out/start-seed3/checkpoint_2", "RECIPE": "idp",
    "PATTERN": "1:8", "RANDOM_SEED": 3, "DATA_SEED": 3, "MODEL_DIR": "out/idp-1_8-seed3",
  }  # fmt: skip
  assert start.macros == {
    "SPARSE_STEPS": 2, "LEARNING_RATE": 0.5, "DENSE_STEPS": 0, "FINETUNE_STEPS": 0,
    "INITIAL_CHECKPOINT_PATH": None, "RECIPE": "dense", "PATTERN": None, "RANDOM_SEED": 3,
    "DATA_SEED": 3, "MODEL_DIR": "out/start-seed3",
  }  # fmt: skip
  assert sweep.command(cell)[:2] == ["train", "--gin_file=gin_configs/runs/local_train.gin"]
  assert "--gin.PATTERN='1:8'" in sweep.command(cell)
  alone = grid.read(write(FILE.partition("[start]")[0].replace('baseline = "sr_ste"', "")))
  assert alone.baseline == "dense" and not alone.starts
  assert "INITIAL_CHECKPOINT_PATH" not in alone.cells[0].macros


@pytest.mark.parametrize(
  "old, new, said",
  [
    ("seeds =", "seedz =", "unknown key 'seedz'; .* did you mean 'seeds'"),
    ('out = "out"', "BATCH_SIZE = 9", r"unknown key 'BATCH_SIZE'; .*belongs in \[macros\]"),
    ('out = "out"', "", "out: give the folder of the sweep"),
    ('out = "out"', 'out = "sweep.toml/s"', "out: Not a directory: '.*sweep.toml' is a file"),
    ("[0, 3]", "[]", r"seeds: give seeds, a list of whole numbers; not \[\]"),
    ("[0, 3]", "[true]", "seeds: give"),
    ("[0, 3]", "[1, 1]", "seeds: 1 stands there twice"),
    ("[0, 3]", "[-1]", "seeds=-1: give a whole number from 0 to 2,147,483,647"),
    ("[0, 3]", "[4_294_967_296]", "seeds=4294967296: give a whole number from 0 to"),
    ('"idp"]', '"idb"]', "recipes: 'idb' is not one of dense, one_shot"),
    ('"idp"]', '"sr_ste"]', "recipes: 'sr_ste' stands there twice"),
    ('"1:8"]', '"8:1"]', "patterns: .*8:1"),
    ('"1:8"]', '"01:4"]', "patterns: '1:4' stands there twice"),
    ('["1:4", "1:8"]', "[]", "patterns: give patterns"),
    ('baseline = "sr_ste"', 'baseline = "snip"', "baseline: 'snip' is not one of the recipes"),
    ("[macros]", "[macros]\nRECIPE = 'x'", "macros: RECIPE is set by the sweep, from 'recipes'"),
    ("[macros]", "[macros]\nINITIAL_CHECKPOINT_PATH = 'x'", r"but \[start\] makes the checkpoint"),
    ("[macros]", '[macros]\n"a..b" = 1', r"macros: 'a\.\.b' is not the name of a gin macro"),
    ("[macros]", '[macros]\n"a.b\\nimport os" = 1', "is not the name of a gin macro"),
    ("LEARNING_RATE = 0.5", "DENSE_STEPS = 1", "start: DENSE_STEPS cannot be set there"),
    ("[start]\nSPARSE_STEPS = 2", "[start]", "start: SPARSE_STEPS is missing"),
    ("[macros]", "[macros", "is not TOML"),
    ("[macros]", "[variants.idp]\nRECIPE = 'idp'\n[macros]", "'idp' cannot be a variant's name"),
    ("[macros]", "[variants.a]\nBETA = 1\n[macros]", "variants: a needs a RECIPE, one of one_shot"),
    ("[macros]", "[variants.a]\nRECIPE = 'idp'\n[macros]", "'a' is not among the recipes"),
    # What gin and the rules say.
    ("[macros]", "[macros]\nBATCHSIZE = 9", "macros or start: BATCHSIZE is set, but nothing reads"),
    ("local_train.gin", "local_trian.gin", "gin_files, macros.*local_trian.gin"),
    ("local_train.gin", "local_common.gin", "gin_files: none is a run file of"),
    ("SPARSE_STEPS = 4", "SPARSE_STEPS = 'a'", "macros: dense, sr_ste-1_4, .*: SPARSE_STEPS='a'"),
    ("[macros]", "[macros]\nDENSE_STEPS = 9", "macros: dense, sr_ste-1_4, .*DENSE_STEPS=9"),
    ('"1:8"]', '"1:5"]', "patterns: sr_ste-1_5: .*no multiple of 5.*idp-1_5"),
    ("[macros]", "[macros]\nGRADIENT = 'masked'", "recipes: sr_ste-1_4, sr_ste-1_8: .*GRADIENT"),

    ("[start]\nSPARSE_STEPS = 2\nLEARNING_RATE = 0.5", "INITIAL_CHECKPOINT_PATH = 'no/ck'",
     "INITIAL_CHECKPOINT_PATH: there is no checkpoint 'no/ck'"),
    ("[start]\nSPARSE_STEPS = 2", "[start]\nSPARSE_STEPS = -2", "start: SPARSE_STEPS=-2: give"),
    ("[macros]", "[macros]\nSPARSITY_RULES = {ff = '1:2'}", "sr_ste-1_8-seed0 has the rules of sr"),
  ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_file_and_key(old, new, said, here, capsys):
  assert old in FILE
  file = write(FILE.replace(old, new))
  for flags in ([], ["--table"]):
    assert cli.main(["sweep", file, *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("nm-sparsity sweep: sweep.toml") and len(error.splitlines()) == 1
    assert re.search(said, error), error
  assert not pathlib.Path("out").exists()  # nothing has been started


@pytest.mark.parametrize("below", ["", "/sweep", "/checkpoint_5/state"])
@pytest.mark.parametrize(
  "files",
  [["config.gin", "run.json"], ["config.gin", "model-info.txt"], ["checkpoint_5/checkpoint"]],
)
def test_a_sweep_does_not_go_into_the_folder_of_a_run(files, below, here, capsys):
  """Such a sweep was silent, and its log, lock and report lay among the run's files."""
  for name in files:
    path = here / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  file = write(FILE.replace('"out"', f'"run{below}"'))
  before = sorted(here.rglob("*"))
  assert cli.main(["sweep", file]) == 1
  error = capsys.readouterr().err
  assert f"out: 'run{below}' is, or lies in, the folder of a run, '{here / 'run'}': take" in error
  assert len(error.splitlines()) == 1 and sorted(here.rglob("*")) == before
  (here / "runs").mkdir()
  (here / "runs/config.gin").touch()  # of the user's own
  assert grid.read(write(FILE.replace('"out"', '"runs/sweep"'))).out.name == "sweep"


def test_a_folder_with_a_name_that_is_too_long_is_one_line_that_names_the_file(here, capsys):
  file = write(FILE.replace('"out"', f'"{"a" * 999}"'))
  assert cli.main(["sweep", file]) == 1
  error = capsys.readouterr().err
  assert f"{file}: out: File name too long: 'aaaa" in error and "Name another place." in error
  assert len(error.splitlines()) == 1
  file = write(FILE.replace("gin_files = [", f'gin_files = ["{"a" * 999}", '))
  assert cli.main(["sweep", file]) == 1
  error = capsys.readouterr().err
  assert file in error and "aaaa" in error and len(error.splitlines()) == 1


def test_the_files_of_example_and_documentation_are_right(here):
  example = grid.read(str(ROOT / "examples/sweep_mini_glue.toml"))
  assert len(list(example.runs())) == 3 * (1 + 1 + 8 * 2)
  (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
  for sweep in (example, grid.read(write(block))):
    last = list(sweep.runs())[-1]
    known = checks.check(sweep).runs[last.name]
    assert (known.first, known.steps) == (1500, 400)


def test_the_task_is_looked_up_before_anything_starts(tmp_path, monkeypatch, capsys):
  pytest.importorskip("seqio", reason="runs need seqio: pip install -e '.[local]'")
  monkeypatch.chdir(tmp_path)
  for macro, said in [
    ("MIXTURE_OR_TASK_NAME = 'nm_test_sord'", "'nm_test_sord' is not registered; did you mean"),
    ("MIXTURE_OR_TASK_MODULE = 'no_tasks'", "MIXTURE_OR_TASK_MODULE='no_tasks': No module named"),
    ("VOCAB_SIZE = 128", "Set VOCAB_SIZE=384"),
  ]:
    file = write(SMALL.replace("[macros]", f"[macros]\n{macro}"))
    assert cli.main(["sweep", file]) == 1
    assert said in capsys.readouterr().err
  assert not pathlib.Path("out").exists()


# --- runs --------------------------------------------------------------------------------------


def sweep(file, capsys, *flags):
  """Exit code, stdout, stderr."""
  code = cli.main(["sweep", file, *flags])
  return code, *capsys.readouterr()


def trace(name):
  return [int(x) for x in pathlib.Path("out", name, "trace").read_text().split()]


def test_runs_are_done_once_and_in_order_and_a_larger_grid_goes_on(here, capsys):
  file = write(SMALL)
  assert sweep(file, capsys, "--table")[:2] == (0, "out, partial: 0 of 6 runs, seeds 0, 3\n")
  code, out, err = sweep(file, capsys)
  assert code == 0 and out.startswith("out, 6 runs, seeds 0, 3\n")
  done = re.findall(r"^(\d/6) done  (\S+) done in 0:0\d(?:  (\S+) left)?$", err, re.MULTILINE)
  assert [(n, name) for n, name, _ in done] == [
    (f"{i + 1}/6", f"{name}-seed{seed}")
    for i, (seed, name) in enumerate(
      (s, n) for s in (0, 3) for n in ("start", "sr_ste-1_4", "idp-1_4")
    )
  ]
  assert [bool(left) for *_, left in done] == [True] * 5 + [False]
  assert trace("start-seed0") == [1, 2] and trace("idp-1_4-seed3") == [3, 4, 5, 6]
  assert pathlib.Path("out/report.html").is_file()
  code, again, err = sweep(file, capsys)
  assert code == 0 and again == out and "6 of 6 runs done" in err
  # An evaluation may be noted before the checkpoint is complete.
  checkpoint = pathlib.Path("out/start-seed3/checkpoint_2/state/_METADATA")
  checkpoint.rename("aside")
  assert "out, partial: 5 of 6 runs" in sweep(file, capsys, "--table")[1]
  pathlib.Path("aside").rename(checkpoint)
  # Another seed; what is there stays.
  code, out, err = sweep(write(SMALL.replace("[0, 3]", "[0, 3, 4]")), capsys)
  assert code == 0 and "6 of 9 runs done" in err and out.startswith("out, 9 runs")
  assert trace("idp-1_4-seed3") == [3, 4, 5, 6]


def test_what_is_done_is_shown_without_the_checkpoint_that_it_started_from(
  here, capsys, monkeypatch
):
  text = SMALL.partition("[start]")[0] + "INITIAL_CHECKPOINT_PATH = 'gone/checkpoint_2'\n"
  with monkeypatch.context() as m:
    m.setattr(checks, "_step_of", lambda checkpoint: 2)
    code, out, _ = sweep(write(text), capsys)
    assert code == 0 and trace("idp-1_4-seed3") == [3, 4, 5, 6]
  assert sweep("sweep.toml", capsys, "--table")[:2] == (0, out)
  code, again, err = sweep("sweep.toml", capsys)
  assert (code, again) == (0, out) and "4 of 4 runs done" in err
  for other in (text.replace("checkpoint_2", "checkpoint_3"), text.replace("[0, 3]", "[0, 3, 4]")):
    code, _, err = sweep(write(other), capsys, "--table")
    assert code == 1 and "INITIAL_CHECKPOINT_PATH: there is no checkpoint" in err


def test_what_fails_is_named_takes_nothing_along_and_is_tried_again(here, capsys):
  outcomes(sr_ste__1_4_s0="nan", idp__1_4_s3="killed")
  file = write(SMALL)
  code, out, err = sweep(file, capsys)
  assert code == 1 and out.startswith("out, partial: 4 of 6 runs")
  assert "failed: sr_ste-1_4-seed0: the loss of step 3 is not finite" in out
  assert "failed: idp-1_4-seed3: it was ended by SIGKILL" in out
  assert re.search(r"sr_ste +50.0 \(1 of 2\)", out) and re.search(r"idp +- \(0 of 2\)", out)
  assert "4/6 done  idp-1_4-seed3 failed: it was ended by SIGKILL" in err
  code, table, _ = sweep(file, capsys, "--table")
  assert code == 0 and table == out
  outcomes()
  code, out, err = sweep(file, capsys)
  assert code == 0 and "failed" not in out and "4 of 6 runs done" in err
  # A start that fails leaves its seed; the other seed goes on.
  outcomes(start_s0="nan")
  code, out, err = sweep(write(SMALL.replace('"out"', '"new"')), capsys)
  assert code == 1 and "new, partial: 3 of 6 runs" in out
  assert "failed: idp-1_4-seed0: start-seed0, which it starts from, is not done" in out
  assert re.search(r"idp +50.0 \(1 of 2\)", out)


def test_a_changed_file_is_refused_where_runs_are_there(here, capsys, monkeypatch):
  file = write(SMALL)
  check = checks.check(grid.read(file))
  settings = {}
  monkeypatch.setattr(
    run_settings, "changed", lambda folder, now: settings.update({folder.name: now}) or ""
  )
  checks.check(grid.read(file))
  monkeypatch.undo()
  monkeypatch.chdir(here)
  monkeypatch.setattr(checks, "check_tasks", lambda sweep, checked: None)
  for name in ("sr_ste-1_4-seed0", "idp-1_4-seed0", "idp-1_4-seed3"):
    folder = pathlib.Path("out", name)
    folder.mkdir(parents=True)
    run_settings.write(folder, settings[name])
    (folder / "evaluation.txt").write_text(check.runs[name].evaluation)
    if name != "idp-1_4-seed3":  # it has saved nothing yet, so it may begin anew
      (folder / "checkpoint_3/state").mkdir(parents=True)
      (folder / "checkpoint_3/state/_METADATA").touch()
  before = sorted(p for p in pathlib.Path("out").rglob("*"))
  for old, new, said in [
    ("SPARSE_STEPS = 4", "SPARSE_STEPS = 5", "sparse_steps was 4, and is 5. So were 1 more runs."),
    ("[macros]", "[macros]\nBATCH_SIZE = 8", "source.batch_size was 128, and is 8."),
  ]:
    for flags in ([], ["--table"]):
      code, _, err = sweep(write(SMALL.replace(old, new)), capsys, *flags)
      assert code == 1 and said in err, err
  code, _, err = sweep(write(SMALL.replace("SPARSE_STEPS = 2", "SPARSE_STEPS = 3")), capsys)
  assert (
    code == 1 and "out/sr_ste-1_4-seed0 was started with other settings: initial_checkpoint" in err
  )
  assert sorted(p for p in pathlib.Path("out").rglob("*")) == before
  other = SMALL.replace("[macros]", "[macros]\nEVALUATOR_NUM_EXAMPLES = 64")
  code, _, err = sweep(write(other), capsys)
  assert code == 1 and "out/sr_ste-1_4-seed0 was evaluated by Evaluation(" in err
  assert "num_examples=None" in err and "num_examples=64" in err
  # When things are looked at is free.
  checks.check(grid.read(write(SMALL.replace("[macros]", "[macros]\nEVAL_PERIOD = 1"))))
  known = check.runs["idp-1_4-seed0"]
  assert (known.first, known.steps) == (2, 4) and known.evaluation.startswith("Evaluation(")


ALONE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from nm_sparsity_jax import cli
from nm_sparsity_jax.sweep import checks
checks.check_tasks = lambda sweep, checked: None
sys.exit(cli.main(["sweep", "sweep.toml"]))
"""


def begin(found, hold):
  """A sweep in a process of its own, when the run `hold` waits after its second step."""
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
  write(SMALL)
  whole = sweep(write(SMALL.replace('"out"', '"whole"')), capsys, "--json")[1]
  write(SMALL)
  process = begin(found, hold="idp-1_4-seed0")
  process.kill()
  process.communicate()
  # The run that it left behind goes on, and nobody else begins one.
  code, out, err = sweep("sweep.toml", capsys)
  assert code == 1 and not out
  child = int(re.search(r"a run that one left behind \(process (\d+)\)", err)[1])
  os.kill(child, signal.SIGKILL)
  time.sleep(0.2)
  code, out, _ = sweep("sweep.toml", capsys, "--table")
  assert code == 0 and "partial: 2 of 6 runs" in out and re.search(r"idp +- \(0 of 2\)", out)
  sweep_stub.install(here / "stub", found)
  assert sweep("sweep.toml", capsys)[0] == 0
  capsys.readouterr()
  code, out, _ = sweep("sweep.toml", capsys, "--json")
  assert json.loads(out) == json.loads(whole.replace("whole", "out"))
  assert trace("idp-1_4-seed0") == trace("sr_ste-1_4-seed0") == [3, 4, 5, 6]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_the_run_save_and_stops(number, code, here, capsys):
  write(SMALL)
  folder = pathlib.Path("out/sr_ste-1_4-seed0")
  folder.mkdir(parents=True)
  (folder / "failed.txt").write_text("an earlier call, which does not count any more")
  process = begin({}, hold="sr_ste-1_4-seed0")
  process.send_signal(number)
  out, err = process.communicate(timeout=60)
  assert process.returncode == code and "out, partial: 1 of 6 runs" in out
  assert f"{signal.Signals(number).name}: 1 of 6 runs done; the same command continues" in err
  assert "failed" not in out + err
  assert trace("sr_ste-1_4-seed0") == [3, 4]
  sweep_stub.install(here / "stub", {})
  assert sweep("sweep.toml", capsys)[0] == 0
  assert trace("sr_ste-1_4-seed0") == [3, 4, 5, 6]


def test_the_first_signal_names_the_end_and_a_second_ctrl_c_kills_the_run():
  said = []
  child = types.SimpleNamespace(
    terminate=lambda: said.append("terminate"), kill=lambda: said.append("kill")
  )
  with Relay() as stop, stop.to(child):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
  assert said == ["terminate"] * 3 + ["kill"] and stop.name == "SIGTERM"


def test_the_time_left_is_that_of_the_steps_that_are_missing():
  clock = training.Clock({"a": 100, "b": 300, "c": 100, "d": 20})
  assert clock.left("a", 10.0) == "0:42"
  assert clock.left("b", None) == "0:12"  # it failed, and tells nothing
  assert clock.left("c", 30.0) == "0:04" and clock.left("d", 1.0) == ""


# --- the table ---------------------------------------------------------------------------------


def test_means_intervals_and_differences_by_seed(here, capsys):
  """Issue 13, point 16: +- is half of a 95 % interval in every table, and its title says so."""
  outcomes(
    dense_s0=[90, 0.1], dense_s3=[92, 0.1], sr_ste__1_4_s0=[80, 0.5], sr_ste__1_4_s3=[84, 0.5],
    sr_ste__1_8_s0=[70, 0.5], sr_ste__1_8_s3=[70, 0.5], idp__1_4_s0=[81, 0.25],
    idp__1_4_s3=[84, 1.5], idp__1_8_s0=[60, 0.5], idp__1_8_s3="nan",
  )  # fmt: skip
  code, out, _ = sweep(write(FILE), capsys)
  assert code == 1
  assert (
    out
    == """\
out, partial: 11 of 12 runs, seeds 0, 3

score: mini RTE, more is better; mean +- half of its 95 % interval (seeds)
          1:4              1:8
  dense   91.0 +-12.7 (2)  91.0 +-12.7 (2)
  sr_ste  82.0 +-25.4 (2)  70.0 +-0.0 (2)
  idp     82.5 +-19.1 (2)  60.0 (1 of 2)

score, difference from sr_ste with the same seed; mean +- half of its 95 % interval (pairs)
         1:4              1:8
  dense  +9.0 +-12.7 (2)  +21.0 +-12.7 (2)
  idp    +0.5 +-6.4 (2)   -10.0 (1 of 2)

loss on validation data, less is better; mean +- half of its 95 % interval (seeds)
          1:4                  1:8
  dense   0.1000 +-0.0000 (2)  0.1000 +-0.0000 (2)
  sr_ste  0.5000 +-0.0000 (2)  0.5000 +-0.0000 (2)
  idp     0.8750 +-7.9414 (2)  0.5000 (1 of 2)

loss, difference from sr_ste with the same seed; mean +- half of its 95 % interval (pairs)
         1:4                   1:8
  dense  -0.4000 +-0.0000 (2)  -0.4000 +-0.0000 (2)
  idp    +0.3750 +-7.9414 (2)  +0.0000 (1 of 2)

Each run counts with its last checkpoint. The 95 % intervals are Student's t.
The intervals of the 6 differences are not corrected for multiple comparisons.
A dense run has no pattern. Each seed has one, which every column shows.
failed: idp-1_8-seed3: the loss of step 3 is not finite
"""
  )  # t of 1 degree of freedom is 12.706
  report = json.loads(sweep("sweep.toml", capsys, "--table", "--json")[1])
  assert report["partial"] and (report["done"], report["of"]) == (11, 12)
  row = next(r for r in report["rows"] if (r["recipe"], r["pattern"]) == ("idp", "1:4"))
  assert row["differences"]["1:4"]["score"] == {
    "mean": 0.5, "half": pytest.approx(12.7062 * 0.5), "pairs": 2
  }  # fmt: skip
  (failed,) = [run for run in report["runs"] if run["state"] != "done"]
  assert failed["run"] == "idp-1_8-seed3" and failed["remarks"] == [
    "the loss of step 3 is not finite"
  ]


def test_a_dense_baseline_is_compared_at_every_pattern(here, capsys):
  outcomes(dense_s0=[90, 0.1], dense_s3=[92, 0.1], idp__1_8_s0=[60, 0.5], idp__1_8_s3=[66, 0.5])
  text = FILE.replace('baseline = "sr_ste"', 'baseline = "dense"').replace('"sr_ste", ', "")
  rows = json.loads(sweep(write(text), capsys, "--json")[1])["rows"]
  found = {row["pattern"]: row["differences"] for row in rows}
  assert found[None] == {} and list(found["1:4"]) == ["1:4"]
  score = found["1:8"]["1:8"]["score"]
  assert (score["mean"], score["pairs"]) == (-28, 2)


def test_a_dense_run_of_the_same_steps_is_beside_sparse_ones_by_itself(here):
  """Issue 13, point 16: what sparsity costs is told by a dense run from the same start."""
  text = FILE.replace('["dense", "sr_ste", "idp"]', '["sr_ste", "idp"]')
  sweep = grid.read(write(text.replace('baseline = "sr_ste"', "")))
  assert sweep.recipes == ["dense", "sr_ste", "idp"] and sweep.baseline == "sr_ste"
  (dense, sparse, *_) = sweep.cells
  assert dense.name == "dense-seed0" and dense.start is sparse.start is not None
  assert dense.macros["SPARSE_STEPS"] == sparse.macros["SPARSE_STEPS"] == 4
  without = grid.read(write(text.replace("[macros]", "dense = false\n[macros]")))
  assert without.recipes == ["sr_ste", "idp"]
  for value, said in (("1", "dense: give true or false; not 1"), ("false", "keep one")):
    with pytest.raises(ValueError, match=said):
      grid.read(write(FILE.replace("[macros]", f"dense = {value}\n[macros]")))


def test_a_dense_run_is_dense_whatever_the_gin_files_say(here):
  """Issue 13, point 16: it comes by itself, beside a file of yours that only knows sparse runs."""
  text = FILE.partition("[start]")[0].replace('local_tiny.gin"', 'local_tiny.gin", "mine.gin"')
  text = text.replace('"dense", "sr_ste", "idp"', '"mdgf_linear"').replace(
    'baseline = "sr_ste"', ""
  )
  file = pathlib.Path("mine.gin")
  file.write_text("BETA = 0.25\n")
  assert list(checks.check(grid.read(write(text))).runs)[:2] == [
    "dense-seed0",
    "mdgf_linear-1_4-seed0",
  ]
  pathlib.Path("below.gin").write_text("include 'mine.gin'\nBETA = 0.25\n")
  file.write_text("include 'below.gin'\n")  # each includes the other
  assert grid.read(write(text)).cells[0].macros["BETA"] is None
  pathlib.Path("below.gin").write_text("BETA = 0.25\n")
  assert list(checks.check(grid.read(write(text))).runs)[0] == "dense-seed0"
  pathlib.Path("below.gin").write_text("BETA = None\n")  # as in gin_configs/sparsity.gin
  assert "BETA" not in grid.read(write(text)).cells[0].macros
  file.write_text(
    "from __gin__ import dynamic_registration\nfrom nm_sparsity_jax import recipes\n"
    "from nm_sparsity_jax.core import schedules\n"
    "SPARSITY_RULES = {'ff': None, 'qk': @recipes.recipe()}\n"
    "recipes.recipe:\n  name = 'sr_ste'\n  pattern = '1:4'\n  phases = @schedules.Phases()\n"
    "schedules.Phases:\n  total = 4\n  dense = 0\n  finetune = 0\n"
  )
  with pytest.raises(ValueError, match="dense: SPARSITY_RULES gives 'qk' the recipe sr_ste"):
    checks.check(grid.read(write(text)))


def test_metrics_of_which_less_is_better_have_tables_of_their_own(here, capsys):
  """Issue 12: an error is neither part of a score nor left out."""
  write(SMALL)
  assert sweep("sweep.toml", capsys)[0] == 0
  for name, error in (("sr_ste-1_4", 0.5), ("idp-1_4", 0.25)):
    for seed in (0, 3):
      folder = pathlib.Path("out", f"{name}-seed{seed}")
      (folder / "inference_eval/nm_glue_mini_rte-metrics.jsonl").unlink()
      entry = {"step": 6, "at_target": True, "loss": {"v": 1.0}, "less_is_better": ["far"],
               "metrics": {"v": {"far": error, "r2": 0.5}}}  # fmt: skip
      (folder / "evaluations.json").write_text(json.dumps([entry]))
  code, out, _ = sweep("sweep.toml", capsys)
  assert code == 0
  assert "score: v, more is better; mean" in out and re.search(r"sr_ste +0.500 \+-0.000 \(2\)", out)
  _, _, table = out.partition("v far, less is better; mean +- half of its 95 % interval (seeds)\n")
  assert re.match(r" +1:4\n  sr_ste  0.5000 .*\n  idp     0.2500 \+-0.0000 \(2\)", table)
  assert re.search(r"v far, difference from sr_ste .*\n +1:4\n  idp  -0.2500", out)
  assert "by task, means over seeds; less is better: v far\n" in out
  found = json.loads(sweep("sweep.toml", capsys, "--table", "--json")[1])
  assert found["measures"] == ["score", "v far", "loss"] and found["less_is_better"] == ["v far"]
  assert found["rows"][1]["v far"]["mean"] == 0.25


def test_a_page_without_a_recipe_that_is_drawn_has_no_loss_curves(here):
  """Issue 13, point 16: nine recipes have colours; those that are done may be others."""
  said = list(pages._all_runs(grid.read(write(FILE)), {}, []))
  assert said == ["No run has curves of its loss."]


def test_loss_curves_of_all_runs_are_in_one_place(here, capsys):
  """Issue 13, point 22: every run of the sweep, and the runs that they start from, in one chart."""
  write(SMALL)
  assert sweep("sweep.toml", capsys)[0] == 0
  names = [cell.name for cell in grid.read("sweep.toml").runs()]
  for i, name in enumerate(names):
    first = 0 if name.startswith("start") else 2
    for room in ("train", "training_eval/rte"):
      folder = pathlib.Path("out", name, room)
      folder.mkdir(parents=True)
      lines = [json.dumps({"step": first + s, "loss": i + 1 / s}) for s in (1, 2)]
      (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  assert sweep("sweep.toml", capsys)[0] == 0
  page = pathlib.Path("out/report.html").read_text()
  for key in ("all_train_loss", "all_eval_loss_rte"):
    (chart,) = re.findall(f'id="chart-{key}".*?</figure>', page, re.DOTALL)
    assert chart.count('<polyline class="thin"') == len(names) == 6
    for name in names:
      assert f"<title>{name}</title></polyline>" in chart and f"{name}</th>" in chart
    assert chart.count('<g class="c-none">') == 2  # the starts
    assert re.search(r"<th>1</th><td>1</td>(<td></td>){2}<td>4</td>", chart)


def test_a_score_needs_every_task_and_tasks_have_columns(here, capsys):
  """A run that lacks a task's number, such as a correlation of constants, has no score."""
  write(FILE)
  assert sweep("sweep.toml", capsys)[0] == 0
  for name in ("sr_ste-1_4-seed0", "sr_ste-1_4-seed3", "idp-1_8-seed0"):
    scores = pathlib.Path("out", name, "inference_eval/nm_glue_mini_stsb-metrics.jsonl")
    values = {"pearson_corrcoef": 30.0, "spearman_corrcoef": 10.0 if "sr" in name else math.nan}
    scores.write_text(json.dumps({"step": 6, **values}) + "\n")
  out = sweep("sweep.toml", capsys, "--table")[1]
  assert "score: mean of mini RTE, mini STS-B, more is better" in out
  assert re.search(r"^  sr_ste +35.0 \+-0.0 \(2\) +- \(0 of 2\)$", out, re.MULTILINE)
  assert "idp-1_8-seed0: mini STS-B: spearman_corrcoef is nan at step 6" in out
  tasks = out.partition("by task, means over seeds\n")[2]
  assert re.search(r"^  sr_ste +1:4 +50.0 +20.0$", tasks, re.MULTILINE)


def test_a_sweep_from_a_program(here):
  """The example of the package's docstring, with the words that it prints."""
  from nm_sparsity_jax.analysis import sweep

  outcomes(idp__1_4_s3="nan")
  grid = sweep.read(write(SMALL))
  found = sweep.table(grid)  # checks by itself
  assert (found["done"], found["of"], found["partial"]) == (0, 6, True)
  checked, said = sweep.check(grid), []
  outcome = sweep.train(grid, checked, said.append)
  assert outcome == sweep.Outcome(done=5, failed=1, stopped=None)
  assert said[0] == "out: 0 of 6 runs done" and len(said) == 13
  assert said[1] == "  start-seed0: out/start-seed0/log.txt"
  found = sweep.table(grid, checked)
  assert [run["state"] for run in found["runs"]] == ["done"] * 5 + ["failed"]
  (row,) = [row for row in found["rows"] if row["recipe"] == "sr_ste"]
  assert row["score"]["mean"] == 50 and (row["done"], row["seeds"]) == (2, 2)
  assert sweep.text(found).startswith("out, partial: 5 of 6 runs, seeds 0, 3\n")
  assert sweep.page(grid, checked, found) == pathlib.Path("out/report.html")
  assert [run.state() for run in checked.runs.values()] == ["done"] * 5 + ["failed"]


def test_the_names_of_the_package_are_there():
  from nm_sparsity_jax.analysis import sweep

  assert all(callable(getattr(sweep, name)) for name in sweep.__all__)
  assert set(sweep.__all__) == set(sweep._HOME)
  with pytest.raises(AttributeError, match="no attribute 'tabel'"):
    sweep.tabel  # noqa: B018


def test_a_variant_is_a_recipe_with_macros_of_its_own(here):
  text = FILE.replace('"idp"]', '"late"]') + "[variants.late]\nRECIPE = 'sr_ste'\nDENSE_STEPS = 1\n"
  read = grid.read(write(text.replace("[macros]", "[macros]\nGRADIENT = 'masked'")))
  late, dense, start = read.cells[-1], read.cells[0], read.starts[0]
  assert (late.name, late.macros["RECIPE"], late.macros["DENSE_STEPS"]) == (
    "late-1_8-seed3",
    "sr_ste",
    1,
  )
  assert "DENSE_STEPS" not in dense.macros and dense.macros["RECIPE"] == "dense"
  # What only a sparse run takes is left out of a dense one.
  assert late.macros["GRADIENT"] == "masked"
  assert "GRADIENT" not in dense.macros and "GRADIENT" not in start.macros
  checks.check(grid.read(write(text)))


def test_the_page_shows_means_over_seeds(here, capsys, monkeypatch):
  outcomes(sr_ste__1_8_s0=[70, 0.5], sr_ste__1_8_s3=[71, 0.5])
  sweep(write(FILE), capsys)
  page = pathlib.Path("out/report.html").read_text()
  assert "out, 12 runs, seeds 0, 3" in page
  assert "Metrics by task, 1:4" in page and "Metrics by task, 1:8" in page
  keys = re.findall(r'id="([^"]+)"', page)
  assert len(keys) == len(set(keys)) and {"metrics-0", "metrics-1"} <= set(keys)
  assert "70.5</td>" in page
  # Settings are folded, as on the page of single runs.
  for title in ("Settings and seeds", "Environment"):
    assert re.search(rf'<h2>{title}, 1:4</h2>\s*<details class="folded">', page), title
  # Figure 4a of the paper: a line for a recipe, dense at every pattern.
  assert {"chart-score_by_pattern", "chart-loss_by_pattern"} <= set(keys)
  (chart,) = re.findall(r'id="chart-score_by_pattern".*?</figure>', page, re.DOTALL)
  assert "dense, 1:8: 50" in chart and "sr_ste, 1:4: 50" in chart and "sr_ste, 1:8: 70.5" in chart
  assert chart.count("<polyline") == 3
  seeds, made = [], sections.sections
  kept = lambda runs, checkpoint, of: seeds.append(of) or made(runs, checkpoint, of)
  monkeypatch.setattr(sections, "sections", kept)
  monkeypatch.setattr(charts, "MAX_RUNS", 2)
  sweep("sweep.toml", capsys)
  assert seeds == [2, 2]  # a mean is no single run
  page = pathlib.Path("out/report.html").read_text()
  assert (
    "for there are 2 colours: idp." in page and "<title>N:M sparsity: dense, sr_ste</title>" in page
  )


def test_no_line_bridges_a_pattern_that_is_missing():
  row = lambda recipe, pattern, x: {
    "recipe": recipe, "pattern": pattern, "score": {"mean": x}, "loss": {"mean": None}
  }  # fmt: skip
  scores = {"1:16": 4, "1:2": 7, "2:8": None, "1:8": 5}
  rows = [row("idp", pattern, score) for pattern, score in scores.items()]
  rows.append(row("dense", None, 9))
  of = lambda rows: pages._by_pattern({"rows": rows, "measures": ["score"]}, ["dense", "idp"])
  (score,) = of(rows)
  assert score.key == "score_by_pattern" and score.labels == ["1:2", "2:8", "1:8", "1:16"]
  found = [(line.run, list(line.points)) for line in score.lines]
  assert found == [(0, [(x, 9) for x in range(4)]), (1, [(0, 7)]), (1, [(2, 5), (3, 4)])]
  assert not list(of(rows[1:2] + rows[4:]))


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
def test_the_page_of_many_runs_in_a_browser(here, capsys):
  """Nine recipes, four patterns, one run that failed: on a desk and on a phone."""
  recipes = [
    "dense", "one_shot", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise",
    "sdgf_geometric", "snip", "idp",
  ]  # fmt: skip
  many = FILE.replace('["dense", "sr_ste", "idp"]', json.dumps(recipes))
  many = many.replace('["1:4", "1:8"]', '["1:2", "2:4", "1:4", "1:8"]').replace("= 4", "= 12")
  found = {
    f"{recipe}-{pattern}-seed{seed}": [60 - 3 * i - 2 * j + seed / 3, 0.5 + 0.1 * i + 0.05 * j]
    for i, recipe in enumerate(recipes[1:])
    for j, pattern in enumerate(("1_2", "2_4", "1_4", "1_8"))
    for seed in (0, 3)
  }
  sweep_stub.install(here / "stub", found | {"idp-1_8-seed0": "nan"})
  code, _, _ = sweep(write(many), capsys)
  assert code == 1
  file = pathlib.Path("out/report.html").resolve()
  with browser.page(here / "profile") as page:
    for width in (1280, 400):
      page.look(file, width)
    assert set(page.requests) == {file.as_uri()} and page.messages == []
    assert page.ask("document.querySelectorAll('figure').length") == 2  # scores and losses
    assert page.ask("document.querySelectorAll('.bar').length") >= 36  # of single evaluations


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what runs import warns on its own account
def test_real_runs_killed_and_resumed_end_with_the_same_bits(tmp_path, monkeypatch):
  pytest.importorskip("seqio", reason="runs need seqio: pip install -e '.[local]'")
  from checkpoint_files import assert_same, read

  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
  more = "BATCH_SIZE = 16\nCHECKPOINT_PERIOD = 3\nDROPOUT_RATE = 0.1\n"
  text = SMALL.partition("[start]")[0].replace('baseline = "sr_ste"', "")
  text = text.replace("[0, 3]", "[7]").replace('["sr_ste", "idp"]', '["one_shot"]')
  text = text.replace("SPARSE_STEPS = 4", f"SPARSE_STEPS = 60\n{more}")
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "sweep", "--json"]

  def whole(file):
    done = subprocess.run([*command, file], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)

  want = whole(write(text.replace('"out"', '"whole"'), "whole.toml"))
  write(text)
  process = subprocess.Popen(
    [*command, "sweep.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  folder = pathlib.Path("out/one_shot-1_4-seed7")
  while not (folder / "checkpoint_18").is_dir():
    assert process.poll() is None
    time.sleep(0.02)
  process.kill()
  process.wait()
  os.kill(int(pathlib.Path("out/.lock").read_text()), signal.SIGKILL)
  assert not (folder / "evaluations.json").exists()
  found = whole("sweep.toml")
  assert found["rows"] == want["rows"] and not found["partial"]
  assert [run["tasks"] for run in found["runs"]] == [run["tasks"] for run in want["runs"]]
  assert found["rows"][0]["score"]["n"] == 1 and found["tasks"] == ["nm_test_sort"]
  assert_same(read(tmp_path / folder, 60), read(tmp_path / "whole/one_shot-1_4-seed7", 60))


@pytest.mark.parametrize("key", ['"X\\nimport os\\nY"', '"a..b"', '"@x"', '"X = 1"', '""', '"1X"'])
def test_keys_of_a_sweep_are_identifiers(tmp_path, key):
  """A key of TOML brings no lines of gin."""
  file = tmp_path / "sweep.toml"
  head = f"out = '{tmp_path}'\ngin_files = ['a.gin']\nrecipes = ['sr_ste']\npatterns = ['1:4']\n"
  file.write_text(f"{head}seeds = [0]\n[macros]\n{key} = 1\n")
  with pytest.raises(ValueError, match="is not the name of a gin macro"):
    grid.read(str(file))
