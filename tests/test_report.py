"""nm-sparsity report: what runs wrote is what the page shows, and a browser shows the page."""

import dataclasses
import html.parser
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import browser
import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import record_writer

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import report
from nm_sparsity_jax.analysis.report import charts as drawing
from nm_sparsity_jax.analysis.report import (
  network,
  page,
  plain,
  reading,
  schedule,
  scored,
  sections,
)
from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.parts import Cell, Section, Strip, Table
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.runs import trained
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


def charts(runs, **more):
  parts = [p for s in sections.sections(reading.read(runs), **more) for p in s.parts]
  return {p.key: p for p in parts if isinstance(p, Chart)}


def make(folder, runs, *flags):
  out = folder / "report.html"
  assert cli.main(["report", *runs, "--out", str(out), *flags]) == 0
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
    self.attributes += [(tag, *pair) for pair in attrs]
    self.ids += [v for k, v in attrs if k == "id"]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_startendtag(self, tag, attrs):
    self.attributes += [(tag, *pair) for pair in attrs]

  def handle_data(self, data):
    self.words.append(data)


# --- what is shown is what was written ------------------------------------------------------------


def test_points_are_those_of_the_events_at_the_steps_that_were_written(runs):
  """Issue 13, point 16: a run that begins at a checkpoint of step 1,000 begins there."""
  found = charts(runs)
  loss = found["train_loss"]
  steps = range(1020, 1101, 20)
  assert [line.run for line in loss.lines] == [0, 1]
  assert loss.lines[0].points == [(s, pytest.approx(64 / (s - 1000))) for s in steps]
  assert loss.lines[1].points == [(s, pytest.approx(64 / (s - 1000) + 0.5)) for s in steps]
  assert drawing.axes_of(loss).x == (1000, 1100)
  assert found["eval_loss_nm_glue_rte"].lines[1].points == [(1050, 1.25), (1100, 1.0)]
  assert found["nm_glue_rte_accuracy"].lines[0].points == [(1050, 52.5), (1100, 55.0)]
  assert [line.run for line in found["nm_glue_sst2_accuracy"].lines] == [1]
  assert found["pattern_ff"].lines[1].points[0] == (1020, 0.25)
  assert not [key for key in found if key.startswith("pattern_enc")]  # a path is no rule
  assert found["flips_all"].lines[0].points[0] == (1020, 0.125)
  assert found["flips_kept"].lines[0].points[0] == (1020, 0.0625)
  variance = found["grad_abs_var_all"]
  assert variance.log and variance.lines[0].points == [(1020, 0.5), (1040, 2.0**-20), (1060, 0.0)]
  assert variance.left_out == "Points not drawn: 2 that are 0, which a logarithmic axis lacks."
  assert found["grad_abs_var_kept"].left_out == "Points not drawn: 2 not finite."
  assert "second_moment_var_all" not in found


def test_d_is_the_schedules_own_beside_the_samples(runs):
  dashed, other, *dots = charts(runs)["decay"].lines
  recipe = reading.read(runs)[0].rules.places["ff"]
  assert dict(dashed.points)[1009] == 1.0 and dict(dashed.points)[1080] == 0.0
  assert 0 < dict(dashed.points)[1040] < 1
  for step, value in dashed.points:
    assert value == float(recipe.decay(step - 1000))
  assert {d for s, d in other.points if s >= 1010} == {0.0}  # sr_ste
  assert [line.run for line in dots] == [0, 1] and dots[0].points[0] == (1020, 0.5)


def test_d_jumps_where_the_schedule_does():
  phases = nms.Phases(total=10_000, dense=1_234, finetune=999)
  recipe = nms.recipe("mdgf_linear", pattern="1:4", phases=phases, beta=1e-5)
  found = dict(schedule.decay(recipe, schedule.segments(recipe)))
  assert found[1_234] == 1.0 and found[9_000] > 0.9 and found[9_001] == 0.0 == found[9_999]


def test_the_published_row_stands_below(tmp_path):
  run = write(tmp_path / "run", "sr_ste", "1:32")
  table, *said = {s.key: s.parts for s in sections.sections(reading.read([run]))}["scores"]
  rte = table.head.index("RTE")
  rows = {getattr(row[0], "text", row[0]): row for row in table.rows}
  text = {name: getattr(row[rte], "text", row[rte]) for name, row in rows.items()}
  assert text == {
    "run": "55.0",
    "at step": "1,100",
    "published, Table 12": "72.6",
    "delta": "-17.6",
  }
  assert any("of T5 base, not tiny" in line for line in said)
  assert any("missing CoLA, MNLI-m" in line for line in said)


