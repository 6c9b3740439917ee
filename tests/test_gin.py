"""gin_configs: every file is read, and what it describes is made, without T5X and with it."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import t5x_found

from nm_sparsity_jax.runs import paper, results

ROOT = pathlib.Path(__file__).resolve().parents[1]
GIN = ROOT / "gin_configs"
FILES = sorted(str(p.relative_to(ROOT)) for p in GIN.rglob("*.gin"))
SPARSITY = "gin_configs/sparsity.gin"


def stems(folder):
  return sorted(p.stem for p in (GIN / folder).glob("*.gin"))


RUNS = sorted(p.stem for p in (GIN / "runs").glob("*.gin"))
SIZES = [
  *(("t5_1_1", size) for size in ("tiny", "small", "base", "large", "xl", "xxl")),
  *(("t5_1_0", size) for size in ("tiny", "small", "base", "large", "3B", "11B")),
]
STEPS = ["SPARSE_STEPS = 1000", "DENSE_STEPS = 100", "FINETUNE_STEPS = 200"]


def included(file):
  """The files that a gin file includes, those of this package with what they include."""
  lines = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
  for name in re.findall(r"(?m)^include '(.+)'", lines):
    yield name
    yield from included(name)


@pytest.mark.parametrize("file", [f for f in FILES if "/runs/" in f])
def test_a_run_file_sets_the_macros_of_sparsity_once(file):
  """A second time would take back what the files in between have set, such as the phases."""
  assert [*included(file)].count(SPARSITY) <= 1


# --- the texts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_a_file_says_what_it_is_and_imports_what_it_may(file):
  lines = (ROOT / file).read_text().splitlines()
  assert lines[0].startswith("# ") and max(map(len, lines)) <= 100
  code = [line.split("#")[0].rstrip() for line in lines]
  code = [line for line in code if line]
  assert code[0] == "from __gin__ import dynamic_registration"
  imports = [line for line in code if re.match(r"(from|import) ", line)]
  assert code[: len(imports)] == imports  # before use
  assert not any("," in line for line in imports)
  if not file.startswith("gin_configs/runs/t5x_"):
    mine = r"from (__gin__|nm_sparsity_jax)\b"
    mine += "|import optax$" if file.startswith("gin_configs/runs/local_") else ""
    assert all(re.match(mine, line) for line in imports)


def test_there_are_few_files():
  assert len([p for p in GIN.rglob("*") if p.is_file() and p.suffix != ".pyc"]) <= 60


def test_translation_is_evaluated_on_each_pair_of_newstest2014_about_once():
  text = (GIN / "runs/t5x_wmt.gin").read_text()
  said = {name: int(x) for name, x in re.findall(r"^(BATCH_SIZE|EVAL_STEPS) = (\d+)$", text, re.M)}
  assert said["EVAL_STEPS"] == -(-3003 // said["BATCH_SIZE"])
  assert "\n  eval_steps = %EVAL_STEPS\n" in text
  assert "\ntrain_eval/utils.DatasetConfig.pack = False\n" in text


# --- without T5X ----------------------------------------------------------------------------------

CASES = {}


def case(files, bindings=(), make=("RULES",)):
  """Adds a case to those that one process reads; returns its name."""
  name = json.dumps([files, list(bindings), list(make)])
  CASES[name] = {"files": list(files), "bindings": list(bindings), "make": list(make)}
  return name


def probe(cases, mode, env=None):
  path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
  env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **(env or {})}
  done = subprocess.run(
    [sys.executable, str(ROOT / "tests/gin_probe.py"), mode], input=json.dumps(cases), env=env,
    capture_output=True, text=True, check=False, cwd="/",  # files are found by search path
  )  # fmt: skip
  assert not done.returncode, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def without_t5x():
  if importlib.util.find_spec("gin") is None:
    pytest.skip("gin is not here: pip install -e '.[dev]' brings gin-config")
  return probe(CASES, "blocked")


MODEL_MACROS = ["NETWORK", "Z_LOSS", "LABEL_SMOOTHING", "LOSS_NORMALIZING_FACTOR"]
T5, WMT = "gin_configs/models/t5.gin", "gin_configs/models/wmt.gin"


def of_size(version, size):
  return [f"T5_VERSION = {version!r}", f"T5_SIZE = {size!r}"]


MODEL_CASES = {
  (*model, scan): case(
    [T5] if model else [WMT],
    [f"SCAN_LAYERS = {scan}", *(of_size(*model) if model else [])],
    MODEL_MACROS,
  )
  for model in (*SIZES, ())
  for scan in (False, True)
}


@pytest.mark.parametrize("model", MODEL_CASES)
def test_a_model_is_made(model):
  found = without_t5x()[MODEL_CASES[model]]
  *model, scan = model
  assert found.get("Z_LOSS") == 0.0001 and found["LOSS_NORMALIZING_FACTOR"] is None, found
  network = found["NETWORK"]
  assert network["scan_layers"] == scan and network["dtype"] == "bfloat16"
  assert network["dropout_rate"] == 0.1 and network["vocab_size"] == 32128
  assert found["LABEL_SMOOTHING"] == (0.0 if model else 0.1)
  from nm_sparsity_jax.models.t5 import T5Config

  want = T5Config.preset(*model) if model else T5Config.wmt()
  for field in ("emb_dim", "num_heads", "num_decoder_layers", "head_dim", "mlp_dim"):
    assert network[field] == getattr(want, field)
  assert tuple(network["mlp_activations"]) == want.mlp_activations
  if "tiny" in model:
    assert network["parameters"] > 2 * 32128 * 128 - (want.logits_via_embedding * 32128 * 128)


MINI = "gin_configs/models/mini.gin"
CHOICES = {
  "recipe": case([SPARSITY], ["RECIPE='sr_ste'", "PATTERN='2:4'", *STEPS]),
  "rules": case(
    [SPARSITY], ["SPARSITY_RULES={'ff': '1:8', 'qkv': '1:4'}", "RECIPE='sr_ste'", *STEPS]
  ),
  "places": case(
    [SPARSITY],
    ["SPARSITY_RULES={'ff': None, 'qkv': None}", "RECIPE='idp'", "PATTERN='1:4'", *STEPS],
  ),
  "sizes": case(
    [T5], [*of_size("t5_1_1", "base"), "VOCAB_SIZE = 384", "DTYPE = 'float32'",
           "REMAT_POLICY = 'minimal'", "network.T5Config.preset.mlp_dim = 64",
           "DROPOUT_RATE = 0.0"], ["NETWORK"],
  ),
  "bad version": case([T5], of_size("t5", "base"), ["NETWORK"]),
  "bad size": case([T5], of_size("t5_1_1", "huge"), ["NETWORK"]),
  "no path": case([SPARSITY], ["RECIPE='custom'", "PATTERN='1:8'", *STEPS]),
  "mini": case([MINI], (), ["NETWORK"]),
  "seqio": case([MINI], (), ["VOCABULARY"]),
}  # fmt: skip


def choice(name):
  return without_t5x()[CHOICES[name]]


def test_rules_from_the_command_line():
  tail = ", total=1000, dense=100, finetune=200"
  assert choice("recipe")["RULES"] == f"ff: sr_ste 2:4{tail}"
  assert choice("rules")["RULES"] == f"ff: sr_ste 1:8{tail}\nqkv: sr_ste 1:4{tail}"
  assert choice("places")["RULES"] == f"ff: idp 1:4{tail}\nqkv: idp 1:4{tail}"


def test_sizes_from_the_command_line():
  network = choice("sizes")["NETWORK"]
  assert [network[k] for k in ("vocab_size", "dtype", "remat_policy", "mlp_dim", "dropout_rate")] \
    == [384, "float32", "minimal", 64, 0.0]  # fmt: skip
  assert "choose one of t5_1_1, t5_1_0" in choice("bad version")["error"]
  assert "choose one of tiny, small" in choice("bad size")["error"]
  assert "custom needs a path" in choice("no path")["error"]


def test_the_model_for_mini_glue():
  network = choice("mini")["NETWORK"]
  assert [network[k] for k in ("vocab_size", "dtype", "emb_dim")] == [256, "float32", 128]


def test_nothing_heavy_is_imported():
  assert "import of seqio halted" in choice("seqio")["error"]  # so the block holds


NEEDED = {
  "RECIPE": case([SPARSITY], ["PATTERN='1:8'", *STEPS]),
  "PATTERN": case([SPARSITY], ["RECIPE='sr_ste'", *STEPS]),
  "SPARSE_STEPS": case([SPARSITY], ["RECIPE='sr_ste'", "PATTERN='1:8'"]),
  "RECIPE_FIELDS": case([SPARSITY], ["RECIPE='custom'", "PATTERN='1:8'", *STEPS]),
  "T5_SIZE": case([T5], (), ["NETWORK"]),
}


@pytest.mark.parametrize("macro", NEEDED)
def test_a_missing_macro_is_named(macro):
  first_line = without_t5x()[NEEDED[macro]]["error"].splitlines()[0]
  assert re.search(rf"(?<!\w){macro}\b", first_line), first_line


# --- with T5X -------------------------------------------------------------------------------------

T5X = {}
SMALL = ["T5_SIZE = 'tiny'", "VOCABULARY_FILE = 'bytes'", "VOCAB_SIZE = 384"]
SIMPLE = ["RECIPE = 'sr_ste'", "PATTERN = '1:8'"]
TASK = {
  "MIXTURE_OR_TASK_NAME": "'nm_glue_rte'", "MIXTURE_OR_TASK_MODULE": "'t5x_tasks'",
  "TASK_FEATURE_LENGTHS": "{'inputs': 16, 'targets': 8}",
}  # fmt: skip
RUN_NEEDS = {
  "pretrain": {"MODEL_DIR": "'m'", "SPARSE_STEPS": "1000", **TASK},
  "finetune": {
    "MODEL_DIR": "'m'", "SPARSE_STEPS": "1000", "INITIAL_CHECKPOINT_PATH": "'/'",
    "PRETRAINED_STEPS": "7_000", **TASK,
  },
  "wmt": {"MODEL_DIR": "'m'", "SPARSE_STEPS": "1000"},
  "mini": {"MODEL_DIR": "'m'", "SPARSE_STEPS": "1000"},
  "eval": {"CHECKPOINT_PATH": "'c'", "EVAL_OUTPUT_DIR": "'e'", "SPARSE_STEPS": "1000", **TASK},
  "infer": {"CHECKPOINT_PATH": "'c'", "INFER_OUTPUT_DIR": "'i'", "SPARSE_STEPS": "1000", **TASK},
  "infer_glue_test": {
    "CHECKPOINT_PATH": "'c'", "INFER_OUTPUT_DIR": "'i'", "SPARSE_STEPS": "1000",
    "MIXTURE_OR_TASK_NAME": "'nm_glue_rte'",
  },
}  # fmt: skip
MAIN = {
  "pretrain": "train", "finetune": "train", "wmt": "train", "mini": "train",
  "infer_glue_test": "infer",
}  # fmt: skip
FRAGMENTS = (  # included, or beside a run
  "t5x_adamw", "t5x_adafactor", "t5x_model", "t5x_stored_rules", "t5x_trainer",
)  # fmt: skip


def t5x_case(name, run, files, bindings, make=("MODEL",), **more):
  T5X[name] = dict(
    files=files, bindings=bindings, make=list(make), main=MAIN.get(run, run), **more
  )  # fmt: skip
  return name


def bind(macros):
  return [f"{k} = {v}" for k, v in macros.items()]


def files_of(run, optimizer="adamw"):
  optimizer = [f"gin_configs/runs/t5x_{optimizer}.gin"] if MAIN.get(run) == "train" else []
  return [T5, *optimizer, f"gin_configs/runs/t5x_{run}.gin"]


THEIRS = {(v, size): f"t5x/examples/t5/{v}/{size}.gin" for v, size in SIZES if size != "tiny"}
for file in THEIRS.values():  # first: they leave it to gin which `network` they mean
  t5x_case(file, "train", [file], ["DROPOUT_RATE = 0.1", "VOCABULARY = None"])
for run, needs in RUN_NEEDS.items():
  for optimizer in ("adamw", "adafactor"):
    t5x_case(f"{run} {optimizer}", run, files_of(run, optimizer), [*SMALL, *SIMPLE, *bind(needs)])
  for macro in needs:
    rest = {k: v for k, v in needs.items() if k != macro}
    t5x_case(f"{run} without {macro}", run, files_of(run), [*SMALL, *SIMPLE, *bind(rest)])
FINETUNE = [*SIMPLE, *bind(RUN_NEEDS["finetune"])]
t5x_case("no model", "finetune", files_of("finetune")[1:], FINETUNE)
t5x_case("no optimizer", "finetune", [f for f in files_of("finetune") if "adamw" not in f],
         [*SMALL, *FINETUNE])  # fmt: skip
t5x_case("not packed", "pretrain", files_of("pretrain"),
         [*SMALL, *SIMPLE, *bind(RUN_NEEDS["pretrain"]), "PACK = False", "LEARNING_RATE = 0.5"],
         )  # fmt: skip
ROWS = {  # the first and the last of each table of T5; test_paper.py has all
  t5x_case(
    f"{row.table} {row.name}", run,
    [f"gin_configs/runs/t5x_{x}.gin" for x in ("adamw", run)] + [f"gin_configs/paper/{table}.gin"],
    ["MODEL_DIR = 'm'", "VOCABULARY_FILE = 'bytes'", f"ROW = {row.name!r}"],
  ): row
  for run, tables in (("finetune", (4, 7, 12)), ("wmt", (5, 9, 10)))
  for table in (f"table{n}" for n in tables)
  for row in [*paper.rows()[table].values()][:: len(paper.rows()[table]) - 1]
}  # fmt: skip
t5x_case("row first", "finetune",
         ["gin_configs/paper/table4.gin",
          *(f"gin_configs/runs/t5x_{x}.gin" for x in ("adamw", "finetune"))],
         ["MODEL_DIR = 'm'", "ROW = 'sr_ste 1:4'"])  # fmt: skip


def probe_t5x(cases):
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  stub = str(ROOT / "tests/t5x_stub")
  # The stub hides the real tasks, which would download.
  path = os.pathsep.join([stub, str(ROOT), *filter(None, sys.path), *t5x_found.paths()])
  return probe(cases, "t5x", {"PYTHONPATH": path})


FOLDERS = []


@pytest.fixture(scope="module", autouse=True)
def a_folder_for_small_runs(tmp_path_factory):
  FOLDERS[:] = [tmp_path_factory.mktemp("small_runs")]


@functools.cache
def with_t5x():
  """What the cases say, and the small runs, which come last: importing T5X is most of a process."""
  return probe_t5x(T5X | small_runs(*FOLDERS))


def model_of(name):
  found = with_t5x()[name]
  assert "MODEL" in found, found
  return found["MODEL"]


def test_every_run_file_is_tested():
  found = [name for name in RUNS if not name.startswith("local_")]  # those: test_local.py
  assert sorted(["t5x_" + run for run in RUN_NEEDS] + list(FRAGMENTS)) == found


@pytest.mark.t5x
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("run", RUN_NEEDS)
def test_a_run_is_made(run, optimizer):
  found = model_of(f"{run} {optimizer}")
  assert found["class"] == "SparseEncoderDecoderModel" and found["vocabulary"] == "ByteVocabulary"
  assert found["rules"] == "ff: sr_ste 1:8, total=1000"
  assert "nm_sparsity" in found["collections"] and found["network"]["emb_dim"] == 128
  training = MAIN.get(run) == "train"
  names = {"adamw": "OptaxWrapper", "adafactor": "Adafactor"}
  assert found["optimizer"] == (names[optimizer] if training else "NoneType")
  assert found["network"]["dropout_rate"] == (0.1 if run in ("finetune", "wmt") else 0.0)
  if not training:
    return
  start = 7_000 if run == "finetune" else 0
  assert found["trainer"] == [True, None, 100] and found["total_steps"] == start + 1000
  assert found["save"] == ["float32", True] and found["random_seed"] == 0
  data = found["data"]
  assert data["seed"] == 0 and not data["use_cached"] and data["module"] == "t5x_tasks"
  assert data["pack"] == (run in ("pretrain", "wmt"))
  assert found["loss_normalizing_factor"] == (233472 if run == "wmt" else None)
  # All schedules start with the sparse run, whatever the step of the checkpoint.
  rates = {
    "pretrain": [0.01, 0.01, 0.01, 0.01],
    "finetune": [1e-8, 0.0005, 0.001, 0.001],
    "wmt": [1e-8, 0.0625 / 2 / 1000**0.5, 0.0625 / 1000**0.5, 0.0625 / 4000**0.5],
    "mini": [1e-8, 0.002, 0.002, 0.002],
  }[run]
  assert list(found["rate"].values()) == pytest.approx(rates, rel=1e-5)
  if optimizer == "adafactor":
    assert found["adafactor_offset"] == start
  else:
    second = {
      "pretrain": 0.01, "finetune": 1e-6, "wmt": 0.0625 / 1000 / 1000**0.5, "mini": 2e-5,
    }[run]  # fmt: skip
    assert found["second_update"] == pytest.approx(-second, rel=1e-3)
  if run == "finetune":
    assert found["restore"] == ["float32", True, True]
  if run == "mini":
    assert found["infer_eval"] and data["batch_size"] == 64
    assert data["mixture_or_task_name"] == "nm_glue_mini_proportional"
    assert data["task_feature_lengths"] == {"inputs": 24, "targets": 4}
  if run == "wmt":
    assert found["infer_eval"] and data["batch_size"] == 512
    assert data["mixture_or_task_name"] == "nm_wmt17_ende"
    assert data["task_feature_lengths"] == {"inputs": 256, "targets": 256}


@pytest.mark.t5x
def test_packing_and_rates_are_macros():
  found = model_of("not packed")
  assert not found["data"]["pack"] and found["rate"]["0"] == pytest.approx(0.005)


@pytest.mark.t5x
@pytest.mark.parametrize("run", RUN_NEEDS)
def test_a_run_names_what_it_misses(run):
  for macro in RUN_NEEDS[run]:
    found = with_t5x()[f"{run} without {macro}"]
    if macro == "MIXTURE_OR_TASK_MODULE" or (run, macro) == ("eval", "TASK_FEATURE_LENGTHS"):
      assert "MODEL" in found  # T5X does without: what is imported already; the longest example
    else:
      first_line = found["error"].splitlines()[0]
      assert re.search(rf"(?<!\w){macro}\b", first_line), first_line


@pytest.mark.t5x
def test_a_run_without_model_or_optimizer_names_it():
  name = with_t5x()["no model"]["error"].splitlines()[0].split("'")[1]
  assert name in [f"{x}/gin.macro" for x in ("NETWORK", "VOCABULARY", "Z_LOSS", "LABEL_SMOOTHING")]
  assert "'OPTIMIZER/gin.macro'" in with_t5x()["no optimizer"]["error"].splitlines()[0]
  assert "INITIAL_CHECKPOINT_PATH" in with_t5x()["row first"]["error"].splitlines()[0]


@pytest.mark.t5x
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_paper_runs_by_its_command(name):
  found, row = model_of(name), ROWS[name]
  rules = found["rules"]
  assert rules.split(": ")[1].startswith(row.published["recipe"]) and "total=" in rules
  assert found["optimizer"] == "OptaxWrapper"
  data = found["data"]
  if row.table in ("table5", "table9", "table10"):
    assert found["total_steps"] == 200_000 and data["pack"] and data["batch_size"] == 512
    assert found["loss_normalizing_factor"] == 233472 and found["label_smoothing"] == 0.1
    assert found["rate"]["4000"] == pytest.approx(0.0625 / 4000**0.5)
  else:
    assert found["total_steps"] == 1_100_000 and not data["pack"] and data["batch_size"] == 128
    assert found["rate"]["500"] == pytest.approx(0.0005)
    assert found["second_update"] == pytest.approx(-1e-6, rel=1e-3)
    assert found["restore"] == ["float32", True, True]


@pytest.mark.t5x
@pytest.mark.parametrize("model", THEIRS)
def test_a_model_has_the_sizes_of_t5x(model):
  theirs = model_of(THEIRS[model])
  ours = without_t5x()[MODEL_CASES[*model, False]]["NETWORK"]
  assert theirs["network"] == {k: ours[k] for k in theirs["network"]}
  assert (theirs["z_loss"], theirs["label_smoothing"]) == (0.0001, 0.0)


TINIER = [
  *SMALL, "DTYPE = 'float32'", "network.T5Config.preset.emb_dim = 32",
  "network.T5Config.preset.mlp_dim = 64", "network.T5Config.preset.num_encoder_layers = 1",
  "network.T5Config.preset.num_decoder_layers = 1", "BATCH_SIZE = 8",
  "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}",
]  # fmt: skip
FEW = ["SPARSE_STEPS = 6", "DENSE_STEPS = 1", "FINETUNE_STEPS = 1"]


def small_runs(folder):
  """A dense pre-training, a GLUE row from its checkpoint, a test set with `idx`."""
  row = "gin_configs/paper/table12.gin"
  runs = "gin_configs/runs/t5x_"
  small = [*TINIER, *FEW, "ROW = 'sdgf_stepwise ff=1:8 qkv=1:4 dense_steps=10000'"]
  dense, sparse = folder / "dense", folder / "sparse"
  return {
    "dense": dict(
      main="train", call="train", files=[T5, f"{runs}adafactor.gin", f"{runs}pretrain.gin"],
      bindings=[*small, *bind(TASK), "RECIPE = 'dense'", f"MODEL_DIR = '{dense}'"],
    ),
    "sparse": dict(
      main="train", call="train", files=[f"{runs}adamw.gin", f"{runs}finetune.gin", row],
      bindings=[
        *small, f"MODEL_DIR = '{sparse}'", f"INITIAL_CHECKPOINT_PATH = '{dense}/checkpoint_6'",
        "PRETRAINED_STEPS = 6", "EVAL_STEPS = 1",
      ],
    ),
    "eval": dict(
      main="eval", call="evaluate", files=[f"{runs}eval.gin", row],
      bindings=[
        *small, f"CHECKPOINT_PATH = '{sparse}/checkpoint_12'",
        f"EVAL_OUTPUT_DIR = '{folder}/eval'", "utils.DatasetConfig.batch_size = 8",
      ],
    ),
    "infer": dict(
      main="infer", call="infer", files=[f"{runs}infer_glue_test.gin", row],
      bindings=[
        *small, "MIXTURE_OR_TASK_NAME = 'nm_glue_rte'",
        f"CHECKPOINT_PATH = '{sparse}/checkpoint_12'", f"INFER_OUTPUT_DIR = '{folder}/infer'",
        "utils.DatasetConfig.batch_size = 8",
      ],
    ),
  }  # fmt: skip


def small_wmt(folder):
  """A row of WMT, which pre-trains with evaluation by beam search."""
  few = [*TINIER, *FEW]
  return {
    "wmt": dict(
      main="train", call="train",
      files=["gin_configs/runs/t5x_adamw.gin", "gin_configs/runs/t5x_wmt.gin",
             "gin_configs/paper/table5.gin"],
      bindings=[
        "ROW = 'mdgf_exponential 1:16'",
        *[x.replace("preset", "wmt") for x in few], f"MODEL_DIR = '{folder}/wmt'",
        "EVAL_PERIOD = 6", "utils.SaveCheckpointConfig.period = 6", "NUM_DECODES = 2",
        "train_script.train.eval_steps = 1",
        "network.T5Config.wmt.num_heads = 2", "infer_eval/utils.DatasetConfig.batch_size = 8",
      ],
    ),
  }  # fmt: skip


@pytest.mark.t5x
def test_rows_of_the_paper_run():
  (folder,), found = FOLDERS, with_t5x()
  cases = small_runs(folder)
  assert {name: found[name] for name in cases} == dict.fromkeys(cases, {})
  assert (folder / "sparse/checkpoint_12").is_dir()
  run = results.settings(folder / "sparse")  # by the ROW in config.gin
  assert run.recipe == "sdgf_stepwise" and run.places == dict(ff="1:8", q="1:4", k="1:4", v="1:4")
  assert "ROW = 'sdgf_stepwise" in (folder / "sparse/config.gin").read_text()
  (written,) = (folder / "infer").glob("nm_glue_rte-predict.jsonl-00000-of-00001")
  lines = [json.loads(line) for line in written.read_text().splitlines()]
  assert [line["inputs"] for line in lines] == [
    {"idx": i, "inputs_pretokenized": f"rte {i}", "targets_pretokenized": "yes"} for i in range(8)
  ]
  assert all(isinstance(line["prediction"], str) for line in lines)


# That a row of WMT is what it should be, test_a_row_of_the_paper_runs_by_its_command holds; of its
# run file test_a_run_is_made does; test_t5x_thread.py decodes between the steps of a run.
@pytest.mark.t5x
@pytest.mark.slow
def test_a_row_of_wmt_runs(tmp_path):
  assert probe_t5x(small_wmt(tmp_path)) == {"wmt": {}}
  assert (tmp_path / "wmt/checkpoint_6").is_dir()
