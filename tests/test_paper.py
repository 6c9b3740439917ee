"""The paper's rows: as printed, as gin files make them, and by the command `rows`."""

import hashlib
import json
import re

import jax
import pytest
from test_gin import config

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import plan, run_folder
from nm_sparsity_jax.analysis.plan import build, contents
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.runs import paper
from nm_sparsity_jax.training import configure, rules_text

ROWS = [row for table in paper.rows().values() for row in table.values()]
IDS = [f"{row.table} {row.name}" for row in ROWS]

# SHA-256 of all tables, as JSON with sorted keys. Their scores were once held against a second copy
# of the paper's tables.
DIGEST = "59dfd318dfd794f597e1170715551961974ba6e329ff98001de609f3447fb475"


def test_the_tables_are_as_printed():
  found = {name: table for name, table in paper.tables().items() if name != "about"}
  assert hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() == DIGEST


# --- as gin makes them --------------------------------------------------------------------------

GLUE, IMAGES = ("table4", "table7", "table12"), ("table2", "table3", "table6", "figure3")
TOTAL = {"table2": 109_200, "table3": 218_750, "table6": 46_800, "figure3": 78_000}


def file_of(table):
  return f"gin_configs/paper/{table}.gin"


@pytest.fixture(scope="module")
def shapes():
  """Network -> parameters and axes."""
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
    # Many tables have the same network, and its trace takes a second.
    network = repr(c.value("NETWORK"))
    if network not in shapes:
      shapes[network] = jax.eval_shape(build.workload_of(c).init, jax.random.PRNGKey(0))
    params, axes = shapes[network]["params"], shapes[network].get("params_axes")
    assignment = (rules.with_logical_axes(axes) if axes else rules).assign(params)
    timelines = contents.schedule(assignment)
    (tmp_path / "config.gin").write_text(c.text())
  patterns = {str(site.pattern) for site in assignment.sites.values()}
  assert patterns == {*row.published["places"].values()}
  assert all(t["segments"][-1]["last_D"] == 0 for t in timelines)
  run = run_folder.Run(tmp_path)
  assert run.recipe == row.published["recipe"]
  if row.table in (*GLUE, *IMAGES) and row.score:
    found, _ = published.match(run)
    score = "overall" if row.table in GLUE else "top1"
    assert found and found[score] == row.published[score]


# What the paper gives, or what we chose: BATCH_SIZE, LEARNING_RATE, WARMUP_STEPS; the network.
GIVEN = {
  "table12": ((128, 0.001, 1000), {"emb_dim": 768, "mlp_dim": 2048, "num_encoder_layers": 12}),
  "table5": ((512, 0.0625, 1000), {"emb_dim": 1024, "mlp_dim": 4096, "num_encoder_layers": 6}),
  "table2": ((4096, 0.001, 4_680), {"layers": 12, "embed": 768, "classes": 1000}),
  "table3": ((2048, 0.001, 12_500), {"window": 8, "depths": (2, 2, 18, 2), "image_size": 256}),
  "table6": ((128, 7.07e-5, 1_950), {"depths": (3, 4, 6, 3), "classes": 10}),
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
  row = "ROW = 'mdgf_linear 1:16 dense_steps=2500'"
  changes = "DENSE_STEPS = 7", "PATTERN = '1:8'", "RECIPE = 'sr_ste'"
  with config([file_of("table9")], [row, *changes]) as c:
    said = rules_text.describe(c.value("RULES"))
  assert said == "ff: sr_ste 1:8, total=200000, dense=7, finetune=20000"


def test_rows_are_listed_and_searched(capsys):
  def rows(*words, code=0):
    assert cli.main(["rows", *words]) == code
    return capsys.readouterr()

  assert len(rows().out.splitlines()) == 1 + len(ROWS) == 187
  out = rows("table12", "1:32", "dense_steps=10000").out
  assert re.findall(r"overall ([\d.]+)", out) == ["79.4", "80.9", "79.3"]
  assert "sr_ste 2:4  top-1 77.761" in rows("vit_b16", "SR-STE", "2:4").out
  assert "no row has" in rows("table12", "mdgf_exponential", code=1).err
  for bindings, word in ((["ROW = 'sr_ste 1:4'"], "'sr_ste 1:4 dense_steps=0'"), ([], "not set")):
    (error,) = plan.plan([file_of("table12")], bindings)["errors"]
    assert "ROW" in error and word in error
