"""The page's summary: what each sparse run kept of a dense one; and what is said, not drawn."""

import json
import math
import pathlib
import re

import pytest
from test_report import make, write

from nm_sparsity_jax.analysis import report
from nm_sparsity_jax.analysis.report import page, reading, summary
from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.parts import Section, Table
from nm_sparsity_jax.analysis.report.plain import plain


def made(folder, recipe="sr_ste", plus=0.0, targets=()):
  """A run of 100 steps after 1,000; scores are 52.5 at 1050 and 55 at 1100, plus something."""
  write(folder, recipe, "1:8", plus=plus)
  lines = [json.dumps({"input": {}, "target": target}) for target in targets]
  (folder / "inference_eval/nm_glue_rte-001100.jsonl").write_text("\n".join(lines))
  return str(folder)


@pytest.fixture
def three(tmp_path):
  """A dense run with 80 at its end, one that lost 20 of it and one that won 1."""
  return [
    made(tmp_path / "base", "dense", 25.0, targets=[0, 1, 1, 1]),
    made(tmp_path / "lower", "sr_ste", 5.0),
    made(tmp_path / "higher", "mdgf_exponential", 26.0),
  ]


def words(table):
  return [[getattr(cell, "text", cell) for cell in row] for row in table.rows]


def test_the_summary_comes_first_and_says_what_is_kept_and_lost(three):
  """Issue 13, point 19: kept x % of dense at 12.5 % of the weights, and what is lost, first."""
  found = report.report(three, "last")
  assert found.sections[0].key == "summary"
  lost, table, *notes = found["summary"]
  assert lost == (
    "With 12.5 % of the weights, lower loses 20.0 and higher gains 1.0 of the 80.0 points of base."
  )
  assert words(table) == [
    ["base", "80.0", "", "all", "77.5", "1,100"],
    ["lower", "60.0", "75.0 % of base", "12.5 %", "57.5", "1,100"],
    ["higher", "81.0", "101.2 % of base", "12.5 %", "78.5", "1,100"],
    ["largest class", "75.0", "", "", "", ""],
  ]
  bars = [row[1].bar for row in table.rows]
  assert bars == pytest.approx([80 / 81, 60 / 81, 1, 75 / 81])
  assert "checkpoint: last" in notes[0] and "always answering with it" in notes[0]
  assert "several seeds" in notes[1] and len(notes) == 2
  *_, note = summary.summary(reading.read(three), "last", seeds=3)
  assert note.startswith("A row is the mean over the seeds that are done.")


def test_the_lowest_score_of_a_sparse_run_is_one_of_its_sparse_steps(three):
  """A dip while a run is dense still, or its learning rate warms up, is no fall of sparsity."""
  for folder in map(pathlib.Path, three):
    file = folder / "inference_eval/nm_glue_rte-metrics.jsonl"
    first = json.dumps({"step": 1005, "accuracy": 3.0})
    file.write_text(f"{first}\n{file.read_text()}")
  table = report.report(three, "last")["summary"][1]
  assert [row[4] for row in words(table)] == ["3.0", "57.5", "78.5", ""]


def test_a_metric_from_0_to_1_has_three_digits(three):
  """A run of a user's own metric was said to lose 0.0 of the 0.9 points of dense."""
  ends = {"base": 0.8, "lower": 0.6, "higher": 0.812}
  for folder in map(pathlib.Path, three):
    lines = [{"step": 1050, "accuracy": 0.5}, {"step": 1100, "accuracy": ends[folder.name]}]
    file = folder / "inference_eval/nm_glue_rte-metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  lost, table, *_ = report.report(three, "last")["summary"]
  assert "lower loses 0.200 and higher gains 0.012 of the 0.800 points of base" in lost
  assert [row[1] for row in words(table)] == ["0.800", "0.600", "0.812", "0.750"]
  assert table.rows[-1][1].bar == pytest.approx(0.75 / 0.812) and words(table)[0][4] == "0.500"


