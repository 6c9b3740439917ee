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
TABLES = published.tables()
ROWS = TABLES["table12"]
TITLES = [c.title for c in glue.COLUMNS]


def write(folder, metrics, settings=None, name="nm_glue_{}"):
  """A run's folder as seqio.JSONLogger leaves it: metrics is config -> step -> metric -> value."""
  (folder / "inference_eval").mkdir(parents=True)
  for config, series in metrics.items():
    lines = [json.dumps({"step": step, **values}) for step, values in series.items()]
    file = folder / "inference_eval" / f"{name.format(config)}-metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
  if settings is not None:
    text = "\n".join(f"{k} = {v!r}" for k, v in settings.items())
    (folder / "config.gin").write_text(f"import t5x\n\n# Macros:\n{text}\n")
  return str(folder)


def metrics_of(row, steps=(1000,), plus=lambda step: 0.0):
  """A row of Table 12 as the metrics of a run."""
  return {
    c.name: {
      step: {m: v + plus(step) for m, v in zip(c.metrics, row["columns"][c.title], strict=False)}
      for step in steps
    }
    for c in glue.COLUMNS
  }


def settings_of(row, **more):
  """Of the paper's run, which began so long ago that every step is one of its fine-tune phase."""
  return dict(
    RECIPE=row["recipe"], PATTERN=None, SPARSITY_RULES=row["places"] or {"ff": None},
    DENSE_STEPS=row["dense_steps"] or 0, SPARSE_STEPS=100_000, FINETUNE_STEPS=10_000,
    **{"PRETRAINED_STEPS": -100_000, **more},
  )  # fmt: skip


@pytest.fixture
def call(capsys):
  """`nm-sparsity glue score`: (exit code, standard output, standard error)."""

  def score(*argv):
    code = cli.main(["glue", "score", *argv])
    return code, *capsys.readouterr()

  return score


# --- the paper ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(26))
def test_table_12_comes_out_of_the_code_that_scores_a_run(number, tmp_path):
  row = ROWS[number]
  run = write(tmp_path / "run", metrics_of(row), settings_of(row))
  (found,) = scores.score([run])["runs"]
  assert found["overall"] == pytest.approx(row["overall"], abs=0.06)
  assert found["published"] == {"table": 12, **row}
  for title, numbers in row["columns"].items():
    assert list(found["columns"][title]["values"].values()) == numbers[:2][: len(numbers)]
    assert found["columns"][title]["mean"] == pytest.approx(numbers[-1], abs=0.0501)
    assert abs(found["delta"][title]) < 0.0501
  assert not found["missing"] and not found["remarks"]
  # The pairs by name: MRPC's is F1 first, QQP's accuracy first, whatever the order of the metrics.
  for title, first in (("MRPC", "f1"), ("QQP", "accuracy"), ("STS-B", "pearson_corrcoef")):
    assert found["columns"][title]["values"][first] == row["columns"][title][0]


# --- which published row --------------------------------------------------------------------------

STEPWISE = next(r for r in ROWS if r["recipe"] == "sdgf_stepwise" and "qkv" in r["places"])


IN_PARTS = {"encoder/ff": "1:8", "decoder/ff": "1:8", "self/qkv": "1:8", "cross/qk": "1:8",
            "decoder/cross/v": "1:8"}  # fmt: skip


@pytest.mark.parametrize(
  ("change", "row", "remark"),
  [
    (dict(SPARSITY_RULES={"ff": "1:8", "q": " 1:8", "v": "1:8", "k": "1:8"}), STEPWISE["row"], ""),
    (dict(SPARSITY_RULES={"ff": None, "qkv": None}, PATTERN="1:8"), STEPWISE["row"], ""),
    (dict(SPARSITY_RULES=IN_PARTS), STEPWISE["row"], ""),
    (dict(SPARSITY_RULES={"encoder/ff": "1:8", "qkv": "1:8"}), None, "no row for sdgf_stepwise"),
    (dict(SPARSITY_RULES={"ff": "1:16"}), None, "no row for sdgf_stepwise 1:16 ff"),
    (dict(DENSE_STEPS=0), None, "with 0 dense steps"),
    (
      dict(DENSE_STEPS=100, SPARSE_STEPS=1000, FINETUNE_STEPS=0),
      STEPWISE["row"],
      "this run 100 dense steps of 1000",
    ),
    (dict(T5_SIZE="base"), STEPWISE["row"], ""),
    (dict(T5_SIZE="small"), STEPWISE["row"], "is of T5 base, not small"),
    (dict(RECIPE="mdgf_linear"), None, "no row for mdgf_linear"),
    (dict(RECIPE="snip", SPARSITY_RULES={"ff": "1:32"}), "SNIP", ""),
    (dict(RECIPE="dense", SPARSITY_RULES={"ff": None}), "Dense", ""),
    (dict(SPARSITY_RULES="%OTHER"), None, "says what was trained"),
  ],
)
def test_which_published_row(change, row, remark, tmp_path):
  settings = {**settings_of(STEPWISE), **change}
  (found,) = scores.score([write(tmp_path / "run", metrics_of(STEPWISE), settings)])["runs"]
  assert (found["published"] and found["published"]["row"]) == row
  assert bool(found["delta"]) == (row is not None)
  assert any(re.search(remark, r) for r in found["remarks"]) if remark else not found["remarks"]


