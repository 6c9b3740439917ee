"""What people read is true: each block runs or is checked, each link leads somewhere.

A block without a language is a picture or an output. Blocks of sh run in bash with stand-ins for
the programs, so quoting is bash's; the command lines that arrive are then checked one by one.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import warnings
import zipfile

import jax
import numpy as np
import pages
import pytest
import t5x_found
import tasks_found
import test_glue_submit
import test_report

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.scores import submission
from nm_sparsity_jax.cli import _local, bench
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.integrations.kauldron import launch
from nm_sparsity_jax.recipes import RECIPES, registry
from nm_sparsity_jax.runs import checkpoint, glue
from nm_sparsity_jax.training import configure, rules_text

ROOT = pages.ROOT
BLOCKS = pages.blocks()
README = (ROOT / "README.md").read_text("utf-8")
(RESUMED,) = (b for b in BLOCKS if b.page == "docs/core.md" and "CheckpointManager" in b.code)
NOTEBOOK = ROOT / "examples/quickstart.ipynb"


def of(language):
  found = [b for b in BLOCKS if b.language == language]
  return pytest.mark.parametrize("block", found, ids=str)


@contextlib.contextmanager
def relaxed(warn="ignore"):
  """What a user has: standard promotion, and warnings of libraries."""
  with (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
    warnings.catch_warnings(),
  ):
    warnings.simplefilter(warn)
    yield


def execute(code, names=None):
  """Runs code by itself; a warning is an error."""
  names = {"__name__": "__main__"} if names is None else names
  with relaxed("error"):
    exec(compile(code, "a block", "exec"), names)
  return names


# --- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is(block):
  assert block.language in ("", "python", "sh", "gin", "toml")
  if not block.language:  # a picture or an output
    assert not re.match(
      r"(\$ )?(nm-sparsity|python|pip|make|git|from|import|include)\b", block.code
    )


def finished_runs(folder):
  """Runs that docs/report.md and docs/glue.md name."""
  tasks = {c.task: c.metrics for c in glue.COLUMNS}
  halves = [list(tasks)[:4], list(tasks)[4:]]
  for name, part in [(n, None) for n in ("mdgf", "stepwise", "sr_ste")] + [
    (f"{n}_{i}", half) for n in ("stepwise", "sr_ste") for i, half in enumerate(halves)
  ]:
    mine = part or list(tasks)
    test_report.write(folder / "runs" / name, tasks=[f"nm_glue_{task}" for task in mine])
    for task in mine:
      line = json.dumps({"step": 1100, **dict.fromkeys(tasks[task], 50.0)}) + "\n"
      file = folder / f"runs/{name}/inference_eval/nm_glue_{task}-metrics.jsonl"
      file.write_text(line)


def sparse_run(folder):
  """A checkpoint with rules of its own, as a sparse run leaves it at its end."""
  rules = configure.rules({"ff": "1:4"}, "sr_ste", sparse_steps=8)
  kernel = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
  mine = {"step": np.int32(8), "rules": rules_text.pack(rules_text.describe(rules))}
  tree = {"target": {"mlp": {"wi": {"kernel": kernel}}}, "flax_mutables": {"nm_sparsity": mine}}
  checkpoint.write(str(folder / "my_run/checkpoint_8"), {**tree, "state": {"step": np.int32(8)}})


def sweep_file(folder):
  """The file that docs/sweep.md shows."""
  (block,) = [b for b in BLOCKS if b.page == "docs/sweep.md" and b.language == "toml"]
  (folder / "sweep.toml").write_text(block.code)


# What a python block names -> what must lie there before it runs.
PREPARED = {'"runs/': finished_runs, '"my_run"': sparse_run, '"sweep.toml"': sweep_file}


@pytest.fixture
def recipes_of_before():
  """What a block registers goes with it."""
  before = dict(RECIPES)
  yield
  for name in RECIPES.keys() - before.keys():
    del registry._recipes[name]


@pytest.mark.usefixtures("recipes_of_before")
@of("python")
def test_python_runs(block, tmp_path, monkeypatch, capsys):
  if block is RESUMED:
    return  # below, three times
  monkeypatch.chdir(tmp_path)
  for words, make in PREPARED.items():
    if words in block.code:
      make(tmp_path)
  if "t5x_tasks" in block.code or "import seqio" in block.code:
    if reason := tasks_found.why_not():
      pytest.skip(reason)
    with relaxed():
      import t5x_tasks  # noqa: F401
    try:
      execute(block.code)
    finally:
      tasks_found.register_again()
    return
  if "kauldron" in block.code:
    compile(block.code, "a block", "exec")  # tests/test_kauldron.py makes a trainer of it
    return
  execute(block.code)
  if block.output:
    assert capsys.readouterr().out == block.output


def test_the_run_trains_and_goes_on_from_a_checkpoint(tmp_path, monkeypatch, capsys):
  ocp = pytest.importorskip("orbax.checkpoint")
  monkeypatch.chdir(tmp_path)
  first = execute(RESUMED.code)
  assert capsys.readouterr().out.splitlines()[-1] == "ok"
  shards = first["run"]["params"]["mlp"]["wi"]["kernel"].addressable_shards
  assert {s.data.shape for s in shards} == {(32, 32)}  # in two, on the devices of conftest
  # A model that says nothing has a loss of about 1, the variance of the data.
  assert first["loss"](first["run"]["params"]) < 0.5

  # Taken away after step 100: the rest is done again, to the same bits.
  kept = sorted(int(p.name) for p in pathlib.Path("checkpoints").iterdir() if p.name.isdigit())
  assert kept == [50, 100, 150, 200]
  for step in (150, 200):
    shutil.rmtree(f"checkpoints/{step}")
  restored, restore = [], ocp.CheckpointManager.restore

  def spy(self, step, *args, **kwargs):
    restored.append(step)
    return restore(self, step, *args, **kwargs)

  monkeypatch.setattr(ocp.CheckpointManager, "restore", spy)
  second = execute(RESUMED.code)
  assert restored == [100]
  jax.tree.map(np.testing.assert_array_equal, first["run"], second["run"])

  # And once more with nothing left to do.
  third = execute(RESUMED.code)
  assert restored == [100, 200]
  jax.tree.map(np.testing.assert_array_equal, first["run"], third["run"])


# The part of big_vision's train.py where the lines of docs/vision.md go.
BIG_VISION = """
{}
{}
{}
opt = tx.init(params)

