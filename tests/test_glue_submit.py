"""nm-sparsity glue submit: from t5x.infer's predictions to GLUE's zip, and the check of a zip."""

import dataclasses
import json
import random
import time
import zipfile

import jax
import pytest
import t5x_found
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.scores import submission

TASKS = submission.TASKS

# File -> (rows, word -> cell, in TFDS' order of classes), apart from the table that is tested.
OFFICIAL = {
  "CoLA.tsv": (1063, {"unacceptable": "0", "acceptable": "1"}),
  "SST-2.tsv": (1821, {"negative": "0", "positive": "1"}),
  "MRPC.tsv": (1725, {"not_equivalent": "0", "equivalent": "1"}),
  "STS-B.tsv": (1379, {"0.0": "0.000", "3.2": "3.200", "5.0": "5.000"}),
  "QQP.tsv": (390965, {"not_duplicate": "0", "duplicate": "1"}),
  "MNLI-m.tsv": (9796, {w: w for w in ("entailment", "neutral", "contradiction")}),
  "MNLI-mm.tsv": (9847, {w: w for w in ("entailment", "neutral", "contradiction")}),
  "QNLI.tsv": (5463, {w: w for w in ("entailment", "not_entailment")}),
  "RTE.tsv": (3000, {w: w for w in ("entailment", "not_entailment")}),
  "WNLI.tsv": (146, {"not_entailment": "0", "entailment": "1"}),
  "AX.tsv": (1104, {w: w for w in ("entailment", "neutral", "contradiction")}),
}


def lines_of(predictions):
  """Lines as t5x.infer writes them: it makes a float of `idx`."""
  line = '{{"inputs": {{"idx": {}.0, "inputs_pretokenized": "x"}}, "prediction": {}}}\n'.format
  return "".join(line(i, json.dumps(p)) for i, p in predictions)


def same(a, b):
  """Whether bytes are equal; pytest would explain for minutes how megabytes differ."""
  return a == b


def name_of(config, shard=0, total=1, mini=False):
  return f"nm_glue_{'mini_' * mini}{config}-predict.jsonl-{shard:05}-of-{total:05}"


def shuffled(task, seed=0):
  """Right predictions for a task's test set, in an order of its own."""
  rng = random.Random(f"{task.name} {seed}")
  count, words = OFFICIAL[task.file]
  rows = list(enumerate(rng.choices(list(words), k=count)))
  rng.shuffle(rows)
  return rows


@pytest.fixture(scope="module")
def predictions():
  return {name: shuffled(task) for name, task in TASKS.items()}


@pytest.fixture(scope="module")
def folder(predictions, tmp_path_factory):
  """A folder with the predictions of all tasks but QQP, which is large."""
  folder = tmp_path_factory.mktemp("predictions")
  for name, rows in predictions.items():
    if name != "qqp":
      (folder / name_of(name)).write_text(lines_of(rows))
  return folder


@pytest.fixture
def call(official, monkeypatch):
  """The same where QQP's test set has 5 rows, which is quicker."""
  small = dataclasses.replace(TASKS["qqp"], splits={"test": 5})
  monkeypatch.setitem(submission.TASKS, "qqp", small)
  return official


@pytest.fixture
def official(capsys, tmp_path):
  """`nm-sparsity glue submit`: (exit code, report or output, error, zip)."""

  def submit(*argv, out=True, js=True):
    target = tmp_path / "submission.zip"
    argv = ["glue", "submit", *map(str, argv)]
    argv += (["--out", str(target)] if out else []) + (["--json"] if js else [])
    code = cli.main(argv)
    text, err = capsys.readouterr()
    return code, json.loads(text) if js and text else text, err, target

  return submit


@pytest.fixture
def made(tmp_path):
  """What `make` says of one task of mini-GLUE: (its counts, its text, problems)."""

  def make(config, rows, fill=(), mini=True):
    (tmp_path / "file").write_text(lines_of(rows))
    files = {config: {0: tmp_path / "file"}}
    report, tables = submission.make(files, fill, mini)
    name = TASKS[config].file
    problems = [p.partition(": ")[2] for p in report["problems"] if p.startswith(name)]
    return report["files"][name], tables[name].decode(), problems

  return make


