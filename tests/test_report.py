"""nm-sparsity report: what runs wrote is what the page shows, and a browser shows the page."""

import html.parser
import itertools
import json
import math
import pathlib
import re

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
from nm_sparsity_jax.analysis.report import reading, sections
from nm_sparsity_jax.core.text import Strong
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import flops

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
    "nm/flip_rate/all": {s: 0.125 for s in steps},
    "nm/flip_rate/kept": {s: 0.0625 for s in steps},
    "nm/grad_abs_var/all": {1020: 0.5, 1040: 2.0**-20, 1060: 0.0},
    "nm/grad_abs_var/kept": {1020: math.nan, 1040: 0.5},
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
  return [write(root / "mdgf"), write(root / "sr<b>ste", "sr_ste", "1:4", plus=0.5, tasks=more)]


@pytest.fixture(scope="module")
def found(runs):
  return report.report(runs, "last")


def words(table):
  return [
    [cell.text if isinstance(cell, Cell) else str(cell) for cell in row] for row in table.rows
  ]


def change(run, old, new, name="config.gin"):
  file = pathlib.Path(run) / name
  file.write_text(file.read_text().replace(old, new))


# --- what is shown is what was written ------------------------------------------------------------


def test_points_are_those_of_the_events_at_the_steps_that_were_written(found):
  charts = found.charts
  loss, steps = charts["train_loss"], range(1020, 1101, 20)
  for i, plus in enumerate((0, 0.5)):
    assert loss.lines[i].run == i
    assert loss.lines[i].points == [(s, pytest.approx(64 / (s - 1000) + plus)) for s in steps]
  assert (loss.since, loss.until) == (1000, 1100)  # it begins at a checkpoint of step 1,000
  assert charts["eval_loss_nm_glue_rte"].lines[1].points == [(1050, 1.25), (1100, 1.0)]
  assert charts["nm_glue_rte_accuracy"].lines[0].points == [(1050, 52.5), (1100, 55.0)]
  assert [line.run for line in charts["nm_glue_sst2_accuracy"].lines] == [1]
  assert charts["density"].lines[1].points[-1] == (1100, 0.25)
  assert charts["flip_rate_kept"].lines[0].points[0] == (1020, 0.0625)
  variance = charts["grad_abs_var_all"]
  assert variance.log and variance.lines[0].points == [(1020, 0.5), (1040, 2.0**-20), (1060, 0.0)]
  assert variance.left_out == 2 == charts["grad_abs_var_kept"].left_out  # 0, and NaN
  dashed, other, *dots = charts["decay"].lines
  recipe = found.runs[0].rules.places["ff"]
  assert all(value == float(recipe.decay(step - 1000)) for step, value in dashed.points)
  assert {d for s, d in other.points if s >= 1010} == {0.0}  # sr_ste
  assert [line.run for line in dots] == [0, 1] and dots[0].points[0] == (1020, 0.5)


def test_a_resumed_run_counts_what_was_written_last(tmp_path):
  for number, points in ((2, {20: 3.0, 30: 2.0}), (1, {10: 5.0, 20: 4.0})):
    file = tmp_path / f"r/train/events.out.tfevents.{number}.host"
    events(file, {reading.T5_LOSS: points, "loss": {1: 9.0}})  # T5X's other losses do not count
  (line,) = report.report([tmp_path / "r"]).charts["train_loss"].lines
  assert line.points == [(10, 5.0), (20, 3.0), (30, 2.0)]


def test_d_jumps_where_the_schedule_does():
  phases = nms.Phases(total=10_000, dense=1_234, finetune=999)
  recipe = nms.recipe("mdgf_linear", pattern="1:4", phases=phases, beta=1e-5)
  found = dict(sections.decay(recipe))
  assert found[1_234] == 1.0 and found[9_000] > 0.9 and found[9_001] == 0.0 == found[9_999]


