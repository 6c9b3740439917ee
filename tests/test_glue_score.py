"""nm-sparsity glue score: from what seqio wrote to a row of Table 12 beside the published one."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest
import test_report
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.analysis.scores import published
from nm_sparsity_jax.runs import glue, results

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = published.tables()["table12"]
DENSE, SR_STE, STEPWISE = ROWS[0], ROWS[2], ROWS[3]
TITLES = [c.title for c in glue.COLUMNS]


def metrics_of(row, *steps, plus=0.0):
  """A row of Table 12 as task -> step -> metric -> value."""
  found = {}
  for column in glue.COLUMNS:
    printed = zip(column.metrics, row["columns"][column.title], strict=False)  # a mean stands last
    values = {metric: value + plus for metric, value in printed}
    found[column.name] = {step: dict(values) for step in steps or (1000,)}
  return found


@pytest.fixture
def write(tmp_path):
  """Writes a run's folder as seqio.JSONLogger leaves it: by default with scores of the paper."""

  def make(name, row=DENSE, metrics=None, task="nm_glue_{}", **macros):
    room = tmp_path / name / "inference_eval"
    room.mkdir(parents=True)
    for config, series in (metrics or metrics_of(row)).items():
      lines = [json.dumps({"step": step, **values}) + "\n" for step, values in series.items()]
      (room / f"{task.format(config)}-metrics.jsonl").write_text("".join(lines))
    macros = {
      "RECIPE": row["recipe"], "SPARSITY_RULES": row["places"] or {"ff": None},
      "DENSE_STEPS": row["dense_steps"] or 0, "SPARSE_STEPS": 100_000, "FINETUNE_STEPS": 10_000,
      "PRETRAINED_STEPS": -100_000,  # so that step 1,000 is one of its fine-tune phase
    } | macros  # fmt: skip
    text = "".join(f"{name} = {value!r}\n" for name, value in macros.items())
    (tmp_path / name / "config.gin").write_text(text)
    return str(tmp_path / name)

  return make


@pytest.fixture
def call(capsys):
  """What `nm-sparsity glue score` prints, or the line with which it refuses."""

  def score(*argv, code=0):
    assert cli.main(["glue", "score", *argv]) == code
    out, err = capsys.readouterr()
    assert not code or (not out and err.count("\n") == 1)
    return err if code else out

  return score


def row_of(run, checkpoint="best"):
  (row,) = scores.score([run], checkpoint)["runs"]
  return row


# --- beside the published row ---------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_the_scores_of_a_published_run_are_those_of_the_paper(row, write):
  found = row_of(write("run", row))
  assert found["published"] == {"table": 12, **row}
  assert found["delta"].keys() == {"overall", *TITLES}
  assert max(map(abs, found["delta"].values())) < 0.06  # the paper rounds to 0.1
  assert not found["missing"] and not found["remarks"]
  for title, first in (("MRPC", "f1"), ("QQP", "accuracy"), ("STS-B", "pearson_corrcoef")):
    assert found["columns"][title]["values"][first] == row["columns"][title][0]


@pytest.mark.parametrize(
  "change, row, remark",
  [
    (dict(SPARSITY_RULES={"ff": None}, PATTERN=" 1:4"), STEPWISE["row"], ""),
    (dict(SPARSITY_RULES={"ff": "1:16"}), None, "no row for sdgf_stepwise 1:16 ff"),
    (dict(DENSE_STEPS=0), None, "with 0 dense steps"),
    (dict(DENSE_STEPS=100, SPARSE_STEPS=1000, FINETUNE_STEPS=0), STEPWISE["row"], "100 dense"),
    (dict(T5_SIZE="small"), STEPWISE["row"], "is of T5 base, not small"),
    (dict(RECIPE="snip", SPARSITY_RULES={"ff": "1:32"}), "SNIP", ""),
    (dict(SPARSITY_RULES="%OTHER"), None, "says what was trained"),
  ],
)
def test_which_published_row(change, row, remark, write):
  found = row_of(write("run", STEPWISE, **change))
  assert (found["published"] and found["published"]["row"]) == row
  assert bool(found["delta"]) == (row is not None)
  assert any(remark in r for r in found["remarks"]) if remark else not found["remarks"]


@pytest.mark.parametrize(
  "whole, parts",
  [
    ("ff", "encoder/ff decoder/ff"),
    ("qkv", "q v k"),
    ("qkv", "self/qkv cross/qk decoder/cross/v"),
    ("o", "encoder/self/o decoder/self/o decoder/cross/o"),
  ],
)
def test_rules_that_say_the_same_are_equal(whole, parts):
  """Cut into parts, rules are the rules that they were; without a part they are not."""
  of = lambda places: published.parts_of(dict.fromkeys(places, "1:8"))
  parts = {*parts.split()}
  assert of(parts) == of([whole])
  assert all(of(parts - {part}) != of([whole]) for part in parts)