# --- round trip -----------------------------------------------------------------------------------


def test_all_eleven_files_there_and_back(folder, predictions, tmp_path, official):
  (tmp_path / name_of("qqp")).write_text(lines_of(predictions["qqp"]))
  code, report, _, target = official(folder, tmp_path / name_of("qqp"))
  assert not code and not report["problems"]
  assert {name: r["rows"] for name, r in report["files"].items()} == {
    name: rows for name, (rows, _) in OFFICIAL.items()
  }
  with zipfile.ZipFile(target) as archive:
    assert set(archive.namelist()) == set(OFFICIAL) and len(archive.namelist()) == 11
    for name, rows in predictions.items():
      data = archive.read(TASKS[name].file)
      words = OFFICIAL[TASKS[name].file][1]
      wanted = "".join(f"{i}\t{words[word]}\n" for i, word in sorted(rows))
      assert same(data, f"index\tprediction\n{wanted}".encode())
  assert official("--validate", target, out=False)[:2] == (0, {"zip": str(target), "problems": []})


def test_the_same_predictions_make_the_same_bytes(folder, call, monkeypatch, tmp_path):
  _, wanted, _, target = call(folder, "--fill", "qqp")
  first = target.read_bytes()
  monkeypatch.setattr(time, "time", lambda: 2e9)
  files, problems = submission.find(sorted(map(str, folder.iterdir()), reverse=True))
  report, tables = submission.make(files, fill={"qqp"})
  assert not problems and report["problems"] == wanted["problems"] == []
  submission.write(str(tmp_path / "other.zip"), tables)
  assert same((tmp_path / "other.zip").read_bytes(), first)
  call(folder, "--fill", "all", "--task", f"qqp={folder / name_of('cola')}")
  assert same(target.read_bytes(), first)  # too many rows: what was there stays


def test_the_table_of_tasks_has_the_official_files():
  assert {t.file: t.splits["test"] for t in TASKS.values()} == {
    file: rows for file, (rows, _) in OFFICIAL.items()
  }
  for task in TASKS.values():
    for word, wanted in OFFICIAL[task.file][1].items():
      assert submission.cell(task, word) == wanted
    if not task.regression:  # and back: no two words become one cell
      assert len({submission.cell(task, w) for w in task.labels}) == len(task.labels)
      assert task.labels == tuple(OFFICIAL[task.file][1])  # TFDS' order, which fill relies on


@pytest.mark.parametrize(
  "text, cell",
  [
    ("-1.0", "0.000"), ("5.2", "5.000"), ("abc", None), ("nan", None), ("inf", None), ("", None),
    ("-0.0", "0.000"), ("2.6", "2.600"), ("3.14159", "3.142"), ("5", "5.000"), ("<unk>", None),
  ],
)  # fmt: skip
def test_sts_b(text, cell, made):
  report, table, problems = made("stsb", [(0, "1.0"), (1, text)], fill={"stsb"})
  assert not problems
  assert table.splitlines()[2] == f"1\t{cell or '2.500'}"
  assert report["invalid"] == report["filled"] == (cell is None)
  assert report["clamped"] == (text in ("-1.0", "5.2"))


@pytest.mark.parametrize("config", [n for n, t in TASKS.items() if t.labels])
def test_matching_is_exact_and_fill_is_class_0(config, made):
  task = TASKS[config]
  right = task.labels[-1]
  rows = list(enumerate([right, f" {right}", right.upper(), "", "<unk>", "0", "-1"]))
  report, _, problems = made(config, rows)
  assert report["invalid"] == 6 and not report["filled"]
  assert len(problems) == 1 and f"--fill {config}" in problems[0]
  report, text, problems = made(config, rows, fill={config})
  class_0 = task.labels[0] if task.words else "0"
  assert not problems and report["filled"] == 6 and report["filler"] == class_0
  assert [line.split("\t")[1] for line in text.splitlines()[3:]] == [class_0] * 5


