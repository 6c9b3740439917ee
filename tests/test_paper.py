"""The paper's rows: as printed, as gin files make them, and by the command `rows`."""

import json
import re

import pytest
from test_gin import ROOT, config

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.analysis.plan import build, contents
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.runs import paper, results
from nm_sparsity_jax.training import configure, rules_text

ROWS = [row for table in paper.rows().values() for row in table.values()]
IDS = [f"{row.table} {row.name}" for row in ROWS]

# --- as printed ---------------------------------------------------------------------------------

# Table: its dense score; recipes, or the lengths of a phase; then pattern and scores by these.
GRIDS = {
  "table2": ("76.389", "sr_ste mdgf_linear mdgf_exponential sdgf_stepwise sdgf_geometric", """
    2:4 77.761 77.613 76.381 77.081 77.363
    1:4 78.782 78.512 78.579 77.357 78.347
    1:8 77.869 78.019 78.009 77.025 78.175
    1:16 75.637 76.594 77.325 75.923 76.869
    1:32 73.056 75.807 76.068 74.394 74.910
    1:128 72.069 74.012 74.180 71.725 69.801
    ff=1:4,qk=1:4 78.145 77.755 78.113 77.163 78.229
    ff=1:8,qk=1:8 75.527 76.473 77.349 76.617 76.334
    ff=1:8,qk=1:4 78.144 78.025 78.273 77.163 76.839
    ff=1:8,qkv=1:4 78.222 78.319 78.319 77.309 78.213"""),
  "table3": ("83.45", "sr_ste mdgf_exponential sdgf_stepwise sdgf_geometric", """
    1:4 82.355 82.491 82.267 82.469
    1:8 81.437 81.466 81.382 81.382
    1:16 80.154 80.542 80.386 80.274
    1:32 78.972 79.545 76.480 79.277
    ff=1:8,qk=1:8 81.441 81.550 81.218 81.438"""),
  "table4": ("86.2", "sr_ste sdgf_stepwise sdgf_geometric", """
    1:4 84.1 83.7 83.4
    1:32 79.4 80.9 79.3
    ff=1:8,qk=1:8 75.8 80.7 76.8
    ff=1:8,qkv=1:4 78 80.3 78.9
    ff=1:8,qkv=1:8 74.2 79.5 75.8"""),
  "table5": ("0.747", "sr_ste sdgf_stepwise mdgf_exponential", """
    1:16 0.709 0.717 0.717
    1:32 0.707 0.713 0.714
    1:64 0.707 0.710 0.711
    1:128 0.707 0.708 0.711"""),
  "table6": ("85.09", "sr_ste mdgf_exponential", """
    2:8 83.33 83.60
    1:8 80.78 82.48"""),
  "table7": ("", "sr_ste snip idp mdgf_exponential", """
    1:32 79.4 79.5 80.6 80.9"""),
  "table9": ("", "dense_steps=2500 dense_steps=5000 dense_steps=10000 dense_steps=20000", """
    mdgf_linear,1:16 0.7155 0.7160 0.7157 0.7156
    mdgf_linear,1:32 0.7134 0.7127 0.7137 0.7126
    mdgf_linear,1:64 0.7106 0.7110 0.7103 0.7107
    mdgf_linear,1:128 0.7100 0.7093 0.7094 0.7104
    sdgf_stepwise,1:16 0.7157 0.7160 0.7164 0.7165
    sdgf_stepwise,1:32 0.7134 0.7136 0.7141 0.7128
    sdgf_stepwise,1:64 0.7108 0.7117 0.7107 0.7115
    sdgf_stepwise,1:128 0.7106 0.7100 0.7098 0.7107"""),
  "table10": ("", "finetune_steps=20000 finetune_steps=40000", """
    mdgf_linear,1:16 0.7153 0.7161
    mdgf_linear,1:32 0.7130 0.7132
    mdgf_linear,1:64 0.7107 0.7106
    mdgf_linear,1:128 0.7098 0.7097
    sdgf_stepwise,1:16 0.7160 0.7121
    sdgf_stepwise,1:32 0.7125 0.7093
    sdgf_stepwise,1:64 0.7095 0.7081
    sdgf_stepwise,1:128 0.7072 0.7065"""),
}  # fmt: skip