def test_tables(runs, tmp_path):
  third = write(tmp_path / "third")
  noted = [{"from": 1000, "environment": {"jax": "1"}}, {"from": 1040, "environment": {"jax": "2"}}]
  (tmp_path / "third/run.json").write_text(json.dumps({"start": 1000, "processes": noted}))
  found = report.report([*runs, third])
  assert words(found["runs"][0])[0][1:5] == [
    "ff: mdgf_exponential 1:8, dense 10, finetune 20", "100 of 100, after 1,000 inherited",
    "0.64", "0.125",
  ]  # fmt: skip
  settings = found["settings"][0].rows
  assert settings[0] == ["RANDOM_SEED", "7", "7", "7"]
  assert settings[1:4] == [
    ["PATTERN", "'1:8'", "'1:4'", "'1:8'"],
    ["RECIPE", "'mdgf_exponential'", "'sr_ste'", "'mdgf_exponential'"],
    ["jax", "–", "–", "2"],  # of the process that went on
  ]
  assert isinstance(settings[1][1], Strong) and not isinstance(settings[4][1], Strong)
  strips = [part for part in found["schedule"] if isinstance(part, Strip)]
  assert [s[:3] for s in strips[1].segments] == [(1000, 1010, "dense"), (1010, 1100, "1:4")]


def scores_of(runs, checkpoint="best"):
  table, *remarks = report.report(runs, checkpoint)["scores"]
  return table.rows, remarks


def test_scores_stand_beside_the_published_ones(tmp_path):
  mini = write(tmp_path / "b", tasks=["nm_glue_mini_rte"])
  rows, remarks = scores_of([write(tmp_path / "a", "sr_ste", "1:32"), mini])
  assert rows == [
    ["RTE", "55 @ 1,100, published 72.6 (-17.6)", "–"], ["mini RTE", "–", "55 @ 1,100"],
  ]  # fmt: skip
  assert any("a: published: Table 12, SR-STE" in line for line in remarks)
  assert any("not tiny" in line for line in remarks)
  rows, _ = scores_of([write(tmp_path / "c"), write(tmp_path / "d", plus=1.0)])
  assert [isinstance(cell, Strong) for cell in rows[0]] == [False, False, True]


def test_a_denser_checkpoint_is_never_the_best(tmp_path):
  """Early on, weights are dense and scores high: they are none of 1:8."""
  run = write(tmp_path / "run", pattern="1:8", tasks=["mine"])
  lines = [{"step": 1000 + s, "accuracy": a} for s, a in ((5, 90), (79, 80), (80, 50))]
  text = "".join(f"{json.dumps(line)}\n" for line in lines)
  (tmp_path / "run/inference_eval/mine-metrics.jsonl").write_text(text)
  assert scores_of([run])[0] == [["mine", "50 @ 1,080"]]
  assert scores_of([run], 1005)[0] == [["mine", "90 @ 1,005"]]
  change(run, "PRETRAINED_STEPS = 1_000\n", "")
  assert any("not known from which step" in line for line in scores_of([run])[1])


def test_what_is_said_of_several_runs_is_said_once(tmp_path):
  runs = [write(tmp_path / name) for name in "abc"]
  for run in runs[:2]:
    change(run, "RECIPE = ", "NO_RECIPE = ")
  found = report.report(runs)
  said = [p for k in ("runs", "scores", "schedule") for p in found[k] if isinstance(p, str)]
  assert any(line.startswith("a, b: no schedule, ") for line in said) and len(said) == len({*said})


def test_a_part_without_data_says_so(tmp_path):
  events(tmp_path / "run/train/events.out.tfevents.1.host", {"nm/x": {5: 1.0}})
  found = report.report([tmp_path / "run"])
  assert not found.charts and all(section.parts for section in found.sections)
  (tmp_path / "run/config.gin").write_text("RECIPE = @my.recipe()\nPATTERN = '1:4'\n")
  (text, *_) = report.report([tmp_path / "run"])["schedule"]
  assert "RECIPE is not a plain value" in text


