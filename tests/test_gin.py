"""gin_configs: every file is read, and what it describes is made, without T5X and with it."""

import functools
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import t5x_found

from nm_sparsity_jax import configure
from nm_sparsity_jax.recipes import RECIPES

ROOT = pathlib.Path(__file__).resolve().parents[1]
GIN = ROOT / "gin_configs"
FILES = sorted(str(p.relative_to(ROOT)) for p in GIN.rglob("*.gin"))
SPARSITY = "gin_configs/sparsity.gin"


def stems(folder):
  return sorted(p.stem for p in (GIN / folder).glob("*.gin"))


MODELS = [f for f in FILES if re.fullmatch(r"gin_configs/models/(t5_1_\d/\w+|wmt)\.gin", f)]
VISION = [f for f in FILES if f.startswith("gin_configs/models/vision/")]  # test_vision_runs.py
PATTERNS, RUNS = stems("patterns"), stems("runs")
# Those of T5; tests/test_paper_images.py has those of images.
ROWS = [f for f in FILES if re.match(r"gin_configs/paper/table(4|5|7|9|10|12)/", f)]
IMAGES = [f for f in FILES if re.match(r"gin_configs/paper/(table[236]|figure3)/", f)]
STEPS = ["SPARSE_STEPS = 1000", "DENSE_STEPS = 100", "FINETUNE_STEPS = 200"]
PATH = "RECIPE_FIELDS = {'path': ((100, '1:2', 0.5),)}"


def patterns_of(stem):
  """'ff_1_8_qkv_1_4' -> {'ff': '1:8', 'qkv': '1:4'}; 'ff_qk_1_8' -> both 1:8."""
  out, waiting = {}, []
  words = stem.split("_")
  while words:
    if words[0].isdigit():
      n, m, *words = words
      out |= dict.fromkeys(waiting, f"{n}:{m}")
      waiting = []
    else:
      waiting.append(words.pop(0))
  assert not waiting
  return out


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


# --- the paper, as data ---------------------------------------------------------------------------

