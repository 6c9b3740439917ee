"""For digests.py: tiny models that are trained with every recipe, by the local runner and by T5X.

Here too: how an output and a checkpoint become what is noted. `JOBS` holds all that is noted, by
name; digests_typed.py adds the command lines.
"""

import collections
import contextlib
import functools
import hashlib
import html.parser
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

# Before jax and TensorFlow are imported: they read these once. One device, one thread for a sum.
os.environ |= dict(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3", COLUMNS="100")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import t5x_found  # noqa: E402

from nm_sparsity_jax import cli  # noqa: E402

RECIPES = (
  "dense", "one_shot", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise",
  "sdgf_geometric", "custom", "snip", "idp",
)  # fmt: skip
FIELDS = {  # what a recipe needs, or what makes it do more
  "custom": {"path": ((5, "2:4", 1.0), (9, "1:4", 0.5))},
  "sdgf_geometric": {"k": 4},
  "snip": {"batches": 2},
  "sr_ste": {"lam": 0.01},
}
STEPS, DENSE, FINETUNE = 20, 5, 5
JOBS = {}  # name -> what makes its value, for JSON


def job(name):
  """Registers a function of no arguments under a name."""
  return lambda make: JOBS.setdefault(name, make)


# --- digests and texts --------------------------------------------------------------------------


def sha(*parts):
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part if isinstance(part, bytes) else str(part).encode())
  return digest.hexdigest()


