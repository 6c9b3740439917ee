"""nm-sparsity glue submit: from t5x.infer's predictions to GLUE's zip, and the check of a zip."""

import dataclasses
import json
import zipfile

import jax
import pytest
import t5x_found

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.scores import submission

TASKS = submission.TASKS

# File -> (rows, word -> cell, in TFDS' order of classes), apart from the table that is tested.
OFFICIAL = {
  "CoLA.tsv": (1063, {"unacceptable": "0", "acceptable": "1"}),
  "SST-2.tsv": (1821, {"negative": "0", "positive": "1"}),
  "MRPC.tsv": (1725, {"not_equivalent": "0", "equivalent": "1"}),
  "STS-B.tsv": (1379, {"-1.0": "0.000", "-0.0": "0.000", "3.14159": "3.142", "5.2": "5.000"}),
  "QQP.tsv": (390965, {"not_duplicate": "0", "duplicate": "1"}),
  "MNLI-m.tsv": (9796, {w: w for w in ("entailment", "neutral", "contradiction")}),
  "MNLI-mm.tsv": (9847, {w: w for w in ("entailment", "neutral", "contradiction")}),
  "QNLI.tsv": (5463, {w: w for w in ("entailment", "not_entailment")}),
  "RTE.tsv": (3000, {w: w for w in ("entailment", "not_entailment")}),
  "WNLI.tsv": (146, {"not_entailment": "0", "entailment": "1"}),
  "AX.tsv": (1104, {w: w for w in ("entailment", "neutral", "contradiction")}),
}
EVERY = pytest.mark.parametrize("name", TASKS)


def name_of(config, shard=0, total=1, mini=False):
  return f"nm_glue_{'mini_' * mini}{config}-predict.jsonl-{shard:05}-of-{total:05}"


def write(file, predictions):
  """Lines of (index, prediction) as t5x.infer writes them: it makes a float of `idx`."""
  line = '{{"inputs": {{"idx": {}.0, "inputs_pretokenized": "x"}}, "prediction": {}}}\n'.format
  file.write_text("".join(line(i, json.dumps(p)) for i, p in predictions))


@pytest.fixture(autouse=True)
def five_rows(monkeypatch):
  """Test sets of five rows."""
  small = {name: dataclasses.replace(t, splits={"test": 5}) for name, t in TASKS.items()}
  monkeypatch.setattr(submission, "TASKS", small)


@pytest.fixture
def call(capsys, tmp_path):
  """`nm-sparsity glue submit --json`: (its problems or the line of its error, report, zip)."""
  target = tmp_path / "out/submission.zip"
  target.parent.mkdir()

  def submit(*argv, out=True):
    argv = ["glue", "submit", *map(str, argv), *(["--out", str(target)] if out else []), "--json"]
    code = cli.main(argv)
    text, err = capsys.readouterr()
    report = json.loads(text) if text else {"problems": [err]}
    assert bool(code) == bool(report["problems"]) and err.count("\n") == (not text)
    return report["problems"], report, target

  return submit


@pytest.fixture
def folder(tmp_path):
  """A folder with right predictions of all tasks, backwards; those of RTE are in three shards."""
  folder = tmp_path / "predictions"
  folder.mkdir()
  for name, task in TASKS.items():
    words, total = [*OFFICIAL[task.file][1]], 3 if name == "rte" else 1
    rows = [(i, words[i % len(words)]) for i in reversed(range(5))]
    for shard in range(total):
      write(folder / name_of(name, shard, total), rows[shard::total])
  return folder


# --- what is written ------------------------------------------------------------------------------


@EVERY
def test_files_and_answers_are_the_official_ones_and_matching_is_exact(name):
  task = TASKS[name]
  rows, words = OFFICIAL[task.file]
  assert task.splits["test"] == rows and len(TASKS) == len(OFFICIAL)
  assert {word: submission.cell(task, word) for word in words} == words
  assert task.regression or task.labels == tuple(words)  # TFDS' order, which fill relies on
  for wrong in (" entailment", "Positive", "", "<unk>", "nan", "inf"):
    assert submission.cell(task, wrong) is None