# Table 12: file, overall score, and those of TASKS. It calls SDGF MDGF.
TASKS = "CoLA MNLI MRPC QNLI QQP RTE SST-2 STS-B"
TABLE_12 = """
dense 86.2 58.9 87.2/87 92.4/89.2 93.6 92.0/89.2 82.3 95 90.1/90.0
sr_ste_ff_1_4_zero 83.1 41.8 85.2/85.3 92.8/90.0 92.3 91.8/88.9 79.1 93.6 89.5/89.2
sr_ste_ff_1_4_10k 84.1 48.1 85.7/85.6 92.4/89.5 92.1 91.8/89.0 82.7 93.6 87.9/87.7
sdgf_stepwise_ff_1_4_10k 83.7 48.8 85.3/85.4 92.4/89.2 92.3 91.8/89.0 80.5 93.5 86.5/86.3
sdgf_geometric_ff_1_4_zero 83.3 48.4 85.3/85.3 92.0/89.0 91.8 91.8/88.9 78 92.8 87.3/87.4
sdgf_geometric_ff_1_4_10k 83.4 47.2 85.4/85.3 92.6/89.7 92 91.8/89.0 79.8 92.9 86.7/86.4
sr_ste_ff_1_32_zero 77.1 19 81.3/81.3 90.9/87.0 86.9 90.6/87.4 71.1 89.9 86.7/86.8
sr_ste_ff_1_32_10k 79.4 29.4 82.2/82.6 91.5/88.5 89.6 91.2/88.2 72.6 91.4 87.1/87.2
sdgf_stepwise_ff_1_32_10k 80.9 38.3 83.6/83.7 92.5/89.7 90.5 91.5/88.5 74.4 91.2 85.2/85.0
sdgf_geometric_ff_1_32_zero 77.6 20.2 81.3/81.6 91.8/88.5 87.2 90.8/87.7 73.3 90.1 85.8/85.5
sdgf_geometric_ff_1_32_10k 79.3 29.2 82.3/82.9 91.3/88.0 90.4 91.3/88.3 73.3 90.5 85.4/85.4
sr_ste_ff_qk_1_8_zero 74.4 15.7 77.2/77.6 89.9/85.8 83.6 89.7/86.2 67.5 88.2 84.1/83.9
sr_ste_ff_qk_1_8_10k 75.8 19.9 78.6/79.4 89.7/86.0 84 90.1/86.7 70 89.4 84.5/84.2
sdgf_stepwise_ff_qk_1_8_10k 80.7 38.7 83.1/83.2 90.9/87.7 89.9 91.2/88.2 76.2 91.9 84.5/84.5
sdgf_geometric_ff_qk_1_8_zero 75.8 21.6 78.8/79 90.0/86.0 83.6 90.1/86.6 69.7 88.9 84.0/83.9
sdgf_geometric_ff_qk_1_8_10k 76.8 22.3 80.7/80.9 89.8/85.8 86.3 90.5/87.4 70 91.1 83.7/83.4
sr_ste_ff_qkv_1_8_zero 73.2 13.5 76.3/76.4 89.0/84.6 83.2 89.5/85.9 63.9 87 84.3/84.2
sr_ste_ff_qkv_1_8_10k 74.2 16.1 77.7/77.6 88.5/84.1 82.9 89.9/86.3 66.4 88.8 84.4/84.2
sdgf_stepwise_ff_qkv_1_8_10k 79.5 33 82.3/82.3 91.3/87.7 89.2 91.0/88.0 74.4 91.1 84.5/84.8
sdgf_geometric_ff_qkv_1_8_zero 75.5 22.1 78.6/78.7 90.5/86.8 83.4 90.0/86.5 67.9 88.2 84.2/84.2
sdgf_geometric_ff_qkv_1_8_10k 75.8 19.5 79.4/79.6 89.4/85.3 84.5 90.2/86.8 70.4 89.8 83.3/83.0
sr_ste_ff_1_8_qkv_1_4_zero 75.1 15 78.4/79 90.5/86.8 84.2 90.1/86.6 67.9 88.4 86.2/86.1
sr_ste_ff_1_8_qkv_1_4_10k 78 24.5 81.2/81.6 91.1/87.7 87.1 90.6/87.3 72.2 90.9 85.8/85.8
sdgf_stepwise_ff_1_8_qkv_1_4_10k 80.3 36.4 83.2/83.4 90.9/87.3 90.3 91.3/88.3 74.7 90.9 85.2/85.0
sdgf_geometric_ff_1_8_qkv_1_4_zero 76.8 20.2 80.5/80.8 91.3/87.7 85.4 90.3/87.0 70.8 90.4 84.9/84.9
sdgf_geometric_ff_1_8_qkv_1_4_10k 78.9 27.7 82.4/82.4 91.3/87.7 88.8 91.0/88.1 74.4 91.3 84.5/84.5
"""

# Files of Table 4, in the order of its columns.
TABLE_4 = {
  "dense": "86.2",
  **{
    f"{recipe}_{stem}": score
    for stem, scores in {
      "ff_1_4": "84.1 83.7 83.4",
      "ff_1_32": "79.4 80.9 79.3",
      "ff_qk_1_8": "75.8 80.7 76.8",
      "ff_1_8_qkv_1_4": "78 80.3 78.9",
      "ff_qkv_1_8": "74.2 79.5 75.8",
    }.items()
    for recipe, score in zip(
      ("sr_ste", "sdgf_stepwise", "sdgf_geometric"), scores.split(), strict=True
    )
  },
}
TABLE_7 = {
  "sr_ste_ff_1_32": "79.4", "snip_ff_1_32": "79.5", "idp_ff_1_32": "80.6",
  "mdgf_exponential_ff_1_32": "80.9",
}  # fmt: skip


def by_pattern(recipe, *scores):
  stems = ("ff_1_16", "ff_1_32", "ff_1_64", "ff_1_128")
  return {f"{recipe}_{stem}": score for stem, score in zip(stems, scores, strict=True)}