@pytest.mark.parametrize(
  "make_it, word",
  [
    (lambda d: ["gs://b/run"], "bucket"),
    (lambda d: [d], "holds no metrics"),
    (lambda d: [write(d / "a"), d / "a"], "once"),
    (lambda d: [d / str(i) for i in range(10)], "10 runs"),
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
SIZES = dict(emb_dim=64, mlp_dim=128, num_encoder_layers=2, num_decoder_layers=3, num_heads=4,
             head_dim=16)  # fmt: skip


@pytest.mark.parametrize("is_t5xs_own", [False, True])
def test_flops_are_those_of_the_network_and_of_its_rules(is_t5xs_own, tmp_path):
  """T5X's own model files bind sizes one by one; rules may be regexes."""
  run = write(tmp_path / "run")
  if is_t5xs_own:
    file = tmp_path / "run/config.gin"
    file.write_text(re.sub(r"network.*\n", "", file.read_text()) + T5X_OWN)
    change(run, "{'ff': None}", "{r'(encoder|decoder)/.*/mlp/w.*/kernel': None}")
  config = T5Config.t5_1_1("tiny", vocab_size=256, **SIZES if is_t5xs_own else {})
  dense = T5(Transformer(config), lengths={"inputs": 16, "targets": 4}).cost()
  found = report.report([run], "last")
  rules = found.runs[0].rules
  assert [*rules.places] != ["ff"] or not is_t5xs_own
  wanted = [
    (flops.training(dense, rules, 8, until=step).flops, (1000 + step) / 20) for step in (50, 100)
  ]
  assert found.charts["score_by_flops"].lines[0].points == wanted
  assert wanted[1][0] < found.runs[0].flops(100)[1]


OP = {"name": "mlp/wi/kernel", "flops": 64, "params": 32, "axis": 8}


def other_family(folder, metrics):
  """A run of another family, without events: metrics by step; less of 'far' is better."""

  def lines(file, entries):
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))

  lines(folder / "train/metrics.jsonl", [{"step": s, "loss": 2 / s} for s in (50, 100)])
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
  (row,) = scores_of(runs)[0]  # step 5 is before the target pattern
  assert row == ["vectors far, less is better", "0.5 @ 85", "0.25 @ 85"]
  assert [isinstance(cell, Strong) for cell in row] == [False, False, True]


# --- the summary ----------------------------------------------------------------------------------


def test_the_summary_says_what_is_kept_and_lost(tmp_path):
  three = [
    write(tmp_path / "base", "dense", plus=25.0),
    write(tmp_path / "lower", "sr_ste", plus=5.0),
    write(tmp_path / "higher", "mdgf_exponential", plus=26.0),
  ]
  found = report.report(three, "last")
  assert found.sections[0].key == "summary"
  table, *_ = found["summary"]
  assert words(table) == [
    ["base", "80.0", "", "all", "1,100"],
    ["lower", "60.0", "75.0 % of base", "12.5 %", "1,100"],
    ["higher", "81.0", "101.2 % of base", "12.5 %", "1,100"],
  ]
  assert [row[1].bar for row in table.rows] == pytest.approx([80 / 81, 60 / 81, 1])
  # What it does not know, it does not say; a dense run of another length is no fair one.
  assert any("No run here is dense" in str(n) for n in report.report(three[1:])["summary"])
  line = '{"step": 1200, "accuracy": 0.8}\n'
  (tmp_path / "base/inference_eval/nm_glue_rte-metrics.jsonl").write_text(line)
  notes = report.report(three[:2], "last")["summary"]
  assert any("1,100 updates, base 1,200" in str(note) for note in notes)
  (tmp_path / "lower/config.gin").unlink()
  assert [row[0] for row in words(report.report(three)["summary"][0])] == ["base", "higher"]


# --- the page -------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
  """The page that the command writes, and each chart as a file beside it."""
  folder = tmp_path_factory.mktemp("page")
  out, pngs = str(folder / "report.html"), str(folder / "png")
  assert cli.main(["report", *runs, "--out", out, "--checkpoint", "last", "--png", pngs]) == 0
  return (folder / "report.html").read_text("utf-8"), folder


