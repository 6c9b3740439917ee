"""Files that somebody else wrote, or that a disk damaged: a limit before the work, one line after.

What they say is never executed. A gin file is a program, and not among them.
"""

import contextlib
import csv
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
import zlib

import numpy as np
import pytest
import test_finalize

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.scores import submission
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.runs import checkpoint, files, orbax, results
from nm_sparsity_jax.training import rules_text

pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's: pip install -e '.[dev]'")
KERNEL = "encoder/layers_0/mlp/wo/kernel"


@pytest.fixture
def refused(capsys):
  """Runs a command that must end soon, with exit code 1 and one line; returns the line."""

  def call(*argv):
    capsys.readouterr()
    begun = time.monotonic()
    code = cli.main([*map(str, argv)])
    out, err = capsys.readouterr()
    assert time.monotonic() - begun < 20  # on a machine with much else to do
    assert code == 1 and err.count("\n") == 1 and not out, (code, out, err)
    assert len(err) < 2000
    return err

  return call


@contextlib.contextmanager
def within(seconds):
  """Ends what takes longer; Python's regexes listen to signals."""

  def end(*_):
    raise AssertionError(f"more than {seconds} seconds")

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def with_rules(folder, packed):
  tree = {
    "target": test_finalize.draw(),
    "state": {"step": np.int32(3)},
    "flax_mutables": {"nm_sparsity": {"step": np.int32(3), "rules": packed}},
  }
  checkpoint.write(str(folder / "checkpoint_3"), tree)
  return folder / "checkpoint_3"


def test_rules_that_inflate_without_end(refused, tmp_path):
  """Point 25: 512 MB of zlib were unpacked and printed."""
  bomb = zlib.compress(b"ff: sr_ste 1:4, total=9\n" * (1 << 14), 9)
  assert len(bomb) < 4096
  packed = np.pad(np.frombuffer(bomb, np.uint8), (0, 4096 - len(bomb)))
  assert "more than 65,536 bytes" in refused("verify", with_rules(tmp_path, packed))
  long = np.zeros(1 << 20, np.uint8)
  assert "flax_mutables/nm_sparsity/rules" in refused("verify", with_rules(tmp_path / "b", long))


@pytest.mark.parametrize(
  "text",
  ["ff: sr_ste 1:4, total=9, beta=" + "(" * 5000, "ff: sr_ste 1:4, total=9)+dict(b=1", "\\",
   "ff: sr_ste 1:4, total=9\naxis x: " + "-" * 60_000 + "1", "ff: sr_ste 1:99999999, total=9"],
  ids=range(5),
)  # fmt: skip
def test_rules_that_nobody_wrote_by_describe(text):
  with pytest.raises(ValueError) as error:
    rules_text.parse(text)
  assert len(str(error.value)) < 9000


def test_a_zip_that_is_larger_than_any_submission(refused, tmp_path):
  """Point 25: a zip of 3 GB was read whole."""
  path = tmp_path / "large.zip"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("CoLA.tsv", b"0" * (80 << 20))
  assert path.stat().st_size < 1 << 20
  line = refused("glue", "submit", "--validate", path)
  assert str(path) in line and "83,886,080 bytes" in line
  with zipfile.ZipFile(path, "w") as archive:
    for i in range(101):
      archive.writestr(f"{i}.tsv", b"")
  assert "101 files" in refused("glue", "submit", "--validate", path)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\5\6" + b"\0" * 18 + b"x", b"\xff" * 99])
def test_what_is_no_zip(tmp_path, content):
  path = tmp_path / "a.zip"
  path.write_bytes(content)
  try:
    assert submission.validate(str(path))
  except ValueError as e:
    assert str(path) in str(e)


def predictions(path, *indices):
  path.parent.mkdir(exist_ok=True)
  line = lambda i: json.dumps({"inputs": {"idx": i}, "prediction": "entailment"})
  path.write_text("".join(f"{line(i)}\n" for i in indices))


def test_an_index_far_away_makes_no_rows(capsys, tmp_path):
  """Point 25: "idx": 1e9 hung submit --mini."""
  file = tmp_path / "p/nm_glue_mini_rte-predict.jsonl"
  predictions(file, 0, 1, 5000, 1e9)
  code = cli.main(["glue", "submit", "--mini", str(file), "--out", str(tmp_path / "out.zip")])
  assert code == 1 and "index 5000, 1000000000 not in 0..1" in capsys.readouterr().out


