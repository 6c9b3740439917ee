"""nm-sparsity glue score: from what seqio wrote to a row of Table 12 next to the published one."""

import json
import math
import pathlib

import pytest
import test_report
from checkout import python
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.analysis import run_folder, scores
from nm_sparsity_jax.analysis.scores.table import Measure
from nm_sparsity_jax.runs import glue, paper

ROWS = paper.tables()["table12"]
DENSE, SR_STE, STEPWISE = ROWS[0], ROWS[2], ROWS[3]
TITLES = [c.title for c in glue.COLUMNS]


def metrics_of(row, *steps):
  """A row of Table 12 as task -> step -> metric -> value."""
  found = {}
  for column in glue.COLUMNS:
    # A mean stands last.
    values = dict(zip(column.metrics, row["columns"][column.title], strict=False))
    found[column.name] = {step: dict(values) for step in steps or (1000,)}
  return found


@pytest.fixture
def write(tmp_path):
  """Writes a run's folder as seqio.JSONLogger leaves it: by default with scores of the paper."""

  def make(row=DENSE, metrics=None, task="nm_glue_{}", **macros):
    folder = tmp_path / "run"
    for config, series in (metrics or metrics_of(row)).items():
      entries = [{"step": step, **values} for step, values in series.items()]
      test_report.lines(folder / f"inference_eval/{task.format(config)}-metrics.jsonl", entries)
    macros = {
      "RECIPE": row["recipe"], "SPARSITY_RULES": row["places"] or {"ff": None},
      "DENSE_STEPS": row["dense_steps"] or 0, "SPARSE_STEPS": 100_000, "FINETUNE_STEPS": 10_000,
      "PRETRAINED_STEPS": -100_000,  # so that step 1,000 is one of its fine-tune phase
    } | macros  # fmt: skip
    text = "".join(f"{name} = {value!r}\n" for name, value in macros.items())
    (folder / "config.gin").write_text(text)
    return str(folder)

  return make


def row_of(run, checkpoint="best"):
  (row,) = scores.score([run], checkpoint)["runs"]
  return row


# --- next to the published row --------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_the_scores_of_a_published_run_are_those_of_the_paper(row, write):
  """The best of a dense run has no target pattern."""
  report = scores.score([write(row, task="glue_{}_v002" if row is DENSE else "nm_glue_{}")])
  words = "best one at the target pattern, " if row["places"] else "best one, "
  assert words in scores.render(report)
  (found,) = report["runs"]
  assert found["published"] == {"table": 12, **row} and len(found["remarks"]) == 1
  assert [*found["columns"]] == ["overall", *TITLES]
  for title, column in found["columns"].items():
    assert abs(column["mean"] - column["published"]) < 0.06  # the paper rounds to 0.1
    printed = row["columns"][title] if title in TITLES else []
    assert [*column["values"].values()] == printed[: len(column["values"])]


@pytest.mark.parametrize(
  "change, row, remark",
  [
    (dict(DENSE_STEPS=0), None, "with 0 dense steps"),
    (dict(DENSE_STEPS=100, SPARSE_STEPS=1000, FINETUNE_STEPS=0), STEPWISE["row"], "100 of 1000"),
    (dict(T5_SIZE="small"), STEPWISE["row"], "is of T5 base, not small"),
    (dict(RECIPE="snip", SPARSITY_RULES={"ff": "1:32"}), "SNIP", "published: Table 7"),
  ],
)
def test_which_published_row(change, row, remark, write):
  found = row_of(write(STEPWISE, **change))
  assert (found["published"] and found["published"]["row"]) == row
  assert (found["columns"]["overall"]["published"] is None) == (row is None)
  assert any(remark in r for r in found["remarks"])


