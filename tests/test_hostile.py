"""Files that somebody else wrote, or that a disk damaged: read as data, with one line of error.

What they say is never executed. A gin file is a program, and not among them.
"""

import json
import pathlib
import pickle
import random
import zipfile
import zlib

import numpy as np
import pytest
import test_finalize

from nm_sparsity_jax import cli
from nm_sparsity_jax.deploy import packed_file
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text

pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's: pip install -e '.[dev]'")

RUN = {
  "config.gin": "RECIPE = 'sr_ste'\nPATTERN = '1:4'\nSPARSITY_RULES = {'ff': None}\n"
  "SPARSE_STEPS = 10\nDENSE_STEPS = 0\nFINETUNE_STEPS = 2\n",
  "run.json": '{"start": 0, "processes": []}',
  "evaluations.json": '[{"step": 10, "loss": {"a": 1.0}}]',
  "train/metrics.jsonl": '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n',
  "inference_eval/nm_glue_rte-metrics.jsonl": '{"step": 10, "accuracy": 50.0}\n',
}


def a_run(folder):
  for name, text in RUN.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  return ["report", folder, "--out", folder / "report.html"]


def a_packed_file(folder):
  layers = test_finalize.draw()["encoder"]["layers_0"]["mlp"]
  for layer in layers.values():
    layer["kernel"][np.arange(len(layer["kernel"])) % 4 > 0] = 0
  rules = rules_text.parse("ff: sr_ste 1:4, total=1")
  packed_file.write(folder / "a.safetensors", {"params": {"mlp": layers}}, rules)
  return ["verify", folder / "a.safetensors"]


def predictions(folder):
  folder.mkdir()
  line = lambda i: json.dumps({"inputs": {"idx": i}, "prediction": "entailment"})
  text = "".join(f"{line(i)}\n" for i in range(9))
  (folder / "nm_glue_mini_rte-predict.jsonl").write_text(text)
  return ["glue", "submit", "--mini", folder, "--out", folder / "out.zip"]


def a_zip(folder):
  folder.mkdir()
  rows = "".join(f"{i}\tentailment\n" for i in range(50))
  with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr("RTE.tsv", f"index\tprediction\n{rows}")
  return ["glue", "submit", "--validate", folder / "a.zip"]


TOKENS = [b"", b"\0", b"\xff", b"{", b"]", b'"', b"-1", b"1e999", b"NaN", b"null", b"[" * 5000,
          b"9" * 5000, b"\x1b[2J", b"\x80\x02cos\nsystem\n", b"__import__('os')"]  # fmt: skip


def damaged(data, rng):
  """Returns the bytes with one wound."""
  found = bytearray(data)
  at = rng.randrange(len(found) + 1)
  end = min(len(found), at + rng.choice((1, 4, 64)))
  how = rng.randrange(3)
  if how == 0:
    del found[at:]
  elif how == 1:
    found[at:end] = rng.choice(TOKENS)
  else:
    found[at:end] = bytes(rng.randrange(256) for _ in range(end - at))
  return bytes(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [a_run, a_packed_file, predictions, a_zip])
def test_a_damaged_file_is_read_or_refused_in_one_line(make, tmp_path, capsys):
  argv = [*map(str, make(tmp_path / "sound"))]
  files = sorted(p for p in (tmp_path / "sound").rglob("*") if p.is_file())
  contents = {file: file.read_bytes() for file in files}
  refused = 0
  for seed in range(40):
    rng = random.Random(seed)
    file = rng.choice(files)
    file.write_bytes(damaged(contents[file], rng))
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert code in (0, 1) and "Traceback" not in out + err, (seed, out, err)
    assert out or err.count("\n") == 1 and len(err) < 5000, (seed, err)
    refused += code
    file.write_bytes(contents[file])
  assert refused > 5


class Bomb:
  def __reduce__(self):
    return pathlib.Path.touch, (pathlib.Path("executed"),)


def test_nothing_in_a_pickle_is_executed(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  data = pickle.dumps(Bomb())
  for name in ("model.bin", "model.safetensors", "checkpoint", "events.out.tfevents.1"):
    (tmp_path / name).write_bytes(data)
    assert cli.main(["verify", name, "--rules", "{'ff': '1:4'}"]) == 1
  assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
  "packed, word",
  [
    (zlib.compress(b"ff: sr_ste 1:4, total=9\n" * (1 << 14), 9), "more than 65,536 bytes"),
    (zlib.compress(b"ff: sr_ste 1:4, total=9)+__import__('os').mkdir('executed'"), ""),
  ],
)
def test_rules_in_a_checkpoint_are_bounded_and_data(packed, word, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  tree = {
    "target": test_finalize.draw(),
    "flax_mutables": {"nm_sparsity": {"rules": np.pad(np.frombuffer(packed, np.uint8), (0, 9))}},
  }
  checkpoint.write(str(tmp_path / "checkpoint_3"), tree)
  assert cli.main(["verify", str(tmp_path / "checkpoint_3")]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert word in line and len(line) < 9000 and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "a\r\\input{x}", "\x1b[2Ja%\n%"])
def test_a_name_of_a_run_says_nothing_to_latex_a_spreadsheet_or_a_terminal(name, capsys, tmp_path):
  folders = [tmp_path / f"run{i}" for i in (1, 2)]
  for folder in folders:
    a_run(folder)
  for form in ([], ["--markdown"], ["--latex"]):
    argv = ["--join", name, str(folders[0]), *form, "--join", "other", str(folders[1])]
    assert cli.main(["glue", "score", *argv]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n")), form
    if form == ["--latex"]:
      latex = out.splitlines()
      begin = next(i for i, line in enumerate(latex) if line.startswith(r"\begin"))
      assert latex.count(r"\end{tabular}") == 1
      assert all(line.startswith("% ") for line in latex[:begin])
  tree = {"target": {"\x1b[2J": {"mlp": {"wi": {"kernel": np.zeros((4, 4), np.float32)}}}}}
  checkpoint.write(str(tmp_path / "checkpoint_1"), tree)
  assert cli.main(["verify", str(tmp_path), "--rules", "{'ff': '1:4'}"]) == 0
  assert "\x1b" not in capsys.readouterr().out
