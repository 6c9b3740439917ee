"""The paper's rows of networks of images: as printed, as gin files, beside runs in a report."""

import functools
import itertools
import json
import pathlib
import re

import pytest
import test_gin

from nm_sparsity_jax import report, roles
from nm_sparsity_jax.images import rand_augment
from nm_sparsity_jax.report import Table
from nm_sparsity_jax.runs import results
from nm_sparsity_jax.scores import published

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAPER = "gin_configs/paper"

# Table: network, dense, recipes, then the rows as printed.
RECIPES = {
  "SR-STE": "sr_ste", "MDGF-Linear": "mdgf_linear", "MDGF-Exponential": "mdgf_exponential",
  "SDGF-Stepwise": "sdgf_stepwise", "SDGF-Geometric": "sdgf_geometric",
}  # fmt: skip
TABLES = {
  2: ("vit_b16", "76.389", [*RECIPES], """
    ff_2_4 77.761 77.613 76.381 77.081 77.363
    ff_1_4 78.782 78.512 78.579 77.357 78.347
    ff_1_8 77.869 78.019 78.009 77.025 78.175
    ff_1_16 75.637 76.594 77.325 75.923 76.869
    ff_1_32 73.056 75.807 76.068 74.394 74.910
    ff_1_128 72.069 74.012 74.180 71.725 69.801
    ff_qk_1_4 78.145 77.755 78.113 77.163 78.229
    ff_qk_1_8 75.527 76.473 77.349 76.617 76.334
    ff_1_8_qk_1_4 78.144 78.025 78.273 77.163 76.839
    ff_1_8_qkv_1_4 78.222 78.319 78.319 77.309 78.213
  """),
  3: ("swinv2_b_w8", "83.45", [n for n in RECIPES if n != "MDGF-Linear"], """
    ff_1_4 82.355 82.491 82.267 82.469
    ff_1_8 81.437 81.466 81.382 81.382
    ff_1_16 80.154 80.542 80.386 80.274
    ff_1_32 78.972 79.545 76.480 79.277
    ff_qk_1_8 81.441 81.550 81.218 81.438
  """),
  6: ("resnet50", "85.09", ["SR-STE", "MDGF-Exponential"], """
    conv_2_8 83.33 83.60
    conv_1_8 80.78 82.48
  """),
}  # fmt: skip


def printed():
  """(table, network, name of the row, recipe, stem of its pattern, score) of each row."""
  for table, (network, dense, names, text) in TABLES.items():
    yield table, network, "Dense", "dense", "", dense
    for line in text.strip().splitlines():
      stem, *found = line.split()
      for name, score in zip(names, found, strict=True):
        yield table, network, name, RECIPES[name], stem, score


ROWS = {
  f"{PAPER}/table{table}/{'_'.join(filter(None, (recipe, stem)))}.gin": (
    table, network, name, recipe, stem, score
  )
  for table, network, name, recipe, stem, score in printed()
}  # fmt: skip
FIGURE = [f"{PAPER}/figure3/{recipe}_ff_1_16.gin" for recipe in ("sr_ste", "mdgf_exponential")]


def text_of(file):
  return (ROOT / file).read_text("utf-8")


def test_the_tables_are_as_printed():
  tables = published.tables()
  for number in TABLES:
    found = [(r["row"], r["network"], r["recipe"], r["places"], r["top1"])
             for r in tables[f"table{number}"]]  # fmt: skip
    assert found == [
      (name, network, recipe, test_gin.patterns_of(stem) if stem else {}, float(score))
      for table, network, name, recipe, stem, score in printed()
      if table == number
    ]
  assert [len(tables[f"table{n}"]) for n in TABLES] == [51, 21, 5]


def test_each_row_is_a_file_with_its_source_command_and_score():
  assert sorted([*ROWS, *FIGURE]) == test_gin.IMAGES
  for file in (*ROWS, *FIGURE):
    lines = text_of(file).splitlines()
    header = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = " ".join(line.lstrip("# ").rstrip("\\ ") for line in header)
    assert len(lines) <= 20 and "Not given: " in text
    assert re.findall(r"--gin_file=(\S+)", text) == [*BEFORE, file]
    assert "nm-sparsity train" in text and "--gin.MODEL_DIR=" in text
    if file in FIGURE:
      assert text.startswith("Figure 3: ") and "Published: no number; " in text
    else:
      table, _, name, _, _, score = ROWS[file]
      assert text.lower().startswith(f"table {table}: {name}".lower())
      assert re.search(rf"Published: top-1 {re.escape(score)} Not given", text), file


# --- read as by their command -------------------------------------------------------------------