@jax.jit
def update_fn(params, opt):
  updates, opt = tx.update(jax.grad(loss)(params), opt, params)
  return optax.apply_updates(params, updates), opt

for _ in range(total_steps):
  params, opt = update_fn(params, opt)
"""


def test_the_lines_for_big_vision_train_sparse_weights():
  import optax

  page = (ROOT / "docs/vision.md").read_text("utf-8").partition("### big_vision")[2]
  lines = re.findall(r"^\| .+ \| `(.+)` \|$", page, re.MULTILINE)
  kernel = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
  path = "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"
  names = execute(
    BIG_VISION.format(*lines),
    dict(
      jax=jax, optax=optax, tx=optax.sgd(0.1), total_steps=4,
      params=nested({path: kernel}),
      loss=lambda params: sum(jax.numpy.sum(x**2) for x in jax.tree.leaves(params)),
    ),
  )  # fmt: skip
  assert int(nms.step_count(names["opt"])) == 4
  assert nms.verify(names["params"], names["rules"]).ok


# --- command lines ------------------------------------------------------------------------------

# Programs of sh blocks: each writes down its arguments, and gin-path what it prints.
STAND_IN = r"""#!/bin/bash
printf '%s\0' "${0##*/}" "$@" $'\n' >>"$LOG"
[ "${0##*/} $1" != "nm-sparsity gin-path" ] || echo "$ROOT"
"""
PROGRAMS = ("nm-sparsity", "python", "python3.11", "pip", "make", "gcloud")


@functools.cache
def arrived(block):
  """The command lines of a block as bash hands them to programs: lists of words.

  Variables are those of the page up to there.
  """
  above = [b.code for b in BLOCKS if b.page == block.page and b.line < block.line]
  code = "\n".join(re.findall(r"^[A-Z]+=.*", "".join(above), re.MULTILINE) + [block.code])
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for program in PROGRAMS:
      (folder / "bin").mkdir(exist_ok=True)
      (folder / "bin" / program).write_text(STAND_IN)
      (folder / "bin" / program).chmod(0o755)
    (folder / "nm/bin").mkdir(parents=True)
    (folder / "nm/bin/activate").touch()
    (folder / "work").mkdir()
    env = dict(PATH=f"{folder}/bin", HOME=name, LOG=f"{folder}/log", ROOT=str(ROOT))
    env |= dict(NAME="a-vm", ZONE="a-zone")  # docs/t5x.md leaves them to the reader
    done = subprocess.run(
      ["/bin/bash", "-euc", code], env=env, cwd=folder, capture_output=True, text=True,
      check=False,
    )  # fmt: skip
    assert not done.returncode and not done.stderr, done.stderr
    lines = (folder / "log").read_text().split("\0\n\0")[:-1]
  return [line.split("\0") for line in lines if line != "nm-sparsity\0gin-path"]


def files_of(argv):
  """The gin files that a command line names."""
  return [a.partition("=")[2] for a in argv if a.startswith("--gin_file=")]


def parser_of(command):
  parser = argparse.ArgumentParser(allow_abbrev=False)
  module = importlib.import_module(f"nm_sparsity_jax.cli.{cli.COMMANDS[command][0]}")
  module.add_arguments(parser)
  parser.add_argument("--debug", action="store_true")
  return parser


def check_nm_sparsity(argv):
  command = next(n for n in cli.COMMANDS if argv[: n.count(" ") + 1] == n.split())
  parser_of(command).parse_args(argv[command.count(" ") + 1 :])


def check_pip(argv):
  assert argv[0] == "install"
  setup = (ROOT / "setup.py").read_text()
  for before, word in zip(argv, argv[1:], strict=False):
    if before == "-c":
      assert (ROOT / word).is_file()
    if before == "-e" and (extra := re.fullmatch(r"\.\[(\w+)\]", word)):
      assert f'"{extra[1]}": ' in setup.partition("extras_require=")[2]
    if word.startswith("git+"):  # test_doctor.py holds the commits
      assert re.fullmatch(r"git\+https://github\.com/[\w/-]+@[0-9a-f]{40}", word)


def check_make(argv):
  (target,) = argv
  assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_python(argv):
  if argv[0] == "-c":
    compile(argv[1], "-c", "exec")
  elif argv[:2] == ["-m", "nm_sparsity_jax.integrations.kauldron.launch"]:
    _, theirs = launch.parser().parse_known_args(argv[2:])
    assert all(flag.startswith("--cfg") for flag in theirs)
  elif argv[0] == "-m":
    assert argv[1] in ("venv", "t5x.train", "t5x.eval", "t5x.infer")
  else:  # a script of ours: it knows all flags but the last
    done = subprocess.run(
      [sys.executable, ROOT / argv[0], *argv[1:], "--nope"],
      capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    if not last.endswith("No module named 'coremltools'"):  # test_coreml.py runs it where it can
      assert last.endswith("error: unrecognized arguments: --nope")


CHECKS = {
  "nm-sparsity": check_nm_sparsity,
  "pip": check_pip,
  "make": check_make,
  "python": check_python,
  "python3.11": check_python,
  "gcloud": lambda argv: None,
}


@of("sh")
def test_sh_arrives_as_meant(block):
  lines = arrived(block)
  assert lines
  for program, *argv in lines:
    CHECKS[program](argv)
    for file in files_of(argv):
      beside = (ROOT / block.page).parent / file
      is_here = file in own_files() or (ROOT / file).is_file() or beside.is_file()
      assert is_here or file.startswith("t5x/"), file  # T5X's own: the plans below read them


# --- plans --------------------------------------------------------------------------------------


def own_files():
  """gin blocks that are a file by their first line: name -> text."""
  gin = [b.code for b in BLOCKS if b.language == "gin"]
  return {m[1]: code for code in gin if (m := re.match(r"# (\w+\.gin)\n", code))}


@pytest.fixture(scope="module")
def t5x():
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  with relaxed():
    import t5x.train  # noqa: F401


def plan(argv, folder, capsys, monkeypatch):
  """What `plan` says of the flags of a run, with buckets as folders that are not there."""
  monkeypatch.chdir(folder)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.syspath_prepend(str(folder))
  for name, code in own_files().items():
    (folder / name).write_text(code)
  (folder / "my_tasks.py").touch()
  flags = [a.replace("gs://", f"{folder}/").replace("'...'", f"'{folder}'") for a in argv]
  if not any(f.startswith("--gin_search_paths") for f in flags):
    flags.append(f"--gin_search_paths={ROOT}")
  with relaxed(), t5x_found.closed_loops():
    cli.main(["plan", *flags, "--json"])
  return json.loads(capsys.readouterr().out)


def beside(block, folder):
  """A folder with what lies beside a page of the examples: its blocks are typed there."""
  if block.page.startswith("examples/"):
    shutil.copytree((ROOT / block.page).parent, folder, dirs_exist_ok=True)
  return folder


RUNS = [b for b in BLOCKS if b.language == "sh" and "--gin_file=" in b.code]


@pytest.mark.t5x
@pytest.mark.parametrize("block", [b for b in RUNS if " t5x." in b.code], ids=str)
def test_runs_of_t5x_are_planned(block, t5x, tmp_path, capsys, monkeypatch):
  for _, dash_m, program, *argv in arrived(block):
    assert dash_m == "-m" and program.startswith("t5x.")
    report = plan([a for a in argv if a != "..."], tmp_path, capsys, monkeypatch)
    errors = [e for e in report["errors"] if "..." not in argv or "is not set" not in e]
    # The checkpoint and the task of an example are nowhere, and that is all.
    assert not [e for e in errors if "/checkpoint_" not in e and "'my_task'" not in e], errors
    assert not report["warnings"]
    if program == "t5x.train":  # the others read their rules from the checkpoint
      assert report["kernels"]["sparse"] and report["schedule"]


@pytest.mark.parametrize("block", [b for b in RUNS if " t5x." not in b.code], ids=str)
def test_local_runs_are_made(block, tmp_path, monkeypatch):
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  monkeypatch.chdir(beside(block, tmp_path))
  arguments = {"train": ["run"], "bench": ["model"]}
  # The checkpoint and the task of an example are nowhere; tests/test_refused.py has what looks.
  monkeypatch.setattr(_local, "_refuse_missing", lambda _: None)
  with relaxed():
    for program, command, *argv in filter(files_of, arrived(block)):
      if command == "plan":
        assert cli.main([command, *argv]) == 0
        continue
      args = parser_of(command).parse_args(argv)
      if command == "bench":
        config = bench.configuration(args)
      else:
        config, _ = _local.read(args, {"eval": "evaluate"}.get(command, command))
      assert program == "nm-sparsity" and not config.warnings
      for name in arguments.get(command, ["model", "evaluation", "checkpoint", "output_dir"]):
        try:
          _local.argument(config, name)
        except ValueError as e:  # eval and infer read the rules from the checkpoint
          assert name == "model" and command != "train" and "so its rules are unknown" in str(e)


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
  return done


def test_pages_about_finished_runs_run_on_some(tmp_path):
  """docs/report.md and docs/glue.md, typed where runs and predictions lie."""
  finished_runs(tmp_path)
  (tmp_path / "predictions").mkdir()
  for name, task in submission.TASKS.items():
    if name != "wnli":
      words = list(test_glue_submit.OFFICIAL[task.file][1])
      rows = ((i, words[i % len(words)]) for i in range(test_glue_submit.OFFICIAL[task.file][0]))
      file = tmp_path / "predictions" / test_glue_submit.name_of(name)
      file.write_text(test_glue_submit.lines_of(rows))

  said = {}
  for block in BLOCKS:
    if block.language == "sh" and block.page in ("docs/report.md", "docs/glue.md"):
      said[block.code.split(" runs")[0].strip()] = in_bash(block.code, tmp_path).stdout
  assert set(said) >= {"nm-sparsity report", "nm-sparsity glue score"} and len(said) == 4, said
  for text in said.values():
    assert text.strip()
  for row in ("sr_ste", "stepwise"):
    assert re.search(rf"^{row} +50\.0", said["nm-sparsity glue score"], re.MULTILINE)
    assert re.search(rf"^{row} +50\.0", said["nm-sparsity glue score --join sr_ste"], re.MULTILINE)
  assert (tmp_path / "report.html").is_file()
  with zipfile.ZipFile(tmp_path / "submission.zip") as archive:
    assert len(archive.namelist()) == 11


@pytest.mark.slow
def test_the_local_run_prints_what_the_page_says(tmp_path):
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  # One block shows a flag with modules of the reader's own: tests/test_own_recipe.py types it.
  blocks = [b for b in BLOCKS if b.page == "docs/local.md" and b.language == "sh"]
  shown = [b for b in blocks if "--import" in b.code]
  assert len(shown) == 1
  blocks.remove(shown[0])
  done = in_bash("\n".join(b.code for b in blocks), tmp_path)

  def without_measures(text):
    text = text.replace(str(tmp_path), "/tmp/run")
    return re.sub(r"(loss|accuracy) [\d.]+|[\d.,]+ tokens/s|\d+:\d+ left", "x", text)

  assert without_measures(blocks[0].output) in without_measures(done.stdout + done.stderr)


@pytest.mark.slow
def test_the_task_of_the_page_is_learned_and_proved(tmp_path):
  """docs/your_task.md, typed as it stands: its module, then its commands."""
  if reason := tasks_found.why_not():
    pytest.skip(reason)
  module, commands = (b for b in BLOCKS if b.page == "docs/your_task.md" and b.language)
  (tmp_path / "my_task.py").write_text(module.code)
  said = in_bash(commands.code, tmp_path)
  found = re.search(r"largest_digit: accuracy ([\d.]+)$", said.stdout + said.stderr, re.MULTILINE)
  assert found and float(found[1]) > 90
  assert said.stdout.endswith("ok\n")


@pytest.mark.slow
def test_the_example_of_a_workload_runs_as_typed(tmp_path):
  """Every command of the page and its sweep, with 20 steps in place of 2000."""
  (block,) = [b for b in BLOCKS if b.page.startswith("examples/") and b.language == "sh"]
  beside(block, tmp_path)
  sweep = tmp_path / "sweep.toml"
  text, count = re.subn(r"= 2000$", "= 20", sweep.read_text(), flags=re.MULTILINE)
  assert count == 2 and "FINETUNE_STEPS = 400" in text
  sweep.write_text(text.replace("FINETUNE_STEPS = 400", "FINETUNE_STEPS = 4"))
  code = block.code.replace("/tmp/own/", f"{tmp_path}/").replace("2000", "20")
  said = in_bash(code, tmp_path).stdout
  assert "Nothing stands in the way." in said and "10 runs, seeds 0, 1" in said
  assert said.count("\nok\n") == 1
  assert (tmp_path / "report.html").is_file() and (tmp_path / "own_sweep/report.html").is_file()


@of("gin")
def test_gin_is_read(block, tmp_path):
  pytest.importorskip("gin", reason="gin files are read with gin-config, in the extra dev")
  if reason := t5x_found.why_not() if "t5x." in block.code else tasks_found.why_not():
    pytest.skip(reason)
  (tmp_path / "block.gin").write_text(block.code)
  with relaxed():
    config = gin_files.Config([str(tmp_path)], ["block.gin"], ["VOCABULARY = None"])
  assert not [e for e in config.errors if "is not set" not in e]


@of("toml")
def test_toml_is_read(block):
  assert tomllib.loads(block.code)


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
  for target in pages.links(page):
    if re.match(r"https://[\w.]+", target):
      continue
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.is_file() and there.is_relative_to(ROOT), target
    assert not anchor or anchor in pages.anchors(there), target


def test_a_page_is_reached_from_another():
  linked = {
    (p.parent / target.partition("#")[0]).resolve()
    for p in pages.PAGES
    for target in pages.links(p)
  }
  lost = [p for p in pages.PAGES if p not in linked and "docs/api" not in str(p)]
  assert not lost


# --- README -------------------------------------------------------------------------------------


def test_the_recipe_table_is_complete():
  rows = re.findall(r"^\| `(\w+)` \| .* \| (yes)? ?\|$", README, re.MULTILINE)
  found = {name: bool(yes) for name, yes in rows if name in RECIPES}
  assert found == {n: c.stateful for n, c in RECIPES.items()}


def test_the_table_of_commands_is_complete():
  rows = re.findall(r"^\| (`nm-sparsity .*?) \|", README, re.MULTILINE)
  names = [n.removeprefix("nm-sparsity ") for n in re.findall(r"`(.*?)`", " ".join(rows))]
  assert sorted([*names, "gin-path"]) == sorted(cli.COMMANDS)


def test_the_table_of_extras_is_complete():
  page = (ROOT / "docs/install.md").read_text("utf-8")
  rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
  found = re.findall(r"`([\w-]+)`", " ".join(rows))
  extras = re.search(r"extras_require=\{(.*?)\}", (ROOT / "setup.py").read_text(), re.DOTALL)
  assert extras and sorted(found) == sorted(re.findall(r'"([\w-]+)":', extras[1]))


def test_readme_is_short():
  assert len(README.splitlines()) <= 140


def test_the_page_of_names_is_complete():
  page = (ROOT / "docs/names.md").read_text("utf-8")
  rows = re.findall(r"^\| `(\w+)` \| (\S.*?) \| .*\|$", page, re.MULTILINE)
  assert sorted(name for name, _ in rows) == sorted(nms.__all__)


def top_level(module):
  """The names that a module defines or imports at its top."""
  file = ROOT / (module.replace(".", "/") + ".py")
  file = file if file.is_file() else ROOT / module.replace(".", "/") / "__init__.py"
  for node in ast.parse(file.read_text("utf-8")).body:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      yield from (alias.asname or alias.name for alias in node.names)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/api").glob("*.md")), ids=lambda p: p.name)
def test_a_page_of_the_api_lists_names_of_its_modules(page):
  """In a plain checkout too, where the docstrings are not shown, it says what there is."""
  text, _, modules = page.read_text("utf-8").partition("\n::: ")
  rows = re.findall(r"^\| `(\w+)` \| \S", text, re.MULTILINE)
  known = {name for module in modules.replace("::: ", "").split() for name in top_level(module)}
  assert len(rows) > 2 and set(rows) <= known, set(rows) - known


# Rooms of helpers, which no page shows, and of commands, which `--help` shows.
WITHOUT_PAGE = {
  *("installed", "directions", "text", "dtypes", "fields"),
  *("quickstart", "commands", "cli"),
}


def test_each_room_has_a_page_of_the_api():
  text = (ROOT / "docs/architecture.md").read_text("utf-8")
  rows = re.findall(r"^\| (`[a-z].*?) \|", text.partition("## The rooms")[2], re.MULTILINE)
  rooms = {name.rstrip("/") for row in rows for name in re.findall(r"`(\w+/?)`", row)}
  files = [*(ROOT / "docs/api").glob("*.md")]
  shown = set(re.findall(r"^::: (\S+)$", "\n".join(f.read_text("utf-8") for f in files), re.M))
  named = {m.removeprefix("nm_sparsity_jax.").split(".")[0] for m in shown}
  assert len(rooms) > 30 and rooms - named == WITHOUT_PAGE
  nav = (ROOT / "mkdocs.yml").read_text("utf-8")
  assert [f.name for f in files if f"docs/api/{f.name}" not in nav] == []


# --- the notebook -------------------------------------------------------------------------------


def cells(kind):
  book = json.loads(NOTEBOOK.read_text("utf-8"))
  return [c for c in book["cells"] if c["cell_type"] == kind]


def printed(cell):
  return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


def without_decimals(text):
  return re.sub(r"\d+\.\d+", "x", text)


def test_the_notebook_runs_and_its_outputs_are_true(monkeypatch, capsys):
  plt = pytest.importorskip("matplotlib.pyplot", reason="the notebook draws: it is in dev")
  plt.switch_backend("agg")
  shown = []
  monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()) or plt.close("all"))
  code = cells("code")
  told, drawn = [], []
  names = {"__name__": "__main__"}
  with plt.rc_context():
    for cell in code:
      execute("".join(cell["source"]), names)
      told.append(capsys.readouterr().out)
      drawn.append(len(shown))
  assert [without_decimals(t) for t in told] == [without_decimals(printed(c)) for c in code]
  pictures = [sum("image/png" in o.get("data", {}) for o in c["outputs"]) for c in code]
  assert np.diff([0, *drawn]).tolist() == pictures and sum(pictures) == 3
  # Its program is README's: one line is new.
  text = "\n".join("".join(cell["source"]) for cell in code)
  assert text.count("tx = nms.sparse(") == text.count("# new") == 1
  # It learned, and so did each sparse run from there.
  losses = [float(x) for x in re.findall(r"loss (\d\.\d+)$", "".join(told), re.MULTILINE)]
  assert len(losses) == 4 and max(losses) < 0.1


@pytest.mark.slow
def test_the_notebook_runs_in_jupyter(tmp_path, monkeypatch):
  nbclient = pytest.importorskip("nbclient", reason="Jupyter's kernel is in the extra docs")
  pytest.importorskip("ipykernel", reason="Jupyter's kernel is in the extra docs")
  import nbformat

  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
  book = nbformat.read(NOTEBOOK, 4)
  with relaxed():
    nbclient.NotebookClient(book, timeout=600, record_timing=False).execute()
  code = [c for c in book.cells if c.cell_type == "code"]
  assert [without_decimals(printed(c)) for c in code] == [
    without_decimals(printed(c)) for c in cells("code")
  ]


def test_the_notebook_links_lead_somewhere():
  text = "".join("".join(c["source"]) for c in cells("markdown"))
  targets = re.findall(r"\]\(([^)\s]+)\)", text)
  assert len(targets) >= 4
  for target in targets:
    path, _, anchor = target.partition("#")
    there = (NOTEBOOK.parent / path).resolve()
    assert there.is_file() and (not anchor or anchor in pages.anchors(there)), target