def test_mini_glue_compares_with_nothing_and_t5s_own_tasks_are_glue(write, call):
  mini, t5 = write("mini", task="nm_glue_mini_{}"), write("t5", task="glue_{}_v002")
  found, other = row_of(mini), row_of(t5)
  assert found["mini"] and found["published"] is None and not found["delta"]
  assert found["overall"] == other["overall"] and other["published"]["row"] == "Dense"
  assert "mini-GLUE" in call(t5, mini, code=1)


# --- several runs as one row ----------------------------------------------------------------------


def test_runs_of_one_task_each_are_one_row(write, call):
  paths = [write(task, STEPWISE, {task: x}) for task, x in metrics_of(STEPWISE).items()]
  whole, rte = write("whole", STEPWISE), write("dense", metrics={"rte": metrics_of(DENSE)["rte"]})
  report = json.loads(call(whole, "--join", "x", *paths, "--join", "y", rte, "--json"))
  alone, joined, other = report["runs"]
  assert joined["run"] == "x" and joined["joined"] == paths
  differ = {"run", "path", "joined"}
  assert differ >= {key for key, value in alone.items() if joined[key] != value}
  assert report["best"]["RTE"] == ["y"] and [*other["columns"]] == ["RTE"]


@pytest.mark.parametrize(
  "change",
  [
    dict(RECIPE="sr_ste"), dict(SPARSITY_RULES={"ff": "1:8"}), dict(SPARSE_STEPS=50_000),
    dict(PRETRAINED_STEPS=5), dict(T5_SIZE="small"),
  ],
)  # fmt: skip
def test_runs_that_were_trained_otherwise_are_not_joined(change, write, call):
  metrics = metrics_of(STEPWISE)
  cola = write("cola", STEPWISE, {"cola": metrics["cola"]})
  rte = write("rte", STEPWISE, {"rte": metrics["rte"]}, **change)
  assert "not one row" in call("--join", "x", cola, rte, code=1)


def test_rows_have_names_and_joined_runs_tasks_of_their_own(write, call):
  a, b = write("a"), write("b")
  for argv, word in (
    (["--join", "x", a, b], "has metrics of"),
    (["--join", "x"], "a name for the row"),
    ([a, a], "called the same"),
    ([], "--join"),
  ):
    assert word in call(*argv, code=1)


# --- which checkpoint -----------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 99), st.sampled_from([math.nan, 1.0, 2.0, 3.0]), min_size=1))
def test_choose_agrees_with_its_definition(values):
  series = {step: {"accuracy": v, "f1": v} for step, v in values.items()}
  sound = {s: v for s, v in values.items() if v == v}
  step, remark = scores.choose(series, ("f1", "accuracy"), "best")
  assert step == min((s for s, v in sound.items() if v == max(sound.values())), default=None)
  assert bool(remark) == (len(sound) < len(values))
  last, _ = scores.choose(series, ("f1",), "last")
  assert last == (max(values) if max(values) in sound else None)


# The mask of SR-STE is hard from its first sparse step on.
@pytest.mark.parametrize("row, first", [(SR_STE, 1_010_000), (STEPWISE, 1_090_000)])
def test_denser_steps_are_never_the_best(row, first, write):
  dense, metrics = metrics_of(DENSE, first - 1), metrics_of(row, first)
  both = {task: series | dense[task] for task, series in metrics.items()}
  run = write("run", row, both, PRETRAINED_STEPS=1_000_000)
  best, early = row_of(run), row_of(run, first - 1)
  assert {c["step"] for c in best["columns"].values()} == {first}
  assert best["published"]["row"] == row["row"] and early["published"] is None
  assert f"before {first}, from which on the target pattern" in early["remarks"][-1]
  with pytest.raises(ValueError, match=f"no step from {first} on"):
    row_of(write("early", row, dense, PRETRAINED_STEPS=1_000_000))


@pytest.mark.parametrize(
  "macro, start",
  [
    ("PRETRAINED_STEPS = 7", 7),
    ("INITIAL_CHECKPOINT_PATH = '/a/checkpoint_300'", 300),
    ("INITIAL_CHECKPOINT_PATH = '/a/run'", None),
    ("INITIAL_CHECKPOINT_PATH = None", 0),
    ("BATCH_SIZE = 8", None),
  ],
)
def test_where_a_run_starts(macro, start, tmp_path):
  (tmp_path / "config.gin").write_text(macro)
  run = results.settings(tmp_path)
  assert run.start == start and run.target_from() is None  # other settings are not known


