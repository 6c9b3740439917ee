"""nm-sparsity glue submit: from t5x.infer's predictions to GLUE's zip, and the check of a zip."""

import dataclasses
import json
import random
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


def name_of(config, shard=0, total=1, mini=False):
  return f"nm_glue_{'mini_' * mini}{config}-predict.jsonl-{shard:05}-of-{total:05}"


@pytest.fixture
def call(capsys, tmp_path, monkeypatch):
  """`nm-sparsity glue submit --json`: (exit code, report, error, zip); QQP has 5 rows here."""
  small = dataclasses.replace(TASKS["qqp"], splits={"test": 5})
  monkeypatch.setitem(submission.TASKS, "qqp", small)
  target = tmp_path / "out/submission.zip"
  target.parent.mkdir()

  def submit(*argv, out=True):
    argv = ["glue", "submit", *map(str, argv), *(["--out", str(target)] if out else []), "--json"]
    code = cli.main(argv)
    text, err = capsys.readouterr()
    return code, json.loads(text) if text else None, err, target

  return submit


@pytest.fixture(scope="module")
def predictions():
  """Right predictions for each test set, in an order of its own."""
  rng, found = random.Random(0), {}
  for name, task in TASKS.items():
    count, words = OFFICIAL[task.file]
    rows = list(enumerate(rng.choices(list(words), k=5 if name == "qqp" else count)))
    rng.shuffle(rows)
    found[name] = rows
  return found


@pytest.fixture
def folder(predictions, tmp_path):
  """A folder with the predictions of all tasks; those of RTE are in three shards."""
  folder = tmp_path / "predictions"
  folder.mkdir()
  for name, rows in predictions.items():
    total = 3 if name == "rte" else 1
    for shard in range(total):
      (folder / name_of(name, shard, total)).write_text(lines_of(rows[shard::total]))
  return folder


def made(folder, config, rows, fill=(), mini=True):
  """What `make` says of one task: (its counts, its lines, problems)."""
  (folder / "file").write_text(lines_of(rows))
  report, tables = submission.make({config: {0: folder / "file"}}, fill, mini)
  name = TASKS[config].file
  problems = [p.partition(": ")[2] for p in report["problems"] if p.startswith(name)]
  return report["files"][name], tables[name].decode().splitlines(), problems


def test_the_table_of_tasks_has_the_official_files():
  assert {t.file: t.splits["test"] for t in TASKS.values()} == {
    file: rows for file, (rows, _) in OFFICIAL.items()
  }
  for task in TASKS.values():
    for word, wanted in OFFICIAL[task.file][1].items():
      assert submission.cell(task, word) == wanted
    if not task.regression:
      assert task.labels == tuple(OFFICIAL[task.file][1])  # TFDS' order, which fill relies on


def test_all_eleven_files_there_and_back(folder, predictions, call, tmp_path):
  code, report, _, target = call(folder)
  assert not code and not report["problems"] and {*report["files"]} == {*OFFICIAL}
  with zipfile.ZipFile(target) as archive:
    assert sorted(archive.namelist()) == sorted(OFFICIAL)
    for name, rows in predictions.items():
      words = OFFICIAL[TASKS[name].file][1]
      wanted = "".join(f"{i}\t{words[word]}\n" for i, word in sorted(rows))
      is_same = archive.read(TASKS[name].file) == f"index\tprediction\n{wanted}".encode()
      assert is_same  # pytest would explain for minutes how megabytes differ
  assert call("--validate", target, out=False)[1] == {"zip": str(target), "problems": []}
  # The same predictions make the same bytes, whatever the order of the files.
  _, tables = submission.make(submission.find(sorted(map(str, folder.iterdir()), reverse=True)))
  submission.write(str(tmp_path / "other.zip"), tables)
  assert (tmp_path / "other.zip").read_bytes() == target.read_bytes()


@pytest.mark.parametrize(
  "text, cell",
  [
    ("-1.0", "0.000"), ("5.2", "5.000"), ("abc", None), ("nan", None), ("inf", None), ("", None),
    ("-0.0", "0.000"), ("2.6", "2.600"), ("3.14159", "3.142"), ("5", "5.000"), ("<unk>", None),
  ],
)  # fmt: skip
def test_sts_b(text, cell, tmp_path):
  counts, lines, problems = made(tmp_path, "stsb", [(0, "1.0"), (1, text)], fill={"stsb"})
  assert not problems and lines[2] == f"1\t{cell or '2.500'}"
  assert counts["filled"] == (cell is None)