def test_scores_against_flops_and_pattern(runs):
  found = charts(runs, checkpoint="last")
  lines = found["score_by_flops"].lines
  dense = t5_cost(T5Config.t5_1_1("tiny", vocab_size=256))
  for run, line, plus in zip(reading.read(runs), lines, (0, 0.5), strict=True):
    recipes = dict(run.rules.places)
    for (x, y), step in zip(line.points, (50, 100), strict=True):
      assert x == flops.training(dense, recipes, 8, until=step).flops
      assert y == (1000 + step) / 20 + plus  # RTE alone: the task that both have
  assert lines[1].points[1][0] < lines[0].points[1][0]
  assert "RTE" in found["score_by_flops"].title and "SST" not in found["score_by_flops"].title
  pattern = found["score_by_pattern"]
  assert pattern.labels == ["1:4 FF", "1:8 FF"]  # from dense to sparse
  assert {line.run: line.points for line in pattern.lines} == {0: [(1.0, 55.0)], 1: [(0.0, 55.5)]}
  first = charts(runs, checkpoint=1050)["score_by_pattern"].lines
  assert {line.points[0][1] for line in first} == {52.5, 53.0}


def test_a_denser_checkpoint_is_never_the_best(tmp_path):
  """Early on, weights are dense and scores high: neither chart nor table takes them for 1:8."""
  found = {}
  for pattern, start in (("1:8", None), ("1:32", 1_040)):
    folder = tmp_path / pattern.replace(":", "_")
    write(folder, pattern=pattern, tasks=("nm_glue_rte", "mine"))
    first = 1000 if start is None else start
    for task in ("nm_glue_rte", "mine"):
      lines = [{"step": first + s, "accuracy": a} for s, a in ((5, 90), (79, 80), (80, 50))]
      text = "".join(f"{json.dumps(line)}\n" for line in lines)
      (folder / f"inference_eval/{task}-metrics.jsonl").write_text(text)
    if start is not None:  # noted by the local runner, whatever the macros say
      (folder / "run.json").write_text(json.dumps({"start": start, "processes": []}))
    found[pattern] = str(folder)
  runs = list(found.values())
  points = {line.run: line.points for line in charts(runs)["score_by_pattern"].lines}
  assert (points[0], points[1]) == ([(0.0, 50.0)], [(1.0, 50.0)])
  parts = {s.key: s.parts for s in sections.sections(reading.read(runs))}["scores"]
  (table,) = [p for p in parts if isinstance(p, Table) and p.head[0] == "metric"]
  assert table.rows == [["mine accuracy", "50 @ 1,080", "50 @ 1,120"]]
  assert "the best one at the target pattern" in " ".join(p for p in parts if isinstance(p, str))
  rows = {s.key: s.parts for s in sections.sections(reading.read(runs), 1005)}["scores"]
  assert any("90 @ 1,005" in row for p in rows if isinstance(p, Table) for row in p.rows)

  config = tmp_path / "1_8/config.gin"
  config.write_text(config.read_text().replace("FINETUNE_STEPS = 20\n", ""))
  (said,) = [p for p in scored.unknown_targets(reading.read(runs), "best")]
  assert said.startswith("1_8: it is not known from which step the weights have the target pattern")
  assert said in {s.key: s.parts for s in sections.sections(reading.read(runs))}["cost"]


def test_the_environment_of_each_run(tmp_path):
  runs = [write(tmp_path / name) for name in "abc"]
  (none,) = {s.key: s.parts for s in sections.sections(reading.read(runs))}["environment"]
  assert none.startswith("No run noted what it ran with: the local runner does, in run.json")
  elsewhere = [{"from": 1000, "environment": {"jax": "1", "devices": "1 x cpu"}},
               {"from": 1040, "environment": {"jax": "2", "devices": "1 x cpu"}}]  # fmt: skip
  for run, processes in zip(runs, (elsewhere[:1], elsewhere), strict=False):
    note = json.dumps({"start": 1000, "processes": processes})
    (tmp_path / run / "run.json").write_text(note)
  table, *said = {s.key: s.parts for s in sections.sections(reading.read(runs))}["environment"]
  text = [[getattr(cell, "text", cell) for cell in row] for row in table.rows]
  assert text == [["jax", "1", "2", "–"], ["devices", "1 x cpu", "1 x cpu", "–"]]
  assert said == [
    "b: went on at step 1,040 in another environment; the last one is shown.",
    "c: no note of what it ran with.",
  ]


def test_runs_of_one_recipe_are_joined_and_mini_glue_is_no_glue(tmp_path):
  same = [write(tmp_path / "a"), write(tmp_path / "b", pattern="1:4")]
  (joined,) = [c for c in charts(same)["score_by_pattern"].lines if c.run is None]
  assert joined.points == [(0.0, 55.0), (1.0, 55.0)]
  mini = write(tmp_path / "c", tasks=("nm_glue_mini_rte",))
  assert "score_by_pattern" not in charts([same[0], mini])
  by_key = {s.key: s.parts for s in sections.sections(reading.read([same[0], mini]))}
  assert "does not compare with GLUE" in by_key["scores"][0]


def sentences(runs, key):
  parts = {s.key: s.parts for s in sections.sections(reading.read(runs))}[key]
  return [part for part in parts if isinstance(part, str)]