def test_a_partial_run_has_no_overall_and_says_what_is_missing(write, call):
  metrics = metrics_of(SR_STE, 10, 20)
  del metrics["qqp"], metrics["mrpc"][20]["f1"]
  metrics["stsb"][10]["spearman_corrcoef"] = math.nan
  run = write("run", SR_STE, metrics)
  best = row_of(run)
  assert best["overall"] is None and best["missing"] == {"QQP": "no metrics"}
  assert best["columns"]["STS-B"]["step"] == 20 and best["columns"]["MRPC"]["step"] == 10
  assert any("STS-B: no finite" in remark for remark in best["remarks"])
  assert "overall" not in best["delta"] and "CoLA" in best["delta"]
  assert row_of(run, 20)["missing"].keys() == {"QQP", "MRPC"}
  assert "no overall, missing: QQP (no metrics)" in call(run)
  assert "no column" in call(run, "--checkpoint", "40", code=1)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, text, word",
  [
    ("nothing", "", "inference_eval"),
    ("inference_eval/nm_wmt-metrics.jsonl", "{}", "nm_wmt"),
    ("inference_eval/nm_glue_rte-metrics.jsonl", '{"step": 1}\n[]\n', "line 2"),
    ("inference_eval/nm_glue_rte-metrics.jsonl", '{"accuracy": 5}', "step"),
    ("inference_eval/nm_glue_rte-metrics.jsonl", "", "no column"),
  ],
)
def test_bad_input_is_one_line_and_no_row(name, text, word, tmp_path, call):
  file = tmp_path / "run" / name
  file.parent.mkdir(parents=True)
  file.write_text(text)
  assert word in call(str(tmp_path / "run"), code=1)


@pytest.mark.parametrize(
  "more, mean, remark",
  [
    ('\n{"step": 1001, "accur', 82.3, "has no end yet"),
    ('{"step": 1000, "accuracy": 82.3}\n', 82.3, ""),
    ('{"step": 1000, "accuracy": 50.5}\n', 50.5, ""),
  ],
)
def test_half_a_line_is_left_out_and_the_last_result_of_a_step_counts(more, mean, remark, write):
  run = write("run")
  with open(f"{run}/inference_eval/nm_glue_rte-metrics.jsonl", "a") as file:
    file.write(more)
  found = row_of(run)
  assert found["columns"]["RTE"]["mean"] == mean
  assert remark in "".join(found["remarks"]) and bool(remark) == bool(found["remarks"])


def test_events_fill_the_steps_that_jsonl_lacks(write):
  run = write("run", metrics={"cola": {20: {"matthews_corrcoef": 12.5}}})
  series = {"eval/matthews_corrcoef": {10: 0.0, 20: 14.0}, "other": {30: 1.0}}
  file = pathlib.Path(run) / "inference_eval/nm_glue_cola/events.out.tfevents.1"
  test_report.events(file, series)
  mean = lambda checkpoint: row_of(run, checkpoint)["columns"]["CoLA"]["mean"]
  assert (mean(10), mean(20)) == (0.0, 12.5)


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
    found.append({title: c["mean"] for title, c in row_of(room)["columns"].items()})
  assert found[0].keys() == {*TITLES}
  assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def test_neither_command_imports_anything_heavy(tmp_path):
  """Not when it works, either: lines of JSON are read, a zip is checked."""
  (tmp_path / "inference_eval").mkdir()
  (tmp_path / "inference_eval/nm_glue_rte-metrics.jsonl").write_text('{"step": 1, "accuracy": 50}')
  (tmp_path / "nm_glue_mini_rte-predict.jsonl").write_text(
    '{"inputs": {"idx": 0}, "prediction": "entailment"}\n'
  )
  code = """
import sys
from nm_sparsity_jax import cli
assert cli.main(["glue", "score", "."]) == 0
assert cli.main(["glue", "submit", ".", "--mini", "--out", "z"]) == 0
heavy = ("jax", "numpy", "tensorflow", "seqio", "gin", "tensorboard")
print([m for m in heavy if m in sys.modules])
"""
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "[]"


# --- forms ----------------------------------------------------------------------------------------


@pytest.fixture
def three(write):
  """Three runs: a has the best of all but RTE; b that; c lacks QQP, and its name needs escapes."""
  b, c = metrics_of(ROWS[7]), metrics_of(ROWS[17])
  b["rte"][1000]["accuracy"] = 90.0
  del c["qqp"]
  return [write("a", SR_STE), write("b", ROWS[7], b), write("c_50%|x", ROWS[17], c)]


def test_several_runs_mark_the_best_of_each_column(three, write, call):
  found = scores.score(three)
  assert found["best"] == {t: ["b"] if t == "RTE" else ["a"] for t in ["overall", *TITLES]}
  assert json.loads(call(*three, "--json")) == found
  # What prints as the same number is marked alike.
  twin = write("twin", SR_STE, metrics_of(SR_STE, plus=0.01))
  assert scores.score([three[0], twin])["best"]["CoLA"] == ["a", "twin"]


def test_text_markdown_and_latex_are_one_table(three, call):
  text, tables = call(*three), []
  assert max(map(len, text.splitlines()[:20])) <= 120 and "92.4/89.5" in text
  for style, mark in (("", "84.1*"), ("--markdown", "**84.1**"), ("--latex", r"\textbf{84.1}")):
    out = call(*three, *filter(None, [style]))
    assert mark in out and "-0.0" not in out and "QQP (no metrics)" in out
    marks = re.sub(r"[*\\|&{}]|textbf", " ", out.replace("$", ""))
    rows = [line.split() for line in marks.splitlines()]
    tables.append([r for r in rows if r and r[0] in ("a", "b", "published", "delta")][:6])
  assert tables[0] == tables[1] == tables[2]
