"""nm-sparsity report: what runs wrote is what the page shows, and a browser shows the page."""

import html.parser
import json
import math
import pathlib
import re

import browser
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
    reading.T5_LOSS: {s: 64 / (s - 1000) + plus for s in steps},
    "loss": {1: 9.0},  # T5X's other losses do not count
    "nm/D": {s: 0.5 if s < 1080 else 0.0 for s in steps},
    "nm/density": {s: 1.0 if s < 1080 else n / m for s in steps},
    "nm/flip_rate/kept": {s: 0.0625 for s in steps},
    "nm/grad_abs_var/all": {1020: 0.5, 1040: 2.0**-20, 1060: 0.0},
    "nm/grad_abs_var/kept": {1020: math.nan, 1040: 0.5},
  }
  events(folder / "train/events.out.tfevents.1.host", series)
  validation = {reading.T5_LOSS: {1050: 0.75 + plus, 1100: 0.5 + plus}}
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


def words(table):
  return [
    [cell.text if isinstance(cell, Cell) else str(cell) for cell in row] for row in table.rows
  ]


def change(run, old, new):
  file = pathlib.Path(run) / "config.gin"
  file.write_text(file.read_text().replace(old, new))


# --- curves and settings --------------------------------------------------------------------------


def test_points_are_those_of_the_events_at_the_steps_that_were_written(found):
  points = {key: [line.points for line in chart.lines] for key, chart in found.charts.items()}
  loss, variance = found.charts["train_loss"], found.charts["grad_abs_var_all"]
  for i, plus in enumerate((0, 0.5)):
    assert loss.lines[i].run == i
    assert loss.lines[i].points == [(s, pytest.approx(64 / (s - 1000) + plus))
                                    for s in range(1020, 1101, 20)]  # fmt: skip
  assert (loss.since, loss.until) == (1000, 1100)  # it begins at a checkpoint of step 1,000
  assert points["eval_loss_nm_glue_rte"][1] == [(1050, 1.25), (1100, 1.0)]
  assert points["nm_glue_rte_accuracy"][0] == [(1050, 52.5), (1100, 55.0)]
  assert [line.run for line in found.charts["nm_glue_sst2_accuracy"].lines] == [1]
  assert points["density"][1][-1] == (1100, 0.25)
  assert points["flip_rate_kept"][0][0] == (1020, 0.0625)
  assert variance.log and points[variance.key][0] == [(1020, 0.5), (1040, 2.0**-20), (1060, 0.0)]
  assert variance.left_out == 2 == found.charts["grad_abs_var_kept"].left_out  # 0, and NaN
  by_schedule, other, *dots = points["decay"]
  recipe = found.runs[0].rules.places["ff"]
  assert all(value == float(recipe.decay(step - 1000)) for step, value in by_schedule)
  assert {d for s, d in other if s >= 1010} == {0.0}  # sr_ste
  assert dots[0][0] == dots[1][0] == (1020, 0.5)


def test_a_resumed_run_counts_what_was_written_last(tmp_path):
  for number, points in ((2, {20: 3.0, 30: 2.0}), (1, {10: 5.0, 20: 4.0})):
    file = tmp_path / f"r/train/events.out.tfevents.{number}.host"
    events(file, {reading.T5_LOSS: points})
  (line,) = report.report([tmp_path / "r"]).charts["train_loss"].lines
  assert line.points == [(10, 5.0), (20, 3.0), (30, 2.0)]


def test_d_jumps_where_the_schedule_does():
  phases = nms.Phases(total=10_000, dense=1_234, finetune=999)
  points = sections.decay(nms.recipe("mdgf_linear", pattern="1:4", phases=phases, beta=1e-5))
  assert {1_233, 1_234, 9_000, 9_001, 9_999} <= {step for step, _ in points}


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
  assert settings[:4] == [
    ["RANDOM_SEED", "7", "7", "7"],
    ["PATTERN", "'1:8'", "'1:4'", "'1:8'"],
    ["RECIPE", "'mdgf_exponential'", "'sr_ste'", "'mdgf_exponential'"],
    ["jax", "–", "–", "2"],  # of the process that went on
  ]
  assert isinstance(settings[1][1], Strong) and not isinstance(settings[4][1], Strong)
  strips = [part for part in found["schedule"] if isinstance(part, Strip)]
  assert [s[:3] for s in strips[1].segments] == [(1000, 1010, "dense"), (1010, 1100, "1:4")]


