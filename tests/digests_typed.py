"""For digests.py: command lines, right ones and wrong ones, and what they print."""

import collections
import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import zipfile

import pages
import sweep_stub
from digests_runs import (
  FIELDS,
  JOBS,
  LOCAL,
  RECIPES,
  ROOT,
  TINY,
  call,
  flags,
  job,
  local,
  local_macros,
  page,
  parsed,
  sha,
  t5x_trained,
  work,
)

COMMANDS = (
    "train", "eval", "infer", "plan", "verify", "finalize", "report", "sweep", "doctor",
    "quickstart", "gin-path", "glue score", "glue submit",
)  # fmt: skip
GLUE = dict(  # task -> its metrics
  cola=["matthews_corrcoef"], mnli_matched=["accuracy"], mnli_mismatched=["accuracy"],
  mrpc=["f1", "accuracy"], qnli=["accuracy"], qqp=["accuracy", "f1"], rte=["accuracy"],
  sst2=["accuracy"], stsb=["pearson_corrcoef", "spearman_corrcoef"],
)  # fmt: skip

# --- the command line ---------------------------------------------------------------------------

for _name in COMMANDS:
  JOBS[f"help/{_name}"] = functools.partial(call, *_name.split(), "--help")
JOBS |= {
  "help/": lambda: call("--help"),
  "help/glue": lambda: call("glue", "--help"),
  "help/version": lambda: call("--version"),
  "gin-path": lambda: call("gin-path"),
}


def typed(block):
  """The commands of a block of the documentation, as bash hands them over."""
  above = [b.code for b in pages.blocks() if b.page == block.page and b.line < block.line]
  code = """note() { printf '%s\\0' "$@" $'\\n'; }
    nm-sparsity() { [ "$1" = gin-path ] && echo "$ROOT" || note "$@"; }
    python() { shift 2; note plan "$@"; }  # of T5X: what it would do
    """ + "\n".join(re.findall(r"^[A-Z]+=.*", "".join(above), re.MULTILINE) + [block.code])
  env = {"PATH": "", "ROOT": str(ROOT)}
  done = subprocess.run(["/bin/bash", "-euc", code], env=env, capture_output=True, check=True)
  return [line.split("\0") for line in done.stdout.decode().split("\0\n\0")[:-1]]


def documented(block):
  """What a block's commands print; those that train are planned."""
  for other in pages.blocks():
    if other.language == "gin" and (name := re.match(r"# (\w+\.gin)\n", other.code)):
      pathlib.Path(name[1]).write_text(other.code)
  pathlib.Path("my_tasks.py").touch()
  made_up_runs()
  with without("final"):
    # `bench` prints times, which differ from run to run.
    said = [planned(*words) for words in typed(block) if words[0] != "bench"]
  return json.loads(json.dumps(said).replace("DIR/tmp/", "/tmp/"))


@contextlib.contextmanager
def without(name):
  """Hides what another job left under a name that pages use, if one did."""
  hidden = pathlib.Path(f"hidden_{name}")
  if there := pathlib.Path(name).exists():
    pathlib.Path(name).rename(hidden)
  yield
  if there:
    hidden.rename(name)


def planned(command, *words):
  """What a command of a page prints: one that trains is planned, and /tmp is an empty folder."""
  command = "plan" if command in ("train", "eval", "infer") else command
  words = [w.replace("gs://", "/gs/").replace("'...'", "'/gs'") for w in words if w != "..."]
  words = [re.sub("(^|')/tmp/", rf"\1{work()}/tmp/", w) for w in words]
  if command == "plan" and not any(w.startswith("--gin_search_paths") for w in words):
    words.append(f"--gin_search_paths={ROOT}")
  if command == "plan":
    words.append("--import=my_tasks")
  if command == "sweep":
    words = [str(ROOT / words[0]), "--table"]
  return call(command, *words)


_WORDS = re.compile(r"--gin_file=|nm-sparsity (report|glue|sweep)")
_PAGES = collections.Counter()
for _block in pages.blocks():
  if _block.language == "sh" and _WORDS.search(_block.code):
    _PAGES[_block.page] += 1
    _name = f"documentation/{_block.page}, block {_PAGES[_block.page]}"
    JOBS[_name] = functools.partial(documented, _block)