def same_everywhere(text):
  """A text without folders, times and rates."""
  for path, name in ((sys.prefix, "PYTHON"), (t5x_home(), "T5X"), (work(), "DIR"), (ROOT, "ROOT")):
    text = text.replace(str(path), name)
  text = re.sub(r"\d+(:\d\d)+ left", "TIME left", text)
  text = re.sub(r"[\d.,]+ tokens/s", "RATE tokens/s", text)
  text = re.sub(r"done in \d+(:\d\d)+", "done in TIME", text)
  text = re.sub(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?", "DATE", text)
  return text


def call(*argv):
  """What a command prints, and its exit code."""
  out, err, path = io.StringIO(), io.StringIO(), list(sys.path)
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      code = cli.main([str(a) for a in argv])
    except SystemExit as e:  # of argparse
      code = e.code
  sys.path[:] = path
  texts = {"out": out.getvalue(), "err": err.getvalue()}
  lines = {k: same_everywhere(v).splitlines() for k, v in texts.items() if v}
  return {"exit": code, **lines}


class Parts(html.parser.HTMLParser):
  """A page by sections and charts: tags, attributes and words, whatever the white space is.

  Left out: the chart of speed, which differs from run to run, and gin files, which name modules.
  """

  def __init__(self, text):
    super().__init__()
    self.section, self.chart, self.parts = "head", "", collections.defaultdict(list)
    self.feed(text)
    self.close()

  def add(self, *what):
    if self.section != "gin" and self.chart != "chart-steps_per_second":
      self.parts[f"{self.section} {self.chart}".strip()].append(what)

  def handle_starttag(self, tag, attrs):
    key = dict(attrs).get("id", "")
    self.section = key if tag == "section" else self.section
    self.chart = key if tag == "figure" else self.chart
    self.add(tag, sorted((name, " ".join((value or "").split())) for name, value in attrs))

  def handle_endtag(self, tag):
    self.add("end of", tag)
    self.chart = "" if tag == "figure" else self.chart
    self.section = "between" if tag == "section" else self.section

  def handle_data(self, data):
    if words := data.split():
      style = self.lasttag == "style" and "}" in data
      self.add(*(declarations(data) if style else [" ".join(words)]))


def declarations(style):
  """The declarations of a style sheet by media and selector, sorted: blocks may be cut anyhow."""
  out, media = set(), ""
  for before, end in re.findall(r"([^{}]*)([{}])", re.sub(r"\s*([{}:;,])\s*", r"\1", style)):
    if end == "{" and before.startswith("@"):
      media = before
    elif end == "{":
      selector = before.strip()
    elif before or selector:
      out |= {f"{media} {selector} {one}" for one in before.split(";") if one}
      selector = ""
    else:
      media = ""
  return sorted(out)


def parsed(path):
  """The digests of a page's parts, by name."""
  text = pathlib.Path(path).read_text("utf-8")
  # Of runs with one value each the chart of speed is a table, which no figure holds.
  text = re.sub(
    r"<table(?:(?!</table>).)*<th>Steps per second</th>.*?</table>", "", text, flags=re.S
  )
  parts = Parts(same_everywhere(text)).parts
  return {name: sha(*part)[:16] for name, part in parts.items()}


def page(*argv):
  """The same of a command that writes page.html, with digests of the page."""
  return {**call(*argv, "--out", "page.html"), "page": parsed("page.html")}


def arrays(checkpoint):
  """Digests of the groups of a checkpoint: parameters, optimizer state, masks."""
  import jax
  import numpy as np
  import orbax.checkpoint as ocp

  reader, path = ocp.PyTreeCheckpointer(), pathlib.Path(checkpoint).absolute() / "state"
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  shapes = reader.metadata(path).item_metadata.tree
  tree = reader.restore(path, restore_args=jax.tree.map(as_numpy, shapes))
  name = lambda keys: "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)
  flat = {name(keys): np.asarray(x) for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
  groups = collections.defaultdict(list)
  for key in sorted(flat):
    x = flat[key]
    groups[key.split("/")[0]] += [str(x.shape), str(x.dtype), x.tobytes()]
  keys = {"keys": len(flat), "of keys": sha("\n".join(sorted(flat)))}
  return keys | {group: sha(*parts) for group, parts in groups.items()}


@functools.cache
def work():
  """The folder of everything that is made, in which the script stands."""
  return pathlib.Path(tempfile.mkdtemp(prefix="digests-")).resolve()


@functools.cache
def t5x_home():
  """The folder with T5X's checkout."""
  if reason := t5x_found.why_not():
    sys.exit(reason)
  import importlib.util

  return pathlib.Path(importlib.util.find_spec("t5x").origin).parents[1]


def flags(*files, search=ROOT, **macros):
  """Flags of gin."""
  out = [f"--gin_search_paths={search}", *(f"--gin_file={f}" for f in files)]
  return out + [f"--gin.{name}={value!r}" for name, value in macros.items()]


def rules(recipe, **more):
  """Macros of a run of 20 steps: dense, then sparser, then fine-tuned."""
  sparse = dict(PATTERN="1:4", DENSE_STEPS=DENSE, FINETUNE_STEPS=FINETUNE)
  places = {"SPARSITY_RULES": {"ff": None, "decoder/cross/o": None}}
  return dict(
    RECIPE=recipe, SPARSE_STEPS=STEPS, RECIPE_FIELDS=FIELDS.get(recipe),
    **({} if recipe == "dense" else sparse | places), **more,
  )  # fmt: skip


# --- the local runner ---------------------------------------------------------------------------

LOCAL = ("gin_configs/runs/local_train.gin", "gin_configs/runs/local_adamw.gin")
OTHER = ("gin_configs/runs/local_train.gin", "gin_configs/runs/local_adafactor.gin")
TINY = HERE / "local_tiny.gin"  # "tests/..." gin takes for a package, which has no file


def local_macros(folder, recipe, **more):
  settings = dict(
    BATCH_SIZE=16, LEARNING_RATE=0.02, WARMUP_STEPS=4, EVAL_PERIOD=10, STATS_PERIOD=5,
    METRICS_EVERY=None, DROPOUT_RATE=0.1, MODEL_DIR=f"local/{folder}",
  )  # fmt: skip
  return settings | rules(recipe, **more)


@functools.cache
def local(folder, recipe, files=LOCAL, **more):
  """A run: what it said; its checkpoints are below local/."""
  said = call("train", *flags(*files, TINY, **local_macros(folder, recipe, **more)))
  assert said["exit"] == 0, said
  return said


def curves(folder):
  """What a run noted on the way, step by step; the rest of a line, without rates, as a digest."""
  names = ("step", "loss", "accuracy", "grad_norm", "learning_rate", "nm/D", "nm/density")
  out = []
  for line in map(json.loads, pathlib.Path(folder, "train/metrics.jsonl").read_text().splitlines()):
    rest = {k: v for k, v in sorted(line.items()) if not re.search("per_second|seconds", k)}
    out.append(" ".join([*(f"{n}={line.get(n)}" for n in names), f"of all={sha(rest)[:16]}"]))
  return out


def scores(folder):
  """What an evaluation wrote: each file, with its digest."""
  files = sorted(p for p in pathlib.Path(folder).rglob("*.jsonl*") if "train" not in p.parts[-2:])
  return {p.name: sha(p.read_bytes()) for p in files}


def local_run(folder, *args, **more):
  said = local(folder, *args, **more)
  folder = f"local/{folder}"
  found = {"curves": curves(folder), "scores": scores(folder)}
  return said | found | arrays(f"{folder}/checkpoint_{STEPS}")


for _recipe in RECIPES:
  JOBS[f"local/{_recipe}"] = functools.partial(local_run, _recipe, _recipe)
HARD = dict(PACK=True, MICROBATCHES=2)
for _recipe in ("sr_ste", "idp"):
  _run = functools.partial(local_run, f"{_recipe}_hard", _recipe, OTHER, **HARD)
  JOBS[f"local/{_recipe} packed, microbatches, adafactor"] = _run


@job("local/resumed in the middle")
def _():
  local("idp", "idp")
  shutil.copytree("local/idp/checkpoint_10", "local/again/checkpoint_10")
  for file in pathlib.Path("local/idp").iterdir():
    if file.is_file():
      shutil.copy(file, "local/again")
  said = call("train", *flags(*LOCAL, TINY, **local_macros("again", "idp")))
  return said | arrays(f"local/again/checkpoint_{STEPS}")


@job("local/finetune of a dense checkpoint")
def _():
  local("dense", "dense")
  files = ("gin_configs/runs/local_finetune.gin", LOCAL[1])
  start = dict(INITIAL_CHECKPOINT_PATH="local/dense/checkpoint_20")
  said = call("train", *flags(*files, TINY, **local_macros("tuned", "mdgf_linear", **start)))
  return said | arrays("local/tuned/checkpoint_40")


def judged(command, **macros):
  local("sdgf_stepwise", "sdgf_stepwise")
  where = {"eval": "EVAL_OUTPUT_DIR", "infer": "INFER_OUTPUT_DIR"}[command]
  more = {where: f"made/{command}", "CHECKPOINT_PATH": "local/sdgf_stepwise/checkpoint_10"}
  more |= {"TASK_FEATURE_LENGTHS": {"inputs": 8, "targets": 8}} | macros
  run = f"gin_configs/runs/local_{command}.gin"
  said = call(command, *flags(run, TINY, **rules("sdgf_stepwise", **more)))
  return said | {"files": scores(f"made/{command}")}


JOBS["local/eval"] = functools.partial(judged, "eval", NUM_DECODES=2)
JOBS["local/infer"] = functools.partial(judged, "infer", EVAL_SPLIT="validation")


def finalized(recipe):
  local(recipe, recipe)
  folder, plain = f"final/{recipe}", ["--rules", "{'ff': '1:4'}"] * (recipe == "dense")
  said = {"finalize": call("finalize", f"local/{recipe}", folder, *plain)}
  said["verify"] = call("verify", folder, *plain)
  said["before"] = call("verify", f"local/{recipe}/checkpoint_{STEPS}", *plain)
  if recipe == "dense":  # refused
    return said
  return said | arrays(f"{folder}/checkpoint_{STEPS}")


for _recipe in RECIPES:
  JOBS[f"finalize/{_recipe}"] = functools.partial(finalized, _recipe)
JOBS["finalize/early, as JSON"] = lambda: (
  local("idp", "idp")
  and call("finalize", "local/idp/checkpoint_10", "final/early", "--early", "--json")
)

# --- T5X ----------------------------------------------------------------------------------------


@functools.cache
def t5x_trained(folder, recipe, *files, **more):
  """A run of T5X's trainer, in this process, configured by gin as `python -m t5x.train` does it."""
  import gin
  import t5x.train
  from t5x import gin_utils

  run = "pretrain" if recipe == "dense" else "finetune"
  macros = dict(
    MODEL_DIR=str(work() / "t5x" / folder), BATCH_SIZE=16, EVAL_STEPS=2, EVAL_PERIOD=STEPS,
    METRICS_EVERY=None, DROPOUT_RATE=0.1, LEARNING_RATE=0.02, WARMUP_STEPS=4,
  )  # fmt: skip
  if recipe != "dense":
    t5x_trained("dense", "dense")
    start = str(work() / f"t5x/dense/checkpoint_{STEPS}")
    macros |= dict(INITIAL_CHECKPOINT_PATH=start, PRETRAINED_STEPS=STEPS)
  files = [f"gin_configs/runs/t5x_{run}.gin", str(HERE / "t5x_tiny.gin"), *files]
  bindings = [f"{k} = {v!r}" for k, v in (macros | rules(recipe)).items()]
  bindings += [f"{k} = {v!r}" for k, v in more.items()]
  script, sys.modules["__main__"] = sys.modules["__main__"], t5x.train
  prefixes = list(gin.config._LOCATION_PREFIXES)  # an error names them
  try:
    with t5x_found.closed_loops(), open(os.devnull, "w") as nowhere:
      gin.clear_config()
      gin_utils.parse_gin_flags([str(ROOT), str(HERE), str(t5x_home())], files, bindings)
      with contextlib.redirect_stdout(nowhere):
        gin.get_configurable(t5x.train.train)()
  finally:
    gin.clear_config()
    gin.config._LOCATION_PREFIXES[:] = prefixes
    sys.modules["__main__"] = script


def t5x_run(folder, recipe, *args, **more):
  t5x_trained(folder, recipe, *args, **more)
  found = arrays(f"t5x/{folder}/checkpoint_{STEPS * (1 + (recipe != 'dense'))}")
  return found | {"scores": scores(f"t5x/{folder}")}


for _recipe in RECIPES:
  JOBS[f"t5x/{_recipe}"] = functools.partial(t5x_run, _recipe, _recipe)
JOBS["t5x/sr_ste with adafactor, microbatches"] = functools.partial(
  t5x_run, "hard", "sr_ste", "gin_configs/runs/t5x_adafactor.gin",
  **{"t5x_adapter.SparseTrainer.num_microbatches": 2},
)  # fmt: skip


@job("t5x/idp with the network of this library")
def _():
  text = "from __gin__ import dynamic_registration\nimport seqio\n"
  text += f"include '{TINY}'\nVOCABULARY = @seqio.ByteVocabulary()\n"
  pathlib.Path("ours.gin").write_text(text)
  return t5x_run("ours", "idp", str(work() / "ours.gin"))
