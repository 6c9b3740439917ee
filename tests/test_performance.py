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


def test_encoding_is_the_files_that_its_commands_wrote():
  targets = {"dense": "", "1:8": "2.7", "1:32": "6"}
  found = json.loads((ROOT / "benchmarks/results/encode_cpu.json").read_text())
  for row in found["rows"]:
    ratios = (f"{row['over_dense']:.2f}", targets[row["weights"]], f"{row['bound']:.2f}")
    bytes_ = (f"{row['weights_MB']:,}", f"{row['peak_MB']:,}")
    cells = [row["weights"], f"{row['pass_ms']:.1f}", *ratios, *bytes_]
    assert f"| {' | '.join(cells)} |\n".replace("|  |", "| |") in PAGE
  peaks = json.loads((ROOT / "benchmarks/results/decode_peak_cpu.json").read_text())
  for row in peaks["rows"]:
    assert f"| {row['weights']} | {row['peak_MB']:,} |\n" in PAGE
  assert found["command"] in PAGE and peaks["command"] in PAGE


def test_what_rounding_costs_is_the_file_that_its_command_wrote():
  page = (ROOT / "docs/deploy.md").read_text("utf-8")
  found = json.loads((ROOT / "benchmarks/results/rounding.json").read_text())
  for row in found["rows"]:
    held = "with zeros" if row["bytes"] is None else f"{row['bytes']:,}"
    cells = [row["task"], row["values"], held, f"{row['loss']:.4f}", f"{row['accuracy']:g}"]
    assert f"| {' | '.join(cells)} |\n" in page
  assert f"{found['command']}\n" in page and len(found["rows"]) == 8


PRODUCTS = ["cpu", "cpu_avx2", "cpu_two", "cpu_bfloat16", "cpu_int8"]


@pytest.mark.parametrize("file", PRODUCTS)
def test_the_table_of_products_is_the_file_that_its_command_wrote(file):
  found = json.loads((ROOT / f"benchmarks/results/packed_{file}.json").read_text())
  of = {}
  for row in found["ratios"]:
    of.setdefault((row["backend"], row["pattern"]), {})[row["rows"]] = row
  for (backend, pattern), rows in of.items():
    cells = (f"{row['mean']:.2f} ({row['least']:.2f})" for row in rows.values())
    name = f"{backend}, {pattern}" if pattern != "dense" else backend
    line = f"| {name} | {' | '.join(cells)} |\n"
    assert line in PAGE, f"docs/performance.md lacks a line of {file}:\n{line}"
  assert f"{found['command']}\n" in PAGE


def test_the_table_of_small_weights_and_wide_groups_is_four_files():
  lines = PAGE.partition("\n| weights | 1 row | 16 rows |")[2].partition("\n\n")[0].splitlines()[2:]
  files = {"256x1024 to": "medium", "128x512": "small", "64x64": "tiny", "1024x4096": "wide"}
  for line in lines:
    name, *cells = line.strip("| ").split(" | ")
    (file,) = (file for start, file in files.items() if name.startswith(start))
    found = json.loads((ROOT / f"benchmarks/results/packed_cpu_{file}.json").read_text())
    pattern = name.rpartition(", ")[2]
    rows = [r for r in found["ratios"] if (r["backend"], r["pattern"]) == ("cpu_ffi", pattern)]
    assert cells == [f"{r['mean']:.2f} ({r['least']:.2f})" for r in rows], line
  assert len(lines) == 8


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


def test_the_tables_of_t5x_are_the_file_that_its_command_wrote():
  """Issue 12, point 5: a step, its compilation, and greedy decoding, over T5X's own."""
  found = json.loads((ROOT / "benchmarks/results/t5x_step_cpu.json").read_text())
  text = PAGE.partition("## In T5X")[2].partition("## Products of packed weights")[0]
  for row in found["rows"]:
    cells = [
      row["candidate"].removeprefix("decode "),
      "{:.3f} [{:.3f}, {:.3f}]".format(*row["over_dense"]),
    ]
    if (compiled := row["compile_over_dense"]) is not None:
      cells.append(f"{compiled:.2f}")
    assert f"| {' | '.join(cells)} |\n" in text
  assert f"{found['command']}\n" in text


def test_what_a_sampled_step_costs_is_what_its_command_wrote():
  found = json.loads((ROOT / "benchmarks/results/t5x_sampled_cpu.json").read_text())
  rows = {row["candidate"]: row for row in found["rows"]}
  # The row of a recipe is the mean over 99 steps that do not sample and one that does.
  mean, sampled = [], []
  for name in ("sr_ste 1:8", "sdgf_geometric 1:8", "idp 1:8"):
    once = rows[f"{name} sampled"]["over_dense"][0]
    plain = (100 * rows[name]["over_dense"][0] - once) / 99
    sampled.append(f"{rows[f'{name} sampled']['compile_over_dense']:.2f}")
    mean.append(f"{once / plain:.2f}")
  page = " ".join(PAGE.split())
  assert f"It took {mean[0]} times as long as a step of the same recipe" in page
  assert "`sr_ste`, {} under `sdgf_geometric` and {} under `idp`".format(*mean[1:]) in page
  assert "That takes {}, {} and {} times as long".format(*sampled) in page
  only = "^(sr_ste 1:8|sdgf_geometric|idp)"
  assert found["command"].replace(only, f'"{only}"') + "\n" in PAGE


def test_another_processor_gave_what_the_page_says():
  found = json.loads((ROOT / "benchmarks/results/decode_packed_xeon.json").read_text())
  layers, token = ([row[key] for row in found["rows"][1:]] for key in ("layers_x", "token_x"))
  page = " ".join(PAGE.split())
  assert (
    "{:.2f} and {:.2f} in the layers, and {:.2f} and {:.2f} of a token".format(*layers, *token)
    in page
  )