def test_what_is_said_of_several_runs_is_said_once(tmp_path):
  """Issue 13, point 7: a note is not repeated for each run."""
  runs = [write(tmp_path / name) for name in "abc"]
  for name in "abc":
    file = tmp_path / name / "config.gin"
    file.write_text(re.sub(r"network.*\n", "", file.read_text()))
    if name != "c":
      file.write_text(file.read_text().replace("RECIPE = ", "NO_RECIPE = "))
  said = [line for key in ("runs", "scores", "schedule", "cost") for line in sentences(runs, key)]
  assert "a, b, c: start at a checkpoint of step 1,000, and inherit the steps before it." in said
  assert "a, b: no schedule, config.gin has no macro RECIPE." in said
  assert "a, b, c: no FLOPs, config.gin binds no T5Config." in said
  assert any(line.startswith("a, b, c: no overall, missing CoLA, ") for line in said)
  assert len(said) == len(set(said))


def test_a_level_jumps_and_does_not_slope(runs, tmp_path):
  """Issue 13, point 7: two samples of a level are joined by a step."""
  found = charts(runs)
  assert {found[key].lines[0].style for key in ("pattern_ff", "density")} == {"steps"}
  text = make(tmp_path, runs)
  (figure,) = re.findall(r'<figure id="chart-density">(.*?)</figure>', text, re.DOTALL)
  for corners in re.findall(r'<polyline class="steps" points="(.*?)"', figure):
    places = [tuple(map(float, place.split(","))) for place in corners.split()]
    assert len(places) == 2 * 5 - 1
    for (x, y), (right, down) in itertools.pairwise(places):
      assert x == right or y == down


def test_the_second_moment_is_named_by_what_was_measured(tmp_path):
  """Issue 13, point 7: Adafactor writes the first name too, where it does not factor."""
  tags = {f"nm/second_moment_var{end}/all": {5: 1.0} for end in ("", "_factored")}
  events(tmp_path / "run/train/events.out.tfevents.1.host", tags)
  found = charts([str(tmp_path / "run")])
  assert {found[f"second_moment_var{end}_all"].title for end in ("", "_factored")} == {
    "Variance of the second moment, all weights",
    "Variance of Adafactor's factored second moment, all weights",
  }


T5X_OWN = """
network.T5Config.dropout_rate = %DROPOUT_RATE
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


def t5_cost(config):
  """The cost of a T5 for the lengths of CONFIG."""
  return T5(Transformer(config), lengths={"inputs": 16, "targets": 4}).cost()


def own(folder, places="{'ff': None}"):
  """A run of T5X's own model file."""
  run = write(folder)
  file = folder / "config.gin"
  config = re.sub(r"network.*\n", "", file.read_text()) + T5X_OWN
  file.write_text(config.replace("{'ff': None}", places))
  return run


def test_flops_of_t5xs_own_model_files(tmp_path):
  """Issue 13, point 7: config.gin binds the sizes one by one; `plan` prices such a run."""
  (run,) = reading.read([own(tmp_path / "run")])
  assert run.cost == t5_cost(OWN_CONFIG)
  recipes = dict(run.rules.places)
  dense = flops.training(run.cost, {}, 8, steps=100).flops
  assert run.flops(100) == (flops.training(run.cost, recipes, 8).flops, dense)
  assert "score_by_flops" in charts([str(run.path)])


REGEX = r"{r'(encoder|decoder)/.*/mlp/w.*/kernel': None}"


def test_flops_of_rules_by_regex(tmp_path):
  """Issue 13, point 7: the same weights cost the same, however the rules call them."""
  (role,) = reading.read([own(tmp_path / "role")])
  (regex,) = reading.read([own(tmp_path / "regex", REGEX)])
  for until in (0, 15, 60, 100):
    assert regex.flops(until) == pytest.approx(role.flops(until))
  assert 0 < regex.flops(100)[0] < regex.flops(100)[1]
  with pytest.raises(ValueError, match="until=101.*from 0 to 100"):
    regex.flops(101)


def test_a_run_of_another_family_notes_its_operations(tmp_path):
  folder = tmp_path / "mlp"
  other_family(folder, [OP])
  file = folder / "config.gin"
  file.write_text(file.read_text().replace("{'ff': None}", "{r'.*mlp/wi/kernel': None}"))
  (run,) = reading.read([str(folder)])
  recipe = next(iter(run.rules.places.values()))
  dense = flops.training(run.cost, {}, 8, steps=100).flops
  assert run.flops(100) == (flops.training(run.cost, {"ff": recipe}, 8).flops, dense)