@given(st.permutations(range(8)), st.integers(1, 3))
def test_rows_come_out_in_order_from_any_number_of_shards(tmp_path_factory, order, total):
  tmp = tmp_path_factory.mktemp("shards")
  label = lambda i: TASKS["rte"].labels[i % 3 == 0]
  shards = {shard: tmp / f"{shard}" for shard in range(total)}
  for shard, file in shards.items():
    file.write_text(lines_of([(i, label(i)) for i in order[shard::total]]))
  report, tables = submission.make({"rte": shards}, mini=True)
  wanted = "".join(f"{i}\t{label(i)}\n" for i in range(8))
  assert not report["problems"]
  assert tables["RTE.tsv"].decode() == "index\tprediction\n" + wanted


# --- what stops it --------------------------------------------------------------------------------


def test_missing_and_repeated_rows_stop_it_even_with_fill(made):
  rows = [(i, "entailment") for i in range(3000)]
  for change, word in (
    (rows[:-2], "missing: index 2998, 2999"),
    (rows + [(7, "entailment")], "index 7 more than once"),
    (rows + [(3000, "entailment")], "index 3000 not in"),
    (rows + [(-1, "entailment")], "index -1 not in"),
  ):
    (said,) = made("rte", change, mini=False, fill={"rte"})[2]
    assert word in said
  assert not made("rte", rows, mini=False)[2]
  assert "index 5" in made("rte", rows[:5] + rows[6:9])[2][0]


def test_missing_tasks_are_named_and_filled_on_request_alone(folder, call, tmp_path):
  only = tmp_path / "only"
  only.mkdir()
  for name in ("cola", "wnli"):
    (only / name_of(name)).write_text((folder / name_of(name)).read_text())
  code, text, _, target = call(only, "--fill", "wnli", "--fill", "stsb", js=False)
  assert code == 1 and not target.exists() and "8 problems\n" in text
  assert "RTE.tsv: no predictions (--fill rte" in text and "STS-B.tsv: no" not in text
  code, report, _, target = call(only, "--fill", "all")
  assert not code and target.exists()
  filled = {name: (r["filled"], r["filler"]) for name, r in report["files"].items()}
  assert filled["CoLA.tsv"] == filled["WNLI.tsv"] == (0, None)  # they are there
  assert filled["STS-B.tsv"] == (1379, "2.500") and filled["AX.tsv"] == (1104, "entailment")
  assert call("--validate", target, out=False)[0] == 0


def test_a_missing_shard_and_two_runs_in_one_folder_stop_it(tmp_path):
  for shard in (0, 2):
    (tmp_path / name_of("rte", shard, 3)).write_text("")
  (tmp_path / f"{name_of('rte', 1, 3)}.COMPLETED").write_text("")
  files, problems = submission.find([str(tmp_path)])
  assert sorted(files["rte"]) == [0, 2] and problems == ["RTE.tsv: shard 00001 of 00003 is missing"]
  (tmp_path / name_of("rte")).write_text("")  # of another run
  with pytest.raises(ValueError, match="both predictions of rte"):
    submission.find([str(tmp_path)])


def test_a_file_tells_its_task_by_name_or_is_told(tmp_path):
  half = tmp_path / "nm_glue_mnli-predict.jsonl-00000-of-00001"  # which of the two halves?
  for path in (half, tmp_path / "weird.jsonl"):
    path.write_text("")
    with pytest.raises(ValueError, match="--task TASK=FILE"):
      submission.find([str(path)])
  files, _ = submission.find([str(tmp_path)], [("mnli_matched", str(half))])
  assert files == {"mnli_matched": {0: half}}  # what a folder holds besides is no concern
  half.unlink()
  for name in ("glue_rte_v002-predict.jsonl", "nm_glue_rte-predict_with_aux.jsonl-00000-of-00001"):
    (tmp_path / name).write_text("")
    assert submission.find([str(tmp_path)])[0] == {"rte": {0: tmp_path / name}}
    with pytest.raises(ValueError, match="both predictions of rte"):
      submission.find([str(tmp_path)], [("rte", str(tmp_path / "x"))])
    (tmp_path / name).unlink()