TABLE_5 = {
  "dense": "0.747",
  **by_pattern("sr_ste", "0.709", "0.707", "0.707", "0.707"),
  **by_pattern("sdgf_stepwise", "0.717", "0.713", "0.710", "0.708"),
  **by_pattern("mdgf_exponential", "0.717", "0.714", "0.711", "0.711"),
}
TABLE_9 = {
  **by_pattern(
    "mdgf_linear",
    "0.7155 0.7160 0.7157 0.7156",
    "0.7134 0.7127 0.7137 0.7126",
    "0.7106 0.7110 0.7103 0.7107",
    "0.7100 0.7093 0.7094 0.7104",
  ),
  **by_pattern(
    "sdgf_stepwise",
    "0.7157 0.7160 0.7164 0.7165",
    "0.7134 0.7136 0.7141 0.7128",
    "0.7108 0.7117 0.7107 0.7115",
    "0.7106 0.7100 0.7098 0.7107",
  ),
}
TABLE_10 = {
  **by_pattern("mdgf_linear", "0.7153 0.7161", "0.7130 0.7132", "0.7107 0.7106", "0.7098 0.7097"),
  **by_pattern("sdgf_stepwise", "0.7160 0.7121", "0.7125 0.7093", "0.7095 0.7081", "0.7072 0.7065"),
}


def published():
  """File -> how its line of the published score goes on."""
  out = {}
  for line in TABLE_12.strip().splitlines():
    name, score, *scores = line.split()
    tasks = ", ".join(map(" ".join, zip(TASKS.split(), scores, strict=True)))
    out[f"table12/{name}{'_dense' * (name != 'dense')}"] = f"overall {score}; {tasks}."
  out |= {f"table4/{name}": f"overall {score}" for name, score in TABLE_4.items()}
  out |= {f"table7/{name}": f"overall {score}" for name, score in TABLE_7.items()}
  out |= {f"table5/{name}": f"accuracy {score}" for name, score in TABLE_5.items()}
  for name, scores in TABLE_9.items():
    phases = "DENSE_STEPS = 2_500 5_000 10_000 20_000"
    out[f"table9/{name}"] = f"accuracy {scores} for {phases}."
  for name, scores in TABLE_10.items():
    out[f"table10/{name}"] = f"accuracy {scores} for FINETUNE_STEPS = 20_000 40_000."
  return {f"gin_configs/paper/{name}.gin": line for name, line in out.items()}


def expected_rules(row):
  """What the name of a paper file says: recipe, patterns and phases."""
  table, name = row.removeprefix("gin_configs/paper/").removesuffix(".gin").split("/")
  translation = table in ("table5", "table9", "table10")
  total = 200_000 if translation else 100_000
  dense, finetune = total // 10, total // 10
  if name == "dense":
    return f"ff: dense, total={total}, finetune={finetune}"
  if table == "table12":
    name, phase = re.fullmatch(r"(.*)_(zero|10k)_dense", name).groups()
    dense = {"zero": 0, "10k": 10_000}[phase]
  if table == "table9":
    dense = 2_500
  recipe, stem = re.fullmatch(r"(\w+?)_(ff_.*)", name).groups()
  return describe(recipe, stem, total, dense, finetune)


def describe(recipe, stem, total, dense, finetune, fields=None):
  return configure.describe(
    configure.rules(
      patterns_of(stem), recipe, sparse_steps=total, dense_steps=dense, finetune_steps=finetune,
      fields=fields,
    )
  )  # fmt: skip


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


def test_every_file_is_of_a_kind_that_is_tested_here():
  fragments = [SPARSITY, *MODELS, *VISION, *ROWS, *IMAGES]
  fragments += [f"gin_configs/models/{name}.gin" for name in ("common", "t5", "mini", "mini_small")]
  fragments += [f"gin_configs/recipes/{name}.gin" for name in RECIPES]
  fragments += [f"gin_configs/patterns/{name}.gin" for name in PATTERNS]
  fragments += [f"gin_configs/runs/{name}.gin" for name in RUNS]
  parts = ["glue", "glue_not_given", "wmt", "wmt_not_given", "t5_1_0", "images"]
  parts += ["images_not_given", "vit_b16", "swinv2_b_w8", "vit_tiny_3", "resnet50"]
  fragments += [f"gin_configs/paper/{name}.gin" for name in parts]
  assert sorted(fragments) == FILES
  assert len(ROWS) == 26 + 16 + 4 + 13 + 8 + 8