TASK = dict(
  MIXTURE_OR_TASK_NAME="nm_test_sort", MIXTURE_OR_TASK_MODULE="t5x_task",
  TASK_FEATURE_LENGTHS={"inputs": 512, "targets": 62}, MODEL_DIR="none",
)  # fmt: skip
START = dict(INITIAL_CHECKPOINT_PATH="/no/checkpoint_1000000", PRETRAINED_STEPS=1_000_000)
LONG = dict(SPARSE_STEPS=100_000, DENSE_STEPS=10_000, FINETUNE_STEPS=20_000)
for _size, _recipe, _places, _how in [
  ("base", "mdgf_exponential", {"ff": "1:8", "qkv": "1:4"}, "finetune adafactor"),
  ("base", "sr_ste", {"ff": "2:4"}, "pretrain adafactor"),
  ("small", "idp", {"ff": "1:16", "decoder/cross/qk": "1:4"}, "finetune adamw"),
  ("small", "sdgf_geometric", {"ff": "1:8"}, "finetune adamw"),
  ("small", "snip", {"o": "1:4"}, "mini adamw"),
  ("small", "custom", {"ff": "1:4"}, "wmt adafactor"),
]:
  _run, _optimizer = _how.split()
  _files = [f"gin_configs/models/t5_1_1/{_size}.gin", f"gin_configs/runs/t5x_{_optimizer}.gin"]
  _files += [f"gin_configs/runs/t5x_{_run}.gin", f"gin_configs/recipes/{_recipe}.gin"]
  _more = LONG | {"SPARSITY_RULES": _places, "RECIPE_FIELDS": FIELDS.get(_recipe)}
  _more |= (TASK if _run != "mini" else {"MODEL_DIR": "none"}) | (START if "fine" in _run else {})
  _more |= {"PATTERN": "1:4"} if _recipe == "custom" else {}
  _argv = ["plan", "--json", "--import=t5x_task", *flags(*_files, **_more)]
  JOBS[f"plan/{_size} {_recipe} {_how}"] = functools.partial(call, *_argv)
for _recipe in RECIPES:
  _argv = [*flags(*LOCAL, TINY, **local_macros("none", _recipe)), "--all", "--import=t5x_task"]
  JOBS[f"plan/local {_recipe}"] = functools.partial(call, "plan", *_argv)
JOBS["plan/resumes a run"] = lambda: (
  local("idp", "idp")
  and call("plan", "--import=t5x_task", *flags(*LOCAL, TINY, **local_macros("idp", "idp")))
)

# --- made-up runs -------------------------------------------------------------------------------


@functools.cache
def made_up_runs():
  """Runs with scores, and predictions, as the documentation names them."""
  config = "RECIPE = {!r}\nPATTERN = '1:8'\nSPARSITY_RULES = {{'ff': None}}\nSPARSE_STEPS = 100\n"
  config += "DENSE_STEPS = 10\nFINETUNE_STEPS = 20\nPRETRAINED_STEPS = 1_000\n"
  names = {"mdgf": "mdgf_exponential", "stepwise": "sdgf_stepwise", "sr_ste": "sr_ste"}
  halves = [list(GLUE)[:4], list(GLUE)[4:]]
  runs = [(n, r, list(GLUE)) for n, r in names.items()]
  runs += [(f"{n}_{i}", names[n], half) for n in list(names)[1:] for i, half in enumerate(halves)]
  for i, (name, recipe, tasks) in enumerate(runs):
    folder = pathlib.Path("runs", name, "inference_eval")
    folder.mkdir(parents=True)
    (folder.parent / "config.gin").write_text(config.format(recipe))
    for j, task in enumerate(tasks):
      first = {m: 50.0 + i + j + k for k, m in enumerate(GLUE[task])}
      steps = [{"step": s, **{m: v + s / 500 for m, v in first.items()}} for s in (1050, 1100)]
      lines = [json.dumps(step) + "\n" for step in steps]
      (folder / f"nm_glue_{task}-metrics.jsonl").write_text("".join(lines))
  pathlib.Path("predictions").mkdir()
  for task, words in (("rte", ["entailment", "not_entailment", "?"]), ("stsb", ["5.2", "1.25"])):
    rows = [{"inputs": {"idx": float(i)}, "prediction": words[i % len(words)]} for i in range(9)]
    for name in (f"predictions/nm_glue_{task}", f"mini/nm_glue_mini_{task}"):
      file = pathlib.Path(f"{name}-predict.jsonl-00000-of-00001")
      file.parent.mkdir(exist_ok=True)
      file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def on_made_up(*argv, make=call):
  made_up_runs()
  return make(*argv)


def zipped(*argv):
  said = on_made_up("glue", "submit", *argv, "--out", "made.zip")
  with zipfile.ZipFile("made.zip") as archive:
    said["zip"] = {n: sha(archive.read(n)) for n in archive.namelist()}
  return said | {"check": call("glue", "submit", "--validate", "made.zip", "--mini")}


def reported(*argv):
  local("idp", "idp"), local("sr_ste", "sr_ste"), t5x_trained("idp", "idp")
  return page("report", *argv)


SWEEP = f"""
out = "swept"
gin_files = ["{LOCAL[0]}", "{LOCAL[1]}", "{TINY}"]
recipes = ["dense", "sr_ste", "idp"]
patterns = ["1:4", "1:8"]
seeds = [0, 3]
baseline = "sr_ste"
macros = {{SPARSE_STEPS = 4}}
start = {{SPARSE_STEPS = 2, LEARNING_RATE = 0.5}}
"""


