"""nm-sparsity report: what runs wrote is what the page shows, and a browser shows the page."""

import html.parser
import itertools
import json
import math
import pathlib
import re
import sys

import browser
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import record_writer

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts as drawing
from nm_sparsity_jax.analysis import page, report
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Cell, Section, Strip, Table
from nm_sparsity_jax.analysis.report import reading, scored, sections, summary
from nm_sparsity_jax.core.text import Strong
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import configure, flops

CONFIG = """
from __gin__ import dynamic_registration
RECIPE = {recipe!r}
PATTERN = {pattern!r}
SPARSITY_RULES = {{'ff': None}}
SPARSE_STEPS = 100
DENSE_STEPS = 10
FINETUNE_STEPS = 20
PRETRAINED_STEPS = 1_000
BATCH_SIZE = 8
RANDOM_SEED = 7
NOTE = 'a<b & c'
T5_SIZE = 'tiny'
TASK_FEATURE_LENGTHS = \\
    {{'inputs': 16, 'targets': 4}}
network.T5Config.preset.size = %T5_SIZE
network.T5Config.preset.version = 't5_1_1'
network.T5Config.preset.vocab_size = 256
"""
PATHS = ("encoder/layers_2/mlp/wo/kernel", "encoder/layers_10/mlp/wo/kernel")


# --- a run's folder, as T5X leaves it -------------------------------------------------------------


def events(file, series):
  """An event file of TensorBoard: tag -> step -> value."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with file.open("wb") as out:
    writer = record_writer.RecordWriter(out)
    for tag, points in series.items():
      for step, value in points.items():
        summary = {"value": [{"tag": tag, "simple_value": value}]}
        writer.write(event_pb2.Event(step=step, summary=summary).SerializeToString())


def write(folder, recipe="mdgf_exponential", pattern="1:8", plus=0.0, tasks=("nm_glue_rte",)):
  """A run of 100 steps after 1,000, with values that are exact in float32."""
  steps = range(1020, 1101, 20)
  n, m = map(int, pattern.split(":"))
  series = {
    "loss_per_nonpadding_target_token": {s: 64 / (s - 1000) + plus for s in steps},
    "accuracy": {s: 0.5 for s in steps},
    "learning_rate": {s: 0.25 for s in steps},
    "nm/D": {s: 0.5 if s < 1080 else 0.0 for s in steps},
    "nm/density": {s: 1.0 if s < 1080 else n / m for s in steps},
    "nm/n/ff": {s: n for s in steps},
    "nm/m/ff": {s: m for s in steps},
    "nm/flip_rate/all": {s: 0.125 for s in steps},
    "nm/flip_rate/kept": {s: 0.0625 for s in steps},
    "nm/grad_abs_var/all": {1020: 0.5, 1040: 2.0**-20, 1060: 0.0},
    "nm/grad_abs_var/kept": {1020: math.nan, 1040: 0.5},
    **{f"nm/D/{p}": {1100: 0.0} for p in PATHS},
    **{f"nm/n/{p}": {1100: n} for p in PATHS},
    **{f"nm/m/{p}": {1100: m} for p in PATHS},
    **{f"nm/density/{p}": {1020: 1.0, 1100: n / m} for p in PATHS},
    **{f"nm/density_target/{p}": {1100: n / m} for p in PATHS},
  }
  events(folder / "train/events.out.tfevents.1.host", series)
  validation = {"loss_per_nonpadding_target_token": {1050: 0.75 + plus, 1100: 0.5 + plus}}
  events(folder / "training_eval/nm_glue_rte/events.out.tfevents.1.host", validation)
  (folder / "inference_eval").mkdir()
  for i, task in enumerate(tasks):
    lines = [{"step": s, "accuracy": s / 20 + plus + i} for s in (1050, 1100)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / f"inference_eval/{task}-metrics.jsonl").write_text(text)
  (folder / "config.gin").write_text(CONFIG.format(recipe=recipe, pattern=pattern))
  return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two runs; the second has one task more."""
  root = tmp_path_factory.mktemp("runs")
  more = ("nm_glue_rte", "nm_glue_sst2")
  return [
    write(root / "mdgf"),
    write(root / "sr<b>ste", "sr_ste", "1:4", plus=0.5, tasks=more),
  ]