@given(st.data())
def test_rules_that_say_the_same_are_equal(data):
  """Cut into parts, rules are the rules that they were; without a part they are not."""
  whole = data.draw(
    st.dictionaries(
      st.sampled_from(["ff", "q", "k", "v", "o"]), st.sampled_from(["1:4", "1:8"]), min_size=1
    )
  )
  cut = {}
  for role, pattern in whole.items():
    ways = [[role], [f"encoder/{role}", f"decoder/{role}"]]
    if role != "ff":
      ways += [
        [f"self/{role}", f"cross/{role}"],
        [f"encoder/self/{role}", f"decoder/self/{role}", f"decoder/cross/{role}"],
      ]
    cut |= dict.fromkeys(data.draw(st.sampled_from(ways)), pattern)
  parts = published.parts_of
  assert parts(cut) == parts(whole)
  gone = data.draw(st.sampled_from(sorted(cut)))
  assert parts({place: pattern for place, pattern in cut.items() if place != gone}) != parts(whole)
  assert parts(cut | {gone: "2:4"}) != parts(whole)


def test_gin_breaks_long_values_and_these_are_read(tmp_path):
  gin = pytest.importorskip("gin")
  places = {"decoder/cross/qkv": "1:4", "encoder/layers_[0-3]/mlp/.*/kernel": "2:4", "ff": None}
  bindings = dict(SPARSITY_RULES=places, PATTERN="1:8", RECIPE="idp", DENSE_STEPS=7)
  gin.clear_config()
  gin.parse_config([f"{k} = {v!r}" for k, v in bindings.items()] + ["SPARSE_STEPS = 90"])
  (tmp_path / "config.gin").write_text(gin.config_str())
  gin.clear_config()
  run = results.settings(tmp_path)
  assert published.parts_of(run.places) == published.parts_of(places | {"ff": "1:8"})
  assert (run.recipe, run.dense_steps, run.sparse_steps) == ("idp", 7, 90)
  assert not run.remarks


def test_mini_glue_and_t5s_own_tasks(tmp_path, call):
  row = ROWS[0]
  mini = write(tmp_path / "mini", metrics_of(row), settings_of(row), name="nm_glue_mini_{}")
  t5 = write(tmp_path / "t5", metrics_of(row), settings_of(row), name="glue_{}_v002")
  (found,), (other,) = (scores.score([run])["runs"] for run in (mini, t5))
  assert found["mini"] and found["published"] is None and not found["delta"]
  assert found["overall"] == other["overall"] == pytest.approx(86.16, abs=0.01)
  assert other["published"]["row"] == "Dense"
  code, _, err = call(t5, mini)
  assert code == 1 and "mini-GLUE" in err


# --- several runs as one row ----------------------------------------------------------------------


def singles(folder, row, settings, tasks=None):
  """A run for each task."""
  metrics = metrics_of(row, steps=(1000, 2000), plus=lambda step: step / 1000)
  return [
    write(folder / f"run_{task}", {task: series}, settings)
    for task, series in metrics.items()
    if tasks is None or task in tasks
  ]