def test_all_eleven_files_there_and_back(folder, call, tmp_path):
  problems, report, target = call(folder)
  assert not problems and {*report["files"]} == {*OFFICIAL}
  with zipfile.ZipFile(target) as archive:
    assert sorted(archive.namelist()) == sorted(OFFICIAL)
    for name, (_, words) in OFFICIAL.items():
      lines = [f"{i}\t{[*words.values()][i % len(words)]}\n" for i in range(5)]
      assert archive.read(name).decode() == "".join(["index\tprediction\n", *lines])
  assert call("--validate", target, out=False)[1] == {"zip": str(target), "problems": []}
  # The same predictions make the same bytes, whatever the order of the files.
  _, tables = submission.make(submission.find(sorted(map(str, folder.iterdir()), reverse=True)))
  submission.write(str(tmp_path / "other.zip"), tables)
  assert (tmp_path / "other.zip").read_bytes() == target.read_bytes()


@EVERY
def test_fill_is_class_0_or_the_middle(name, tmp_path):
  task, file = TASKS[name], tmp_path / "file"
  answer, cell = next(iter(OFFICIAL[task.file][1].items()))
  filler = "2.500" if task.regression else cell
  write(file, enumerate([answer, "<unk>", ""]))
  report, _ = submission.make({name: {0: file}}, mini=True)
  assert len(report["problems"]) == 2
  report, tables = submission.make({name: {0: file}}, {name}, mini=True)
  assert report == {
    "files": {task.file: {"rows": 3, "filled": 2, "filler": filler}}, "problems": [],
  }  # fmt: skip
  assert tables[task.file].decode().split()[2:] == ["0", cell, "1", filler, "2", filler]


# --- what stops it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "indices, word",
  [([0, 1, 2, 3], "has 4 rows"), ([0, 1, 2, 3, 3], "index 4"), ([-1, 1, 2, 3, 4], "index 0")],
)
def test_missing_and_repeated_rows_stop_it_even_with_fill(indices, word, folder, call):
  target = call(folder)[2]
  before = target.read_bytes()
  write(folder / name_of("wnli"), [(i, "entailment") for i in indices])
  (problem,) = call(folder, "--fill", "all")[0]
  assert word in problem
  assert target.read_bytes() == before and [*target.parent.iterdir()] == [target]


def test_missing_tasks_are_named_and_filled_on_request_alone(folder, call):
  for name in ("stsb", "wnli", "ax"):
    (folder / name_of(name)).unlink()
  problems, _, target = call(folder, "--fill", "wnli")
  assert problems == ["STS-B.tsv: no predictions", "AX.tsv: no predictions"]
  assert not target.exists()
  files = call(folder, "--fill", "all")[1]["files"]
  assert [files[name]["filled"] for name in ("CoLA.tsv", "STS-B.tsv", "AX.tsv")] == [0, 5, 5]


@pytest.mark.parametrize(
  "names, word",
  [
    ([name_of("rte", 0, 3), name_of("rte", 2, 3), f"{name_of('rte', 1, 3)}.COMPLETED"], "00001 of"),
    ([name_of("rte"), name_of("rte", 0, 2)], "both predictions of rte"),
    (["glue_rte_v002-predict.jsonl", name_of("rte")], "both predictions of rte"),
    ([name_of("mnli")], "its name says no task"),  # which of its two test sets?
    ([name_of("rte", mini=True)], "--mini"),
    (["weird.jsonl"], "no prediction files"),
  ],
)
def test_files_that_do_not_make_a_set_stop_it(names, word, tmp_path, call):
  (tmp_path / "found").mkdir()
  for name in names:
    (tmp_path / "found" / name).write_text("")
  (error,), _, target = call(tmp_path / "found")
  assert word in error and not target.exists()


