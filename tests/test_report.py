"""nm-sparsity report: what runs wrote is what the page shows."""

import base64
import json
import math
import re

import markupsafe
import pytest
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer import record_writer

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts as drawing
from nm_sparsity_jax.analysis import page, report, run_folder
from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Section, Table
from nm_sparsity_jax.analysis.report import costs
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import flops

CONFIG = """
RECIPE = {recipe!r}
PATTERN = {pattern!r}
SPARSITY_RULES = {{'ff': None}}
SPARSE_STEPS = 100
DENSE_STEPS = 10
FINETUNE_STEPS = 20
BATCH_SIZE = 8
RANDOM_SEED = 7
NOTE = 'a<b & c'
{more}"""
OF_T5 = """
PRETRAINED_STEPS = 1_000
T5_SIZE = 'tiny'
TASK_FEATURE_LENGTHS = \\
    {'inputs': 16, 'targets': 4}
network.T5Config.preset.size = %T5_SIZE
network.T5Config.preset.version = 't5_1_1'
network.T5Config.preset.vocab_size = 256
"""
VIT = "DATA = 'imagenet2012'\nvit.config.name = 'vit_b16'\nvit.config.classes = %CLASSES\n"

# --- a run's folder -------------------------------------------------------------------------------


def events(file, series):
  """An event file of TensorBoard: tag -> step -> value."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with file.open("wb") as out:
    writer = record_writer.RecordWriter(out)
    for tag, points in series.items():
      for step, value in points.items():
        summary = {"value": [{"tag": tag, "simple_value": value}]}
        writer.write(event_pb2.Event(step=step, summary=summary).SerializeToString())


def lines(file, entries):
  """A file with a line of JSON for each entry."""
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def write(folder, recipe="mdgf_exponential", pattern="1:8", plus=0.0, tasks=("nm_glue_rte",)):
  """A run of T5X of 100 steps after 1,000, with values that are exact in float32."""
  steps = range(1020, 1101, 20)
  n, m = map(int, pattern.split(":"))
  series = {
    run_folder.T5_LOSS: {s: 64 / (s - 1000) + plus for s in steps},
    "loss": {1: 9.0},  # T5X's other losses do not count
    "nm/D": {s: 0.5 if s < 1080 else 0.0 for s in steps},
    "nm/density": {s: 1.0 if s < 1080 else n / m for s in steps},
    "nm/flip_rate/kept": {s: 0.0625 if s < 1080 else 0.0 for s in steps},
    "nm/flip_rate/all": {s: 0.5 for s in steps},
    "nm/grad_abs_var/all": {1020: 0.5, 1040: 2.0**-20, 1060: 0.0},
    "nm/grad_abs_var/kept": {1020: math.nan, 1040: 0.5},
  }
  events(folder / "train/events.out.tfevents.1.host", series)
  validation = {run_folder.T5_LOSS: {1050: 0.75 + plus, 1100: 0.5 + plus}}
  events(folder / "training_eval/nm_glue_rte/events.out.tfevents.1.host", validation)
  for i, task in enumerate(tasks):
    found = [{"step": s, "accuracy": s / 20 + plus + i} for s in (1050, 1100)]
    lines(folder / f"inference_eval/{task}-metrics.jsonl", found)
  text = CONFIG.format(recipe=recipe, pattern=pattern, more=OF_T5)
  (folder / "config.gin").write_text(text)
  return str(folder)


OP = {"name": "mlp/wi/kernel", "flops": 64, "params": 32, "axis": 8}


def local(folder, metrics, task="validation", recipe="sr_ste", pattern="1:4", more=""):
  """A run of the local runner: step -> metric -> value; less of 'far' is better."""
  lines(folder / "train/metrics.jsonl", [{"step": s, "loss": 2 / s} for s in metrics])
  noted = [
    {"step": step, "metrics": {task: values}, "less_is_better": ["far"]}
    for step, values in metrics.items()
  ]
  (folder / "evaluations.json").write_text(json.dumps(noted))
  (folder / "run.json").write_text(json.dumps({"start": 0, "workload": {"ops": [OP]}}))
  (folder / "config.gin").write_text(CONFIG.format(recipe=recipe, pattern=pattern, more=more))
  return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two runs; the second has one task more."""
  root = tmp_path_factory.mktemp("runs")
  more = ("nm_glue_rte", "nm_glue_sst2")
  return [write(root / "mdgf"), write(root / "sr<b>ste", "sr_ste", "1:4", plus=0.5, tasks=more)]


