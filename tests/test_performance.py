"""docs/performance.md and deploy.md show what benchmarks/results holds; the benchmarks run."""

import importlib
import json
import sys

import jax
import pytest
from study_records import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = {name: (ROOT / f"docs/{name}.md").read_text("utf8") for name in ("performance", "deploy")}
TARGETS = {"dense": "", "1:8": "2.7", "1:32": "6"}  # of a forward pass


def ratio(found):
  return "{:.3f} [{:.3f}, {:.3f}]".format(*found)


def decoded(row):
  return [f"{x:.2f}" if isinstance(x, float) else x for x in row.values()]


def peak(row):
  return [row["weights"], f"{row['peak_MB']:,}"]


def encoded(row):
  ratios = f"{row['over_dense']:.2f}", TARGETS[row["weights"]], f"{row['bound']:.2f}"
  held = f"{row['weights_MB']:,}", f"{row['peak_MB']:,}"
  return [row["weights"], f"{row['pass_ms']:.1f}", *ratios, *held]


def rounded(row):
  held = "with zeros" if row["bytes"] is None else f"{row['bytes']:,}"
  return [row["task"], row["values"], held, f"{row['loss']:.4f}", f"{row['accuracy']:g}"]


def step(row):
  ratios = [ratio(row[key]) for key in ("over_dense", "over_floor") if key in row]
  compiled = row["compile_over_dense"]
  last = [] if compiled is None else [f"{compiled:.2f}"]
  return [row["candidate"].removeprefix("decode "), *ratios, *last]


TABLES = {
  "decode_packed_cpu": decoded, "decode_peak_cpu": peak,
  "encode_cpu": encoded, "rounding": rounded, "train_step_cpu": step, "train_step_vit_cpu": step,
  "train_step_resnet_cpu": step, "t5x_step_cpu": step,
}  # fmt: skip


@pytest.mark.parametrize("file", TABLES)
def test_a_table_is_the_file_that_its_command_wrote(file):
  found = json.loads((RESULTS / f"{file}.json").read_text())
  page = PAGES["deploy" if file == "rounding" else "performance"]
  for row in found["rows"]:
    line = f"| {' | '.join(TABLES[file](row))} |".replace("|  |", "| |")
    assert f"{line}\n" in page, f"{file} has {line}"
  assert found["command"].partition(" --json")[0] in page


def products(file):
  """(backend, pattern) -> the cells of a line."""
  lines = {}
  for row in json.loads((RESULTS / f"packed_{file}.json").read_text())["rows"]:
    cell = f"{row['mean']:.2f} ({row['least']:.2f})"
    lines.setdefault((row["backend"], row["pattern"]), []).append(cell)
  return lines


@pytest.mark.parametrize("file", ["cpu", "cpu_avx2", "cpu_two", "cpu_bfloat16", "cpu_int8"])
def test_the_table_of_products_is_the_file_that_its_command_wrote(file):
  for (backend, pattern), cells in products(file).items():
    name = f"{backend}, {pattern}" if pattern != "dense" else backend
    assert f"| {name} | {' | '.join(cells)} |\n" in PAGES["performance"]
  command = json.loads((RESULTS / f"packed_{file}.json").read_text())["command"]
  assert command.partition(" --record")[0] + "\n" in PAGES["performance"]


SMALL = {
  "256x1024 to 512x2048": ("medium", "2:4", "1:8"),
  "128x512 and 512x128": ("small", "2:4", "1:8"),
  "64x64": ("tiny", "2:4", "1:8"),
  "1024x4096 and 4096x1024": ("wide", "64:128", "16:128"),
}


@pytest.mark.parametrize("shapes", SMALL)
def test_small_weights_and_wide_groups(shapes):
  file, *patterns = SMALL[shapes]
  for pattern in patterns:
    cells = products(f"cpu_{file}")["cpu_ffi", pattern]
    assert f"| {shapes}, {pattern} | {' | '.join(cells)} |\n" in PAGES["performance"]


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
  return json.loads((RESULTS / f"{file}.json").read_text())["rows"][0].keys()


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