def test_a_zip_of_mini_glue_is_to_try_out(tmp_path, call, folder):
  file = tmp_path / name_of("rte", mini=True)
  write(file, [(1, "entailment"), (0, "entailment")])
  problems, report, target = call(file, "--mini")
  assert not problems and [*report["files"]] == ["RTE.tsv"]
  assert not call("--validate", target, "--mini", out=False)[0]
  assert "RTE.tsv: has 2 rows, not 5" in call("--validate", target, out=False)[0]
  assert "mini-GLUE" in call(folder, "--mini")[0][0]


@pytest.mark.parametrize(
  "line, word",
  [
    ('{"inputs": {}, "prediction": "x"}', "idx"),
    ('{"inputs": {"idx": 1}}', "prediction"),
    ('{"inputs": {"idx": 1', "line 1"),
    ('{"inputs": {"idx": 1.5}, "prediction": "x"}', "1.5"),
    ('{"inputs": {"idx": NaN}, "prediction": "x"}', "NaN"),
    ('{"inputs": {"idx": 1}, "prediction": 1}', "prediction 1"),
    # QNLI's validation set has as many rows as its test set.
    ('{"inputs": {"idx": 1, "targets_pretokenized": "x"}, "prediction": "x"}', "not a test set"),
  ],
)
def test_a_broken_line_is_one_line_of_error(line, word, tmp_path, call):
  (tmp_path / name_of("rte")).write_text(line)
  (error,), _, target = call(tmp_path)
  assert word in error and not target.exists()


def test_command_lines_that_make_no_sense(tmp_path, call):
  for argv, out in (
    ([], True), ([tmp_path], False), (["--validate", "x", tmp_path], False),
    (["--validate", "x"], True),
  ):  # fmt: skip
    assert "--validate" in call(*argv, out=out)[0][0]
  assert "there is no such file" in call(tmp_path / "nowhere")[0][0]


# --- the validator --------------------------------------------------------------------------------

HEAD = "index\tprediction\n"
GOOD = f"{HEAD}0\tentailment\n1\tnot_entailment\n2\tentailment\n"


@pytest.mark.parametrize(
  "text, words",
  [
    (GOOD, []),
    (GOOD.replace("\n", "\r\n"), ["first line"]),
    (GOOD[:-1], ["does not end", "has 2 rows"]),
    (GOOD + "\n", ["has 4 rows", "index 3 belongs"]),
    (GOOD.replace("\n1\t", "\n2\t"), ["index 1 belongs"]),
    (GOOD.replace("1\tnot_", "01\tnot_"), ["index 1 belongs"]),
    (GOOD.replace("1\tnot_", "1 not_"), ["index 1 belongs"]),
    (GOOD.replace("not_entailment", "neutral"), ["'neutral' is no answer"]),
    (GOOD.replace("not_entailment", "entailment\t"), ["is no answer"]),
    (GOOD.partition("\n")[2], ["first line", "has 2 rows", "index 0 belongs"]),
    ("\ufeff" + GOOD, ["first line"]),
    ("", ["UTF-8"]),
    ("\udcff", ["UTF-8"]),  # the byte 0xff
    (HEAD + "x\n" * 5, ["has 5 rows", "line 2", "line 3", "line 4", "5 such"]),
  ],
)
def test_check(text, words):
  problems = submission.check(TASKS["rte"], text.encode(errors="surrogateescape"), 3)
  assert len(problems) >= len(words) and bool(problems) == bool(words)
  assert all(word in problem for word, problem in zip(words, problems, strict=False))


def test_check_of_scores():
  problems = lambda text: submission.check(TASKS["stsb"], f"{HEAD}0\t{text}\n".encode(), 1)
  assert not any(map(problems, ("0.000", "5.000", "2.5", "4")))
  assert all(map(problems, ("5.001", "-0.1", "nan", "inf", "", "1e0", "3.", " 3", "٣")))


def test_validate_looks_at_the_zip_itself(tmp_path, call):
  path = tmp_path / "x.zip"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("out/CoLA.tsv", "")
  (problem,), *_ = call("--validate", path, out=False)
  assert "out/CoLA.tsv" in problem
  path.write_text("no zip")
  (error,), *_ = call("--validate", path, out=False)
  assert "no zip that can be read" in error


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
