"""nm-sparsity glue submit: from t5x.infer's predictions to GLUE's zip, and the check of a zip."""

import dataclasses
import json
import pathlib
import random
import re
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


def table(config, rows, mini=True, fill=False):
  """What `make` says of one task with these predictions: (report, text, problems)."""
  task = TASKS[config]
  (report, text), problems = submission.table(task, rows, fill, mini)
  return report, text, problems


@pytest.fixture
def made(tmp_path):
  """The table of predictions that lie in one file."""

  def make(config, rows, **options):
    (tmp_path / "file").write_text(lines_of(rows))
    return table(config, {0: tmp_path / "file"}, **options)

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


def test_the_same_predictions_make_the_same_bytes(folder, call, monkeypatch):
  _, _, _, target = call(folder, "--fill", "qqp")
  first = target.read_bytes()
  monkeypatch.setattr(time, "time", lambda: 2e9)
  code, _, _, target = call(*sorted(folder.iterdir(), reverse=True), "--fill", "qqp")
  assert not code and same(target.read_bytes(), first)
  assert list(target.parent.iterdir()) == [target]  # nothing lies beside it
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
  ("text", "cell"),
  [
    ("-1.0", "0.000"), ("5.2", "5.000"), ("abc", None), ("nan", None), ("inf", None), ("", None),
    ("-0.0", "0.000"), ("2.6", "2.600"), ("3.14159", "3.142"), ("5", "5.000"), ("<unk>", None),
  ],
)  # fmt: skip
def test_sts_b(text, cell, made):
  assert submission.cell(TASKS["stsb"], text) == cell
  report, table, problems = made("stsb", [(0, "1.0"), (1, text)], fill=True)
  assert not problems
  assert table.splitlines()[2] == f"1\t{cell or '2.500'}"
  assert report["invalid"] == report["filled"] == (cell is None)
  assert report["clamped"] == (text in ("-1.0", "5.2"))


@pytest.mark.parametrize("config", [n for n, t in TASKS.items() if t.labels])
def test_matching_is_exact_and_fill_is_class_0(config, made):
  task = TASKS[config]
  right = task.labels[-1]
  rows = list(enumerate([right, f" {right}", right.upper(), "", "<unk>", "0", "-1"]))
  report, text, problems = made(config, rows)
  assert report["invalid"] == 6 and not report["filled"]
  assert problems == [
    f"6 are no answers: ' {right}' at index 1, {right.upper()!r} at index 2, '' at index 3, ... "
    f"(--fill {config} fills)"
  ]
  report, text, problems = made(config, rows, fill=True)
  class_0 = {"words": task.labels[0], "index": "0"}["words" if task.words else "index"]
  assert not problems and report["filled"] == 6 and report["filler"] == class_0
  assert [line.split("\t")[1] for line in text.splitlines()[3:]] == [class_0] * 5


@given(st.permutations(range(8)), st.data())
def test_rows_come_out_in_order_from_any_number_of_shards(tmp_path_factory, order, data):
  tmp = tmp_path_factory.mktemp("shards")
  labels = {i: data.draw(st.sampled_from(["entailment", "not_entailment"])) for i in order}
  total = data.draw(st.integers(1, 3))
  shards = {}
  for shard in range(total):
    shards[shard] = tmp / f"{shard}"
    shards[shard].write_text(lines_of([(i, labels[i]) for i in order[shard::total]]))
  _, text, problems = table("rte", shards)
  assert not problems
  assert text == "index\tprediction\n" + "".join(f"{i}\t{labels[i]}\n" for i in range(8))


# --- what stops it --------------------------------------------------------------------------------