def test_the_page_is_well_formed_and_fetches_nothing(text):
  found = Outline(text[0])
  assert len(found.ids) == len(set(found.ids)) and found.ids[0] == "summary"
  for tag, name, value in found.attributes:
    assert tag not in ("script", "iframe", "img", "object") and not name.startswith("on")
    if name in ("href", "src", "xlink:href"):
      assert value == "data:," or value.removeprefix("#") in found.ids
  assert not re.search(r"@import|url\((?!#)", text[0])
  assert "NOTE = 'a<b & c'" in "".join(found.words)  # escaped, once


def test_a_report_from_python_is_that_of_the_command(found, text, tmp_path):
  assert report.write(found, tmp_path / "new/page.html").read_text("utf-8") == text[0]
  files = sorted((text[1] / "png").iterdir())
  assert [f.stem for f in files] == sorted(k for k, c in found.charts.items() if not c.is_empty)
  assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_every_number_of_a_chart_is_in_its_table_and_every_line_is_drawn(found, text):
  figures = dict(re.findall(r'<figure id="chart-([^"]+)">(.*?)</figure>', text[0], re.DOTALL))
  assert figures.keys() == found.charts.keys()
  for key, chart in found.charts.items():
    for line in chart.lines:
      assert f"--run-{line.run}" in figures[key] or chart.left_out
      for _, y in line.points if line.style != "dashed" else ():
        assert f">{y:.6g}<" in figures[key]
  # y of the first and last point of a line, in pixels, is linear in the value.
  loss = re.findall(r"<title>mdgf</title>\s*<path d=\"(.*?)\"", figures["train_loss"], re.DOTALL)[0]
  ys = [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", loss)]
  values = [y for _, y in found.charts["train_loss"].lines[0].points]
  assert np.interp(values[1], values[::-1][::4], ys[::-1][::4]) == pytest.approx(ys[1], abs=0.01)


def test_steps_jump_and_marks_far_from_zero_are_exact():
  points = [(1_000_000, 1.0), (1_000_500, 2.0), (1_001_000, 1.5)]
  chart = Chart("k", "t", "step", [Line(0, points, "steps")], since=1_000_000)
  drawn = drawing.svg(chart, ["level"])
  assert ">1M<" in drawn and ">1.0002M<" in drawn and ">1.001M<" in drawn
  path = re.search(r"<title>level</title>\s*<path d=\"(.*?)\"", drawn, re.DOTALL)[1]
  corners = re.findall(r"[ML] (\S+) (\S+)", path)
  assert len(corners) == 5
  assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(corners))


def test_names_are_escaped_wherever_they_stand(tmp_path):
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
    file = tmp_path / "page.html"
    page.write(file, odd, [odd], [Section("s", odd, parts)], [odd], {odd: odd})
    return file.read_text("utf-8"), Outline(file.read_text("utf-8"))

  odd = """x<y>&"z'</title>"""
  (text, found), (_, bare) = outline(odd), outline("name")
  tags = lambda outline: [(tag, name) for tag, name, _ in outline.attributes]
  assert tags(found) == tags(bare)  # no name adds a tag or an attribute
  assert "".join(found.words).count(odd) > 25 and odd not in text


# Pixels that stick out, of the smallest text, and texts of drawings that leave their card.
SHOWN = """[
  document.documentElement.scrollWidth - document.documentElement.clientWidth,
  Math.min(...[...document.querySelectorAll("body *")].filter(e =>
    [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) && e.getClientRects().length
  ).map(e => parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ?
    e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width
    : 1))),
  [...document.querySelectorAll("svg text")].filter(t => {
    const a = t.getBoundingClientRect(), b = t.closest("figure").getBoundingClientRect();
    return a.left < b.left || a.right > b.right || a.bottom > b.bottom
  }).map(t => t.textContent),
  new Set([...document.querySelectorAll("#loss figure")]
    .map(f => f.getBoundingClientRect().left)).size,
  getComputedStyle(document.body).backgroundColor
]"""


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_on_a_desk_and_on_a_phone(dark, text, tmp_path):
  found = browser.ask(SHOWN, text[1] / "report.html", (1280, 400), tmp_path, dark)
  for (outside, smallest, cut, columns, ground), wanted in zip(found, (3, 1), strict=True):
    assert outside <= 0 and smallest >= 9 and cut == [] and columns == wanted
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