def test_runs_of_one_task_each_are_one_row(tmp_path, call):
  row = ROWS[22]
  paths = singles(tmp_path / "a", row, settings_of(row))
  whole = write(tmp_path / "whole", metrics_of(row, plus=lambda step: 1), settings_of(row))
  report = json.loads(call("--join", "mine", *paths, "--checkpoint", "1000", "--json")[1])
  (joined,), (alone,) = report["runs"], scores.score([whole])["runs"]
  assert joined["run"] == "mine" and joined["joined"] == paths
  same = ("columns", "overall", "places", "published", "delta", "missing", "recipe")
  assert {k: joined[k] for k in same} == {k: alone[k] for k in same}
  other = singles(tmp_path / "b", ROWS[0], settings_of(ROWS[0]), tasks=("rte", "cola"))
  found = json.loads(call(whole, "--join", "x", *paths, "--join", "y", *other, "--json")[1])
  assert [r["run"] for r in found["runs"]] == ["whole", "x", "y"]
  assert found["best"]["RTE"] == ["y"] and set(found["runs"][2]["columns"]) == {"CoLA", "RTE"}


@pytest.mark.parametrize(
  "change",
  [
    dict(RECIPE="sr_ste"), dict(SPARSITY_RULES={"ff": "1:4"}), dict(SPARSE_STEPS=50_000),
    dict(PRETRAINED_STEPS=5), dict(T5_SIZE="small"),
  ],
)  # fmt: skip
def test_runs_that_were_trained_otherwise_are_not_joined(change, tmp_path):
  one, other = (
    results.read(*singles(tmp_path, STEPWISE, settings_of(STEPWISE) | more, (task,)))
    for task, more in (("cola", {}), ("rte", change))
  )
  with pytest.raises(ValueError, match="not one row"):
    results.join("mine", [one, other])


def test_what_else_cannot_be_joined(tmp_path, call):
  row = STEPWISE
  paths = singles(tmp_path / "a", row, settings_of(row), ("cola", "rte"))
  again = singles(tmp_path / "b", row, settings_of(row), ("rte",))
  for argv, word in (
    (["--join", "x", *paths, *again], "has metrics of rte"),
    (["--join", "x"], "a name for the row comes first"),
    (["--join", "x", paths[0], "--join", "x", paths[1]], "called the same"),
    ([paths[0], paths[0]], "called the same"),
    ([], "--join"),
  ):
    code, out, err = call(*argv)
    assert code == 1 and not out and word in err, (argv, err)


# --- which checkpoint -----------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 99), st.sampled_from([math.nan, 1.0, 2.0, 3.0]), min_size=1))
def test_choose_agrees_with_its_definition(values):
  series = {step: {"f1": v, "accuracy": 4 - v} | {"accuracy": v} for step, v in values.items()}
  sound = {s: v for s, v in values.items() if v == v}
  step, remark = scores.choose(series, ("f1", "accuracy"), "best")
  assert step == min((s for s, v in sound.items() if v == max(sound.values())), default=None)
  assert bool(remark) == (len(sound) < len(values))
  last, _ = scores.choose(series, ("f1",), "last")
  assert last == (max(values) if max(values) in sound else None)


@pytest.mark.parametrize("recipe", ["sdgf_stepwise", "sr_ste"])
def test_denser_steps_are_never_the_best(tmp_path, recipe):
  row = next(r for r in ROWS if r["recipe"] == recipe and r["dense_steps"] and "ff" in r["places"])
  metrics = metrics_of(row, (1_100_000,))
  first = 1_010_000 if recipe == "sr_ste" else 1_090_000  # its mask is hard from the first
  for c in glue.COLUMNS:  # the dense model's scores, until then
    for step in (1_005_000, first - 1):
      metrics[c.name][step] = metrics_of(ROWS[0], (step,))[c.name][step]
  run = write(tmp_path / "run", metrics, settings_of(row, PRETRAINED_STEPS=1_000_000))
  (best,) = scores.score([run])["runs"]
  assert {c["step"] for c in best["columns"].values()} == {1_100_000}
  assert best["published"]["row"] == row["row"] and abs(best["delta"]["overall"]) < 0.06
  (early,) = scores.score([run], first - 1)["runs"]
  assert early["published"] is None and early["delta"] == {}
  assert f"before {first}, from which on the target pattern" in early["remarks"][-1]
  for c in glue.COLUMNS:
    metrics[c.name] = {s: v for s, v in metrics[c.name].items() if s < first}
  dead = write(tmp_path / "dead", metrics, settings_of(row, PRETRAINED_STEPS=1_000_000))
  with pytest.raises(ValueError, match=f"no step from {first} on"):
    scores.score([dead])