# Recipe, patterns, dense steps; overall score, and those of TASKS. The table calls SDGF MDGF.
TASKS = "CoLA MNLI MRPC QNLI QQP RTE SST-2 STS-B"
TABLE_12 = """
dense 86.2 58.9 87.2/87 92.4/89.2 93.6 92.0/89.2 82.3 95 90.1/90.0
sr_ste,1:4,0 83.1 41.8 85.2/85.3 92.8/90.0 92.3 91.8/88.9 79.1 93.6 89.5/89.2
sr_ste,1:4,10k 84.1 48.1 85.7/85.6 92.4/89.5 92.1 91.8/89.0 82.7 93.6 87.9/87.7
sdgf_stepwise,1:4,10k 83.7 48.8 85.3/85.4 92.4/89.2 92.3 91.8/89.0 80.5 93.5 86.5/86.3
sdgf_geometric,1:4,0 83.3 48.4 85.3/85.3 92.0/89.0 91.8 91.8/88.9 78 92.8 87.3/87.4
sdgf_geometric,1:4,10k 83.4 47.2 85.4/85.3 92.6/89.7 92 91.8/89.0 79.8 92.9 86.7/86.4
sr_ste,1:32,0 77.1 19 81.3/81.3 90.9/87.0 86.9 90.6/87.4 71.1 89.9 86.7/86.8
sr_ste,1:32,10k 79.4 29.4 82.2/82.6 91.5/88.5 89.6 91.2/88.2 72.6 91.4 87.1/87.2
sdgf_stepwise,1:32,10k 80.9 38.3 83.6/83.7 92.5/89.7 90.5 91.5/88.5 74.4 91.2 85.2/85.0
sdgf_geometric,1:32,0 77.6 20.2 81.3/81.6 91.8/88.5 87.2 90.8/87.7 73.3 90.1 85.8/85.5
sdgf_geometric,1:32,10k 79.3 29.2 82.3/82.9 91.3/88.0 90.4 91.3/88.3 73.3 90.5 85.4/85.4
sr_ste,ff=1:8,qk=1:8,0 74.4 15.7 77.2/77.6 89.9/85.8 83.6 89.7/86.2 67.5 88.2 84.1/83.9
sr_ste,ff=1:8,qk=1:8,10k 75.8 19.9 78.6/79.4 89.7/86.0 84 90.1/86.7 70 89.4 84.5/84.2
sdgf_stepwise,ff=1:8,qk=1:8,10k 80.7 38.7 83.1/83.2 90.9/87.7 89.9 91.2/88.2 76.2 91.9 84.5/84.5
sdgf_geometric,ff=1:8,qk=1:8,0 75.8 21.6 78.8/79 90.0/86.0 83.6 90.1/86.6 69.7 88.9 84.0/83.9
sdgf_geometric,ff=1:8,qk=1:8,10k 76.8 22.3 80.7/80.9 89.8/85.8 86.3 90.5/87.4 70 91.1 83.7/83.4
sr_ste,ff=1:8,qkv=1:8,0 73.2 13.5 76.3/76.4 89.0/84.6 83.2 89.5/85.9 63.9 87 84.3/84.2
sr_ste,ff=1:8,qkv=1:8,10k 74.2 16.1 77.7/77.6 88.5/84.1 82.9 89.9/86.3 66.4 88.8 84.4/84.2
sdgf_stepwise,ff=1:8,qkv=1:8,10k 79.5 33 82.3/82.3 91.3/87.7 89.2 91.0/88.0 74.4 91.1 84.5/84.8
sdgf_geometric,ff=1:8,qkv=1:8,0 75.5 22.1 78.6/78.7 90.5/86.8 83.4 90.0/86.5 67.9 88.2 84.2/84.2
sdgf_geometric,ff=1:8,qkv=1:8,10k 75.8 19.5 79.4/79.6 89.4/85.3 84.5 90.2/86.8 70.4 89.8 83.3/83.0
sr_ste,ff=1:8,qkv=1:4,0 75.1 15 78.4/79 90.5/86.8 84.2 90.1/86.6 67.9 88.4 86.2/86.1
sr_ste,ff=1:8,qkv=1:4,10k 78 24.5 81.2/81.6 91.1/87.7 87.1 90.6/87.3 72.2 90.9 85.8/85.8
sdgf_stepwise,ff=1:8,qkv=1:4,10k 80.3 36.4 83.2/83.4 90.9/87.3 90.3 91.3/88.3 74.7 90.9 85.2/85.0
sdgf_geometric,ff=1:8,qkv=1:4,0 76.8 20.2 80.5/80.8 91.3/87.7 85.4 90.3/87.0 70.8 90.4 84.9/84.9
sdgf_geometric,ff=1:8,qkv=1:4,10k 78.9 27.7 82.4/82.4 91.3/87.7 88.8 91.0/88.1 74.4 91.3 84.5/84.5
"""


