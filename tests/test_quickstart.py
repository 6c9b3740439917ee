"""The quickstart: the same table however often it is stopped, and commands that work as typed."""

import argparse
import importlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys

import browser
import jax
import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.analysis.report import reading, scored
from nm_sparsity_jax.cli import quickstart_steps
from nm_sparsity_jax.recipes import RECIPES

HERE = pathlib.Path(__file__).resolve().parent


def lines(out="my quickstart", steps=40):
  """All commands that it may print."""
  names = ["warmup", *quickstart_steps.ALL]
  yield quickstart_steps.warmup(out, steps)
  for name in quickstart_steps.ALL:
    yield quickstart_steps.finetune(out, steps, name)
  yield quickstart_steps.finetune(out, steps, "mdgf_exponential", "1:32", "harder")
  yield quickstart_steps.packed(out, "sr_ste")
  yield quickstart_steps.score(out, names)
  yield from quickstart_steps.reports(out, names)


def rebus_lines(out="my rebus", steps=40):
  """All commands of the other task."""
  task = quickstart_steps.TASKS["rebus"]
  for name in task.runs(True):
    yield task.train(out, steps, name)
  yield from task.harder(out, steps)[1]
  yield from task.compared(out, task.runs(True))


@pytest.mark.parametrize("argv", [*lines(), *rebus_lines()], ids=lambda argv: argv[0])
def test_a_shell_reads_what_is_printed_as_what_is_run(argv):
  text = quickstart_steps.typed(argv)
  assert shlex.split(text.replace("\\\n", " ")) == ["nm-sparsity", *argv]
  assert max(map(len, text.splitlines())) <= 100
  name = next(n for n in cli.COMMANDS if argv[: n.count(" ") + 1] == n.split())
  parser = argparse.ArgumentParser()
  importlib.import_module(f"nm_sparsity_jax.cli.{cli.COMMANDS[name][0]}").add_arguments(parser)
  parser.parse_args(argv[name.count(" ") + 1 :])


def test_quotes_are_those_that_a_user_would_type():
  text = quickstart_steps.typed(quickstart_steps.warmup("out", 10))
  assert "--gin.MODEL_DIR=\"'out/warmup'\"" in text and "--gin.SPARSE_STEPS=25 " in text
  assert quickstart_steps.typed(["verify", "$a b"]) == "nm-sparsity verify '$a b'"


@pytest.mark.parametrize("odd", ["$HOME", 'a"b', "`ls`", "back\\slash", "it's"])
def test_odd_folders_reach_the_command_as_they_are(odd):
  argv = quickstart_steps.finetune(odd, 10, "custom")
  text = quickstart_steps.typed(argv).replace("nm-sparsity", "printf '%s\\0'", 1)
  done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
  assert done.stdout.split("\0")[:-1] == argv


def test_every_recipe_is_there_and_a_page_holds_its_runs():
  assert sorted(quickstart_steps.ALL) == sorted(RECIPES)
  assert set(quickstart_steps.RECIPES) < set(quickstart_steps.ALL)
  assert sorted(quickstart_steps.STATEFUL) == sorted(n for n, c in RECIPES.items() if c.stateful)
  pages = quickstart_steps.reports("out", ["warmup", *quickstart_steps.ALL])
  assert [len(argv) - 5 for argv in pages] == [8, 4]
  assert max(len(argv) - 5 for argv in pages) <= charts.MAX_RUNS < len(quickstart_steps.ALL) + 1
  (page,) = quickstart_steps.reports("out", ["warmup", *quickstart_steps.RECIPES])
  assert page[-1] == "out/report.html" and len(page) == 10


def test_dense_and_sparse_runs_are_as_long_and_often_evaluated():
  """Issue 13, point 19: as many updates, twelve points to look at, and the last one counts."""
  flags = {name: quickstart_steps.finetune("out", 240, name) for name in quickstart_steps.RECIPES}
  assert "dense" in flags and len(flags) == 4
  for argv in flags.values():
    assert {"--gin.SPARSE_STEPS=240", "--gin.EVAL_PERIOD=20", "--gin.METRICS_EVERY=20"} <= {*argv}
    assert "--gin.INITIAL_CHECKPOINT_PATH='out/warmup/checkpoint_600'" in argv
  for argv in [quickstart_steps.score("out", flags), *quickstart_steps.reports("out", [*flags])]:
    assert argv[argv.index("--checkpoint") + 1] == "last"
  assert "--gin.PATTERN='1:32'" in quickstart_steps.finetune("out", 240, "sr_ste", "1:32")