@pytest.mark.parametrize("config", [n for n, t in TASKS.items() if t.labels])
def test_matching_is_exact_and_fill_is_class_0(config, tmp_path):
  task = TASKS[config]
  right = task.labels[-1]
  rows = list(enumerate([right, f" {right}", right.upper(), "", "<unk>", "9", "-1"]))
  assert len(made(tmp_path, config, rows)[2]) == 4  # three, and how many there are
  counts, lines, problems = made(tmp_path, config, rows, fill={config})
  class_0 = task.labels[0] if task.words else "0"
  assert not problems and counts["filled"] == 6 and counts["filler"] == class_0
  assert [line.split("\t")[1] for line in lines[2:]] == [class_0] * 6


# --- what stops it --------------------------------------------------------------------------------


def test_missing_and_repeated_rows_stop_it_even_with_fill(tmp_path):
  rows = [(i, "entailment") for i in range(3000)]
  for change, word in (
    (rows[:-2], "has 2998 rows"),
    (rows[:5] + rows[6:] + [(3000, "entailment")], "index 5 belongs"),
    (rows + [(7, "entailment")], "index 8 belongs"),
    ([(-1, "entailment"), *rows[1:]], "index 0 belongs"),
  ):
    problems = made(tmp_path, "rte", change, mini=False, fill={"rte"})[2]
    assert any(word in problem for problem in problems), (word, problems)
  assert not made(tmp_path, "rte", rows, mini=False)[2]


def test_missing_tasks_are_named_and_filled_on_request_alone(folder, call):
  for name in ("stsb", "wnli", "ax"):
    (folder / name_of(name)).unlink()
  code, report, _, target = call(folder, "--fill", "wnli")
  assert code == 1 and not target.exists()
  assert report["problems"] == ["STS-B.tsv: no predictions", "AX.tsv: no predictions"]
  code, report, _, target = call(folder, "--fill", "all")
  filled = {name: (r["filled"], r["filler"]) for name, r in report["files"].items()}
  assert filled["CoLA.tsv"] == (0, None)  # it is there
  assert filled["STS-B.tsv"] == (1379, "2.500") and filled["AX.tsv"] == (1104, "entailment")
  before = target.read_bytes()
  (folder / name_of("wnli")).write_text(lines_of([(0, "entailment")]))
  assert call(folder, "--fill", "all")[0] == 1
  assert target.read_bytes() == before  # what was there stays
  assert list(target.parent.iterdir()) == [target]


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
  code, _, err, target = call(tmp_path / "found")
  assert code == 1 and word in err and err.count("\n") == 1 and not target.exists()


def test_a_zip_of_mini_glue_is_to_try_out(tmp_path, call, folder):
  (tmp_path / name_of("rte", mini=True)).write_text(lines_of([(i, "entailment") for i in (1, 0)]))
  code, report, _, target = call(tmp_path / name_of("rte", mini=True), "--mini")
  assert not code and list(report["files"]) == ["RTE.tsv"]
  assert call("--validate", target, "--mini", out=False)[0] == 0
  code, report, *_ = call("--validate", target, out=False)
  assert code == 1 and "RTE.tsv: has 2 rows, not 3000" in report["problems"]
  assert "mini-GLUE" in call(folder, "--mini")[2]


@pytest.mark.parametrize(
  "line, word",
  [
    ('{"inputs": {}, "prediction": "x"}', "idx"),
    ('{"inputs": {"idx": 1}}', "prediction"),
    ('{"inputs": {"idx": 1', "line 2"),
    ("[]", "line 2"),
    ('{"inputs": {"idx": 1.5}, "prediction": "x"}', "1.5"),
    ('{"inputs": {"idx": NaN}, "prediction": "x"}', "NaN"),
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
    (["--validate", "x"], True),
  ):  # fmt: skip
    code, _, err, _ = call(*argv, out=out)
    assert code == 1 and "--validate" in err
  assert "there is no such file" in call(tmp_path / "nowhere")[2]
  assert call("/no", "--out", "/dev/null/x.zip", out=False)[2].startswith("nm-sparsity")


# --- the validator --------------------------------------------------------------------------------

GOOD = "index\tprediction\n0\tentailment\n1\tnot_entailment\n2\tentailment\n"


@pytest.mark.parametrize(
  "text, words",
  [
    (GOOD, []),
    (GOOD.replace("\n", "\r\n"), ["first line"]),
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


def test_validate_looks_at_the_zip_itself(tmp_path, call):
  path = tmp_path / "x.zip"
  with zipfile.ZipFile(path, "w") as archive:
    archive.writestr("RTE.tsv", GOOD)
    archive.writestr("out/CoLA.tsv", "")
  code, report, *_ = call("--validate", path, out=False)
  assert code == 1 and "out/CoLA.tsv" in report["problems"][0]
  assert "RTE.tsv: has 3 rows, not 3000" in report["problems"]
  path.write_text("no zip")
  code, _, err, _ = call("--validate", path, out=False)
  assert code == 1 and "no zip that can be read" in err and err.count("\n") == 1


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