def grid(table):
  """Name of each row -> score, as printed."""
  dense, columns, text = GRIDS[table]
  found = {"dense": dense} if dense else {}
  for line in text.strip().splitlines():
    first, *scores = line.strip().replace(",", " ").rsplit(maxsplit=len(columns.split()))
    for column, score in zip(columns.split(), scores, strict=True):
      found[f"{first} {column}" if "=" in column else f"{column} {first}"] = score
  return found


@pytest.mark.parametrize("table", GRIDS)
def test_a_table_is_as_printed(table):
  found = {name: float(row.score.split()[1]) for name, row in paper.rows()[table].items()}
  assert found == {name: float(score) for name, score in grid(table).items()}


def test_table_12_is_as_printed():
  lines = [line.split() for line in TABLE_12.strip().splitlines()]
  names = [name.replace(",10k", ",10000").replace(",", " ") for name, *_ in lines]
  assert names == [name.replace("dense_steps=", "") for name in paper.rows()["table12"]]
  for (_, overall, *tasks), row in zip(lines, paper.rows()["table12"].values(), strict=True):
    assert row.published["overall"] == float(overall)
    columns = {title: values[:2] for title, values in row.published["columns"].items()}
    columns["MNLI"] = columns.pop("MNLI-m") + columns.pop("MNLI-mm")
    for title, printed in zip(TASKS.split(), tasks, strict=True):
      assert columns[title] == [float(x) for x in printed.split("/")], (row.name, title)


# --- as gin makes them --------------------------------------------------------------------------

GLUE, IMAGES = ("table4", "table7", "table12"), ("table2", "table3", "table6", "figure3")
TOTAL = {"table2": 109_200, "table3": 218_750, "table6": 46_800, "figure3": 78_000}


def file_of(table):
  return f"gin_configs/paper/{table}.gin"


@pytest.fixture(scope="module")
def shapes():
  """Table -> parameters and axes of its network: all rows have one."""
  return {}