def shown(runs, checkpoint="best"):
  """Section -> parts."""
  return {s.key: s.parts for s in sections.sections(reading.read(runs), checkpoint)}


def charts(runs, checkpoint="best"):
  return report.report(runs, checkpoint).charts


def words(table):
  return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]


def make(folder, runs, *flags):
  out = folder / "report.html"
  assert cli.main(["report", *map(str, runs), "--out", str(out), *flags]) == 0
  return out.read_text("utf-8")


class Outline(html.parser.HTMLParser):
  """Refuses tags that do not close in order, and keeps what the tests ask for."""

  VOID = {"meta", "link"}  # and what closes itself, as <line/>

  def __init__(self, text):
    super().__init__()
    self.open, self.ids, self.attributes, self.words = [], [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.attributes += [(tag, *pair) for pair in attrs]
    self.ids += [v for k, v in attrs if k == "id"]

  def handle_data(self, data):
    self.words.append(data)


# --- what is shown is what was written ------------------------------------------------------------


def test_points_are_those_of_the_events_at_the_steps_that_were_written(runs):
  found = charts(runs)
  loss = found["train_loss"]
  steps = range(1020, 1101, 20)
  for i, plus in enumerate((0, 0.5)):
    assert loss.lines[i].run == i
    assert loss.lines[i].points == [(s, pytest.approx(64 / (s - 1000) + plus)) for s in steps]
  assert (loss.since, loss.until) == (1000, 1100)  # it begins at a checkpoint of step 1,000
  assert found["eval_loss_nm_glue_rte"].lines[1].points == [(1050, 1.25), (1100, 1.0)]
  assert found["nm_glue_rte_accuracy"].lines[0].points == [(1050, 52.5), (1100, 55.0)]
  assert [line.run for line in found["nm_glue_sst2_accuracy"].lines] == [1]
  assert found["pattern_ff"].lines[1].points[0] == (1020, 0.25)
  assert found["pattern_ff"].lines[1].style == "steps"  # a level jumps and does not slope
  assert not [key for key in found if key.startswith("pattern_enc")]  # a path is no rule
  assert found["flips_kept"].lines[0].points[0] == (1020, 0.0625)
  variance = found["grad_abs_var_all"]
  assert variance.log and variance.lines[0].points == [(1020, 0.5), (1040, 2.0**-20), (1060, 0.0)]
  assert "2 that are 0" in variance.left_out and "second_moment_var_all" not in found
  assert "2 not finite" in found["grad_abs_var_kept"].left_out


def test_a_resumed_run_counts_what_was_written_last(tmp_path):
  for number, points in ((2, {20: 3.0, 30: 2.0}), (1, {10: 5.0, 20: 4.0})):
    file = tmp_path / f"r/train/events.out.tfevents.{number}.host"
    events(file, {reading.LOSS: points})
  (line,) = charts([tmp_path / "r"])["train_loss"].lines
  assert line.points == [(10, 5.0), (20, 3.0), (30, 2.0)]


def test_d_is_the_schedules_own_beside_the_samples(runs):
  dashed, other, *dots = charts(runs)["decay"].lines
  recipe = reading.read(runs)[0].rules.places["ff"]
  points = dict(dashed.points)
  assert points[1009] == 1.0 and points[1080] == 0.0 and 0 < points[1040] < 1
  assert all(value == float(recipe.decay(step - 1000)) for step, value in dashed.points)
  assert {d for s, d in other.points if s >= 1010} == {0.0}  # sr_ste
  assert [line.run for line in dots] == [0, 1] and dots[0].points[0] == (1020, 0.5)
  phases = nms.Phases(total=10_000, dense=1_234, finetune=999)  # D jumps where the schedule does
  recipe = nms.recipe("mdgf_linear", pattern="1:4", phases=phases, beta=1e-5)
  found = dict(sections.decay(recipe, sections.segments(recipe)))
  assert found[1_234] == 1.0 and found[9_000] > 0.9 and found[9_001] == 0.0 == found[9_999]


def test_tables(runs):
  by_key = shown(runs, "last")
  overview = by_key["runs"][0]
  assert overview.rows[0][1:5] == [
    "ff: mdgf_exponential 1:8, dense 10, finetune 20", "100 of 100, after 1,000 inherited",
    "0.64", "0.125",
  ]  # fmt: skip
  density = by_key["density"][0]
  assert [row[0] for row in density.rows] == list(PATHS)  # 2 before 10
  assert density.rows[0][2] == Cell("0.25", bar=0.25, run=1)
  settings = by_key["settings"][0].rows
  assert settings[0] == ["RANDOM_SEED", "7", "7"]
  assert [row[0] for row in settings[1:3]] == ["PATTERN", "RECIPE"]
  assert isinstance(settings[1][1], Strong)
  strips = [p for p in by_key["schedule"] if isinstance(p, Strip)]
  assert [s[:3] for s in strips[1].segments] == [(1000, 1010, "dense"), (1010, 1100, "1:4")]
  rte = by_key["scores"][0].head.index("RTE")
  cells = {row[0].text: row[rte] for row in by_key["scores"][0].rows if row[0].run is not None}
  assert cells == {"mdgf": "55.0", "sr<b>ste": "55.5"}
  assert [isinstance(c, Strong) for c in cells.values()] == [False, True]


def test_the_published_row_stands_below(tmp_path):
  table, *said = shown([write(tmp_path / "run", "sr_ste", "1:32")])["scores"]
  rte = table.head.index("RTE")
  text = {row[0].strip(): row[rte] for row in words(table)}
  assert (text["run"], text["at step"], text["published"], text["delta"]) == (
    "55.0", "1100", "72.6", "-17.6"
  )  # fmt: skip
  assert any("not tiny" in line for line in said) and any("CoLA, MNLI-m" in line for line in said)


def test_a_denser_checkpoint_is_never_the_best(tmp_path):
  """Early on, weights are dense and scores high: neither chart nor table takes them for 1:8."""
  folder = tmp_path / "run"
  write(folder, pattern="1:8", tasks=("nm_glue_rte", "mine"))
  for task in ("nm_glue_rte", "mine"):
    lines = [{"step": 1000 + s, "accuracy": a} for s, a in ((5, 90), (79, 80), (80, 50))]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / f"inference_eval/{task}-metrics.jsonl").write_text(text)
  assert charts([folder])["score_by_pattern"].lines[0].points == [(0.0, 50.0)]
  tables = [part for part in shown([folder])["scores"] if isinstance(part, Table)]
  assert tables[1].rows == [["mine accuracy", "50 @ 1,080"]]
  assert [p for p in shown([folder], 1005)["scores"] if isinstance(p, Table)][1].rows == [
    ["mine accuracy", "90 @ 1,005"]
  ]
  config = folder / "config.gin"
  config.write_text(config.read_text().replace("FINETUNE_STEPS = 20\n", ""))
  (said,) = scored.unknown_targets(reading.read([folder]), "best")
  assert "not known from which step" in said and said in shown([folder])["cost"]