def test_every_row_of_the_paper_has_a_file_with_its_score_and_its_command():
  assert set(published()) == set(ROWS)
  for row, line in published().items():
    lines = (ROOT / row).read_text().splitlines()
    assert len(lines) <= 20, row
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = " ".join(x.lstrip("# ").rstrip("\\ ") for x in header)
    table = re.match(r"Table (\d+)", text)
    assert table and f"/table{table[1]}/" in row
    assert re.search(rf"Published: {re.escape(line)}( |$)", text), row
    run = "t5x_wmt" if table[1] in ("5", "9", "10") else "t5x_finetune"
    files = re.findall(r"--gin_file=(\S+)", text)
    assert files == ["gin_configs/runs/t5x_adamw.gin", f"gin_configs/runs/{run}.gin", row]
    assert "python -m t5x.train" in text and "--gin.MODEL_DIR=" in text
    if table[1] != "4" and row != "gin_configs/paper/table7/sr_ste_ff_1_32.gin":
      assert "Not given: " in text, row
    else:  # they point to Table 12
      (target,) = re.findall(r"include '(.*)'", "\n".join(lines))
      assert "/paper/table12/" in target and "The row of Table 12." in text
      assert published()[target].startswith(line + ";")


SAID_ELSEWHERE = ("USE_CACHED_TASKS", "INITIAL_CHECKPOINT_PATH")


@pytest.mark.parametrize("name, count", [("glue", 14), ("wmt", 11)])
def test_what_the_paper_omits_is_marked(name, count):
  text = (GIN / f"paper/{name}_not_given.gin").read_text()
  bound = [line for line in text.splitlines() if re.match(r"[A-Z_0-9]+ = ", line)]
  bound = [line for line in bound if line.split()[0] not in SAID_ELSEWHERE]
  if name == "wmt":  # it says that the model is trained from scratch
    bound.remove("PRETRAINED_STEPS = 0")
  assert len(bound) == count and all("  # not given" in line for line in bound)


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


def recipe_of(name):
  return f"gin_configs/recipes/{name}.gin"


def pattern_of(stem):
  return f"gin_configs/patterns/{stem}.gin"