@pytest.mark.parametrize(
  "line",
  ['{"inputs": {"idx": %s}, "prediction": "x"}' % ("9" * 60_000), "[" * 100_000, '{"inputs": []}',
   '{"inputs": {"idx": 1e999}, "prediction": "x"}', "x" * (1 << 20), "\xff"],
  ids=range(6),
)  # fmt: skip
def test_predictions_that_are_none_name_file_and_line(refused, tmp_path, line):
  file = tmp_path / "nm_glue_rte-predict.jsonl"
  file.write_bytes(line.encode("latin-1"))
  assert str(file) in refused("glue", "submit", file, "--out", tmp_path / "out.zip")


# --- a run's folder -----------------------------------------------------------------------------

DIGITS = "9" * 60_000
RUN = {
  "config.gin": "RECIPE = 'sr_ste'\nPATTERN = '1:4'\nSPARSITY_RULES = {'ff': None}\n"
  "SPARSE_STEPS = 10\nDENSE_STEPS = 0\nFINETUNE_STEPS = 2\n",
  "run.json": '{"start": 0, "processes": []}',
  "evaluations.json": '[{"step": 10, "loss": {"a": 1.0}}]',
  "train/metrics.jsonl": '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n',
  "inference_eval/nm_glue_rte-metrics.jsonl": '{"step": 10, "accuracy": 50.0}\n',
}


def a_run(folder, **changed):
  for name, text in {**RUN, **changed}.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode("latin-1"))
  return folder


DAMAGED = [
  ("run.json", '{"start": ' + DIGITS + "}"),
  ("run.json", "{"),
  ("run.json", "[]"),
  ("run.json", '{"start": "x"}'),
  ("run.json", '{"start": 0, "processes": [3]}'),
  ("evaluations.json", '[{"step": ' + DIGITS + ', "loss": {}}]'),
  ("evaluations.json", '[{"loss": {}}]'),
  ("evaluations.json", '[{"step": 1, "loss": {"a": "b"}}]'),
  ("evaluations.json", "[" * 100_000),
  ("train/metrics.jsonl", '{"step": ' + DIGITS + "}\n"),
  ("train/metrics.jsonl", '{"step": 1, "loss": ' + DIGITS + "}\n"),
  ("train/metrics.jsonl", "[]\n"),
  ("train/metrics.jsonl", "\xff\n"),
  ("config.gin", "\xff"),
]


@pytest.mark.parametrize("name, text", DAMAGED, ids=[f"{n}{i}" for i, (n, _) in enumerate(DAMAGED)])
def test_a_damaged_file_of_a_run_is_named(refused, tmp_path, name, text):
  """Point 26: broken run.json, metrics.jsonl and config.gin gave Python's words without a name."""
  a_run(tmp_path / "run", **{name: text})
  assert name in refused("report", tmp_path / "run", "--out", tmp_path / "report.html")


@pytest.mark.parametrize(
  "value", [DIGITS, "0x" + "f" * 60_000, "{" * 300, "(" * 5000, "{[]: 1}", "-" * 9000 + "1"],
  ids=range(6),
)  # fmt: skip
def test_macros_that_are_no_value_are_left_out(tmp_path, value):
  """Point 25: an integer of 60,000 digits took 7 GB in report."""
  a_run(tmp_path / "run", **{"config.gin": RUN["config.gin"] + f"SPARSE_STEPS = {value}\n"})
  found = results.settings(tmp_path / "run")
  assert found.sparse_steps is None and len(found.remarks[0]) < 300
  assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0


def test_a_text_that_is_too_long_is_not_read(tmp_path):
  file = tmp_path / "run.json"
  with file.open("wb") as hole:
    hole.truncate(files.MOST_TEXT + 1)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  with pytest.raises(ValueError, match="run.json has 67,108,865 bytes"):
    files.read_json(file, {})
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000


@pytest.mark.parametrize(
  "text", ["seeds = [" + DIGITS + "]", "x = " + "[" * 5000, ""], ids=["digits", "deep", "empty"]
)
def test_a_sweep_that_cannot_be_read(refused, tmp_path, text):
  file = tmp_path / "sweep.toml"
  file.write_text(text)
  assert str(file) in refused("sweep", "--table", file)


def test_a_group_is_not_longer_than_any_axis():
  with pytest.raises(ValueError, match="no axis is as long"):
    NM(1, 1 << 21)
  with pytest.raises(ValueError, match="is not a pattern"):
    nms.recipe("sr_ste", pattern="1:" + "9" * 5000, phases=nms.Phases(total=9))