def test_missing_and_repeated_rows_stop_it_even_with_fill(made):
  rows = [(i, "entailment") for i in range(3000)]
  for change, said in (
    (rows[:-2], "2 of 3000 rows are missing: index 2998, 2999"),
    (rows + [(7, "entailment")], "index 7 more than once"),
    (rows + [(3000, "entailment")], "index 3000 not in 0..2999"),
    (rows + [(-1, "entailment")], "index -1 not in 0..2999"),
    (rows[10:], "10 of 3000 rows are missing: index 0, 1, 2, 3, 4, ..."),
  ):
    assert made("rte", change, mini=False, fill=True)[2] == [said]
  assert not made("rte", rows, mini=False)[2]
  assert made("rte", rows[:5] + rows[6:9])[2] == ["1 of 9 rows are missing: index 5"]


def test_missing_tasks_are_named_and_filled_on_request_alone(folder, call, tmp_path):
  only = tmp_path / "only"
  only.mkdir()
  for name in ("cola", "wnli"):
    (only / name_of(name)).write_text((folder / name_of(name)).read_text())
  code, report, _, target = call(only, "--fill", "wnli", "--fill", "stsb")
  assert code == 1 and not target.exists()
  left = [n for n in TASKS if n not in ("cola", "wnli", "stsb")]
  assert report["problems"] == [
    f"{TASKS[n].file}: no predictions (--fill {n} fills it)" for n in left
  ]
  code, report, _, target = call(only, "--fill", "all")
  assert not code and target.exists()
  filled = {name: (r["filled"], r["filler"]) for name, r in report["files"].items()}
  assert filled["CoLA.tsv"] == filled["WNLI.tsv"] == (0, None)  # they are there
  assert filled["STS-B.tsv"] == (1379, "2.500") and filled["AX.tsv"] == (1104, "entailment")
  assert call("--validate", target, out=False)[0] == 0
  code, text, *_ = call(only, js=False)
  assert code == 1 and text.rstrip().endswith(f"{target} was not written.")
  assert "9 problems\n" in text and re.search(r"^CoLA.tsv +1,063 +0 +0  0$", text, re.MULTILINE)


def test_shards(folder, call, tmp_path):
  rows = shuffled(TASKS["rte"])
  shards = [tmp_path / name_of("rte", i, 3) for i in range(3)]
  for i, file in enumerate(shards):
    file.write_text(lines_of(rows[i::3]))
    pathlib.Path(f"{file}.COMPLETED").write_text("")
  others = [folder / name_of(n) for n in TASKS if n not in ("rte", "qqp")]
  code, report, _, target = call(*others, tmp_path, "--fill", "qqp")
  assert not code and len(report["files"]["RTE.tsv"]["from"]) == 3
  target.unlink()
  shards[1].unlink()
  code, report, _, target = call(*others, tmp_path, "--fill", "all")
  assert code == 1 and not target.exists()
  assert report["problems"][0] == "RTE.tsv: shard 00001 of 00003 is missing"
  assert "1000 of 3000 rows are missing" in report["problems"][1]
  (tmp_path / name_of("rte")).write_text(lines_of(rows))  # of another run
  code, _, err, _ = call(tmp_path)
  assert code == 1 and "are both predictions of rte; keep one of them" in err
  (tmp_path / "again").mkdir()
  (tmp_path / "again" / name_of("cola")).write_text("")
  code, _, err, _ = call(folder, tmp_path / "again")
  assert code == 1 and "are both predictions of cola; keep one of them" in err


def test_predictions_of_a_set_with_labels_are_refused(folder, call, tmp_path):
  # QNLI's validation set has as many rows as its test set.
  text = lines_of(shuffled(TASKS["qnli"]))
  for hidden, fine in (("<unk>", True), ("entailment", False)):
    told = text.replace('"x"', f'"x", "targets_pretokenized": "{hidden}"')
    (tmp_path / name_of("qnli")).write_text(told)
    code, out, err, _ = call(tmp_path, "--fill", "all")
    assert ("has the label 'entailment', so it is not a test set" in err) == (not fine)


def test_a_file_that_was_named_is_never_passed_over(folder, call, tmp_path):
  (tmp_path / "weird.jsonl").write_text("")
  for path in (tmp_path / "weird.jsonl", f"{tmp_path}/./weird.jsonl"):
    code, _, err, _ = call(folder, path)
    assert code == 1 and "its name does not say the task. Name it: --task TASK=FILE" in err
    with pytest.raises(ValueError, match=r"the task. Name it: named=\[\(TASK, FILE\)\]$"):
      submission.find([str(path)])