@pytest.fixture(scope="module")
def found(runs):
  return report.report(runs, "last")


# --- curves and tables ----------------------------------------------------------------------------


def test_points_are_those_of_the_events_at_the_steps_that_were_written(found):
  points = {key: [line.points for line in chart.lines] for key, chart in found.charts.items()}
  for i, plus in enumerate((0, 0.5)):
    losses = [(s, pytest.approx(64 / (s - 1000) + plus)) for s in range(1020, 1101, 20)]
    assert points["train_loss"][i] == losses
  assert points["training_eval_nm_glue_rte_loss"][1] == [(1050, 1.25), (1100, 1.0)]
  assert points["inference_eval_nm_glue_rte_accuracy"][0] == [(1050, 52.5), (1100, 55.0)]
  assert [line.run for line in found.charts["inference_eval_nm_glue_sst2_accuracy"].lines] == [1]
  assert points["train_nm_density"][1][-1] == (1100, 0.25)
  assert points["train_nm_flip_rate_kept"][0][0] == (1020, 0.0625)
  assert found["flips"][0] == "train/nm/flip_rate/all: 0.5 throughout."
  assert points["train_nm_grad_abs_var_all"][0] == [(1020, 0.5), (1040, 2.0**-20), (1060, 0.0)]
  by_schedule, other, *dots = points["D"]
  recipe = found.runs[0].rules.places["ff"]
  assert all(value == float(recipe.decay(step - 1000)) for step, value in by_schedule)
  assert {d for s, d in other if s >= 1010} == {0.0}  # sr_ste
  assert dots[0][0] == dots[1][0] == (1020, 0.5)


def test_a_resumed_run_counts_what_was_written_last(tmp_path):
  for number, points in ((2, {20: 3.0, 30: 2.0}), (1, {10: 5.0, 20: 4.0})):
    events(tmp_path / f"train/events.out.tfevents.{number}.host", {run_folder.T5_LOSS: points})
  assert run_folder.Run(tmp_path).curves == {"train/loss": {10: 5.0, 20: 3.0, 30: 2.0}}


def test_tables(runs, tmp_path):
  third = write(tmp_path / "third")
  noted = [{"from": 1000, "environment": {"jax": "1"}}, {"from": 1040, "environment": {"jax": "2"}}]
  (tmp_path / "third/run.json").write_text(json.dumps({"start": 1000, "processes": noted}))
  found = report.report([*runs, third])
  table, *_ = found["runs"]
  # A column without a value is left out.
  head = [name for name in table.head if "FLOPs" not in name]
  assert head == ["run", "score", "weights", "steps", "inherited", "last loss", "density now"]
  first = dict(zip(table.head, table.rows[0], strict=True))
  said = ["mdgf", "55", "12.5 %", "100", "1,000", "0.64", "0.125"]
  assert [first[name] for name in head] == said
  settings = found["settings"][0].rows
  assert settings[:3] == [
    ["PATTERN", "'1:8'", "'1:4'", "'1:8'"],
    ["RECIPE", "'mdgf_exponential'", "'sr_ste'", "'mdgf_exponential'"],
    ["jax", "-", "-", "2"],  # of the process that went on
  ]
  strips = [row[3:5] for row in found["schedule"][0].rows if row[0] == "sr<b>ste"]
  assert strips == [["1,000 .. 1,009", "dense"], ["1,010 .. 1,099", "1:4"]]


def test_a_part_without_data_says_so(tmp_path):
  events(tmp_path / "a/train/events.out.tfevents.1.host", {"nm/x": {5: 1.0}})
  (tmp_path / "a/config.gin").write_text("RECIPE = @my.recipe()\nPATTERN = '1:4'\n")
  found = report.report([tmp_path / "a"])
  assert not found.charts and all(section.parts for section in found.sections)
  assert found["schedule"][0].startswith("a: no schedule, config.gin: RECIPE is not")


# --- scores and costs -----------------------------------------------------------------------------


def scores_of(runs, checkpoint="best"):
  table, *remarks = report.report(runs, checkpoint)["scores"]
  return table.rows, remarks


