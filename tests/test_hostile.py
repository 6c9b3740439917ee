"""Files that somebody else wrote, or that a disk damaged: read as data, with one line of error.

What they say is never executed. A gin file is a program, and not among them.
"""

import os
import pathlib
import pickle
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest
import test_finalize
import test_report

from nm_sparsity_jax import cli
from nm_sparsity_jax.core.files import whole
from nm_sparsity_jax.deploy import packed_file
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text

pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's: pip install -e '.[dev]'")


def a_run(folder):
  test_report.local(folder, {1: {"a": 0.5}, 100: {"a": 1.0}})
  scores = [{"step": 100, "accuracy": 50.0}]
  test_report.lines(folder / "inference_eval/nm_glue_rte-metrics.jsonl", scores)
  return ["report", folder, "--out", folder / "report.html"]


def a_packed_file(folder):
  layers = test_finalize.draw()["encoder"]["layers_0"]["mlp"]
  for layer in layers.values():
    layer["kernel"][np.arange(len(layer["kernel"])) % 4 > 0] = 0
  rules = rules_text.parse("ff: sr_ste 1:4, total=1")
  packed_file.write(folder / "a.safetensors", {"params": {"mlp": layers}}, rules)
  return ["verify", folder / "a.safetensors"]


TOKENS = [b"", b"\0", b"\xff", b"{", b"]", b'"', b"-1", b"1e999", b"NaN", b"null", b"[" * 5000,
          b"9" * 5000, b"\x1b[2J", b"\x80\x02cos\nsystem\n", b"__import__('os')"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [a_run, a_packed_file])
def test_a_damaged_file_is_read_or_refused_in_one_line(make, tmp_path, capsys):
  argv = [*map(str, make(tmp_path / "sound"))]
  files = sorted(p for p in (tmp_path / "sound").rglob("*") if p.is_file())
  refused = 0
  for seed in range(40):
    rng = random.Random(seed)
    file = rng.choice(files)
    sound = file.read_bytes()
    at = rng.randrange(len(sound) + 1)
    end = min(len(sound), at + rng.choice((1, 4, 64)))
    wound, rest = rng.choice(
      [(b"", b""), (rng.choice(TOKENS), sound[end:]), (rng.randbytes(end - at), sound[end:])]
    )
    file.write_bytes(sound[:at] + wound + rest)
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert code in (0, 1) and "Traceback" not in out + err, (seed, out, err)
    assert out or err.count("\n") == 1 and len(err) < 5000, (seed, err)
    refused += code
    file.write_bytes(sound)
  assert refused > 5


class Bomb:
  def __reduce__(self):
    return pathlib.Path.touch, (pathlib.Path("executed"),)


def test_nothing_in_a_pickle_is_executed(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("model.bin", "model.safetensors", "checkpoint", "events.out.tfevents.1"):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    assert cli.main(["verify", name, "--rules", "{'ff': '1:4'}"]) == 1
  assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
  "text, word",
  [
    (b"ff: sr_ste 1:4, total=9\n" * (1 << 16), "more than 1,048,576 bytes"),
    (b"ff: sr_ste 1:4, total=9)+__import__('os').mkdir('executed'", ""),
  ],
)
def test_rules_in_a_checkpoint_are_bounded_and_data(text, word, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  rules = np.pad(np.frombuffer(zlib.compress(text, 9), np.uint8), (0, 9))
  mutables = {"nm_sparsity": {"rules": rules}}
  tree = {"target": test_finalize.draw(), "flax_mutables": mutables}
  checkpoint.write(str(tmp_path / "checkpoint_3"), tree)
  assert cli.main(["verify", str(tmp_path / "checkpoint_3")]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert word in line and len(line) < 9000 and not (tmp_path / "executed").exists()


def test_a_name_says_nothing_to_a_terminal(capsys, tmp_path):
  tree = {"target": {"\x1b[2J": {"mlp": {"wi": {"kernel": np.zeros((4, 4), np.float32)}}}}}
  checkpoint.write(str(tmp_path / "checkpoint_1"), tree)
  assert cli.main(["verify", str(tmp_path), "--rules", "{'ff': '1:4'}"]) == 0
  assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


# --- two hands in one folder ----------------------------------------------------------------------


def test_of_two_writers_the_second_replaces_nothing_that_was_to_be_kept(tmp_path):
  path = tmp_path / "a"
  with pytest.raises(ValueError, match="already"), whole(path) as unfinished:
    unfinished.write_text("mine")
    path.write_text("theirs")
  assert path.read_text() == "theirs" and [*tmp_path.iterdir()] == [path]
  with whole(path, replace=True) as unfinished:
    unfinished.write_text("mine")
    assert path.read_text() == "theirs"  # so a kill leaves it
  assert path.read_text() == "mine"


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
  child = subprocess.Popen([sys.executable, "-c", ""])
  child.wait()
  left, kept = (tmp_path / f".a.{pid}.unfinished" for pid in (child.pid, os.getppid()))
  backup = tmp_path / ".a.20241129"  # of a user
  left.mkdir()
  for path in (kept, backup):
    path.write_text("theirs")
  with whole(tmp_path / "a") as unfinished:
    unfinished.write_text("mine")
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted([kept.name, backup.name, "a"])


@pytest.mark.parametrize("name", ["train/events.out.tfevents.1", "train/metrics.jsonl"])
def test_what_is_no_file_is_not_read(name, tmp_path, capsys):
  argv = [*map(str, a_run(tmp_path))]
  (tmp_path / name).unlink(missing_ok=True)
  os.mkfifo(tmp_path / name)
  code = cli.main(argv)
  assert "neither a file" in capsys.readouterr().err if code else "metrics" in name