def expected_rules(row):
  """What the name of a row says: recipe, patterns and phases."""
  total = TOTAL.get(row.table, 100_000 if row.table in GLUE else 200_000)
  phases = {"dense_steps": total // 10, "finetune_steps": total // 10}
  if row.table in IMAGES:
    phases["finetune_steps"] = total // 5
  recipe, *words = row.name.split()
  if row.table == "table12" and recipe == "dense":
    phases["dense_steps"] = 0
  places = {}
  for word in words:
    place, _, value = word.rpartition("=")
    if place in phases:
      phases[place] = int(value)
    else:
      places[place or ("conv" if row.table == "table6" else "ff")] = value
  rules = configure.rules(places or {".*": None}, recipe, sparse_steps=total, **phases)
  return rules_text.describe(rules)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_row_is_planned_and_its_run_is_matched_with_it(row, tmp_path, shapes):
  with config([file_of(row.table)], [f"ROW = {row.name!r}"]) as c:
    assert not c.errors
    rules = c.value("RULES")
    assert rules_text.describe(rules) == expected_rules(row)
    if row.table not in shapes:
      shapes[row.table] = build.shapes_of(build.workload_of(c))
    params, axes = shapes[row.table]["params"], shapes[row.table].get("params_axes")
    assignment = (rules.with_logical_axes(axes) if axes else rules).assign(params)
    timelines = contents.schedule(assignment)
    (tmp_path / "config.gin").write_text(c.text())
  patterns = {str(place.pattern) for place in assignment.places.values()}
  assert patterns == {*row.published["places"].values()}
  assert all(t["segments"][-1]["decay_stop"] == 0 for t in timelines)
  run = results.settings(tmp_path)
  assert run.recipe == row.published["recipe"] and not run.remarks
  if row.table in (*GLUE, *IMAGES) and row.score:
    found, _ = published.match(run)
    score = "overall" if row.table in GLUE else "top1"
    assert found and found[score] == row.published[score]


BEFORE = {
  "images": ["local_images", "local_images_adamw"],
  "glue": ["t5x_adamw", "t5x_finetune"],
  "wmt": ["t5x_adamw", "t5x_wmt"],
}


@pytest.mark.parametrize("table", paper.rows())
def test_the_command_of_a_table(capsys, table):
  """In the header of its file, and by `rows`, whose last row is shown alone."""
  kind = "images" if table in IMAGES else "glue" if table in GLUE else "wmt"
  files = [*(f"gin_configs/runs/{run}.gin" for run in BEFORE[kind]), file_of(table)]
  header = (ROOT / file_of(table)).read_text().partition("from __gin__")[0]
  assert f"`nm-sparsity rows {table}`" in header
  name = [*paper.rows()[table]][-1]
  assert not cli.main(["rows", table, name])
  for text in header, capsys.readouterr().out:
    assert re.findall(r"--gin_file=(\S+)", text) == files
    row = re.search(r"--gin.ROW=\"'(.*?)'\"", text)
    assert row and paper.find(table, row[1])
    assert ("nm-sparsity train" if kind == "images" else "python -m t5x.train") in text
  assert row[1] == name


# What the paper gives, or what we chose: BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS; the network.
GIVEN = {
  "table12": ((128, 0.001, 1000), {"emb_dim": 768, "mlp_dim": 2048, "num_encoder_layers": 12}),
  "table5": ((512, 0.0625, 1000), {"emb_dim": 1024, "mlp_dim": 4096, "num_encoder_layers": 6}),
  "table2": ((4096, 0.001, 4_680), {"layers": 12, "embed": 768, "classes": 1000}),
  "table3": ((2048, 0.001, 12_500), {"window": 8, "depths": (2, 2, 18, 2), "image_size": 256}),
  "table6": ((128, 7.07e-5, 1_950), {"depths": (3, 4, 6, 3), "classes": 10, "stem": 7}),
  "figure3": ((128, 7.07e-5, 5_850), {"layers": 3, "heads": 3, "embed": 192, "classes": 10}),
}
GIVEN |= {table: GIVEN["table12"] for table in GLUE}
GIVEN |= {table: GIVEN["table5"] for table in ("table9", "table10")}


@pytest.mark.parametrize("table", paper.rows())
def test_a_table_sets_what_the_paper_gives(table):
  numbers, network = GIVEN[table]
  with config([file_of(table)], [f"ROW = {[*paper.rows()[table]][-1]!r}"]) as c:
    assert tuple(map(c.value, ("BATCH_SIZE", "LEARNING_RATE", "WARMUP_STEPS"))) == numbers
    made = c.value("NETWORK").config
    assert {name: getattr(made, name) for name in network} == network
    assert made.dtype == "bfloat16"


def test_what_a_row_sets_can_be_overridden():
  row = "ROW = 'MDGF_Linear  dense_steps=2500 1:16'"  # in any order and case
  for changes, said in (
    ([], "ff: mdgf_linear 1:16, total=200000, dense=2500, finetune=20000"),
    (["DENSE_STEPS = 7", "PATTERN = '1:8'", "RECIPE = 'sr_ste'"],
     "ff: sr_ste 1:8, total=200000, dense=7, finetune=20000"),
  ):  # fmt: skip
    with config([file_of("table9")], [row, *changes]) as c:
      assert rules_text.describe(c.value("RULES")) == said
  with config([file_of("table4"), file_of("t5_1_0")], ["ROW = 'dense'"]) as c:
    assert c.value("PRETRAINED_STEPS") == 999_900 and c.value("NETWORK").config.mlp_dim == 3072


def test_rows_are_listed_and_searched(capsys):
  def rows(*words):
    code = cli.main(["rows", *words])
    return code, *capsys.readouterr()

  code, out, _ = rows()
  assert not code and len(out.splitlines()) == 1 + len(ROWS) == 187
  code, out, _ = rows("table12", "1:32", "dense_steps=10_000")
  assert not code and re.findall(r"overall ([\d.]+)", out) == ["79.4", "80.9", "79.3"]
  code, out, _ = rows("--json", "vit_b16", "SR-STE", "2:4")
  assert [(row["ROW"], row["top1"]) for row in json.loads(out)] == [("sr_ste 2:4", 77.761)]
  code, out, err = rows("table12", "mdgf_exponential")
  assert code == 1 and "the nearest" in err and "mdgf_exponential" in out
  for bindings, word in ((["ROW = 'sr_ste 1:4'"], "nearest are 'sr_ste 1:4 "), ([], "not set")):
    (error,) = plan.plan([file_of("table12")], bindings)["errors"]
    assert "ROW" in error and word in error