def test_the_environment_of_each_run(tmp_path):
  runs = [write(tmp_path / name) for name in "abc"]
  noted = [{"from": 1000, "environment": {"jax": "1", "devices": "1 x cpu"}},
           {"from": 1040, "environment": {"jax": "2", "devices": "1 x cpu"}}]  # fmt: skip
  for run, processes in zip(runs, (noted[:1], noted), strict=False):
    note = json.dumps({"start": 1000, "processes": processes})
    (tmp_path / run / "run.json").write_text(note)
  table, *said = shown(runs)["environment"]
  assert words(table) == [["jax", "1", "2", "–"], ["devices", "1 x cpu", "1 x cpu", "–"]]
  assert len(said) == 2 and said[0].startswith("b: went on at step 1,040")


def test_what_is_said_of_several_runs_is_said_once(tmp_path):
  runs = [write(tmp_path / name) for name in "abc"]
  for name in "ab":
    file = tmp_path / name / "config.gin"
    file.write_text(file.read_text().replace("RECIPE = ", "NO_RECIPE = "))
  parts = shown(runs)
  said = [p for k in ("runs", "scores", "schedule") for p in parts[k] if isinstance(p, str)]
  assert any(line.startswith("a, b, c: start at a checkpoint of step 1,000") for line in said)
  assert any(line.startswith("a, b: no schedule, ") for line in said)
  assert len(said) == len(set(said))