@pytest.mark.parametrize(
  "macros, start",
  [
    (dict(PRETRAINED_STEPS=7), 7),
    (dict(PRETRAINED_STEPS=None, INITIAL_CHECKPOINT_PATH="/a/checkpoint_300"), 300),
    (dict(PRETRAINED_STEPS=None, INITIAL_CHECKPOINT_PATH="/a/run"), None),
    (dict(PRETRAINED_STEPS=None, INITIAL_CHECKPOINT_PATH=None), 0),
    ({}, None),
  ],
)
def test_where_a_run_starts(tmp_path, macros, start):
  run = results.read(write(tmp_path / "run", metrics_of(ROWS[1]), macros))
  assert run.start == start and run.target_from() is None  # other settings are not known


def test_a_partial_run_has_no_overall_and_says_what_is_missing(tmp_path, call):
  metrics = metrics_of(ROWS[1], steps=(10, 20))
  del metrics["qqp"]
  metrics["stsb"][10]["spearman_corrcoef"] = math.nan
  metrics["rte"] = {20: {"accuracy": math.inf}, 30: {"accuracy": 70.0}}
  del metrics["mrpc"][20]["f1"]
  run = write(tmp_path / "run", metrics, settings_of(ROWS[1]))
  (best,) = scores.score([run])["runs"]
  assert best["overall"] is None and best["missing"] == {"QQP": "no metrics"}
  assert best["columns"]["STS-B"]["step"] == 20 and best["columns"]["MRPC"]["step"] == 10
  assert any("STS-B: no finite" in remark for remark in best["remarks"])
  assert "overall" not in best["delta"] and "CoLA" in best["delta"]
  (at,) = scores.score([run], 20)["runs"]
  assert at["missing"].keys() == {"QQP", "MRPC", "RTE"}
  assert call(run, "--checkpoint", "30")[0] == 0  # a row of one column
  code, out, _ = call(run)
  row = next(line for line in out.splitlines() if line.startswith("run "))
  assert not code and row.split()[1] == "-" and row.split()[7] == "-"
  assert "no overall, missing: QQP (no metrics)" in out
  code, out, err = call(run, "--checkpoint", "40")
  assert code == 1 and not out and err.count("\n") == 1 and "no column" in err


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
  code, out, err = call(str(tmp_path / "run"))
  assert code == 1 and not out and err.count("\n") == 1 and word in err


def test_a_half_written_line_is_left_out_and_the_last_result_of_a_step_counts(tmp_path):
  run = pathlib.Path(write(tmp_path / "run", metrics_of(ROWS[0]), settings_of(ROWS[0])))
  file = run / "inference_eval/nm_glue_rte-metrics.jsonl"
  same = file.read_text()
  file.write_text(same + '\n{"step": 1001, "accur')
  (found,) = scores.score([run])["runs"]
  assert found["columns"]["RTE"]["step"] == 1000 and "has no end yet" in found["remarks"][0]
  file.write_text(same * 2)
  assert not scores.score([run])["runs"][0]["remarks"]
  file.write_text(same + '{"step": 1000, "accuracy": 50.5}\n')
  (found,) = scores.score([run])["runs"]
  assert found["columns"]["RTE"]["mean"] == 50.5 and found["run"] == "run"
  assert found["published"]["row"] == "Dense" and "evaluated again" in found["remarks"][0]


def test_events_and_jsonl_of_the_same_run_give_the_same_row(tmp_path):
  """By seqio's own loggers."""
  loggers = pytest.importorskip("seqio", reason="writes with seqio").loggers
  from seqio import metrics as seqio_metrics

  row, folders = ROWS[8], {}
  for name in ("JSONLogger", "TensorBoardLogger", "TensorBoardLoggerV1"):
    folders[name] = tmp_path / name
    (folders[name] / "inference_eval").mkdir(parents=True)
    logger = getattr(loggers, name)(str(folders[name] / "inference_eval"))
    for task, series in metrics_of(row, (10, 20, 30), lambda step: -abs(step - 20) / 7).items():
      for step, values in series.items():
        scalars = {k: seqio_metrics.Scalar(v) for k, v in values.items()}
        logger(f"nm_glue_{task}", step, scalars, None, None, None)
    text = "\n".join(f"{k} = {v!r}" for k, v in settings_of(row).items())
    (folders[name] / "config.gin").write_text(text)
  first, *others = [scores.score([folder])["runs"][0] for folder in folders.values()]
  assert first["overall"] == pytest.approx(80.9, abs=0.06)
  for other in others:
    assert other["overall"] == pytest.approx(first["overall"], rel=1e-6)
    assert other["published"] == first["published"] and not other["remarks"]
    for title in TITLES:
      assert other["columns"][title]["step"] == 20
      assert other["columns"][title]["mean"] == pytest.approx(first["columns"][title]["mean"])