def test_a_file_tells_its_task_by_name_or_is_told(folder, call, tmp_path):
  rows = lines_of(shuffled(TASKS["mnli_matched"]))
  nowhere = tmp_path / "nm_glue_mnli-predict.jsonl-00000-of-00001"  # which of the two halves?
  nowhere.write_text(rows)
  for path in (tmp_path, nowhere):
    code, _, err, _ = call(path)
    assert code == 1 and "its name does not say the task. Name it: --task TASK=FILE" in err
  code, report, *_ = call(tmp_path, "--task", f"mnli_matched={nowhere}", "--fill", "all")
  assert not code and report["files"]["MNLI-m.tsv"]["from"] == [str(nowhere)]
  nowhere.unlink()
  for name in ("glue_rte_v002-predict.jsonl", "nm_glue_rte-predict_with_aux.jsonl-00000-of-00001"):
    (tmp_path / name).write_text((folder / name_of("rte")).read_text())
    code, report, *_ = call(tmp_path, "--fill", "all")
    assert not code and report["files"]["RTE.tsv"]["from"] == [str(tmp_path / name)]
    (tmp_path / name).unlink()
  (tmp_path / "nm_wmt-predict.jsonl-00000-of-00001").write_text("")  # no concern
  assert "no prediction files" in call(tmp_path)[2]
  code, _, err, _ = call(folder, "--task", f"rte={folder / name_of('cola')}")
  assert code == 1 and "both predictions of rte" in err


def test_mini_glue_is_meant_or_refused(folder, call, tmp_path):
  rows = [(i, "entailment") for i in (2, 0, 1)]
  (tmp_path / name_of("rte", mini=True)).write_text(lines_of(rows))
  code, _, err, target = call(tmp_path)
  assert code == 1 and "--mini makes a zip to try out" in err and not target.exists()
  with pytest.raises(ValueError, match="is mini-GLUE: mini=True makes a zip to try out$"):
    submission.find([str(tmp_path)])
  code, report, _, target = call(tmp_path, "--mini")
  assert not code and list(report["files"]) == ["RTE.tsv"]
  assert call("--validate", target, "--mini", out=False)[0] == 0
  code, report, *_ = call("--validate", target, out=False)
  assert code == 1 and "RTE.tsv: has 3 rows, not 3000" in report["problems"]
  assert "CoLA.tsv: is missing" in report["problems"]
  code, _, err, _ = call(folder, "--mini")
  assert code == 1 and "not of mini-GLUE" in err


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ('{"inputs": {}, "prediction": "x"}', "line 2: no .*'idx'.*t5x_infer_glue_test.gin"),
    ('{"inputs": {"idx": 1}}', "line 2: no .*'prediction'"),
    ('{"inputs": {"idx": 1', "line 2: no .*JSONDecodeError"),
    ("[]", "line 2: no .*TypeError"),
    ('{"inputs": {"idx": 1.5}, "prediction": "x"}', "idx is 1.5, not a whole number"),
    ('{"inputs": {"idx": NaN}, "prediction": "x"}', "idx is nan"),
    ('{"inputs": {"idx": true}, "prediction": "x"}', "idx is True"),
    ('{"inputs": {"idx": [1]}, "prediction": "x"}', r"idx is \[1\]"),
    ('{"inputs": {"idx": 1}, "prediction": 1}', "the prediction is 1, not a text"),
  ],
)
def test_a_broken_line_is_one_line_of_error(line, said, tmp_path, call):
  (tmp_path / name_of("rte")).write_text(lines_of([(0, "entailment")]) + line + "\n")
  code, _, err, target = call(tmp_path)
  assert code == 1 and err.count("\n") == 1 and re.search(said, err), err
  assert not target.exists()