def test_a_part_without_data_says_so(tmp_path):
  folder = tmp_path / "run"
  events(folder / "train/events.out.tfevents.1.host", {"timing/seconds": {5: 1.0}})
  text = make(tmp_path, [folder])
  assert "<svg" not in text and all(shown([folder]).values())
  (folder / "config.gin").write_text("RECIPE = @my.recipe()\nPATTERN = '1:4'\n")
  assert "RECIPE is not a plain value" in make(tmp_path, [folder])


@pytest.mark.parametrize(
  "make_it, word",
  [
    (lambda d: [d / "no"], "no such folder"),
    (lambda d: ["gs://b/run"], "bucket"),
    (lambda d: [d], "holds no metrics"),
    (lambda d: [write(d / "a"), d / "a"], "once"),
    (lambda d: [d] * 10, "10 runs"),
    (lambda d: [write(d / "a"), "--out", d], "--out"),
    (lambda d: [write(d / "a"), "--png", d / "a/config.gin"], "--png"),
  ],
)
def test_mistakes_are_one_line(make_it, word, tmp_path, capsys):
  out = tmp_path / "page.html"
  assert cli.main(["report", "--out", str(out), *map(str, make_it(tmp_path))]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1 and not out.exists()


# --- FLOPs and other families ---------------------------------------------------------------------

T5X_OWN = """
network.T5Config.dtype = 'bfloat16'
network.T5Config.emb_dim = 64
network.T5Config.head_dim = 16
network.T5Config.logits_via_embedding = False
network.T5Config.mlp_activations = \\
    ('gelu', 'linear')
network.T5Config.mlp_dim = 128
network.T5Config.num_decoder_layers = 3
network.T5Config.num_encoder_layers = 2
network.T5Config.num_heads = 4
network.T5Config.vocab_size = %VOCAB_SIZE
VOCAB_SIZE = 256
network.Transformer.config = @network.T5Config()
"""
OWN_CONFIG = T5Config.t5_1_1(
  "tiny", emb_dim=64, mlp_dim=128, num_encoder_layers=2, num_decoder_layers=3, num_heads=4,
  head_dim=16, vocab_size=256,
)  # fmt: skip
REGEX = r"{r'(encoder|decoder)/.*/mlp/w.*/kernel': None}"


def t5_cost(config):
  """The cost of a T5 for the lengths of CONFIG."""
  return T5(Transformer(config), lengths={"inputs": 16, "targets": 4}).cost()


def own(folder, places="{'ff': None}"):
  """A run of T5X's own model file, whose config.gin binds the sizes one by one."""
  write(folder)
  file = folder / "config.gin"
  config = re.sub(r"network.*\n", "", file.read_text()) + T5X_OWN
  file.write_text(config.replace("{'ff': None}", places))
  return folder


def test_flops_of_t5xs_own_model_files_and_of_rules_by_regex(tmp_path):
  role, regex = reading.read([own(tmp_path / "role"), own(tmp_path / "regex", REGEX)])
  assert role.cost == t5_cost(OWN_CONFIG)
  dense = flops.training(role.cost, {}, 8, steps=100).flops
  assert role.flops(100) == (flops.training(role.cost, dict(role.rules.places), 8).flops, dense)
  for until in (0, 60, 100):  # the same weights cost the same, however the rules call them
    assert regex.flops(until) == pytest.approx(role.flops(until))


def test_scores_against_flops_and_pattern(runs):
  found = charts(runs, "last")
  lines = found["score_by_flops"].lines
  dense = t5_cost(T5Config.t5_1_1("tiny", vocab_size=256))
  for run, line, plus in zip(reading.read(runs), lines, (0, 0.5), strict=True):
    for (x, y), step in zip(line.points, (50, 100), strict=True):
      assert x == flops.training(dense, dict(run.rules.places), 8, until=step).flops
      assert y == (1000 + step) / 20 + plus  # RTE alone: the task that both have
  pattern = found["score_by_pattern"]
  assert pattern.labels == ["1:4 FF", "1:8 FF"]  # from dense to sparse
  assert {line.run: line.points for line in pattern.lines} == {0: [(1.0, 55.0)], 1: [(0.0, 55.5)]}


def test_runs_of_one_recipe_are_joined_and_mini_glue_is_no_glue(tmp_path):
  same = [write(tmp_path / "a"), write(tmp_path / "b", pattern="1:4")]
  (joined,) = [c for c in charts(same)["score_by_pattern"].lines if c.run is None]
  assert joined.points == [(0.0, 55.0), (1.0, 55.0)]
  parts = shown([same[0], write(tmp_path / "c", tasks=("nm_glue_mini_rte",))])
  assert "mini-GLUE" in parts["scores"][0] and not isinstance(parts["cost"][0], Chart)


def test_flops_of_inherited_steps_count_where_they_are_known(tmp_path):
  before, after = write(tmp_path / "warmup", "dense"), write(tmp_path / "sparse")
  for run, start in ((before, 1000), (after, 1100)):
    (pathlib.Path(run) / "run.json").write_text(json.dumps({"start": start, "processes": []}))
  (tmp_path / "sparse/inference_eval/nm_glue_rte-metrics.jsonl").write_text(
    json.dumps({"step": 1150, "accuracy": 50.0})
  )
  file = tmp_path / "sparse/config.gin"
  file.write_text(file.read_text() + f"INITIAL_CHECKPOINT_PATH = '{before}/checkpoint_1100'\n")
  first, second = reading.read([before, after])
  parts = shown([before, after])["cost"]
  ((x, _),) = parts[0].lines[1].points
  assert x == first.flops(100)[0] + second.flops(50)[0]
  assert "warmup: the FLOPs of its 1,000 inherited steps are not in them." in parts
  assert "sparse: the FLOPs of its 1,100 inherited steps are not in them." in shown([after])["cost"]


OP = {"name": "mlp/wi/kernel", "flops": 64, "params": 32, "axis": 8}


def other_family(folder, metrics):
  """A run of another family, without events: metrics by step; less of 'far' is better."""

  def lines(file, entries):
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))

  train = [{"step": s, "loss": 2 / s, "learning_rate": 0.5} for s in (50, 100)]
  lines(folder / "train/metrics.jsonl", train)
  evals = [{"step": s, "loss": 3 / s, **values} for s, values in metrics.items()]
  lines(folder / "training_eval/vectors/metrics.jsonl", evals)
  noted = [
    {"step": step, "at_target": True, "loss": {}, "metrics": {"vectors": values},
     "less_is_better": ["far"]}
    for step, values in metrics.items()
  ]  # fmt: skip
  (folder / "evaluations.json").write_text(json.dumps(noted))
  config = re.sub(r"(TASK_FEATURE_LENGTHS|network|PRETRAINED|    ).*\n", "", CONFIG)
  (folder / "config.gin").write_text(config.format(recipe="sr_ste", pattern="1:4"))
  note = {"start": 0, "processes": [], "workload": {"ops": [OP]}}
  (folder / "run.json").write_text(json.dumps(note))
  return str(folder)