def test_flops_of_inherited_steps_count_where_they_are_known(tmp_path):
  """Issue 13, point 16: a sparse run does not begin at no cost beside its warm-up."""
  before, after = write(tmp_path / "warmup", "dense"), write(tmp_path / "sparse")
  for run, start in ((before, 1000), (after, 1100)):
    (pathlib.Path(run) / "run.json").write_text(json.dumps({"start": start, "processes": []}))
  lines = [json.dumps({"step": s, "accuracy": 50.0}) for s in (1150, 1200)]
  (tmp_path / "sparse/inference_eval/nm_glue_rte-metrics.jsonl").write_text("\n".join(lines))
  file = tmp_path / "sparse/config.gin"
  file.write_text(file.read_text() + f"INITIAL_CHECKPOINT_PATH = '{before}/checkpoint_1100'\n")
  chart = charts([before, after])["score_by_flops"]
  first, second = reading.read([before, after])
  paid = first.flops(100)[0]
  assert [x for x, _ in chart.lines[1].points] == [
    paid + second.flops(50)[0], paid + second.flops(100)[0]
  ]  # fmt: skip
  missing = "the FLOPs of its 1,{}00 inherited steps are not in them."
  said = sentences([before, after], "cost")
  assert f"warmup: {missing.format(0)}" in said and f"sparse: {missing.format(1)}" not in said
  assert f"sparse: {missing.format(1)}" in sentences([after], "cost")


def test_marks_far_from_zero_are_exact():
  """Issue 13, point 16: steps after a million inherited ones have marks of their own."""
  chart = Chart("k", "t", "step", [Line(0, [(1_000_000, 1.0), (1_001_000, 2.0)])], since=1_000_000)
  drawn = drawing.svg(chart, ["a"])
  assert ">1M<" in drawn and ">1.0002M<" in drawn and ">1.001M<" in drawn


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_well_formed_alone_and_the_same_twice(runs, tmp_path):
  text = make(tmp_path, runs)
  assert text == make(tmp_path, runs)
  page = Outline(text)
  assert len(page.ids) == len(set(page.ids))
  for tag, name, value in page.attributes:
    assert tag not in ("script", "iframe", "img", "object")
    if name in ("href", "src", "srcset", "xlink:href", "data", "action"):
      assert value == "data:," or value.removeprefix("#") in page.ids
    assert not name.startswith("on")
  assert not re.search(r"url\(|@import|https?://", text)
  said = "".join(page.words)
  assert "sr<b>ste" in said and "NOTE = 'a<b & c'" in said  # escaped, once
  assert said.count("&lt;") == 0


def test_every_number_of_a_chart_is_in_its_table_and_every_dot_in_its_place(runs, tmp_path):
  text = make(tmp_path, runs)
  figures = dict(re.findall(r'<figure id="chart-([^"]+)">(.*?)</figure>', text, re.DOTALL))
  found = {k: c for k, c in charts(runs).items() if plain.plain(c, ["mdgf", "sr_ste"]) is c}
  assert set(figures) == set(found) and len(found) > 9
  for key, chart in found.items():
    axes = drawing.axes_of(chart)
    assert axes is not None
    for line in chart.lines:
      if line.run is None or line.style == "dashed":
        continue
      drawn = re.findall(rf'<g class="c{line.run}">(.*?)</g>', figures[key], re.DOTALL)
      dots = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)".*?: (\S+)</title>', "".join(drawn))
      expected = [(*axes.at(x, y), f"{y:.6g}") for x, y in chart.drawn(line)]
      for x, y, value in expected:
        assert (f"{x:.1f}", f"{y:.1f}", value) in dots
      for _, y in line.points:
        assert f">{y:.6g}<" in figures[key]


def test_axes():
  chart = Chart("k", "t", "x", [Line(0, [(0, 1.0), (10, 3.0)])])
  axes = drawing.axes_of(chart)
  left, low = axes.at(0, axes.y[0])
  right, high = axes.at(10, axes.y[1])
  assert left < right and low > high  # pixels count downwards
  middle = axes.at(5, (axes.y[0] + axes.y[1]) / 2)
  assert middle == (pytest.approx((left + right) / 2), pytest.approx((low + high) / 2))
  log = drawing.axes_of(Chart("k", "t", "x", [Line(0, [(0, 1e-6), (1, 1e-2)])], log=True))
  assert log.at(0, 1e-4)[1] == pytest.approx((log.at(0, 1e-6)[1] + log.at(0, 1e-2)[1]) / 2)
  assert drawing.axes_of(Chart("k", "t", "x", [Line(0, [(0, math.nan)])])) is None
  assert drawing.axes_of(Chart("k", "t", "x", [Line(0, [(0, -1.0)])], log=True)) is None
  for low, high in ((0, 1), (0.3, 0.31), (-5, 12), (0, 4e15)):
    marks = drawing.ticks(low, high)
    assert 2 <= len(marks) <= 6 and low <= marks[0] and marks[-1] <= high
  for low, high in ((1e-9, 1), (0.2, 0.9), (3, 40), (1e-30, 1e-3)):
    marks = drawing.log_ticks(low, high)
    assert 1 <= len(marks) <= 6 and low <= marks[0] and marks[-1] <= high