# --- names --------------------------------------------------------------------------------------

NAMES = [
  "=HYPERLINK(1)", "@SUM(A1)", "+1", "-1", "a\nb", "a\r\\input{x}", "\x1b[2Ja", "a\u202eb", "%\n%",
  "a\tb", "\\end{tabular}", "a|b", "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_of_a_run_says_nothing_to_latex_a_spreadsheet_or_a_terminal(capsys, tmp_path, name):
  """Point 28: names of runs in every form that `glue score` prints."""
  folders = [a_run(tmp_path / f"run{i}") for i in (1, 2)]
  show = lambda *form: (
    cli.main(["glue", "score", "--join", name, str(folders[0]), *form, "--join", "other",
              str(folders[1])]),
    capsys.readouterr().out,
  )[1]  # fmt: skip
  plain = show()
  lines = len(plain.splitlines())
  assert lines == len(show().replace(name, "").splitlines())
  for form in ([], ["--csv"], ["--markdown"], ["--latex"]):
    out = show(*form)
    assert all(line.isprintable() for line in out.split("\n")), form
  rows = list(csv.reader(show("--csv").splitlines()))
  assert not any(cell[:1] in "=+@\t\r" and cell for row in rows for cell in row[:4])
  assert not any(row[0].startswith("-") for row in rows)
  assert any(row[0].lstrip("'") == name for row in rows) or not name.isprintable()
  latex = show("--latex").splitlines()
  assert latex[-1] == r"\end{tabular}" and latex.count(r"\end{tabular}") == 1
  begin = next(i for i, line in enumerate(latex) if line.startswith(r"\begin"))
  assert all(line.startswith("% ") for line in latex[:begin])
  assert all(line.endswith((r"\\", r"\hline")) for line in latex[begin + 1 : -1])


def test_a_name_in_an_error_or_in_a_checkpoint_says_nothing_to_a_terminal(capsys, tmp_path):
  """Point 28: keys of a checkpoint and paths in errors are printed by their escapes."""
  tree = {"target": {"\x1b[2J": {"mlp": {"wi": {"kernel": np.zeros((4, 4), np.float32)}}}}}
  checkpoint.write(str(tmp_path / "a\x07/checkpoint_1"), tree)
  assert cli.main(["verify", str(tmp_path / "a\x07"), "--rules", "{'ff': '1:4'}"]) == 0
  assert cli.main(["verify", str(tmp_path / "b\x07")]) == 1
  out, err = capsys.readouterr()
  assert "\\x1b[2J/mlp/wi/kernel" in out and "\\x07" in err
  assert "\x1b" not in out + err and "\x07" not in out + err


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
from nm_sparsity_jax import cli
files = ["gin_configs/runs/local_workload.gin", "own_workload.gin",
         "gin_configs/runs/local_adamw.gin"]
macros = ["RECIPE='sr_ste'", "PATTERN='1:8'", "SPARSE_STEPS=4", "MODEL_DIR='run'"]
argv = [*(f"--gin_file={f}" for f in files), *(f"--gin.{m}" for m in macros)]
sys.exit(cli.main(["train", *argv]))
"""


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line(tmp_path):
  """Point 26: it ended in 60 lines of tracebacks of Orbax' threads."""
  pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
  root = pathlib.Path(nms.__file__).parents[1]
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(root / "examples/own_workload" / name, tmp_path)
  env = os.environ | {"PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3"}
  command = [sys.executable, "-c", FULL_DISK]
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
  last = done.stderr.splitlines()[-1]
  assert last.startswith("nm-sparsity train: ") and "checkpoint_4 could not be written" in last


def test_a_line_is_not_endless():
  """Point 26: one line last, and one that can be read."""
  line = cli.one_line(ValueError("x" * 100_000))
  assert len(line) < 4100 and line.endswith("... (100,000 characters)")


def test_what_comes_too_late_is_not_told(capsys):
  """Point 26: damaged OCDBT ended in tracebacks of tensorstore's threads, by chance."""
  before = sys.unraisablehook
  orbax._ignore_late_callbacks.cache_clear()
  try:
    told = []
    sys.unraisablehook = told.append
    orbax.library("a checkpoint")
    for error in (RuntimeError("Event loop is closed"), RuntimeError("another")):
      raised = types.SimpleNamespace(exc_type=type(error), exc_value=error)
      sys.unraisablehook(raised)
    assert [str(t.exc_value) for t in told] == ["another"]
  finally:
    sys.unraisablehook = before