def test_mini_glue_is_meant_or_refused(folder, call, tmp_path):
  rows = [(i, "entailment") for i in (2, 0, 1)]
  (tmp_path / name_of("rte", mini=True)).write_text(lines_of(rows))
  code, _, err, target = call(tmp_path)
  assert code == 1 and "--mini" in err and not target.exists()
  code, report, _, target = call(tmp_path, "--mini")
  assert not code and list(report["files"]) == ["RTE.tsv"]
  assert call("--validate", target, "--mini", out=False)[0] == 0
  code, report, *_ = call("--validate", target, out=False)
  assert code == 1 and "RTE.tsv: has 3 rows, not 3000" in report["problems"]
  assert "CoLA.tsv: is missing" in report["problems"]
  assert "mini-GLUE" in call(folder, "--mini")[2]


@pytest.mark.parametrize(
  "line, word",
  [
    ('{"inputs": {}, "prediction": "x"}', "idx"),
    ('{"inputs": {"idx": 1}}', "prediction"),
    ('{"inputs": {"idx": 1', "line 2"),
    ("[]", "line 2"),
    ('{"inputs": {"idx": 1.5}, "prediction": "x"}', "1.5"),
    ('{"inputs": {"idx": NaN}, "prediction": "x"}', "nan"),
    ('{"inputs": {"idx": 1}, "prediction": 1}', "prediction 1"),
    # QNLI's validation set has as many rows as its test set.
    ('{"inputs": {"idx": 1, "targets_pretokenized": "x"}, "prediction": "x"}', "not a test set"),
  ],
)
def test_a_broken_line_is_one_line_of_error(line, word, tmp_path, call):
  (tmp_path / name_of("rte")).write_text(lines_of([(0, "entailment")]) + line + "\n")
  code, _, err, target = call(tmp_path)
  assert code == 1 and err.count("\n") == 1 and word in err and not target.exists()


def test_command_lines_that_make_no_sense(tmp_path, call):
  for argv, out in (
    ([], True), ([tmp_path], False), (["--validate", "x", tmp_path], False),
    (["--validate", "x"], True), (["--validate", "x", "--fill", "wnli"], False),
  ):  # fmt: skip
    code, _, err, _ = call(*argv, out=out)
    assert code == 1 and "--validate" in err
  assert "no prediction files" in call(tmp_path)[2]
  assert "there is no such file" in call(tmp_path / "nowhere")[2]
  (tmp_path / "file").touch()  # it is said before anything is read
  assert "--out" in call("/no/predictions", "--out", tmp_path / "file/my.zip", out=False)[2]
  for argv in (["--fill", "mnli"], ["--task", "mnli=x"], ["--task", "cola"]):
    with pytest.raises(SystemExit):
      call(*argv)


def test_what_is_made_is_checked_before_it_is_written(folder, call, monkeypatch):
  """The same check as that of a zip, whatever goes wrong in between."""
  monkeypatch.setattr(submission, "cell", lambda task, prediction: "yes")
  code, report, _, target = call(folder, "--fill", "qqp")
  assert code == 1 and not target.exists()
  assert "RTE.tsv: line 2: 'yes' is no answer" in report["problems"]


def test_a_write_that_fails_leaves_the_old_zip(folder, call, monkeypatch):
  _, _, _, target = call(folder, "--fill", "qqp")
  before = target.read_bytes()

  def full(*args, **kwargs):
    raise OSError("no space left")

  monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
  code, _, err, _ = call(folder, "--fill", "qqp")
  assert code == 1 and "no space left" in err
  assert same(target.read_bytes(), before) and list(target.parent.iterdir()) == [target]


# --- the validator --------------------------------------------------------------------------------

GOOD = "index\tprediction\n0\tentailment\n1\tnot_entailment\n2\tentailment\n"