def test_tables(runs, tmp_path):
  by_key = {s.key: s.parts for s in sections.sections(reading.read(runs), "last")}
  overview = by_key["runs"][0]
  assert overview.rows[0][1:5] == [
    "ff: mdgf_exponential 1:8, dense 10, finetune 20", "100 of 100, after 1,000 inherited",
    "0.64", "0.125",
  ]  # fmt: skip
  assert by_key["runs"][1:] == [
    "mdgf, sr<b>ste: start at a checkpoint of step 1,000, and inherit the steps before it."
  ]
  density = by_key["density"][0]
  assert [row[0] for row in density.rows] == list(PATHS)  # 2 before 10
  assert density.rows[0][2].text == "0.25" and density.rows[0][2].bar == 0.25
  scores = {row[0].text: row for row in by_key["scores"][0].rows if not isinstance(row[0], str)}
  rte = by_key["scores"][0].head.index("RTE")
  assert scores["mdgf"][rte].text == "55.0" and scores["sr<b>ste"][rte].text == "55.5"
  assert scores["sr<b>ste"][rte].strong and not scores["mdgf"][rte].strong
  settings = by_key["settings"][0].rows
  assert settings[0][0] == "RANDOM_SEED" and [c.text for c in settings[0][1:]] == ["7", "7"]
  assert [row[0] for row in settings[1:3]] == ["PATTERN", "RECIPE"] and settings[1][1].strong
  strips = [p for p in by_key["schedule"] if isinstance(p, Strip)]
  assert [s[:3] for s in strips[1].segments] == [(1000, 1010, "dense"), (1010, 1100, "1:4")]


def test_a_part_without_data_says_so(tmp_path):
  folder = tmp_path / "run"
  events(folder / "train/events.out.tfevents.1.host", {"timing/seconds": {5: 1.0}})
  text = make(tmp_path, [str(folder)])
  page = Outline(text)
  said = "".join(page.words)
  for words in (
    "No run has metrics of decoded predictions", "no schedule, there is no config.gin",
    "No run has samples by layer", "No run has samples of its masks", "samples of variances",
    "is common to the runs", "No run has a config.gin", "No run has curves of training",
  ):  # fmt: skip
    assert words in said, words
  assert "<svg" not in text
  (folder / "config.gin").write_text("RECIPE = @my.recipe()\nPATTERN = '1:4'\n")
  assert "RECIPE is not a plain value in config.gin: @my.recipe()" in make(tmp_path, [str(folder)])


def test_a_resumed_run_counts_what_was_written_last(tmp_path):
  tag = "loss_per_nonpadding_target_token"
  events(tmp_path / "r/train/events.out.tfevents.2.host", {tag: {20: 3.0, 30: 2.0}})
  events(tmp_path / "r/train/events.out.tfevents.1.host", {tag: {10: 5.0, 20: 4.0}})
  assert charts([str(tmp_path / "r")])["train_loss"].lines[0].points == [
    (10, 5.0), (20, 3.0), (30, 2.0),
  ]  # fmt: skip


def test_pngs(runs, tmp_path):
  pytest.importorskip("matplotlib")
  tags = {"nm/flip_rate/all": {1: 0.5}, "nm/flip_rate/kept": {1: math.nan}}  # nothing to draw
  events(tmp_path / "run/train/events.out.tfevents.1.host", tags)
  make(tmp_path, [str(tmp_path / "run")], "--png", str(tmp_path / "png"))
  assert [file.name for file in (tmp_path / "png").iterdir()] == ["flips_all.png"]
  log = Chart("log", "t", "x", [Line(0, [(0, 1e-3), (1, 1.0), (2, 0.5)])], log=True)
  plain = dataclasses.replace(log, key="plain", log=False)
  for chart in (log, plain, charts(runs)["decay"], charts(runs)["score_by_pattern"]):
    drawing.png(chart, ["a", "b"], tmp_path / "png" / f"{chart.key}.png")
  data = {file.read_bytes() for file in (tmp_path / "png").iterdir()}
  assert len(data) == 5 and all(png.startswith(b"\x89PNG") for png in data)


@pytest.mark.parametrize(
  ("make_it", "said"),
  [
    (lambda d: [str(d / "no")], "no: there is no such folder"),
    (lambda d: ["gs://b/run"], "copy it from the bucket first"),
    (lambda d: [str(d)], "is not a run's folder: it holds no train/"),
    (lambda d: (d / "train").mkdir() or [str(d)], "holds no metrics yet"),
    (lambda d: [write(d / "a"), str(d / "a")], "are one folder: name it once"),
    (lambda d: [str(d)] * 10, "10 runs: more than 9 cannot be told apart"),
    (lambda d: _broken(d), "is damaged"),
  ],
)
def test_mistakes_are_one_line(make_it, said, tmp_path, capsys):
  out = tmp_path / "page.html"
  assert cli.main(["report", *make_it(tmp_path), "--out", str(out)]) == 1
  err = capsys.readouterr().err
  assert said in err and err.count("\n") == 1 and not out.exists()


