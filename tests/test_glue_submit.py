"""nm-sparsity glue submit: from t5x.infer's predictions to GLUE's zip."""

import dataclasses
import json
import zipfile

import pytest

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


def name_of(config, shard=0, total=1):
  return f"nm_glue_{config}-predict.jsonl-{shard:05}-of-{total:05}"


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
  """What `nm-sparsity glue submit` prints, or the line of its error, and the zip."""
  target = tmp_path / "out.zip"

  def submit(*argv, code=0):
    argv = ["glue", "submit", *map(str, argv), "--out", str(target)]
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == code
    return err or out, target

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


@EVERY
def test_files_and_answers_are_the_official_ones_and_matching_is_exact(name):
  task = TASKS[name]
  rows, words = OFFICIAL[task.file]
  assert task.splits["test"] == rows and len(TASKS) == len(OFFICIAL)
  assert {word: submission.cell(task, word) for word in words} == words
  assert task.regression or task.labels == tuple(words)  # TFDS' order, which fill relies on
  for wrong in (" entailment", "Positive", "", "<unk>", "nan", "inf"):
    assert submission.cell(task, wrong) is None


def test_all_eleven_files(folder, call):
  _, target = call(folder)
  with zipfile.ZipFile(target) as archive:
    assert sorted(archive.namelist()) == sorted(OFFICIAL)
    for name, (_, words) in OFFICIAL.items():
      lines = [f"{i}\t{[*words.values()][i % len(words)]}\n" for i in range(5)]
      assert archive.read(name).decode() == "".join(["index\tprediction\n", *lines])


@EVERY
def test_fill_is_class_0_or_the_middle(name, folder):
  task, file = TASKS[name], folder / name_of(name)
  answer, cell = next(iter(OFFICIAL[task.file][1].items()))
  filler = "2.500" if task.regression else cell
  for shard in folder.glob(f"nm_glue_{name}-predict*"):
    shard.unlink()
  tables, filled, problems = submission.make([folder], {name})
  assert filled.pop(task.file) == 5 and set(filled.values()) == {0} and not problems
  assert tables[task.file].decode().split()[3::2] == [filler] * 5
  write(file, enumerate([answer, "<unk>", "", answer, answer]))
  _, _, (problem,) = submission.make([folder])
  assert f"{task.file}: 2 predictions are no answer, as '<unk>'" in problem
  tables, *_ = submission.make([folder], {name})
  assert tables[task.file].decode().split()[3::2] == [cell, filler, filler, cell, cell]


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [0, 1, 2, 3, 3], [-1, 1, 2, 3, 4]])
def test_missing_and_repeated_rows_stop_it_even_with_fill(indices, folder, call):
  _, target = call(folder)
  before = target.read_bytes()
  write(folder / name_of("wnli"), [(i, "entailment") for i in indices])
  (folder / name_of("ax")).unlink()
  assert "WNLI.tsv: " in call(folder, "--fill", "all", code=1)[0]
  assert "AX.tsv: 0 predictions" in call(folder, code=1)[0]
  assert target.read_bytes() == before


@pytest.mark.parametrize(
  "line, word",
  [
    ('{"inputs": {}, "prediction": "x"}', "idx"),
    ('{"inputs": {"idx": NaN}, "prediction": "x"}', "NaN"),
    # QNLI's validation set has as many rows as its test set.
    ('{"inputs": {"idx": 1, "targets_pretokenized": "x"}, "prediction": "x"}', "not a test set"),
  ],
)
def test_a_broken_line_is_one_line_of_error(line, word, tmp_path, call):
  (tmp_path / name_of("rte")).write_text(line)
  error, target = call(tmp_path, code=1)
  assert word in error and not target.exists()


def test_what_is_no_prediction_of_glue_is_refused(tmp_path, call):
  (tmp_path / "nm_glue_mini_rte-predict.jsonl").write_text("")
  assert "no prediction files" in call(tmp_path, code=1)[0]