BEFORE = ["gin_configs/runs/local_images.gin", "gin_configs/runs/local_images_adamw.gin"]
STEPS = {"vit_b16": 109_200, "swinv2_b_w8": 218_750, "vit_tiny_3": 78_000, "resnet50": 46_800}
MACROS = """DATA IMAGE_SIZE CLASSES BATCH_SIZE SPARSE_STEPS WARMUP_STEPS LEARNING_RATE WEIGHT_DECAY
  LEARNING_RATE_FACTORS CLIP_NORM LOSS MIXUP CUTMIX LABEL_SMOOTHING RANDOM_ERASING DROP_PATH
  EMA_DECAY RAND_AUGMENT ADAM_B1 ADAM_B2 RANDOM_SEED DATA_SEED DTYPE""".split()


@functools.cache
def network_macro():
  """What a model file calls the network."""
  return re.search(r"(?m)^(\w*NETWORK) = ", text_of("gin_configs/models/vision/vit_b16.gin"))[1]


@functools.cache
def read():
  cases = {
    file: {"files": [*BEFORE, file], "bindings": ["MODEL_DIR = 'm'"], "config": True,
           "make": ["RULES", *MACROS]}
    for file in (*ROWS, *FIGURE)
  }  # fmt: skip
  for file in cases:
    if file.endswith("/dense.gin") or file == FIGURE[0]:
      cases[file]["make"].append(network_macro())
  return test_gin.probe(cases, "images")


def network_of(file):
  return ROWS[file][1] if file in ROWS else "vit_tiny_3"


@pytest.mark.parametrize("file", [*ROWS, *FIGURE])
def test_a_row_is_what_its_name_says(file):
  found, network = read()[file], network_of(file)
  assert "error" not in found, found
  total = STEPS[network]
  dense, finetune = round(total / 10), round(total / 5)
  if file.endswith("/dense.gin"):
    assert found["RULES"] == f"ff: dense, total={total}, dense={dense}, finetune={finetune}"
  else:
    recipe, stem = re.fullmatch(r".*/(\w+?)_((ff|conv)_.*)\.gin", file).groups()[:2]
    wanted = test_gin.describe(recipe, stem, total, dense, finetune)
    assert found["RULES"] == wanted
  given = {
    "vit_b16": ["imagenet2012", 224, 1000, 4096, 4_680, 0.001, 0.01],
    "swinv2_b_w8": ["imagenet2012", 256, 1000, 2048, 12_500, 0.001, 0.05],
    "vit_tiny_3": ["cifar10", 224, 10, 128, 5_850, 7.07e-5, 0.05],
    "resnet50": ["cifar10", 224, 10, 128, 1_950, 7.07e-5, 0.05],
  }[network]
  names = "DATA IMAGE_SIZE CLASSES BATCH_SIZE WARMUP_STEPS LEARNING_RATE WEIGHT_DECAY".split()
  assert [found[name] for name in names] == given and found["SPARSE_STEPS"] == total
  assert found["LEARNING_RATE_FACTORS"] == "constant * linear_warmup * cosine_decay"
  assert [found[x] for x in ("ADAM_B1", "ADAM_B2", "EMA_DECAY")] == [0.9, 0.999, None]
  swin = network == "swinv2_b_w8"
  mixing = [0.8, 1.0, 0.1, 0.25, 0.5, 5.0] if swin else [0.5, 0.0, 0.0, 0.0, 0.1, 1.0]
  names = "MIXUP CUTMIX LABEL_SMOOTHING RANDOM_ERASING DROP_PATH CLIP_NORM".split()
  assert [found[name] for name in names] == mixing and found["DTYPE"] == "bfloat16"
  assert found["LOSS"] == ("softmax" if swin else "sigmoid")
  augment = rand_augment.parse(found["RAND_AUGMENT"])
  assert augment.magnitude == (9 if swin else 15)


def test_the_networks_are_the_paper_s():
  for file in (*(f"{PAPER}/table{n}/dense.gin" for n in TABLES), FIGURE[0]):
    made = read()[file][network_macro()]
    assert made["dtype"] == "bfloat16"
    wanted = {
      "vit_b16": {"layers": 12, "embed": 768, "classes": 1000, "dropout": 0.1, "drop_path": 0.1},
      "swinv2_b_w8": {"window": 8, "depths": [2, 2, 18, 2], "image_size": 256, "drop_path": 0.5},
      "resnet50": {"depths": [3, 4, 6, 3], "classes": 10, "stem": 7, "drop_path": 0.1},
      "vit_tiny_3": {"layers": 3, "heads": 3, "embed": 192, "classes": 10},
    }[network_of(file)]
    assert {name: made[name] for name in wanted} == wanted


def bound(file):
  """The macros that a gin file binds, with those of files that it includes."""
  names = set(re.findall(r"(?m)^([A-Z][A-Z0-9_]*) = ", text_of(file)))
  return names.union(*(bound(inside) for inside in test_gin.included(file)))