def test_command_lines_that_make_no_sense(tmp_path, call):
  for argv, out in (
    ([], True), ([tmp_path], False), (["--validate", "x", tmp_path], False),
    (["--validate", "x"], True), (["--validate", "x", "--fill", "wnli"], False),
  ):  # fmt: skip
    code, _, err, _ = call(*argv, out=out)
    assert code == 1 and "--validate" in err
  assert "there is no such file" in call(tmp_path / "nowhere")[2]
  for argv in (["--fill", "mnli"], ["--task", "mnli=x"], ["--task", "cola"]):
    with pytest.raises(SystemExit):
      call(*argv)


def test_a_zip_that_cannot_be_written_is_said_before_anything_is_read(folder, tmp_path, capsys):
  (tmp_path / "file").touch()
  before = sorted(tmp_path.rglob("*"))
  for out, why in (
    ("no/folder/my.zip", "No such file"), ("file/my.zip", "Not a directory"), ("", "is a folder"),
  ):  # fmt: skip
    argv = ["glue", "submit", "/no/predictions", "--out", f"{tmp_path}/{out}"]
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert "cannot be written" in error and why in error and error.count("\n") == 1
  assert cli.main([*argv[:-1], f"{tmp_path}/my.zip"]) == 1
  assert "/no/predictions: there is no such file" in capsys.readouterr().err
  assert sorted(tmp_path.rglob("*")) == before


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
  ("text", "said"),
  [
    (GOOD, []),
    (GOOD.replace("\n", "\r\n"), ["line ends are CRLF, not LF"]),
    (GOOD[:-1], ["the last line does not end"]),
    (GOOD + "3\tentailment\n", ["has 4 rows, not 3"]),
    (GOOD + "\n", ["has 4 rows, not 3", "line 5 is '', where index 3 belongs"]),
    (GOOD.replace("\n1\t", "\n2\t"), [r"line 3 is '2\tnot_entailment', where index 1 belongs"]),
    (GOOD.replace("1\tnot_", "01\tnot_"), [r"line 3 is '01\tnot_entailment', where "]),
    (GOOD.replace("1\tnot_", "1 not_"), ["line 3 is '1 not_entailment', where index 1 belongs"]),
    (GOOD.replace("not_entailment", "neutral"), ["line 3: 'neutral' is no answer"]),
    (GOOD.replace("not_entailment", "1"), ["line 3: '1' is no answer"]),
    (GOOD.replace("not_entailment", "entailment\t"), [r"line 3: 'entailment\t' is no answer"]),
    (GOOD.partition("\n")[2], [r"the first line is '0\tentailment', not 'index\tprediction'"]),
    ("\ufeff" + GOOD, [r"the first line is '\ufeffindex\tprediction', not "]),
    ("", ["the first line is '', not "]),
    (b"\xff", ["is not UTF-8 (invalid start byte at byte 0)"]),
    ("index\tprediction\n" + "x\n" * 5, ["has 5 rows, not 3", "line 2 is 'x', ",
     "line 3 is 'x', ", "line 4 is 'x', ", "5 such lines"]),
  ],
)  # fmt: skip
def test_check(text, said):
  data = text if isinstance(text, bytes) else text.encode()
  problems = submission.check(TASKS["rte"], data, 3)
  assert len(problems) == len(said), problems
  for problem, start in zip(problems, said, strict=True):
    assert problem.startswith(start), problem


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
  assert list(submission.read([file])) == rows


def test_a_zip_from_python_is_that_of_the_command(folder, call, tmp_path):
  """The example at the top of `scores`."""
  _, wanted, _, target = call(folder, "--fill", "wnli", "--fill", "qqp")
  files, problems = submission.find([str(folder)])
  report, tables = submission.make(files, fill={"wnli", "qqp"})
  assert not problems and report == {k: wanted[k] for k in ("files", "problems")}
  submission.write(str(tmp_path / "other.zip"), tables)
  assert same((tmp_path / "other.zip").read_bytes(), target.read_bytes())
  assert submission.validate(str(tmp_path / "other.zip")) == []