@pytest.mark.parametrize("recipe", ["warmup", *quickstart_steps.ALL])
def test_gin_takes_each_run_and_reads_every_override(recipe):
  pytest.importorskip("seqio", reason="run files of the local runner need .[local]")
  from nm_sparsity_jax.cli import _flags
  from nm_sparsity_jax.integrations import gin_files

  argv = (
    quickstart_steps.finetune("out", 40, recipe)
    if recipe != "warmup"
    else quickstart_steps.warmup("out", 40)
  )
  parser = argparse.ArgumentParser()
  _flags.add(parser, "")
  args = parser.parse_args(argv[1:])
  config = gin_files.Config([gin_files.folder()], args.gin_file, args.gin_bindings)
  assert not config.errors and not config.warnings and config.program == "train"
  places = config.value("RULES").places
  (made,) = set(places.values())
  name = "dense" if recipe == "warmup" else recipe
  assert made.name == name and str(made.pattern) == ("None" if name == "dense" else "1:8")
  assert made.name == "dense" or sorted(places) == ["ff", "qkv"]
  if name != "dense":
    assert (made.phases.total, made.phases.dense, made.phases.finetune) == (40, 4, 20)
    assert float(made.decay(20)) == 0  # exactly 1:8, when it is evaluated and finalized
  config.close()


def test_the_task_rebus_is_data_too():
  """Runs of one length, from scratch, of which two are dense, and one page."""
  task = quickstart_steps.TASKS["rebus"]
  assert task.runs(False) == ["dense", "no_ff", "sr_ste", "mdgf_exponential", "sdgf_stepwise"]
  assert sorted(task.runs(True)) == sorted([*RECIPES, "no_ff"]) and {*task.runs(True)} <= {
    *task.titles
  }
  for name in task.runs(True):
    argv = task.train("out", 540, name)
    assert "--gin.SPARSE_STEPS=540" in argv and task.last(540, name) == 540
    assert not any("INITIAL_CHECKPOINT_PATH" in word for word in argv)
    assert ("--gin.MLP=0" in argv) == (name == "no_ff")
  assert task.proven(task.runs(True)) == [n for n in task.runs(True) if n not in ("dense", "no_ff")]
  assert len(task.compared("out", task.runs(False))) == 1


@pytest.mark.parametrize("name", quickstart_steps.TASKS["rebus"].runs(True))
def test_gin_takes_each_run_of_rebus(name):
  pytest.importorskip("clu", reason="run files of the local runner need .[local]")
  from nm_sparsity_jax.cli import _flags
  from nm_sparsity_jax.integrations import gin_files

  parser = argparse.ArgumentParser()
  _flags.add(parser, "")
  args = parser.parse_args(quickstart_steps.TASKS["rebus"].train("out", 40, name)[1:])
  config = gin_files.Config([gin_files.folder()], args.gin_file, args.gin_bindings)
  assert not config.errors and not config.warnings and config.program == "train"
  (made,) = set(config.value("RULES").places.values())
  assert made.name == ("dense" if name == "no_ff" else name)
  workload = config.value("WORKLOAD")
  workload.check()
  assert workload.network.config.mlp == (0 if name == "no_ff" else 512)
  params = jax.eval_shape(workload.init, jax.random.PRNGKey(0))["params"]
  assert config.value("RULES").assign(params).places or made.name == "dense"
  config.close()