# --- which checkpoint -----------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 99), st.sampled_from([math.nan, 1.0, 2.0, 3.0]), min_size=1))
def test_the_step_that_counts_agrees_with_its_definition(values):
  run = run_folder.Run(pathlib.Path("/none"))
  run.tasks = {"t": {step: {"accuracy": v, "f1": v} for step, v in sorted(values.items())}}
  sound = {s: v for s, v in values.items() if v == v}
  measure = Measure("t", ("f1", "accuracy"))
  best = min((s for s, v in sound.items() if v == max(sound.values())), default=None)
  assert measure.at(run, "best") == (None if best is None else (best, sound[best]))
  for checkpoint, step in (("last", max(values)), (50, 50)):
    assert measure.at(run, checkpoint) == ((step, sound[step]) if step in sound else None)


def test_a_partial_run_has_no_overall(write):
  metrics = metrics_of(SR_STE, 10, 20)
  del metrics["qqp"], metrics["mrpc"][20]["f1"]
  metrics["stsb"][10]["spearman_corrcoef"] = math.nan
  run = write(SR_STE, metrics)
  best = row_of(run)["columns"]
  assert best["STS-B"]["step"] == 20 and best["MRPC"]["step"] == 10
  assert best.keys() == {*TITLES} - {"QQP"}
  assert row_of(run, 20)["columns"]["MRPC"] is None
  with pytest.raises(ValueError, match="no run has scores of step 40"):
    row_of(run, 40)


# --- what is read ---------------------------------------------------------------------------------


def test_bad_input_is_one_line_and_no_row(tmp_path, command):
  file = tmp_path / "inference_eval/nm_glue_rte-metrics.jsonl"
  test_report.lines(file, [{"step": 1}, {"accuracy": 5}])
  code, error = command("glue", "score", tmp_path)
  assert code == 1 and "line 2" in error and "step" in error and error.count("\n") == 1


def test_half_a_line_is_left_out_and_events_fill_the_steps_that_jsonl_lacks(tmp_path):
  file = tmp_path / "inference_eval/nm_glue_cola-metrics.jsonl"
  test_report.lines(file, [{"step": 20, "mcc": 7}, {"step": 20, "mcc": 12.5}])  # the last counts
  with file.open("a") as out:
    out.write('{"step": 30, "mcc": 1')
  series = {"eval/mcc": {10: 0.0, 20: 14.0}}
  test_report.events(tmp_path / "inference_eval/nm_glue_cola/events.out.tfevents.1", series)
  assert run_folder.Run(tmp_path).tasks == {"nm_glue_cola": {10: {"mcc": 0.0}, 20: {"mcc": 12.5}}}


def test_seqios_loggers_write_what_is_read(tmp_path):
  loggers = pytest.importorskip("seqio", reason="writes with seqio").loggers
  from seqio import metrics as seqio_metrics

  found = []
  for name in ("JSONLogger", "TensorBoardLogger", "TensorBoardLoggerV1"):
    room = tmp_path / name / "inference_eval"
    room.mkdir(parents=True)
    for task, series in metrics_of(STEPWISE).items():
      for step, values in series.items():
        scalars = {k: seqio_metrics.Scalar(v) for k, v in values.items()}
        getattr(loggers, name)(str(room))(f"nm_glue_{task}", step, scalars, None, None, None)
    found.append({title: c["mean"] for title, c in row_of(room.parent)["columns"].items()})
  assert found[0].keys() == {"overall", *TITLES}
  assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


SCORE = """
import sys
from nm_sparsity_jax import cli
assert cli.main(["glue", "score", sys.argv[1]]) == 0
assert cli.main(["glue", "score", sys.argv[1], "--json"]) == 0
assert not {"tensorflow", "seqio", "gin", "t5x"} & {*sys.modules}
"""


def test_the_command_prints_the_report_and_needs_no_t5x(write):
  run = write(SR_STE)
  text, _, found = python("-c", SCORE, run).partition("{")
  assert "CoLA     48.1 @ 1,000, published 48.1 (+0)" in text
  assert json.loads("{" + found) == scores.score([run])