# A recipe and a pattern in either order, but after what a run file includes.
ORDERS = {
  (recipe, stem): [
    case(files, [*STEPS, *([PATH] if recipe == "custom" else [])])
    for files in (
      [SPARSITY, recipe_of(recipe), pattern_of(stem)],
      [SPARSITY, pattern_of(stem), recipe_of(recipe)],
    )
  ]
  for recipe in RECIPES
  for stem in PATTERNS
}
TOO_EARLY = {
  recipe_of("sr_ste"): case([recipe_of("sr_ste"), SPARSITY, pattern_of("ff_1_8")], STEPS),
  **{
    pattern_of(stem): case([pattern_of(stem), SPARSITY, recipe_of("sr_ste")], STEPS)
    for stem in PATTERNS
  },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_patterns_combine_in_either_order(recipe):
  fields = {"path": ((100, "1:2", 0.5),)} if recipe == "custom" else None
  for stem in PATTERNS:
    found = [without_t5x()[name].get("RULES") for name in ORDERS[recipe, stem]]
    assert found == [describe(recipe, stem, 1000, 100, 200, fields)] * 2, stem


@pytest.mark.parametrize("file", TOO_EARLY)
def test_what_comes_before_the_run_file_is_never_lost_silently(file):
  error = without_t5x()[TOO_EARLY[file]]["error"]
  assert ("RECIPE names no recipe" if "recipes" in file else "PATTERN, which is not set") in error


ROW_CASES = {row: case([row], make=["RULES", "NETWORK", *"""
  BATCH_SIZE SPARSE_STEPS LEARNING_RATE WARMUP_STEPS ADAM_B1 ADAM_B2 RANDOM_SEED DATA_SEED
  USE_CACHED_TASKS LOSS_NORMALIZING_FACTOR MIXTURE_OR_TASK_NAME PACK DTYPE PRETRAINED_STEPS
""".split()]) for row in ROWS}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_paper_is_what_its_name_says(row):
  found = without_t5x()[ROW_CASES[row]]
  assert found.get("RULES") == expected_rules(row), found
  for x in ("RANDOM_SEED", "DATA_SEED", "USE_CACHED_TASKS"):
    assert found[x] == 0
  names = ("BATCH_SIZE", "SPARSE_STEPS", "LEARNING_RATE", "WARMUP_STEPS", "ADAM_B1", "ADAM_B2")
  given, network = [found[x] for x in names], found["NETWORK"]
  assert network["dtype"] == found["DTYPE"] == "bfloat16"
  if re.search("table(5|9|10)/", row):
    assert given == [512, 200_000, 0.0625, 1000, 0.9, 0.92]
    assert found["MIXTURE_OR_TASK_NAME"] == "nm_wmt17_ende" and found["PACK"]
    assert found["LOSS_NORMALIZING_FACTOR"] == 233472 and found["PRETRAINED_STEPS"] == 0
    want = dict(emb_dim=1024, mlp_dim=4096, num_heads=16, num_encoder_layers=6)
  else:
    assert given == [128, 100_000, 0.001, 1000, 0.9, 0.999]
    assert found["MIXTURE_OR_TASK_NAME"] == "nm_glue_proportional" and not found["PACK"]
    assert found["LOSS_NORMALIZING_FACTOR"] is None and found["PRETRAINED_STEPS"] == 1_000_000
    want = dict(emb_dim=768, mlp_dim=2048, num_heads=12, num_encoder_layers=12)
  assert {k: network[k] for k in want} == want


SWEEPS = {
  (table, steps): case(
    [f"gin_configs/paper/{table}/mdgf_linear_ff_1_16.gin"], [f"{macro}={steps}"]
  )
  for table, macro, choices in (
    ("table9", "DENSE_STEPS", (2_500, 5_000, 10_000, 20_000)),
    ("table10", "FINETUNE_STEPS", (20_000, 40_000)),
  )
  for steps in choices
}  # fmt: skip


@pytest.mark.parametrize("table, steps", SWEEPS)
def test_the_phase_of_a_sweep_is_a_macro(table, steps):
  phases = (steps, 20_000) if table == "table9" else (20_000, steps)
  want = describe("mdgf_linear", "ff_1_16", 200_000, *phases)
  assert without_t5x()[SWEEPS[table, steps]].get("RULES") == want


MODEL_MACROS = ["NETWORK", "Z_LOSS", "LABEL_SMOOTHING", "LOSS_NORMALIZING_FACTOR"]
MODEL_CASES = {
  (file, scan): case([file], [f"SCAN_LAYERS = {scan}"], MODEL_MACROS)
  for file in MODELS
  for scan in (False, True)
}


@pytest.mark.parametrize("file, scan", MODEL_CASES)
def test_a_model_is_made(file, scan):
  found = without_t5x()[MODEL_CASES[file, scan]]
  assert found.get("Z_LOSS") == 0.0001 and found["LOSS_NORMALIZING_FACTOR"] is None, found
  network = found["NETWORK"]
  assert network["scan_layers"] == scan and network["dtype"] == "bfloat16"
  assert network["dropout_rate"] == 0.1 and network["vocab_size"] == 32128
  assert found["LABEL_SMOOTHING"] == (0.1 if file.endswith("wmt.gin") else 0.0)
  from nm_sparsity_jax.models.t5 import T5Config

  if file.endswith("wmt.gin"):
    want = T5Config.wmt()
  else:
    version, size = file.removesuffix(".gin").split("/")[-2:]
    want = T5Config.preset(version, size)
  for field in ("emb_dim", "num_heads", "num_decoder_layers", "head_dim", "mlp_dim"):
    assert network[field] == getattr(want, field)
  assert tuple(network["mlp_activations"]) == want.mlp_activations
  if file.endswith("tiny.gin"):
    assert network["parameters"] > 2 * 32128 * 128 - (want.logits_via_embedding * 32128 * 128)


GLUE_ROW = "gin_configs/paper/table12/sr_ste_ff_1_4_10k_dense.gin"
BASE = "gin_configs/models/t5_1_1/base.gin"
MINI = "gin_configs/models/mini.gin"
CHOICES = {
  "version": case([BASE], ["T5_VERSION = 't5_1_0'"], ["NETWORK"]),
  "file": case([GLUE_ROW, "gin_configs/paper/t5_1_0.gin"], (), ["NETWORK", "PRETRAINED_STEPS"]),
  "rules": case(
    [SPARSITY], ["SPARSITY_RULES={'ff': '1:8', 'qkv': '1:4'}", "RECIPE='sr_ste'", *STEPS]
  ),
  "pattern": case([SPARSITY], ["RECIPE='sr_ste'", "PATTERN='2:4'", *STEPS]),
  "over a file": case(
    [SPARSITY, pattern_of("ff_qkv_1_8"), recipe_of("idp")],
    ["SPARSITY_RULES={'decoder/ff': '1:8'}", *STEPS],
  ),
  "another pattern": case(
    [SPARSITY, pattern_of("ff_qkv_1_8"), recipe_of("idp")], ["PATTERN='1:4'", *STEPS]
  ),
  "sizes": case(
    [BASE], ["VOCAB_SIZE = 384", "DTYPE = 'float32'", "REMAT_POLICY = 'minimal'",
             "network.T5Config.preset.mlp_dim = 64", "DROPOUT_RATE = 0.0"], ["NETWORK"],
  ),
  "bad version": case([BASE], ["T5_VERSION = 't5'"], ["NETWORK"]),
  "bad size": case([BASE], ["T5_SIZE = 'huge'"], ["NETWORK"]),
  "no path": case([SPARSITY, recipe_of("custom"), pattern_of("ff_1_8")], STEPS),
  "mini": case([MINI], (), ["NETWORK"]),
  "seqio": case([BASE], (), ["VOCABULARY"]),
}  # fmt: skip


def choice(name):
  return without_t5x()[CHOICES[name]]


def test_t5_base_is_t5_1_0_by_a_macro_and_by_a_file():
  assert choice("version")["NETWORK"]["mlp_dim"] == choice("file")["NETWORK"]["mlp_dim"] == 3072
  assert choice("version")["NETWORK"]["logits_via_embedding"]
  assert choice("file")["PRETRAINED_STEPS"] == 999_900


def test_rules_from_the_command_line():
  tail = ", total=1000, dense=100, finetune=200"
  assert choice("rules")["RULES"] == f"ff: sr_ste 1:8{tail}\nqkv: sr_ste 1:4{tail}"
  assert choice("pattern")["RULES"] == f"ff: sr_ste 2:4{tail}"
  assert choice("over a file")["RULES"] == f"decoder/ff: idp 1:8{tail}"
  assert choice("another pattern")["RULES"] == f"ff: idp 1:4{tail}\nqkv: idp 1:4{tail}"


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
  "RECIPE": case([SPARSITY, pattern_of("ff_1_8")], STEPS),
  "PATTERN": case([SPARSITY, recipe_of("sr_ste")], STEPS),
  "SPARSE_STEPS": case([SPARSITY, recipe_of("sr_ste"), pattern_of("ff_1_8")]),
  "RECIPE_FIELDS": case([SPARSITY, recipe_of("custom"), pattern_of("ff_1_8")], STEPS),
  "T5_VERSION": case(["gin_configs/models/t5.gin"], ["T5_SIZE='base'"], ["NETWORK"]),
  "T5_SIZE": case(["gin_configs/models/t5.gin"], ["T5_VERSION='t5_1_1'"], ["NETWORK"]),
}