def test_a_folder_of_something_else_is_refused(tmp_path, capsys):
  def said(*argv):
    assert cli.main(["quickstart", *map(str, argv)]) == 1
    return capsys.readouterr().err

  (tmp_path / "mine.txt").write_text("")
  assert "holds something else: choose a new or an empty folder" in said("--out", tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
  assert "cannot be written to: Not a directory" in said("--out", tmp_path / "mine.txt" / "q")
  quickstart_steps.claim(tmp_path / "q", 40)
  quickstart_steps.claim(tmp_path / "q", 40)
  assert "was begun with --steps 40, not 41" in said("--out", tmp_path / "q", "--steps", 41)
  said_of = "was begun with --task mini-glue, not rebus: choose another --out"
  assert said_of in said("--out", tmp_path / "q", "--task", "rebus")
  assert "--steps 9: give 10 or more" in said("--out", tmp_path / "r", "--steps", 9)
  assert not (tmp_path / "r").exists()


# --- runs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start():
  """Runs a quickstart in a folder: its exit code and all that it said."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
  env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
  command, pipe = [sys.executable, str(HERE / "quickstart_worker.py")], subprocess.PIPE
  with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as p:

    def run(folder, *argv, stop=None):
      folder.mkdir(exist_ok=True)
      p.stdin.write(json.dumps([str(folder), argv, stop]) + "\n")
      p.stdin.flush()
      return int(p.stdout.readline().split()[1]), (folder / "said.txt").read_text()

    yield run
    p.stdin.close()
    p.wait(60)


def table(said):
  """What is said of the result, without the time."""
  return re.sub(r"Done in .*CPU time\)", "", said[said.index("Exact zeros, and the proof") :])


STEPS = ("--steps", "12")


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
  """A small quickstart: its folder, and what it said."""
  folder = tmp_path_factory.mktemp("tests") / "whole"  # as deep as tmp_path's, for it is told
  code, said = start(folder, *STEPS)
  assert code == 0, said
  return folder / "quickstart", said


def test_its_report_has_every_part(whole):
  page = (whole[0] / "report.html").read_text()
  parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL))
  assert next(iter(parts)) == "summary" and "sdgf_stepwise" in parts["summary"]
  for name in ("loss", "metrics", "schedule", "flips", "variance", "cost"):
    # So short a run may score 0 throughout, which is said and not drawn.
    assert "<svg" in parts[name] or " throughout." in parts[name], name
  assert parts["density"].count("mlp/wo/kernel") == 2 and "0.125" in parts["density"]
  assert jax.__version__ in parts["environment"] and "1 x cpu" in parts["environment"]
  assert "MNLI-m" in parts["scores"] and "RANDOM_SEED" in parts["settings"]


def test_its_last_words_pack_a_checkpoint_that_is_there(whole):
  folder, said = whole
  line = next(x for x in said[said.index("What next") :].splitlines() if "nm-sparsity pack" in x)
  _, command, final, file = shlex.split(line)
  made = folder.parent / file
  assert cli.main([command, str(folder.parent / final), str(made)]) == 0
  assert made.stat().st_size
  made.unlink()


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
def test_a_browser_shows_its_report(whole, tmp_path):
  with browser.page(tmp_path / "profile") as page:
    for width in (1280, 400):
      page.look(whole[0] / "report.html", width, dark=False)
    assert len(set(page.requests)) == 1 and page.messages == []


def test_stopped_and_gone_on_with_is_the_same_table(start, whole, tmp_path):
  argv, (first, said) = STEPS, whole
  want = table(said)
  assert "1:8 proven: 672 groups of 15 kernels" in want
  assert re.search(r"^sdgf_stepwise +- .*\d\.\d", want, re.MULTILINE), want
  assert re.search(r"^largest class +\d\d\.\d$", want, re.MULTILINE), want

  # As one that is stopped in its last run: what comes before it is the first one's.
  gone = shutil.ignore_patterns("sdgf_stepwise", "report.html")
  shutil.copytree(first, tmp_path / "cut" / "quickstart", ignore=gone)
  code, said = start(tmp_path / "cut", *argv, stop=36)
  assert code == 1 and "SIGTERM: saved checkpoint_" in said, said
  assert said.endswith("stopped; start the quickstart again, and it continues from there\n")
  assert "Exact zeros" not in said
  code, said = start(tmp_path / "cut", *argv)
  assert code == 0 and "warmup: done before" in said, said
  assert "from step 3" in said and table(said) == want
  # The last loss and norm too, for so short a run scores little.
  ends = [first / "sdgf_stepwise", tmp_path / "cut/quickstart/sdgf_stepwise"]
  evaluations = [(end / "evaluations.json").read_text() for end in ends]
  losses = [(end / "train/metrics.jsonl").read_text().splitlines()[-1] for end in ends]
  assert evaluations[0] == evaluations[1] and losses[0] == losses[1]
  assert json.loads(losses[0])["step"] == 42 and json.loads(losses[0])["loss"] > 0


@pytest.mark.slow
def test_every_recipe_trains_and_is_proven(start, tmp_path):
  code, said = start(tmp_path, "--all", *STEPS)
  assert code == 0, said
  sparse = [name for name in quickstart_steps.ALL if name != "dense"]
  assert said.count("1:8 proven: 672 groups of 15 kernels") == len(sparse) == 9
  scored = re.findall(r"^(\w+) +- .*\d\.\d", said[said.index("Scores on") :], re.MULTILINE)
  assert scored == ["warmup", *quickstart_steps.ALL]
  assert (tmp_path / "quickstart/report-masks.html").is_file()


@pytest.mark.slow
def test_all_of_it_within_four_minutes_and_convincing(tmp_path):
  """Issue 13, point 19: dense far above the largest class; sparse runs fall, and come back."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "quickstart"]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert not done.returncode, done.stdout + done.stderr
  # Not by the clock, which other programs on this machine may hold up; one core would do.
  spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  print(done.stdout, f"{spent:.0f} s of CPU time")
  assert spent < 360
  sparse = [name for name in quickstart_steps.RECIPES if name != "dense"]
  assert done.stdout.count("1:8 proven: 15,360 groups") == len(sparse)

  names = ["warmup", *quickstart_steps.RECIPES]
  runs = reading.read([tmp_path / "quickstart" / name for name in names])
  curves = {run.name: [mean for _, mean in scored.means(run, scored.common(runs))] for run in runs}
  assert {run.last_step for run in runs[1:]} == {840} and runs[0].last_step == 600
  # The largest class has 38.3.
  assert min(curves["warmup"][-1], *curves["dense"]) > 70 and curves["dense"][-1] > 93
  for name in sparse:
    assert len(curves[name]) == 12
    # The learning rate rises again in each run, so only dense at the same step tells a fall, and
    # only once the run is sparse: from the second of its twelve evaluations on.
    sparse_part = list(zip(curves["dense"], curves[name], strict=True))[1:]
    fall = max(beside - mean for beside, mean in sparse_part)
    lowest = min(mean for _, mean in sparse_part)
    assert fall > (2 if name.startswith("mdgf") else 10), (name, fall)
    assert curves[name][-1] > max(85, lowest + 5), name


@pytest.mark.slow
def test_all_of_rebus_within_six_minutes_and_convincing(tmp_path):
  """One seed lies where the recorded seeds do. Issue 15's 85 % and 55 % are promises of their mean:
  tests/test_study_page.py. Never ranks."""
  pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
  env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "quickstart", "--task", "rebus"]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert not done.returncode, done.stdout + done.stderr
  spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  print(done.stdout, f"{spent:.0f} s of CPU time")
  assert spent < 360
  task = quickstart_steps.TASKS["rebus"]
  sparse = task.proven(task.runs(False))
  assert done.stdout.count("1:16 proven: 16,384 groups of 4 kernels") == len(sparse) == 3
  assert (tmp_path / "quickstart/report.html").is_file()
  records = (HERE.parent / "benchmarks/results/recipes_rebus.jsonl").read_text().splitlines()
  for name in ("dense", "no_ff"):
    found = json.loads((tmp_path / "quickstart" / name / "evaluations.json").read_text())
    score = found[-1]["metrics"]["validation"]["accuracy"]
    rows = [r for r in map(json.loads, records) if (r["row"], r["budget"]) == (name, "540")]
    seeds = [row["accuracy"] for row in rows]
    print(name, score, seeds)
    assert len(seeds) >= 7
    assert abs(score - statistics.fmean(seeds)) < 3 * statistics.stdev(seeds), (name, score, seeds)
  packed_as_finalized(tmp_path, env)