@pytest.mark.parametrize(
  "text, words",
  [
    (GOOD, []),
    (GOOD.replace("\n", "\r\n"), ["CRLF"]),
    (GOOD[:-1], ["does not end", "has 2 rows"]),
    (GOOD + "3\tentailment\n", ["has 4 rows"]),
    (GOOD + "\n", ["has 4 rows", "index 3 belongs"]),
    (GOOD.replace("\n1\t", "\n2\t"), ["index 1 belongs"]),
    (GOOD.replace("1\tnot_", "01\tnot_"), ["index 1 belongs"]),
    (GOOD.replace("1\tnot_", "1 not_"), ["index 1 belongs"]),
    (GOOD.replace("not_entailment", "neutral"), ["'neutral' is no answer"]),
    (GOOD.replace("not_entailment", "1"), ["'1' is no answer"]),
    (GOOD.replace("not_entailment", "entailment\t"), ["is no answer"]),
    (GOOD.partition("\n")[2], ["first line", "has 2 rows", "index 0 belongs"]),
    ("\ufeff" + GOOD, ["first line"]),
    ("", ["UTF-8"]),
    (b"\xff", ["UTF-8"]),
    ("index\tprediction\n" + "x\n" * 5, ["has 5 rows", "line 2", "line 3", "line 4", "5 such"]),
  ],
)
def test_check(text, words):
  data = text if isinstance(text, bytes) else text.encode()
  problems = submission.check(TASKS["rte"], data, 3)
  assert len(problems) >= len(words) and bool(problems) == bool(words)
  assert all(word in problem for word, problem in zip(words, problems, strict=False)), problems


@pytest.mark.parametrize("value", ["5.001", "-0.1", "nan", "inf", "", "1e0", "3.", " 3", "٣"])
def test_check_of_scores(value):
  text = "index\tprediction\n0\t{}\n"
  assert submission.check(TASKS["stsb"], text.format(value).encode(), 1)
  for good in ("0.000", "5.000", "2.5", "4"):
    assert not submission.check(TASKS["stsb"], text.format(good).encode(), 1)


def test_check_of_indices_takes_no_words():
  for value, good in (("1", True), ("0", True), ("2", False), ("entailment", False), ("-1", False)):
    data = f"index\tprediction\n0\t{value}\n".encode()
    assert (not submission.check(TASKS["wnli"], data, 1)) == good


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning:zipfile")
def test_validate_looks_at_the_zip_itself(tmp_path, call):
  path = tmp_path / "x.zip"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("RTE.tsv", GOOD)
    archive.writestr("RTE.tsv", GOOD)
    archive.writestr("out/CoLA.tsv", "")
  code, report, *_ = call("--validate", path, out=False)
  assert code == 1
  assert {"RTE.tsv: is there twice", "out/CoLA.tsv: does not belong there", "CoLA.tsv: is missing",
          "RTE.tsv: has 3 rows, not 3000"} <= set(report["problems"])  # fmt: skip
  path.write_text("no zip")
  code, _, err, _ = call("--validate", path, out=False)
  assert code == 1 and "no zip that can be read" in err and err.count("\n") == 1
  assert call("--validate", tmp_path / "nowhere", out=False)[0] == 1


# --- T5X ------------------------------------------------------------------------------------------


@pytest.mark.t5x
@pytest.mark.filterwarnings("ignore")
def test_what_t5x_writes_is_read(tmp_path):
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  import numpy as np
  import seqio
  import tensorflow as tf

  with jax.numpy_dtype_promotion("standard"):
    from t5x import infer

  rows = [(2, "entailment"), (0, "é"), (1, "not_entailment")]
  data = tf.data.Dataset.from_tensor_slices(
    {
      "idx": tf.constant([i for i, _ in rows], tf.int32),
      "inputs": tf.constant([[3, 4]] * 3),
      "inputs_pretokenized": ["rte a", "rte b", "rte c"],
    }
  )
  vocabulary = seqio.ByteVocabulary()
  tokens = [np.array(vocabulary.encode(word)) for _, word in rows]
  file = tmp_path / name_of("rte")
  infer.write_inferences_to_file(
    str(file), (tokens, {}), data, "predict", vocabulary,
    input_fields_to_include=["idx", "inputs_pretokenized"],
  )  # fmt: skip
  assert list(submission.read({0: file})) == rows