def test_events_fill_the_steps_that_jsonl_lacks(tmp_path):
  metrics = {"cola": {20: {"matthews_corrcoef": 12.5}}}
  run = pathlib.Path(write(tmp_path / "run", metrics))
  series = {"eval/matthews_corrcoef": {10: 0.0, 20: 14.0}, "other": {30: 1.0}}
  test_report.events(run / "inference_eval/nm_glue_cola/events.out.tfevents.1", series)
  assert scores.score([run], 10)["runs"][0]["columns"]["CoLA"]["mean"] == 0.0
  (best,) = scores.score([run])["runs"]
  assert best["columns"]["CoLA"]["mean"] == 12.5  # of the lines


def test_neither_command_imports_anything_heavy(tmp_path):
  """Not when it works, either: lines of JSON are read, a zip is checked."""
  write(tmp_path / "run", {"rte": {1: {"accuracy": 50}}})
  (tmp_path / "nm_glue_mini_rte-predict.jsonl").write_text(
    '{"inputs": {"idx": 0}, "prediction": "entailment"}\n'
  )
  code = """
import sys
from nm_sparsity_jax import cli
assert cli.main(["glue", "score", "run"]) == 0
assert cli.main(["glue", "submit", ".", "--mini", "--out", "z"]) == 0
heavy = ("jax", "numpy", "tensorflow", "seqio", "gin", "tensorboard")
print([m for m in heavy if m in sys.modules])
"""
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


# --- forms ----------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
  """Three runs: a has the best of all but RTE; b that; c lacks QQP, and its name needs escapes."""
  a, b, c = metrics_of(ROWS[2]), metrics_of(ROWS[7]), metrics_of(ROWS[17])
  b["rte"][1000]["accuracy"] = 90.0
  del c["qqp"]
  return [
    write(tmp_path / "a", a, settings_of(ROWS[2])),
    write(tmp_path / "b", b, settings_of(ROWS[7])),
    write(tmp_path / "c_50%|x", c, settings_of(ROWS[17])),
  ]


def test_several_runs_mark_the_best_of_each_column(three, tmp_path, call):
  found = scores.score(three)
  assert found["runs"][1]["delta"]["RTE"] == pytest.approx(90 - 72.6)
  assert found["best"] == {t: ["b"] if t == "RTE" else ["a"] for t in ["overall", *TITLES]}
  assert json.loads(call(*three, "--json")[1]) == json.loads(json.dumps(found))
  assert not scores.score(three[:1])["best"]
  # What prints as the same number is marked alike.
  twin = write(tmp_path / "twin", metrics_of(ROWS[2], plus=lambda step: 0.01))
  assert scores.score([three[0], twin])["best"]["CoLA"] == ["a", "twin"]


def test_text_markdown_and_latex_are_one_table(three, call):
  tables = {}
  for style, mark in (("text", "84.1*"), ("markdown", "**84.1**"), ("latex", r"\textbf{84.1}")):
    _, out, _ = call(*three, *([f"--{style}"] * (style != "text")))
    assert mark in out and "-0.0" not in out and "QQP (no metrics)" in out
    marks = re.sub(r"[*\\|&{}]|textbf", " ", out.replace("$", ""))
    tables[style] = [line.split() for line in marks.splitlines()]
  kept = [row for row in tables["text"] if row and row[0] in ("a", "b", "published", "delta")]
  for style in ("markdown", "latex"):
    assert [row for row in kept[:7] if row not in tables[style]] == []
  _, out, _ = call(*three)
  assert max(map(len, out.splitlines()[:20])) <= 120
  assert re.search(r"^ +MCC +Acc +Acc +F1/Acc +Acc +Acc/F1 +Acc +Acc +P/S$", out, re.MULTILINE)
  assert "92.4/89.5" in out