def test_a_run_of_another_family_is_judged_by_what_its_evaluations_note(tmp_path):
  metrics = {50: {"r2": 0.25}, 100: {"r2": 0.5, "far": 1.0}}
  found = report.report([other_family(tmp_path / "mlp", metrics)])
  assert found.charts["train_loss"].lines[0].points == [(50, 0.04), (100, 0.02)]
  assert found.charts["eval_loss_vectors"].lines[0].points == [(50, 0.06), (100, 0.03)]
  assert found.charts["vectors_r2"].lines[0].points == [(50, 0.25), (100, 0.5)]
  assert "eval_r2_vectors" not in found.charts
  cost = flops.training(flops.Cost((flops.Op(**OP),)), found.runs[0].rules, 8, until=100).flops
  assert found.charts["score_by_flops"].lines[0].points[-1] == (cost, 0.5)


def test_the_best_of_an_error_is_the_least(tmp_path):
  runs = []
  for name, errors in (("a", (0.1, 0.5, 0.75)), ("b", (0.3, 0.25, 0.3))):
    metrics = {s: {"far": x} for s, x in zip((5, 85, 100), errors, strict=True)}
    runs.append(other_family(tmp_path / name, metrics))
  found = report.report(runs)
  (row,) = found["scores"][0].rows  # step 5 is before the target pattern
  assert row == ["vectors far, less is better", "0.5 @ 85", "0.25 @ 85"]
  assert [isinstance(cell, Strong) for cell in row] == [False, False, True]
  chart = found.charts["score_by_pattern"]
  assert [line.points for line in chart.lines if line.run is not None] == [[(0, 0.5)], [(0, 0.25)]]