def packed_as_finalized(folder, env):
  """A trained ViT, packed: `infer` says the classes of the finalized one, `eval` its scores."""

  def said(*words):
    command = [sys.executable, "-m", "nm_sparsity_jax.cli", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout

  said("finalize", "quickstart/mdgf_exponential", "final")
  said("pack", "final", "packed.safetensors")
  (final,) = folder.glob("final/checkpoint_*")
  found = []
  for path in (str(final), "packed.safetensors"):
    told = {}
    for command, kind in (("eval", "EVAL_OUTPUT_DIR"), ("infer", "INFER_OUTPUT_DIR")):
      files = [f"runs/local_images_{command}", "runs/local_rebus"]
      out = f"{command} of {pathlib.Path(path).name}"
      settings = {"CHECKPOINT_PATH": path, kind: out, "EVAL_SPLIT": "validation"}
      told[command] = said(
        command,
        *(["--memory"] if path == "packed.safetensors" else []),  # else all are unpacked here
        *(f"--gin_file=gin_configs/{name}.gin" for name in files),
        *(f"--gin.{name}={value!r}" for name, value in settings.items()),
      )
    (file,) = folder.glob(f"{out}/*.jsonl-*")
    said_of_each = [json.loads(line)["prediction"] for line in file.read_text().splitlines()]
    classes = [said["label"] for said in said_of_each]
    found.append((re.findall(r"(accuracy) ([\d.]+)", told["eval"]), classes))
  assert "4 of 4 kernels stay packed" in told["infer"]
  assert (
    found[0][0] and found[0] == found[1] and len(found[0][1]) == 2048 and len(set(found[0][1])) > 9
  )