def test_a_row_binds_macros_that_files_before_it_know():
  models = [f"gin_configs/models/vision/{network}.gin" for network in STEPS]
  known = set().union(*(bound(file) for file in (*BEFORE, *models)))
  for file in (*ROWS, *FIGURE):
    assert bound(file) <= known, bound(file) - known


def test_what_the_paper_omits_is_marked_in_one_file():
  lines = text_of(f"{PAPER}/images_not_given.gin").splitlines()
  found = [line for line in lines if re.match(r"[A-Z_0-9]+ = ", line)]
  assert len(found) == 23 and found[0] == "PRETRAINED_STEPS = 0"
  assert all("  # not given" in line for line in found[1:])
  for name in ("images", *STEPS):
    text = text_of(f"{PAPER}/{name}.gin")
    assert "not given" not in text and re.search(r"Table|section|C\.\d", text)


# --- beside runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ROWS)
def test_a_run_of_a_row_is_matched_with_it(file, tmp_path):
  (tmp_path / "config.gin").write_text(read()[file]["config"])
  run = results.settings(tmp_path)
  table, network, name, recipe, stem, score = ROWS[file]
  assert (run.network, run.recipe, run.mini) == (network, recipe, False)
  row, remark = published.match_images(run)
  assert row and not remark
  assert (row["table"], row["row"], row["top1"]) == (table, name, float(score))
  assert roles.single(row["places"]) == (roles.single(test_gin.patterns_of(stem)) if stem else {})


CONFIG = """
RECIPE = {recipe!r}
PATTERN = {pattern!r}
SPARSITY_RULES = {rules!r}
SPARSE_STEPS = 100
DENSE_STEPS = 10
FINETUNE_STEPS = 20
DATA = {data!r}
{more}vit.config.name = 'vit_b16'
vit.config.classes = %CLASSES
"""


def write(folder, scores, split="validation", **given):
  """A run of ViT-B/16 on images; scores is step -> accuracy."""
  given = {"recipe": "mdgf_exponential", "pattern": "1:16", "rules": {"ff": None},
           "data": "imagenet2012", "more": "", **given}  # fmt: skip
  (folder / "train").mkdir(parents=True)
  lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in scores]
  (folder / "train/metrics.jsonl").write_text("".join(lines))
  noted = [
    {"step": step, "at_target": step > 80, "loss": {split: 1.0},
     "metrics": {split: {"accuracy": value, "accuracy_top5": 0.9}}}
    for step, value in scores.items()
  ]  # fmt: skip
  (folder / "evaluations.json").write_text(json.dumps(noted))
  (folder / "run.json").write_text(json.dumps({"start": 0, "processes": []}))
  (folder / "config.gin").write_text(CONFIG.format(**given))
  return str(folder)


def beside(paths, checkpoint="best"):
  """The table of top-1 of a report, as texts, and the sentences behind it."""
  parts = list(report.report(paths, checkpoint)["scores"])
  at = [i for i, part in enumerate(parts) if isinstance(part, Table) and part.head == ["", "top-1"]]
  if not at:
    return None, []
  cells = [[getattr(cell, "text", cell) for cell in row] for row in parts[at[0]].rows]
  said = itertools.takewhile(lambda part: isinstance(part, str), parts[at[0] + 1 :])
  return cells, [line for line in said if "published row" in line or "has no row" in line]


def test_a_report_shows_the_published_row(tmp_path):
  mine = write(tmp_path / "mine", {50: 0.9, 90: 0.775, 100: 0.7812})
  other = write(tmp_path / "other", {90: 0.7}, pattern="3:8")
  dense = write(tmp_path / "dense", {100: 0.76}, recipe="dense", split="test", data="/my/images")
  wide = write(tmp_path / "wide", {100: 0.8}, more="vit.config.layers = 13\n")
  cells, said = beside([mine, other, dense, wide])
  assert cells == [
    ["mine", "78.120 @ 100"],  # step 50 is before the target pattern
    ["published, Table 2, MDGF-Exponential", "77.325"],
    ["delta", "+0.795"],
    ["other", "70.000 @ 90"],
    ["dense", "76.000 @ 100"],
    ["published, Table 2, Dense", "76.389"],
    ["delta", "-0.389"],
  ]
  assert said == [
    "other: Table 2 has no row for mdgf_exponential 3:8 FF.",
    "dense: the published row is of imagenet2012, this run of /my/images.",
  ]
  cells, said = beside([mine], checkpoint=50)
  assert cells == [["mine", "90.000 @ 50"]]
  assert said == ["mine: no published row: step 50 is before the target pattern."]
  assert beside([wide]) == (None, [])