def test_the_newest_checkpoint_tells_the_rules(tmp_path):
  """It holds what config.gin cannot tell by its macros: a recipe by reference, INDIVISIBLE."""
  ocp = pytest.importorskip("orbax.checkpoint")
  folder = pathlib.Path(write(tmp_path / "run"))
  phases = nms.Phases(total=100, dense=10, finetune=20)
  for step, pattern in ((1020, "1:2"), (1100, "2:4")):
    recipe = nms.recipe("sr_ste", pattern=pattern, phases=phases)
    rules = nms.Rules({"ff": recipe, "qkv": recipe}, indivisible="pad")
    tree = {
      "target": {"w": np.ones((4, 2), np.float32)},
      "state": {"step": np.int32(step)},
      "flax_mutables": {"nm_sparsity": {"rules": configure.pack(configure.describe(rules))}},
    }
    ocp.PyTreeCheckpointer().save((folder / f"checkpoint_{step}/state").absolute(), tree)
  assert shown([folder])["runs"][0].rows[0][1].startswith("ff: sr_ste 2:4, dense 10")


# --- the summary ----------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
  """A dense run with 80 at its end, one that lost 20 of it and one that won 1."""
  runs = [
    write(tmp_path / "base", "dense", plus=25.0),
    write(tmp_path / "lower", "sr_ste", plus=5.0),
    write(tmp_path / "higher", "mdgf_exponential", plus=26.0),
  ]
  targets = [json.dumps({"input": {}, "target": target}) for target in (0, 1, 1, 1)]
  (tmp_path / "base/inference_eval/nm_glue_rte-001100.jsonl").write_text("\n".join(targets))
  return runs


def test_the_summary_comes_first_and_says_what_is_kept_and_lost(three):
  for folder in map(pathlib.Path, three):  # a dip while a run is dense is no fall of sparsity
    file = folder / "inference_eval/nm_glue_rte-metrics.jsonl"
    file.write_text(json.dumps({"step": 1005, "accuracy": 3.0}) + "\n" + file.read_text())
  found = report.report(three, "last")
  assert found.sections[0].key == "summary"
  lost, table, *notes = found["summary"]
  assert lost == (
    "With 12.5 % of the weights, lower loses 20.0 and higher gains 1.0 of the 80.0 points of base."
  )
  assert words(table) == [
    ["base", "80.0", "", "all", "3.0", "1,100"],
    ["lower", "60.0", "75.0 % of base", "12.5 %", "57.5", "1,100"],
    ["higher", "81.0", "101.2 % of base", "12.5 %", "78.5", "1,100"],
    ["largest class", "75.0", "", "", "", ""],
  ]
  bars = [row[1].bar for row in table.rows]
  assert bars == pytest.approx([80 / 81, 60 / 81, 1, 75 / 81])
  *_, note = summary.summary(reading.read(three), "last", seeds=3)
  assert "seeds" in note and "seeds" in notes[-1] and note != notes[-1]


