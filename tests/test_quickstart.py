"""The quickstart: the same table however often it is stopped, and commands that work as typed."""

import json
import os
import pathlib
import re
import resource
import shlex
import subprocess
import sys

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts, run_folder, scores
from nm_sparsity_jax.analysis.report import sections
from nm_sparsity_jax.cli import quickstart
from nm_sparsity_jax.recipes import RECIPES

HERE = pathlib.Path(__file__).resolve().parent
TASKS = quickstart.TASKS
RUNS = [(task, name) for task in TASKS for name in TASKS[task].runs(True)]


@pytest.mark.parametrize("out", ["my quickstart", "$HOME", 'a"b', "`ls`", "back\\slash", "it's"])
def test_a_shell_reads_what_is_printed_as_what_is_run(out):
  commands = [quickstart.train(TASKS[task], out, 40, name)[0] for task, name in RUNS]
  for task in TASKS.values():
    commands += quickstart.compare(task, out, task.runs(True))
  for argv in commands:
    text = quickstart.typed(argv)
    assert shlex.split(text.replace("\\\n", " ")) == ["nm-sparsity", *argv]
    assert max(map(len, text.splitlines())) <= 100
    cli.parse(argv)


def test_every_recipe_is_there_and_a_page_holds_its_runs():
  assert {*RECIPES} == {*quickstart.TITLES} - {"warmup", "no_ff"}
  for task in TASKS.values():
    names = task.runs(True)
    assert {*task.runs(False)} < {*names}
    pages = [argv for argv in quickstart.compare(task, "out", names) if argv[0] == "report"]
    shown = [{*argv} & {f"out/{name}" for name in names} for argv in pages]
    assert set.union(*shown) == {f"out/{name}" for name in names}
    assert all("out/dense" in page and len(page) <= charts.MAX_RUNS for page in shown)


@pytest.mark.parametrize("task, name", RUNS)
def test_gin_takes_each_run_and_reads_every_override(task, name):
  pytest.importorskip("seqio", reason="run files of the local runner need .[local]")
  from nm_sparsity_jax.integrations import gin_files

  task = TASKS[task]
  args = cli.parse(quickstart.train(task, "out", 40, name)[0])[-1]
  with gin_files.Config([gin_files.folder()], args.gin_file, args.gin_bindings) as config:
    assert not config.errors and config.program == "train"
    places = config.value("RULES").places
    (made,) = set(places.values())
    assert made.name == ("dense" if name in task.dense else name)
    if name not in task.dense:
      assert made.phases.total == 40 and str(made.pattern) == task.pattern
      assert float(made.decay(39)) == 0  # n:m, when it is evaluated and finalized
      assert sorted(places) == (["ff", "qkv"] if task.is_glue else ["ff"])
    if not task.is_glue:
      workload = config.value("WORKLOAD")
      workload.check()
      assert workload.network.config.mlp == (0 if name == "no_ff" else 512)


@pytest.mark.parametrize(
  "argv, word",
  [
    (["--out", "mine"], "holds something else"),
    (["--out", "mine/file/q"], "nothing can be written"),
    (["--out", "new", "--steps", "9"], "--steps 9"),
  ],
)
def test_what_cannot_begin_is_one_line_and_makes_nothing(argv, word, tmp_path, monkeypatch, capsys):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine/file").touch()
  monkeypatch.chdir(tmp_path)
  assert cli.main(["quickstart", *argv]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1
  assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "mine"]


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory):
  """A small quickstart in whole/, and in cut/ one that was stopped and went on."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  folder = tmp_path_factory.mktemp("quickstart")
  env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
  env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
  command = [sys.executable, str(HERE / "quickstart_worker.py"), str(folder)]
  found = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  assert not found.returncode, found.stderr[-3000:]
  assert json.loads(found.stdout.splitlines()[-1]) == [0, 1, 0], found.stdout
  return folder


def test_stopped_and_gone_on_with_is_the_same_table(done):
  whole, first, again = (
    (done / name).read_text() for name in ("whole/said_1.txt", "cut/said_2.txt", "cut/said_3.txt")
  )
  assert "1:8 proven: 672 groups of 15 kernels" in whole
  assert "SIGTERM: saved checkpoint_" in first and first.endswith("it continues from there\n")
  assert "warmup: done before" in again and "from step 3" in again
  # All that is said of the result, but for the time.
  table = lambda said: re.sub(
    r"Done in [\d:]+", "", said[said.index("Exact zeros, and the proof") :]
  )
  assert re.search(r"^sdgf_stepwise +\d", table(whole), re.MULTILINE)
  assert table(again) == table(whole) and "Exact zeros" not in first
  # The last loss too, for so short a run scores little.
  ends = [done / name / "quickstart/sdgf_stepwise" for name in ("whole", "cut")]
  losses = [(end / "train/metrics.jsonl").read_text().splitlines()[-1] for end in ends]
  assert losses[0] == losses[1] and json.loads(losses[0])["step"] == 42


def test_its_report_has_every_part_and_its_last_words_pack_what_is_there(done, monkeypatch):
  page = (done / "whole/quickstart/report.html").read_text()
  parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))
  assert next(iter(parts)) == "summary" and "sdgf_stepwise" in parts["summary"]
  for name in ("loss", "metrics", "schedule", "flips", "variance", "cost"):
    assert "<figure" in parts[name], name
  monkeypatch.chdir(done / "whole")
  said = pathlib.Path("said_1.txt").read_text()
  (line,) = re.findall("^nm-sparsity (pack .*)$", said, re.MULTILINE)
  assert cli.main(shlex.split(line)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("task, groups", [("mini-glue", "15,360"), ("rebus", "16,384")])
def test_all_of_it_within_six_minutes_and_convincing(task, groups, tmp_path):
  """All are far above chance. Never ranks: it is one seed."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "quickstart", "--task", task]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert not done.returncode, done.stdout + done.stderr
  # Not by the clock, which other programs on this machine may hold up; one core would do.
  assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 360
  assert done.stdout.count(f"{TASKS[task].pattern} proven: {groups} groups") == 3
  folder = tmp_path / "quickstart"
  if task == "rebus":
    return  # benchmarks/results/recipes_rebus.jsonl has its scores
  runs = run_folder.read([folder / name for name in TASKS[task].runs(False)])
  last = {run.name: sections.means(run, scores.table.common(runs))[-1][1] for run in runs}
  assert last["dense"] > 93  # the largest class has 38.3
  assert min(last[name] for name in quickstart.RECIPES) > 85