@pytest.mark.parametrize("macro", NEEDED)
def test_a_missing_macro_is_named(macro):
  first_line = without_t5x()[NEEDED[macro]]["error"].splitlines()[0]
  assert re.search(rf"(?<!\w){macro}\b", first_line), first_line


# --- with T5X -------------------------------------------------------------------------------------

T5X = {}
TINY = "gin_configs/models/t5_1_1/tiny.gin"
SMALL = ["VOCABULARY_FILE = 'bytes'", "VOCAB_SIZE = 384"]
SIMPLE = [recipe_of("sr_ste"), pattern_of("ff_1_8")]
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
SIZED = re.compile(r"/(small|base|large|xl|xxl|3B|11B)\.gin")
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


def files_of(run, optimizer="adamw", model=TINY):
  optimizer = [f"gin_configs/runs/t5x_{optimizer}.gin"] if MAIN.get(run) == "train" else []
  return [model, *optimizer, f"gin_configs/runs/t5x_{run}.gin", *SIMPLE]


THEIRS = {f: f.replace("gin_configs/models", "t5x/examples/t5") for f in MODELS if SIZED.search(f)}
for file in THEIRS.values():  # first: they leave it to gin which `network` they mean
  t5x_case(file, "train", [file], ["DROPOUT_RATE = 0.1", "VOCABULARY = None"])