def test_what_the_summary_does_not_know_it_does_not_say(three, tmp_path):
  assert "No run here is dense" in report.report(three[1:])["summary"][0]
  file = pathlib.Path(three[0]) / "inference_eval/nm_glue_rte-001100.jsonl"
  for text in ("", '{"target": 1}\n{"targ', '{"prediction": 1}\n'):  # no largest class
    file.write_text(text)
    assert [row[0] for row in words(report.report(three)["summary"][1])][-1] == "higher"
  longer = pathlib.Path(write(tmp_path / "longer", "dense", plus=30.0))
  metrics = longer / "inference_eval/nm_glue_rte-metrics.jsonl"
  metrics.write_text('{"step": 1200, "accuracy": 0.8}\n')
  notes = report.report([longer, three[1]], "last")["summary"][2:]
  assert any("1,100 updates, longer 1,200" in note for note in notes)
  (pathlib.Path(three[1]) / "config.gin").unlink()
  assert [row[0] for row in words(report.report(three)["summary"][1])] == ["base", "higher"]


def test_a_sparse_run_without_a_dense_one_of_its_steps_is_said(tmp_path):
  sparse, dense = write(tmp_path / "sparse"), write(tmp_path / "dense", "dense")
  warmup = write(tmp_path / "warmup", "dense")  # it ended where the sparse run began
  (tmp_path / "warmup/run.json").write_text(json.dumps({"start": 900, "processes": []}))
  is_said = lambda runs: any("sparse: no dense run" in str(p) for p in shown(runs)["scores"])
  assert is_said([sparse, warmup]) and not is_said([sparse, dense, warmup])


# --- the page -------------------------------------------------------------------------------------


def chart_of(*series, x="step", **more):
  return Chart("k", "Rate", x, [Line(i, points) for i, points in enumerate(series)], **more)


def test_a_chart_that_would_show_nothing_is_a_sentence_or_bars():
  flat = chart_of([(1, 0.001), (2, 0.001)], [(2, 0.001)])
  assert page.plain(flat, "ab") == "Rate: 0.001 throughout."
  bars = page.plain(chart_of([(100, 50.0)], [(100, 75.0)]), ["one", "two"])
  assert words(bars) == [["one", "50", "100"], ["two", "75", "100"]]
  assert [row[1].bar for row in bars.rows] == pytest.approx([2 / 3, 1])
  below = page.plain(chart_of([(100, -1.0)], [(100, 75.0)]), ["one", "two"])
  assert [row[1].bar for row in below.rows] == [None, None]
  for chart in (
    chart_of([(1, 0.001), (2, 0.002)], [(2, 0.001)]),
    chart_of([(1, 0.001), (2, 0.001), (3, math.nan)]),
    chart_of([(1, 1.0)], [(2, 1.5)], x="training FLOPs"),
    chart_of([]),
  ):
    assert page.plain(chart, "ab") is chart


def test_the_page_is_well_formed_alone_and_the_same_twice(runs, tmp_path):
  text = make(tmp_path, runs)
  assert text == make(tmp_path, runs)
  found = Outline(text)
  assert len(found.ids) == len(set(found.ids)) and found.ids[0] == "summary"
  for tag, name, value in found.attributes:
    assert tag not in ("script", "iframe", "img", "object") and not name.startswith("on")
    if name in ("href", "src", "xlink:href"):
      assert value == "data:," or value.removeprefix("#") in found.ids
  assert not re.search(r"@import|url\((?!#)", text)
  assert "NOTE = 'a<b & c'" in "".join(found.words)  # escaped, once
  parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
  for key, part in parts.items():
    assert ('<details class="folded">' in part) == (key in ("settings", "environment")), key


def test_every_number_of_a_chart_is_in_its_table_and_every_line_is_drawn(runs, tmp_path):
  text = make(tmp_path, runs)
  figures = dict(re.findall(r'<figure id="chart-([^"]+)">(.*?)</figure>', text, re.DOTALL))
  assert len(figures) > 9
  for key, chart in charts(runs).items():
    if key in figures:
      for line in chart.lines:
        assert f"--run-{line.run}" in figures[key] or line.run is None or not chart.drawn(line)
        for _, y in line.points if line.style != "dashed" and line.run is not None else ():
          assert f">{y:.6g}<" in figures[key]
  # y of the first and last point of a line, in pixels, is linear in the value.
  loss = re.findall(r"<title>mdgf</title>\s*<path d=\"(.*?)\"", figures["train_loss"], re.DOTALL)[0]
  ys = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", loss)]
  values = [y for _, y in charts(runs)["train_loss"].lines[0].points]
  assert np.interp(values[1], values[::-1][::4], ys[::-1][::4]) == pytest.approx(ys[1], abs=0.01)


