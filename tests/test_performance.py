"""performance.md, deploy.md and tpu.md show what benchmarks/results holds; the benchmarks run."""

import importlib
import json
import re
import sys

import pytest
from study_records import ROOT

RESULTS = ROOT / "benchmarks" / "results"
LINES = {
  name: [re.split(r" *\| *", line) for line in (ROOT / name).read_text("utf8").splitlines()]
  for name in ("docs/performance.md", "docs/deploy.md", "docs/tpu.md")
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
  found, page = read(f"packed_{file}"), (ROOT / "docs/performance.md").read_text("utf8")
  for row in found["rows"]:
    if patterns is None or (row["backend"] == "cpu_ffi" and row["pattern"] in patterns):
      assert f"| {row['mean']:.2f} ({row['least']:.2f}) |" in page
  assert patterns or f"{found['command']}\n" in page


# --- what a TPU's compiler says -----------------------------------------------------------------

CHIPS = {  # record of masks -> the chips that it was compiled for
  "tpu_masks": "v5e:2x2", "tpu_masks_v6e": "v6e:2x2", "tpu_masks_v5p": "v5p:2x2x1",
  "tpu_masks_v4": "v4:2x2x1",
}  # fmt: skip
ON_TPU = sorted(path.stem for path in RESULTS.glob("tpu_*.json"))


def is_on_a_line(*cells):
  """Whether a line of docs/tpu.md has all of these cells."""
  return any(set(cells) <= set(line) for line in LINES["docs/tpu.md"])


@pytest.mark.parametrize("name", [name for name in ON_TPU if "masks" not in name])
def test_a_program_on_tpus_has_a_row(name):
  for row in read(name)["rows"]:
    over = row["over_dense"]
    cells = [f"{over[key]:.3f}" for key in ("bytes", "peak")]
    if row["recipe"] != "dense":
      assert is_on_a_line(f"`{row['recipe']}`", *cells, f"{over['seconds']:.2f}"), row


@pytest.mark.parametrize("name", CHIPS)
def test_the_masks_on_chips_have_a_row(name):
  found = read(name)
  whole = [row for row in found["rows"] if row["kernels"] == 1]
  assert found["machine"]["chips"] == CHIPS[name]
  for dtype in ("float32", "bfloat16"):
    most = {}
    for row in whole:
      if row["dtype"] == dtype:
        kind = row["axis"], row["what"] == "mask"
        most[kind] = max(row["over_one_pass"], most.get(kind, 0))
    assert len(most) == 4
    assert is_on_a_line(CHIPS[name], dtype, *(f"{x:.2f}x" for x in most.values()))


# --- the benchmarks run, small -----------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path, as_users_compute):
  """Runs a benchmark in this process, which is not pinned, and returns what it wrote."""
  timing = importlib.import_module("_timing")
  monkeypatch.setattr(timing, "pin", lambda core: None)

  def main(name, *words):
    file = tmp_path / f"{name}.json"
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words, "--json", str(file)])
    importlib.import_module(name).main()
    return json.loads(file.read_text())["rows"]

  return main


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, words, file, count",
  [
    ("masks", "--patterns=1:4,2:4 --shapes=16x8 --dtypes=float32 --blocks=3", "masks_cpu_f32", 4),
    ("train_step", "--network=vit --only=sr_ste --compiles=1 --blocks=3", "train_step_vit_cpu", 2),
    (
      "decode", "--size=tiny --layers=2 --steps=2 --inputs=4 --blocks=3 --patterns 1:8",
      "decode_packed_cpu", 2,
    ),
  ],
)  # fmt: skip
def test_a_benchmark_runs(name, words, file, count, run, monkeypatch):
  if name == "masks":
    pytest.importorskip("qwix")
  networks = importlib.import_module("_networks")
  tiny = networks.vit.ViT(networks.vit.config("vit_test"))
  monkeypatch.setattr(networks, "vit_b16", lambda layers: networks.images(tiny, 2))
  rows = run(name, *words.split())
  assert len(rows) == count and rows[-1].keys() == read(file)["rows"][-1].keys()


def test_costs_in_place_run(run, capsys):
  in_place = importlib.import_module("in_place")
  in_place.leaves(2, "sr_ste")
  said = capsys.readouterr().out
  assert "times as long" in said