def test_scores_of_images_stand_beside_the_published_ones(tmp_path):
  mine = {50: 0.9, 90: 0.775, 100: 0.7812}  # step 50 is before the target pattern
  accuracy = lambda found: {s: {"accuracy": x, "accuracy_top5": 0.9} for s, x in found.items()}
  mdgf = dict(recipe="mdgf_exponential", more=VIT)
  runs = [
    local(tmp_path / "mine", accuracy(mine), pattern="1:16", **mdgf),
    local(tmp_path / "wide", accuracy({100: 0.8}), more=VIT + "vit.config.layers = 13\n"),
  ]  # fmt: skip
  rows, remarks = scores_of(runs)
  assert rows == [
    ["validation", "0.7812 @ 100, published 0.77325 (+0.00795)", "0.8 @ 100"],
  ]
  assert remarks[1:] == [
    "mine: published: Table 2, MDGF-Exponential.",
  ]
  assert scores_of(runs[:1], 50)[0] == [["validation", "0.9 @ 50"]]


@pytest.mark.parametrize("metric", ["far", "near_top5"])
def test_the_best_of_an_error_is_the_least(metric, tmp_path):
  runs = []
  for name, values in (("a", (0.1, 0.5, 0.5)), ("b", (0.9, 0.25, 0.25))):
    series = {s: {metric: x} for s, x in zip((5, 85, 100), values, strict=True)}
    runs.append(local(tmp_path / name, series))
  ((name, *cells),) = scores_of(runs)[0]  # step 5 is before the target pattern
  assert cells == ["0.5 @ 85", "0.25 @ 85"] and ("less is better" in name) == (metric == "far")


def test_costs_of_another_family_are_those_that_its_run_notes(tmp_path):
  found = report.report([local(tmp_path, {50: {"r2": 0.25}, 100: {"r2": 0.5, "far": 1.0}})])
  cost = flops.training(flops.Cost((flops.Op(**OP),)), found.runs[0].rules, 8, until=100).flops
  assert found.charts["score_by_flops"].lines[0].points[-1] == (cost, 0.5)


def test_flops_are_those_of_the_network_and_of_its_rules(tmp_path):
  write(tmp_path)
  network = Transformer(T5Config.preset("t5_1_1", "tiny", vocab_size=256))
  dense = T5(network, lengths={"inputs": 16, "targets": 4}).cost()
  found = report.report([tmp_path], "last")
  spent = lambda until: flops.training(dense, found.runs[0].rules, 8, until=until).flops
  assert found.charts["score_by_flops"].lines[0].points == [(spent(50), 52.5), (spent(100), 55.0)]
  assert spent(100) < costs.training_flops(found.runs[0], 100)[1]


def test_the_runs_say_what_is_kept_and_lost(tmp_path):
  three = [
    write(tmp_path / "base", "dense", plus=25.0),
    write(tmp_path / "lower", "sr_ste", plus=5.0),
    write(tmp_path / "higher", "mdgf_exponential", plus=26.0),
  ]
  table = report.report(three, "last")["runs"][0]
  assert table.head[1:4] == ("score", "kept", "weights")
  assert [row[1:4] for row in table.rows] == [
    ("80", "-", "all"), ("60", "75.0% of base", "12.5 %"), ("81", "101.2% of base", "12.5 %"),
  ]  # fmt: skip


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_every_number_and_every_line(runs, found, tmp_path):
  file = tmp_path / "report.html"
  assert cli.main(["report", *runs, "--out", str(file), "--checkpoint", "last"]) == 0
  text = file.read_text("utf-8")
  figures = dict(re.findall(r'<figure id="chart-([^"]+)">(.*?)</figure>', text, re.DOTALL))
  assert figures.keys() == found.charts.keys()
  for key, chart in found.charts.items():
    svg = base64.b64decode(re.search(r"base64,([^\"]+)", figures[key])[1]).decode()
    for line in chart.lines:
      assert drawing.COLOURS[line.run] in svg
      for _, y in line.points if line.style != "dashed" else ():
        assert f">{y:.6g}<" in figures[key]


def test_names_are_escaped_and_nothing_is_fetched(tmp_path):
  odd = """x<y>&"z'</title>"""
  parts = [
    Chart("a", odd, odd, [Line(0, [(0, 1.0), (1, math.nan)])], labels=[odd, odd], note=odd),
    Table([odd, odd], [[odd, odd]]),
    odd,
  ]
  page.write(tmp_path / "page.html", odd, [odd], [Section("s", odd, parts)], {odd: odd})
  text = (tmp_path / "page.html").read_text("utf-8")
  assert "<y>" not in text and text.count(str(markupsafe.escape(odd))) == 19
  assert not re.search(r"<(script|link|iframe)|(src|href)=\"(?!#|data:image)|@import|url\(", text)