def test_marks_far_from_zero_are_exact():
  """Steps after a million inherited ones have marks of their own."""
  line = Line(0, [(1_000_000, 1.0), (1_001_000, 2.0)])
  drawn = drawing.svg(Chart("k", "t", "step", [line], since=1_000_000), ["a"])
  assert ">1M<" in drawn and ">1.0002M<" in drawn and ">1.001M<" in drawn


def test_a_level_jumps_and_does_not_slope():
  line = Line(0, [(0, 1.0), (1, 2.0), (2, 1.5)], "steps")
  drawn = drawing.svg(Chart("k", "t", "step", [line]), ["level"])
  path = re.search(r"<title>level</title>\s*<path d=\"(.*?)\"", drawn, re.DOTALL)[1]
  corners = re.findall(r"[ML] (\S+) (\S+)", path)
  assert len(corners) == 5
  assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(corners))


def test_names_are_escaped_wherever_they_stand():
  """A name with all that HTML gives a meaning comes out as text, in elements and in attributes."""

  def outline(odd):
    line = Line(0, [(0, 1.0), (1, 2.0)], name=odd)
    strip = Strip(0, odd, [(0, 5, odd, 0.5, 1.0, 1.0), (5, 9, "dense", 1.0, 0.0, 0.0)])
    cells = [odd, Cell(odd, bar=0.5, run=0), Strong(odd)]
    parts = [
      Chart("a", odd, odd, [line], note=odd),
      Chart("b", odd, odd, [line], labels=[odd, odd]),
      Chart("c", odd, odd, [Line(0, [(0, math.nan)])]),
      Table(cells, [cells]),
      strip,
      odd,
    ]
    text = page.render(odd, [odd], [Section("s", odd, parts)], [odd], {odd: odd})  # fmt: skip
    return text, Outline(text)

  odd = """x<y>&"z'</title>"""
  (text, found), (_, bare) = outline(odd), outline("name")
  tags = lambda outline: [(tag, name) for tag, name, _ in outline.attributes]
  assert tags(found) == tags(bare)  # no name adds a tag or an attribute
  assert "".join(found.words).count(odd) > 25 and odd not in text


def test_a_report_from_python_is_that_of_the_command_and_pngs(runs, tmp_path):
  found = report.report(runs, checkpoint="last")
  path = report.write(found, tmp_path / "new/page.html")
  pngs = str(tmp_path / "png")
  assert path.read_text("utf-8") == make(tmp_path, runs, "--checkpoint", "last", "--png", pngs)
  files = sorted((tmp_path / "png").iterdir())
  assert [f.stem for f in files] == sorted(k for k, c in found.charts.items() if not c.is_empty)
  assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_missing_package_is_one_line(name, runs, tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, name, None)
  assert cli.main(["report", runs[0], "--out", str(tmp_path / "page.html")]) == 1
  err = capsys.readouterr().err
  assert f"not installed: {name}" in err and err.count("\n") == 1


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
def test_a_browser_shows_it_on_a_desk_and_on_a_phone(runs, tmp_path):
  make(tmp_path, runs)
  file = tmp_path / "report.html"
  with browser.page(tmp_path / "profile") as page:
    for width in (1280, 400):
      for dark in (False, True):
        page.look(file, width, dark)
        ground = page.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
      columns = page.ask(
        "new Set([...document.querySelectorAll('#loss figure')]"
        ".map(f => f.getBoundingClientRect().left)).size"
      )
      assert columns == {1280: 2, 400: 1}[width]  # two charts: the others would show nothing
    assert set(page.requests) == {file.resolve().as_uri()} and page.messages == []