def test_what_is_in_the_way_is_named_before_anything_is_read(tmp_path, capsys):
  file = write(tmp_path / "run") and tmp_path / "a file"
  file.touch()
  for flags, said in (
    (["--out", str(file / "b/page.html")], f"--out: Not a directory: {str(file)!r} is a file"),
    (["--out", str(tmp_path)], f"--out: {str(tmp_path)!r} is a folder"),
    (["--png", str(file)], f"--png: Not a directory: {str(file)!r} is a file"),
  ):
    assert cli.main(["report", "no such run", *flags]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def _broken(folder):
  path = folder / "run/train/events.out.tfevents.1.host"
  events(path, {"loss": {1: 1.0}})
  path.write_bytes(path.read_bytes()[:-1] + b"\0")
  return [str(folder / "run")]


# --- from Python ------------------------------------------------------------------------------


def test_a_report_from_python_is_that_of_the_command(runs, tmp_path):
  """The example at the top of `report`."""
  found = report.report(runs, checkpoint="last")
  assert found.charts["train_loss"].lines[0].points == charts(runs)["train_loss"].lines[0].points
  again = {s.key: s.parts for s in sections.sections(reading.read(runs), "last")}
  assert found["scores"] == again["scores"]
  path = report.write(found, tmp_path / "new/page.html")
  assert path.read_text("utf-8") == make(tmp_path, runs, "--checkpoint", "last")


def test_pngs_from_python(tmp_path):
  pytest.importorskip("matplotlib")
  tags = {"nm/flip_rate/all": {1: 0.5}, "nm/flip_rate/kept": {1: math.nan}}
  events(tmp_path / "run/train/events.out.tfevents.1.host", tags)
  written = report.png(report.report([tmp_path / "run"]), tmp_path / "new/png")
  assert written == [tmp_path / "new/png/flips_all.png"] and written[0].is_file()


def test_matplotlib_is_for_pngs_alone_and_a_missing_package_is_one_line(runs, tmp_path):
  code = f"""
import sys
class Lost:
  def find_spec(self, name, path=None, target=None):
    if name in lost:
      raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Lost())
lost = ["matplotlib"]
from nm_sparsity_jax import cli
assert cli.main(["report", {runs[0]!r}, "--out", "page.html"]) == 0
heavy = ("matplotlib", "tensorflow", "seqio", "t5x", "gin")
assert not [m for m in heavy if m in sys.modules]
from nm_sparsity_jax.report import page
page._template.cache_clear()
lost = ["jinja2"]
del sys.modules["jinja2"]
assert cli.main(["report", {runs[0]!r}, "--out", "page.html"]) == 1
"""
  env = os.environ | {"PYTHONPATH": str(pathlib.Path(nms.__file__).parents[1])}
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
  )
  assert not done.returncode, done.stderr
  assert done.stderr.splitlines() == [
    "nm-sparsity report: the page needs jinja2: pip install jinja2"
  ]


# --- what a run trained -------------------------------------------------------------------------


def checkpoint(folder, rules, step, target=None):
  """A checkpoint of a run with these rules, by Orbax."""
  ocp = pytest.importorskip("orbax.checkpoint")
  tree = {
    "target": target or {"w": np.ones((4, 2), np.float32)},
    "state": {"step": np.int32(step)},
    "flax_mutables": {"nm_sparsity": {"rules": configure.pack(configure.describe(rules))}},
  }
  ocp.PyTreeCheckpointer().save((folder / f"checkpoint_{step}/state").absolute(), tree)


def test_the_newest_checkpoint_tells_the_rules(tmp_path):
  """It holds what config.gin cannot tell by its macros: a recipe by reference, INDIVISIBLE."""
  folder = pathlib.Path(write(tmp_path / "run"))
  gin = (folder / "config.gin").read_text()
  told = trained.rules_of(folder, gin)
  assert told.indivisible == "error"
  assert trained.rules_of(folder, gin + "INDIVISIBLE = 'skip'\n").indivisible == "skip"
  phases = nms.Phases(total=100, dense=10, finetune=20)
  for step, pattern in ((1020, "1:2"), (1100, "2:4")):
    recipe = nms.recipe("sr_ste", pattern=pattern, phases=phases)
    checkpoint(folder, nms.Rules({"ff": recipe, "qkv": recipe}, indivisible="pad"), step)
  rules = trained.rules_of(folder, "SPARSITY_RULES = {'ff': @mine()}")
  assert rules.indivisible == "pad" and set(rules.places) == {"ff", "qkv"}
  assert {str(r.pattern) for r in rules.places.values()} == {"2:4"}
  assert report.report([folder])["runs"][0].rows[0][1].startswith("ff: sr_ste 2:4, dense 10")
  for file in (folder / "checkpoint_1100/state").iterdir():  # it was copied in part
    if file.name == "_METADATA":
      file.write_text("{")
  assert trained.rules_of(folder, gin) == told
  assert trained.rules_of(tmp_path / "none", gin) == told