@job("made up/sweep, of runs that a stub stands for")
def _():
  outcomes = {"sr_ste-1_4-seed0": [61.0, 0.5], "idp-1_4-seed3": "killed", "idp-1_8-seed0": "nan"}
  os.environ["PYTHONPATH"] = sweep_stub.install(work() / "stub", outcomes)
  pathlib.Path("sweep.toml").write_text(SWEEP)
  said = {"before": call("sweep", "sweep.toml", "--table"), "runs": call("sweep", "sweep.toml")}
  del os.environ["PYTHONPATH"]
  said |= {f: call("sweep", "sweep.toml", f) for f in ("--table", "--json")}
  return said | {"page": parsed("swept/report.html")}


RUNS = ("runs/stepwise", "runs/sr_ste")
JOBS |= {
  "made up/report": functools.partial(on_made_up, "report", *RUNS, make=page),
  "made up/report of local runs": functools.partial(reported, "local/idp", "local/sr_ste"),
  "made up/report of T5X's runs": functools.partial(reported, "t5x/idp"),
  "made up/glue score": functools.partial(on_made_up, "glue", "score", *RUNS),
  "made up/glue score of a step, as JSON": functools.partial(
    on_made_up, "glue", "score", *RUNS, "--checkpoint", "1050", "--json"
  ),
  "made up/glue submit": functools.partial(zipped, "mini", "--mini", "--fill", "all"),
}

# --- mistakes -----------------------------------------------------------------------------------

EVAL = "gin_configs/runs/local_eval.gin"
FIRST = dict(BATCH_SIZE=16, MODEL_DIR="none", RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=2)
for _mistake in [
  dict(RECIPE="sr_stee"), dict(PATTERN="4:1"), dict(PATTERN="1:5"), dict(PATTERN=None),
  dict(SPARSE_STEPS=None), dict(SPARSE_STEP=9), dict(DENSE_STEPS=9), dict(BATCH_SIZE=15,
  MICROBATCHES=2), dict(NUM_PARTITIONS=3), dict(VOCAB_SIZE=128), dict(DECODER="beams"),
  dict(MIXTURE_OR_TASK_NAME="nm_test_sor"), dict(INITIAL_CHECKPOINT_PATH="/no/checkpoint_1"),
  dict(LEARNING_RATE_FACTORS="constant * cosine"), dict(SPARSITY_RULES={"fff": None}),
  dict(MODEL_DIR="/dev/null/run"), dict(GRADIENT="masked"), dict(RECIPE_FIELDS={"lamb": 1}),
]:  # fmt: skip
  _argv = flags(*LOCAL, TINY, **FIRST | _mistake)
  for _command in ("train", "plan"):
    _name = f"mistakes/{_command} {_mistake}"
    JOBS[_name] = functools.partial(call, _command, *_argv)


def after_a_run(*argv):
  """On a run that is there, and on a copy of it with a damaged checkpoint."""
  local("dense", "dense"), local("idp", "idp")
  if not pathlib.Path("damaged").exists():
    shutil.copytree("local/idp/checkpoint_20", "damaged/checkpoint_20")
    pathlib.Path("damaged/checkpoint_20/state/_METADATA").write_text("{")
  made_up_runs()
  return call(*argv)


def again(command, **change):
  """The flags of the run that is there, with a change."""
  named = ["--import=t5x_task"] if command == "plan" else []
  return [command, *named, *flags(*LOCAL, TINY, **local_macros("idp", "idp") | change)]


for _name, _argv in {
  "no gin file": ["train"],
  "no such command": ["trian"],
  "half a command": ["glue"],
  "an override without a value": ["plan", "--gin.RECIPE", "x"],
  "train with another pattern on resume": again("train", PATTERN="1:2"),
  "train with another learning rate on resume": again("train", LEARNING_RATE=0.5),
  "plan with another recipe on resume": again("plan", RECIPE="sr_ste"),
  "train with a run file of eval": ["train", *flags(EVAL, TINY, **FIRST)],
  "train with a file that is nowhere": ["train", *flags(f"{EVAL}s", TINY, **FIRST)],
  "finalize too early": ["finalize", "local/idp/checkpoint_10", "final/too_early"],
  "finalize over a checkpoint": ["finalize", "local/idp", "local/idp"],
  "finalize a damaged one": ["finalize", "damaged", "final/damaged"],
  "verify a damaged one": ["verify", "damaged/checkpoint_20"],
  "verify nothing": ["verify", "nowhere"],
  "verify a folder of runs": ["verify", "local"],
  "verify by other rules": ["verify", "local/idp", "--rules", "{'ff': '1:8'}"],
  "verify a dense one": ["verify", "local/dense/checkpoint_20", "--rules", "{'ff': '1:8'}"],
  "verify without rules": ["verify", "local/dense/checkpoint_20"],
  "report of nothing": ["report", "nowhere"],
  "score of nothing": ["glue", "score", "runs/nope"],
  "score of the same twice": ["glue", "score", "runs/mdgf", "runs/mdgf"],
  "submit a part": ["glue", "submit", "predictions", "--out", "part.zip"],
  "submit mini-GLUE": ["glue", "submit", "mini", "--out", "part.zip"],
  "sweep of nothing": ["sweep", "nowhere.toml"],
}.items():
  JOBS[f"mistakes/{_name}"] = functools.partial(after_a_run, *_argv)
