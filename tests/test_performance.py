"""docs/performance.md: its tables of train steps are what benchmarks/results holds."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs/performance.md").read_text("utf8")


@pytest.mark.parametrize("file", ["decode_cpu", "decode_packed_cpu"])
def test_the_account_of_a_token_is_the_file_that_its_command_wrote(file):
  found = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
  for row in found["rows"]:
    cells = [f"{x:.2f}" if isinstance(x, float) else x for x in row.values()]
    assert f"| {' | '.join(cells)} |\n" in PAGE
  assert f"{found['command']}\n" in PAGE


FILES = ["train_step_cpu", "train_step_vit_cpu", "train_step_resnet_cpu"]


@pytest.mark.parametrize("file", FILES)
def test_a_table_is_the_file_that_its_command_wrote(file):
  found = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
  has_floor = "over_floor" in found["rows"][0]
  ratios = ("over_dense", "over_floor") if has_floor else ("over_dense",)
  show = lambda ratio: "{:.3f} [{:.3f}, {:.3f}]".format(*ratio)
  head = ("candidate", "over dense", *["over the floor"] * has_floor, "compilation")
  lines = [
    (row["candidate"], *(show(row[r]) for r in ratios), f"{row['compile_over_dense']:.2f}")
    for row in found["rows"]
  ]
  rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
  text = "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])
  assert f"\n{text}\n\n" in PAGE, f"the table of {file}.json is\n\n{text}"
  assert found["command"].partition(" --json")[0] in PAGE