def other_family(folder, ops=None, metrics=None):
  """A run of another model family: no events, no inference_eval/, no T5 in its config.gin."""

  def lines(file, entries):
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))

  steps = range(20, 101, 20)
  lines(folder / "train/metrics.jsonl", [
    {"step": s, "loss": 2 / s, "learning_rate": 0.5, "nm/D": 0.0, "timing/steps_per_second": 9.0}
    for s in steps
  ])  # fmt: skip
  evals = [{"step": s, "loss": 3 / s, "r2": s / 200} for s in (50, 100)]
  lines(folder / "training_eval/vectors/metrics.jsonl", evals)
  noted = [
    {"step": e["step"], "at_target": True, "loss": {"vectors": e["loss"]},
     "metrics": {"vectors": {"r2": e["r2"], "absolute_error": 1.0}} if metrics else {}}
    for e in evals
  ]  # fmt: skip
  (folder / "evaluations.json").write_text(json.dumps(noted))
  config = re.sub(r"(TASK_FEATURE_LENGTHS|network|PRETRAINED|    ).*\n", "", CONFIG)
  (folder / "config.gin").write_text(config.format(recipe="sr_ste", pattern="1:4"))
  note = {"start": 0, "processes": []} | ({"workload": {"ops": ops}} if ops else {})
  (folder / "run.json").write_text(json.dumps(note))
  return str(folder)


OP = {"name": "mlp/wi/kernel", "flops": 64, "params": 32, "axis": 8}


def test_a_run_of_another_family(tmp_path):
  """No inference_eval/, no T5: the report holds what was written, and says what is not known."""
  folder = other_family(tmp_path / "mlp")
  found = report.report([folder])
  assert found.charts["train_loss"].lines[0].points == [(s, 2 / s) for s in range(20, 101, 20)]
  assert found.charts["eval_loss_vectors"].lines[0].points == [(50, 0.06), (100, 0.03)]
  assert found.charts["eval_r2_vectors"].lines[0].points == [(50, 0.25), (100, 0.5)]
  assert {"learning_rate", "steps_per_second", "decay"} <= set(found.charts)
  assert found.charts["train_loss"].title == "Training loss"
  row = found["runs"][0].rows[0]
  assert row[1:4] == ["ff: sr_ste 1:4, dense 10, finetune 20", "100 of 100", "0.02"]
  assert row[5] == "–" and "score_by_pattern" not in found.charts
  Outline(make(tmp_path, [folder]))
  both = report.report([folder, write(tmp_path / "t5")])  # each loss in a chart of its own
  assert [line.run for line in both.charts["train_loss"].lines] == [0]


def test_another_family_is_judged_by_what_its_evaluations_note(tmp_path):
  folder = other_family(tmp_path / "mlp", [OP], metrics=True)
  found = report.report([folder])
  assert found.charts["vectors_r2"].lines[0].points == [(50, 0.25), (100, 0.5)]
  assert "eval_r2_vectors" not in found.charts and "eval_loss_vectors" in found.charts
  assert found["scores"][0].rows == [
    ["vectors absolute_error, less is better", "1 @ 50"], ["vectors r2", "0.5 @ 100"],
  ]  # fmt: skip
  assert found.charts["score_by_pattern"].lines[0].points == [(0.0, 0.5)]
  dense = network.cost_of(pathlib.Path(folder), "")
  assert dense.ops == (flops.Op(**OP),)
  cost = flops.training(dense, dict(found.runs[0].rules.places), 8, until=100).flops
  assert found.charts["score_by_flops"].lines[0].points[-1] == (cost, 0.5)
  assert 0 < cost < flops.training(dense, {}, 8, steps=100).flops
  other_family(tmp_path / "odd", [{"nope": 1}])
  with pytest.raises(ValueError, match=r"run.json notes operations that cannot be read: .*nope"):
    network.cost_of(tmp_path / "odd", "")


def test_the_best_of_an_error_is_the_least(tmp_path):
  """Issue 12: a metric of which less is better is judged, in its own direction."""
  for name, errors in (("a", (0.1, 0.5, 0.75)), ("b", (0.3, 0.25, 0.3))):
    folder = tmp_path / name
    other_family(folder, [OP])
    noted = [
      {"step": step, "at_target": True, "loss": {}, "metrics": {"vectors": {"far": x}},
       "less_is_better": ["far"]}
      for step, x in zip((5, 85, 100), errors, strict=True)
    ]  # fmt: skip
    (folder / "evaluations.json").write_text(json.dumps(noted))
  runs = [str(tmp_path / name) for name in "ab"]
  found = report.report(runs)
  (row,) = found["scores"][0].rows  # step 5 is before the target pattern
  assert row == ["vectors far, less is better", "0.5 @ 85", Cell("0.25 @ 85", strong=True)]
  chart = found.charts["score_by_pattern"]
  assert chart.title.startswith("vectors far, less is better")
  assert [line.points for line in chart.lines if line.run is not None] == [[(0, 0.5)], [(0, 0.25)]]
  assert found.charts["vectors_far"].lines[1].points == [(5, 0.3), (85, 0.25), (100, 0.3)]