def test_a_dense_run_of_another_length_is_no_equal(three, tmp_path):
  """Issue 13, point 19: sparse and dense runs are compared at the same number of updates."""
  base, lower, _ = three
  short = pathlib.Path(base)
  for file in (*short.glob("t*/**/*tfevents*"), *short.glob("*/*.jsonl")):
    file.unlink()
  short.joinpath("inference_eval/nm_glue_rte-metrics.jsonl").write_text(
    '{"step": 1050, "accuracy": 80}\n'
  )
  notes = report.report([base, lower], "last")["summary"][2:]
  assert (
    "lower has had 1,100 updates, base 1,050: compare it with a dense run of its own" in notes[1]
  )
  longer = made(tmp_path / "longer", "dense", 30.0)
  found = report.report([base, lower, longer], "last")["summary"]
  assert "lower loses 25.0 of the 85.0 points of longer" in found[0]
  assert not any("updates, " in str(note) for note in found[2:])
  assert "No run here is dense" in report.report([lower])["summary"][0]


def test_what_tells_no_largest_class(three):
  """Issue 13, point 19: the majority class is named where predictions show it, and not guessed."""
  file = pathlib.Path(three[0]) / "inference_eval/nm_glue_rte-001100.jsonl"
  rows = lambda: [row[0] for row in words(report.report(three)["summary"][1])]
  assert rows()[-1] == "largest class"
  for text in ("", '{"target": 1}\n{"targ', "[]\n", '{"target": 1}\n', '{"prediction": 1}\n'):
    file.write_text(text)
    assert rows()[-1] == "higher", text
  file.write_text("".join(f'{{"target": {i}}}\n' for i in range(30)))  # no classes
  assert rows()[-1] == "higher"


def test_what_is_not_known_has_no_row(three):
  """Issue 13, point 19: a run without scores or rules is left out of the summary."""
  (pathlib.Path(three[1]) / "config.gin").unlink()
  assert [row[0] for row in words(report.report(three)["summary"][1])][:2] == ["base", "higher"]
  for folder in three:
    (pathlib.Path(folder) / "inference_eval/nm_glue_rte-metrics.jsonl").unlink()
  (said,) = report.report(three)["summary"]
  assert "No metric" in said
  assert summary.references([]) == {}


# --- said, not drawn ------------------------------------------------------------------------------


def of(*series, x="step", **more):
  return Chart("k", "Rate", x, [Line(i, points) for i, points in enumerate(series)], **more)


def test_a_chart_of_one_value_is_a_sentence():
  """Issue 13, point 19: no chart that shows nothing, such as a constant learning rate."""
  flat = of([(1, 0.001), (2, 0.001)], [(2, 0.001)])
  assert plain(flat, "ab") == "Rate: 0.001 throughout."
  for chart in (
    of([(1, 0.001), (2, 0.002)], [(2, 0.001)]),
    of([(1, 0.001), (2, 0.001), (3, math.nan)]),
    of([(1, 1.0), (2, 1.0), (3, 0.0)], log=True),
    of([]),
  ):
    assert plain(chart, "ab") is chart


def test_single_evaluations_are_bars():
  """Issue 13, point 19: where each run has one evaluation, bars stand in place of dots."""
  table = plain(of([(100, 50.0)], [(100, 75.0)]), ["one", "two"])
  assert isinstance(table, Table) and words(table) == [["one", "50", "100"], ["two", "75", "100"]]
  assert [row[1].bar for row in table.rows] == pytest.approx([2 / 3, 1])
  below = plain(of([(100, -1.0)], [(100, 75.0)]), ["one", "two"])
  assert isinstance(below, Table) and [row[1].bar for row in below.rows] == [None, None]
  for chart in (
    of([(1, 1.0), (2, 2.0)], [(2, 1.0)]),
    of([(1, 1.0)], [(2, 1.5)], x="training FLOPs"),
    Chart("k", "D", "step", [Line(0, [(1, 1.0)]), Line(0, [(1, 0.5)])]),
  ):
    assert plain(chart, "ab") is chart


def test_a_page_says_folds_and_draws(three, tmp_path):
  """Issue 13, point 19: settings are folded; what is said instead of a chart is on the page."""
  text = make(tmp_path, three, "--checkpoint", "last")
  parts = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
  assert next(iter(parts)) == "summary" and "75.0 % of base" in parts["summary"]
  assert "Learning rate: 0.25 throughout." in parts["loss"]
  assert 'id="chart-learning_rate"' not in text and 'id="chart-train_loss"' in text
  for key, part in parts.items():
    assert ('<details class="folded">' in part) == (key in ("settings", "environment")), key
  run = reading.Run(pathlib.Path("r"), "r", {}, {}, {}, "")
  single = page.render([run], [Section("s", "s", [of([(5, 2.0)])])], {})
  assert "<svg" not in single and 'style="width:100%"' in single
