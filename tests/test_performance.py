"""docs/performance.md and deploy.md show what benchmarks/results holds; the benchmarks run."""

import importlib
import json
import re
import sys

import jax
import pytest
from study_records import ROOT

RESULTS = ROOT / "benchmarks" / "results"
LINES = {
  name: [re.split(r" *\| *", line) for line in (ROOT / name).read_text("utf8").splitlines()]
  for name in ("docs/performance.md", "docs/deploy.md")
}
HIDDEN = ("ms", "run", "compile_wall_over_dense")  # of a record, on no page


def read(file):
  return json.loads((RESULTS / f"{file}.json").read_text())


def texts(x):
  """How a page may write a value of a record."""
  if isinstance(x, list):
    return ["{:.3f} [{:.3f}, {:.3f}]".format(*x)]  # a ratio and its interval
  if isinstance(x, str):
    return [x.removeprefix("decode ")]
  return [f"{x:,}", f"{x:g}", *(f"{x:.{digits}f}" for digits in range(1, 5))]


def is_shown(row, page):
  """Whether some line of a page has all values of a record, in their order."""
  values = [texts(x) for key, x in row.items() if key not in HIDDEN and x is not None]
  lines = map(iter, LINES[page])
  return any(all(any(cell in x for cell in line) for x in values) for line in lines)


@pytest.mark.parametrize(
  "file, page",
  [
    *((file, "docs/performance.md") for file in (
      "decode_packed_cpu", "decode_peak_cpu", "encode_cpu", "train_step_cpu",
      "train_step_vit_cpu", "train_step_resnet_cpu", "t5x_step_cpu",
    )),
    ("rounding", "docs/deploy.md"),
  ],
)  # fmt: skip
def test_a_table_is_the_file_that_its_command_wrote(file, page):
  for row in read(file)["rows"]:
    assert is_shown(row, page), row
  assert read(file)["command"].partition(" --json")[0] in (ROOT / page).read_text("utf8")


SMALL, WIDE = ("2:4", "1:8"), ("64:128", "16:128")


@pytest.mark.parametrize(
  "file, patterns",
  [
    *((f"cpu{kind}", None) for kind in ("", "_avx2", "_two", "_bfloat16", "_int8")),
    ("cpu_medium", SMALL), ("cpu_small", SMALL), ("cpu_tiny", SMALL), ("cpu_wide", WIDE),
  ],
)  # fmt: skip
def test_the_table_of_products_is_the_file_that_its_command_wrote(file, patterns):
  found, lines = read(f"packed_{file}"), {}
  page = (ROOT / "docs/performance.md").read_text("utf8")
  for row in found["rows"]:
    pattern = "" if row["pattern"] == "dense" else f", {row['pattern']}"
    line = lines.setdefault((row["backend"], pattern), pattern)
    lines[row["backend"], pattern] = f"{line} | {row['mean']:.2f} ({row['least']:.2f})"
  for (backend, pattern), line in lines.items():
    if patterns is None:
      assert f"| {backend}{line} |\n" in page
    elif backend == "cpu_ffi" and pattern.strip(", ") in patterns:
      assert f"{line} |\n" in page  # of these shapes
  assert patterns or f"{found['command']}\n" in page


# --- the benchmarks run, small -----------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Runs a benchmark in this process, which is not pinned, and returns what it wrote."""
  timing = importlib.import_module("_timing")
  monkeypatch.setattr(timing, "pin", lambda core: None)

  def main(name, *words):
    file = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words, "--json", str(file)])
    importlib.import_module(name).main()
    return json.loads(file.read_text())["rows"]

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield main


def keys(file):
  return read(file)["rows"][0].keys()


def test_masks_run(run):
  pytest.importorskip("qwix")
  rows = run("masks", "--patterns=1:4,2:4", "--shapes=16x8", "--dtypes=float32", "--blocks=3")
  assert [(row["axis"], row["pattern"]) for row in rows] == [
    (0, "1:4"), (0, "2:4"), (-1, "1:4"), (-1, "2:4"),
  ]  # fmt: skip
  assert rows[0].keys() == keys("masks_cpu_f32") and rows[0]["over_limit"][0] > 0


def test_a_train_step_runs(run, monkeypatch):
  networks = importlib.import_module("_networks")
  tiny = networks.vit.ViT(networks.vit.config("vit_test"))
  monkeypatch.setattr(networks, "vit_b16", lambda layers: networks.images(tiny, 2))
  words = "--network=vit", "--only=sr_ste", "--compiles=1", "--blocks=3"
  rows = run("train_step", *words)
  assert [row["candidate"] for row in rows] == ["dense", "sr_ste 1:8"]
  assert rows[1].keys() == keys("train_step_vit_cpu")


def test_decoding_runs(run):
  words = "--size=small", "--layers=2", "--steps=2", "--inputs=4", "--blocks=3"
  rows = run("decode", *words, "--patterns", "1:8")
  assert [row["weights"] for row in rows] == ["dense", "1:8"]
  assert rows[1].keys() == keys("decode_packed_cpu")


def test_costs_in_place_run(run, capsys):
  in_place = importlib.import_module("in_place")
  in_place.leaves(2, "sr_ste")
  said = capsys.readouterr().out
  assert "ratio trace" in said