def test_a_sparse_run_without_a_dense_one_beside_it_is_said(tmp_path):
  """Issue 13, point 16: the warm-up is no such run, for it ended where the sparse run began."""
  sparse, dense = write(tmp_path / "sparse"), write(tmp_path / "dense", "dense")
  warmup = write(tmp_path / "warmup", "dense")
  (tmp_path / "warmup/run.json").write_text(json.dumps({"start": 900, "processes": []}))
  said = "sparse: no dense run from step 1,000 to 1,100 is beside it, so this page does not say "
  assert any(line.startswith(said) for line in sentences([sparse, warmup], "scores"))
  assert not any("beside it" in line for line in sentences([sparse, dense, warmup], "scores"))
  first, second, third = reading.read([sparse, warmup, dense])
  assert reading.dense_beside([first, second, third], first) is third
  assert reading.dense_beside([first, second, third], third) is None


def test_names_are_escaped_wherever_they_stand(tmp_path):
  """A name with all that HTML gives a meaning comes out as text, in elements and in attributes."""
  odd = """x<y>&"z'</title>"""
  chart = Chart(odd, odd, odd, [Line(0, [(0, 1.0), (1, 2.0)], names=[odd, odd])], note=odd)
  labelled = dataclasses.replace(chart, key="b", labels=[odd, odd])
  nothing = Chart("c", odd, odd, [Line(0, [(0, math.nan)])])
  strip = Strip(0, odd, [(0, 5, odd, 0.5, 1.0, 1.0), (5, 9, "dense", 1.0, 0.0, 0.0)])
  cells = [odd, Cell(odd), Cell(odd, bar=0.5, run=0), Cell(odd, run=0), Cell(odd, strong=True)]
  shown = [chart, labelled, nothing, Table(cells, [cells]), strip, odd]
  runs = [reading.Run(pathlib.Path("r"), odd, {}, {}, {}, gin) for gin in (odd, "")]
  text = page.render(runs, [Section("s", odd, shown)], {odd: odd})
  found = Outline(text)
  bare = Outline(page.render(
    [dataclasses.replace(run, name="n", gin=run.gin and "g") for run in runs], [Section("s", "t", [
      *(dataclasses.replace(c, title="t", x="x", note="n", labels=["l"] * len(c.labels), lines=[
        dataclasses.replace(line, names=["n"] * len(line.names)) for line in c.lines
      ]) for c in (dataclasses.replace(chart, key="a"), labelled, nothing)),
      Table(["c", *(dataclasses.replace(c, text="c") for c in cells[1:])],
            [["c", *(dataclasses.replace(c, text="c") for c in cells[1:])]]),
      dataclasses.replace(strip, title="t", segments=[(0, 5, "l", *s[3:]) if s[2] == odd else s
                                                      for s in strip.segments]),
      "sentence"])], {"a": "b"}))  # fmt: skip
  names = lambda page: [(tag, name) for tag, name, _ in page.attributes]
  assert names(found) == names(bare)  # no name adds a tag or an attribute
  said = "".join(found.words)
  # Legend, title and h1, heading and link, tables, figures, strip, gin, footer: each of them.
  assert said.count(odd) > 30 and "&lt;" not in said and "&amp;" not in said
  assert {(tag, name) for tag, name, value in found.attributes if odd in (value or "")} >= {
    ("figure", "id"), ("svg", "aria-label"), ("div", "title"),
  }  # fmt: skip
  assert text.count(odd) == 0


# --- the browser ----------------------------------------------------------------------------------


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
      widths = """[...document.querySelectorAll(".strip")].map(s =>
        [...s.children].map(d => d.getBoundingClientRect().width / s.clientWidth))"""
      for shares, parts in zip(page.ask(widths), ([10, 70, 20], [10, 90]), strict=True):
        assert shares == pytest.approx([part / 100 for part in parts], abs=0.001)
      columns = page.ask(
        "new Set([...document.querySelectorAll('#loss figure')]"
        ".map(f => f.getBoundingClientRect().left)).size"
      )
      assert columns == {1280: 2, 400: 1}[width]  # two charts: the others would show nothing
    assert set(page.requests) == {file.resolve().as_uri()} and page.messages == []
    page.shoot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 50_000
    # The eyes of this test: what a page fetches and complains of is seen.
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='nope.png'><script>console.error('no'); wrong()</script>")
    page.open(bad, 400)
    time.sleep(0.3)
    page.ask("1")
    assert len(page.messages) >= 2 and any("nope.png" in url for url in page.requests)


def test_what_a_page_draws_of_many_points_has_no_dots():
  many = Chart("k", "t", "x", [Line(0, [(x, 1.0 + x) for x in range(500)])])
  section = Section("s", "s", [many])
  text = page.render([reading.Run(pathlib.Path("run"), "run", {}, {}, {}, "")], [section], {})
  (points,) = re.findall('points="(.*?)"', text)
  assert "<circle" not in text and len(points.split()) == 500 and text.count("<tr>") == 501