for run, needs in RUN_NEEDS.items():
  for optimizer in ("adamw", "adafactor"):
    t5x_case(f"{run} {optimizer}", run, files_of(run, optimizer), [*SMALL, *bind(needs)])
  for macro in needs:
    rest = {k: v for k, v in needs.items() if k != macro}
    t5x_case(f"{run} without {macro}", run, files_of(run), [*SMALL, *bind(rest)])
t5x_case("no model", "finetune", files_of("finetune")[1:], bind(RUN_NEEDS["finetune"]))
t5x_case("no optimizer", "finetune", [f for f in files_of("finetune") if "adamw" not in f],
         bind(RUN_NEEDS["finetune"]))  # fmt: skip
t5x_case("not packed", "pretrain", files_of("pretrain"),
         [*SMALL, *bind(RUN_NEEDS["pretrain"]), "PACK = False", "LEARNING_RATE = 0.5"])  # fmt: skip
for row in ROWS:
  run = "wmt" if re.search("table(5|9|10)/", row) else "finetune"
  t5x_case(row, run, [f"gin_configs/runs/t5x_{x}.gin" for x in ("adamw", run)] + [row],
           ["MODEL_DIR = 'm'", "VOCABULARY_FILE = 'bytes'"])  # fmt: skip
t5x_case("row first", "finetune",
         [GLUE_ROW, *(f"gin_configs/runs/t5x_{x}.gin" for x in ("adamw", "finetune"))],
         ["MODEL_DIR = 'm'"])  # fmt: skip


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
@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_paper_runs_by_its_command(row):
  found = model_of(row)
  assert found["rules"] == expected_rules(row) and found["optimizer"] == "OptaxWrapper"
  data = found["data"]
  if re.search("table(5|9|10)/", row):
    assert found["total_steps"] == 200_000 and data["pack"] and data["batch_size"] == 512
    assert found["loss_normalizing_factor"] == 233472 and found["label_smoothing"] == 0.1
    assert found["rate"]["4000"] == pytest.approx(0.0625 / 4000**0.5)
  else:
    assert found["total_steps"] == 1_100_000 and not data["pack"] and data["batch_size"] == 128
    assert found["rate"]["500"] == pytest.approx(0.0005)
    assert found["second_update"] == pytest.approx(-1e-6, rel=1e-3)
    assert found["restore"] == ["float32", True, True]


@pytest.mark.t5x
@pytest.mark.parametrize("file", THEIRS)
def test_a_model_has_the_sizes_of_t5x(file):
  theirs = model_of(THEIRS[file])
  ours = without_t5x()[MODEL_CASES[file, False]]["NETWORK"]
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
  row = "gin_configs/paper/table12/sdgf_stepwise_ff_1_8_qkv_1_4_10k_dense.gin"
  runs = "gin_configs/runs/t5x_"
  small = [*TINIER, *FEW, "T5_SIZE = 'tiny'"]
  dense, sparse = folder / "dense", folder / "sparse"
  return {
    "dense": dict(
      main="train", call="train", bindings=[*small, *bind(TASK), f"MODEL_DIR = '{dense}'"],
      files=[TINY, f"{runs}adafactor.gin", f"{runs}pretrain.gin", recipe_of("dense")],
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
             "gin_configs/paper/table5/mdgf_exponential_ff_1_16.gin"],
      bindings=[
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