def test_a_part_without_data_says_so_once_for_all_runs(tmp_path):
  for name in "ab":
    events(tmp_path / name / "train/events.out.tfevents.1.host", {"nm/x": {5: 1.0}})
    (tmp_path / name / "config.gin").write_text("RECIPE = @my.recipe()\nPATTERN = '1:4'\n")
  found = report.report([tmp_path / "a", tmp_path / "b"])
  assert not found.charts and all(section.parts for section in found.sections)
  assert found["schedule"][0].startswith("a, b: no schedule, RECIPE is not a plain value")


@pytest.mark.parametrize(
  "make_it, word",
  [
    (lambda d: ["gs://b/run"], "bucket"),
    (lambda d: [write(d / "a"), d / "a"], "once"),
    (lambda d: [d / str(i) for i in range(10)], "10 runs"),
  ],
)
def test_mistakes_are_one_line(make_it, word, tmp_path, capsys):
  out = tmp_path / "page.html"
  assert cli.main(["report", "--out", str(out), *map(str, make_it(tmp_path))]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1 and not out.exists()


# --- scores and costs -----------------------------------------------------------------------------


def scores_of(runs, checkpoint="best"):
  table, *remarks = report.report(runs, checkpoint)["scores"]
  return table.rows, "\n".join(remarks)


def test_scores_of_glue_stand_beside_the_published_ones(tmp_path):
  mini = write(tmp_path / "b", tasks=["nm_glue_mini_rte"])
  change(mini, "PRETRAINED_STEPS = 1_000\n", "")
  rows, remarks = scores_of([write(tmp_path / "a", "sr_ste", "1:32"), mini])
  assert rows == [
    ["RTE", "55 @ 1,100, published 72.6 (-17.6)", "–"], ["mini RTE", "–", "55 @ 1,100"],
  ]  # fmt: skip
  assert "a: published: Table 12, SR-STE" in remarks and "not tiny" in remarks
  assert "b: it is not known from which step" in remarks


def test_scores_of_images_stand_beside_the_published_ones(tmp_path):
  mine = {50: 0.9, 90: 0.775, 100: 0.7812}  # step 50 is before the target pattern
  accuracy = lambda found: {s: {"accuracy": x, "accuracy_top5": 0.9} for s, x in found.items()}
  mdgf = dict(recipe="mdgf_exponential", more=VIT)
  runs = [
    local(tmp_path / "mine", accuracy(mine), pattern="1:16", **mdgf),
    local(tmp_path / "other", accuracy({90: 0.7}), pattern="3:8", **mdgf),
    local(tmp_path / "own", accuracy({100: 0.76}), "test", "dense",
          more=VIT.replace("imagenet2012", "/my/images")),
    local(tmp_path / "wide", accuracy({100: 0.8}), more=VIT + "vit.config.layers = 13\n"),
  ]  # fmt: skip
  rows, remarks = scores_of(runs)
  assert rows == [
    ["validation", "0.7812 @ 100, published 0.77325 (+0.00795)", "0.7 @ 90", "–", "0.8 @ 100"],
    ["test", "–", "–", "0.76 @ 100, published 0.76389 (-0.00389)", "–"],
  ]
  assert "mine: published: Table 2, MDGF-Exponential." in remarks
  assert "other: the paper has no row for vit_b16 mdgf_exponential 3:8 ff." in remarks
  assert "own: the published row is of imagenet2012, this run of /my/images." in remarks
  assert scores_of(runs[:1], 50)[0] == [["validation", "0.9 @ 50"]]


@pytest.mark.parametrize("metric, best", [("far", 0.25), ("near", 0.5)])
def test_the_best_of_an_error_is_the_least(metric, best, tmp_path):
  runs = []
  for name, values in (("a", (0.1, 0.5, 0.5)), ("b", (0.9, 0.25, 0.25))):
    series = {s: {metric: x} for s, x in zip((5, 85, 100), values, strict=True)}
    runs.append(local(tmp_path / name, series))
  ((name, *cells),) = scores_of(runs)[0]  # step 5 is before the target pattern
  assert cells == ["0.5 @ 85", "0.25 @ 85"] and ("less is better" in name) == (metric == "far")
  assert [cell for cell in cells if isinstance(cell, Strong)] == [f"{best} @ 85"]


def test_a_run_of_another_family_is_judged_by_what_its_evaluations_note(tmp_path):
  metrics = {50: {"r2": 0.25}, 100: {"r2": 0.5, "far": 1.0}}
  lines(tmp_path / "mlp/training_eval/v/metrics.jsonl", [{"step": 50, "loss": 0.06, "r2": 0.25}])
  found = report.report([local(tmp_path / "mlp", metrics, task="v")])
  points = {key: chart.lines[0].points for key, chart in found.charts.items()}
  assert points["train_loss"] == [(50, 0.04), (100, 0.02)]
  assert points["eval_loss_v"] == [(50, 0.06)] and "eval_r2_v" not in points
  assert points["v_r2"] == [(50, 0.25), (100, 0.5)]
  cost = flops.training(flops.Cost((flops.Op(**OP),)), found.runs[0].rules, 8, until=100).flops
  assert points["score_by_flops"][-1] == (cost, 0.5)


SIZES = dict(emb_dim=64, mlp_dim=128, num_encoder_layers=2, num_decoder_layers=3, num_heads=4,
             head_dim=16)  # fmt: skip
T5X_OWN = "".join(f"network.T5Config.{name} = {size}\n" for name, size in SIZES.items())
T5X_OWN += """
network.T5Config.dtype = 'bfloat16'
network.T5Config.logits_via_embedding = False
network.T5Config.mlp_activations = \\
    ('gelu', 'linear')
network.T5Config.vocab_size = %VOCAB_SIZE
VOCAB_SIZE = 256
network.Transformer.config = @network.T5Config()
"""


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
  spent = lambda until: flops.training(dense, found.runs[0].rules, 8, until=until).flops
  assert found.charts["score_by_flops"].lines[0].points == [(spent(50), 52.5), (spent(100), 55.0)]
  assert spent(100) < found.runs[0].flops(100)[1]


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
  lines(tmp_path / "base/inference_eval/nm_glue_rte-metrics.jsonl", [{"step": 1200, "accuracy": 1}])
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
    self.open, self.attributes, self.words = [], [], []
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

  def handle_data(self, data):
    self.words.append(data)


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
  """The page that the command writes."""
  file = tmp_path_factory.mktemp("page") / "report.html"
  assert cli.main(["report", *runs, "--out", str(file), "--checkpoint", "last"]) == 0
  return file


@pytest.fixture(scope="module")
def text(written):
  return written.read_text("utf-8")


def test_the_page_is_well_formed_and_fetches_nothing(text):
  found = Outline(text)
  ids = [value for _, name, value in found.attributes if name == "id"]
  assert len(ids) == len(set(ids)) and ids[0] == "summary"
  for tag, name, value in found.attributes:
    assert tag not in ("script", "iframe", "img", "object") and not name.startswith("on")
    if name in ("href", "src", "xlink:href"):
      assert value == "data:," or value.removeprefix("#") in ids
  assert not re.search(r"@import|url\((?!#)", text)
  assert "NOTE = 'a<b & c'" in "".join(found.words)  # escaped, once


def test_a_report_from_python_is_that_of_the_command(found, text, tmp_path):
  assert report.write(found, tmp_path / "new/page.html").read_text("utf-8") == text


def test_every_number_of_a_chart_is_in_its_table_and_every_line_is_drawn(found, text):
  figures = dict(re.findall(r'<figure id="chart-([^"]+)">(.*?)</figure>', text, re.DOTALL))
  assert figures.keys() == found.charts.keys()
  for key, chart in found.charts.items():
    for line in chart.lines:
      assert f"--run-{line.run}" in figures[key] or chart.left_out
      for _, y in line.points if line.style != "dashed" else ():
        assert f">{y:.6g}<" in figures[key]


def test_steps_jump_and_marks_far_from_zero_are_exact():
  points = [(1_000_000, 1.0), (1_000_500, 2.0), (1_001_000, 1.5)]
  chart = Chart("k", "t", "step", [Line(0, points, "steps")], since=1_000_000)
  drawn = drawing.svg(chart, ["level"])
  assert ">1M<" in drawn and ">1.0002M<" in drawn and ">1.001M<" in drawn
  path = re.search(r"<title>level</title>\s*<path d=\"(.*?)\"", drawn, re.DOTALL)[1]
  assert len(re.findall("[ML]", path)) == 5  # a corner between two points


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
    return Outline(file.read_text("utf-8"))

  odd = """x<y>&"z'</title>"""
  tags = lambda outline: [(tag, name) for tag, name, _ in outline.attributes]
  assert tags(outline(odd)) == tags(outline("name"))  # no name adds a tag or an attribute
  assert "".join(outline(odd).words).count(odd) > 25


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
def test_a_browser_shows_it_on_a_desk_and_on_a_phone(dark, written, tmp_path):
  found = browser.ask(SHOWN, written, (1280, 400), tmp_path, dark)
  for (outside, smallest, cut, columns, ground), wanted in zip(found, (2, 1), strict=True):
    assert outside <= 0 and smallest >= 9 and cut == [] and columns == wanted
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
