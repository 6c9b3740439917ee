"""docs/tpu.md says what the records of benchmarks/tpu.py say."""

import json
import re

import pytest
from study_records import ROOT

TEXT = (ROOT / "docs" / "tpu.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
CHIPS = {  # record of masks -> the chips that it was compiled for
  "masks": "v5e:2x2", "masks_v6e": "v6e:2x2", "masks_v5p": "v5p:2x2x1", "masks_v4": "v4:2x2x1",
}  # fmt: skip
STEPS = {"base": "step_base", "3B": "step_xl"}  # the row's first word -> a record
OTHERS = {  # record -> the row's first words
  "eval_base": "evaluation, base",
  "decode_base": "greedy decoding, base",
  "eval_base_t5x": "evaluation of T5X, base",
  "decode_base_t5x": "greedy decoding of T5X, base",
  "metrics_base": "metrics, base",
  "step_base_t5x": "step of T5X, base",
  "step_base_v4": "step, base, v4:2x2x1",
  "step_base_v6e": "step, base, v6e:2x2",
  "step_small_unscanned": "step, small, no scan",
  "step_large": "step, large",
  "step_xl_t5x": "step of T5X, 3B, v5p:2x2x2",
  "step_xxl_t5x": "step of T5X, 11B, v5p:2x2x2",
}


def read(name):
  return json.loads((RESULTS / f"tpu_{name}.json").read_text())


def masks_of(name, **wanted):
  """Rows of a record of masks, those with these values."""
  return [row for row in read(name)["rows"] if all(row[k] == v for k, v in wanted.items())]


def over_dense(name, *what):
  """Recipe -> cells of a row; the first row is dense."""
  digits = lambda key: 2 if key == "seconds" else 3
  cell = lambda row, key: f" {row['over_dense'][key]:.{digits(key)}f} "
  rows = [row for row in read(name)["rows"] if row["recipe"] != "dense"]
  return {row["recipe"]: "|".join(cell(row, key) for key in what) for row in rows}


def test_every_record_is_on_the_page_and_has_its_versions():
  files = {path.stem.removeprefix("tpu_") for path in RESULTS.glob("tpu_*.json")}
  plain = {"masks_plain", "masks_jax_0_12", *(f"{name}_plain" for name in STEPS.values())}
  assert files == {*CHIPS, *OTHERS, *STEPS.values(), *plain}
  for name in files:
    assert {"python", "jax", "libtpu"} <= read(name)["machine"].keys(), name


def test_the_table_of_masks():
  cell = lambda name, **of: f"{masks_of(name, what='mask', **of)[0]['over_one_pass']:.2f}x"
  lines = re.findall(r"^\| (\d+:\d+) \| (.+) \|$", TEXT, re.MULTILINE)
  assert len(lines) == 6
  for pattern, cells in lines:
    of = {"pattern": pattern, "dtype": "float32", "cut": "(None, 'model')"}
    wanted = [cell(n, axis=a, **of) for n in ("masks", "masks_plain") for a in (0, 1)]
    assert cells.split(" | ") == wanted


@pytest.mark.parametrize("name", CHIPS)
def test_the_table_of_chips(name):
  whole = masks_of(name, kernels=1)
  assert read(name)["machine"]["chips"] == CHIPS[name]
  assert not any(row["collectives"] for row in whole)
  for dtype in ("float32", "bfloat16"):
    cells = []
    for is_mask in (True, False):
      for axis in (0, 1):
        of = [row for row in whole if (row["axis"], row["dtype"]) == (axis, dtype)]
        of = [row for row in of if (row["what"] == "mask") == is_mask]
        assert len({row["pattern"] for row in of}) == 10
        cells.append(f"{max(row['over_one_pass'] for row in of):.2f}x")
    assert f"| {CHIPS[name]} | {dtype} | {' | '.join(cells)} |" in TEXT


def test_the_tables_of_steps_and_of_other_programs():
  wanted = set()
  for size, name in STEPS.items():
    cells = [over_dense(f"{name}_plain", key) for key in ("bytes", "peak", "seconds")]
    cells += [over_dense(name, "bytes", "least", "memory", "peak", "seconds")]
    wanted |= {f"| {size} | `{r}` |{'|'.join(c.get(r, ' ') for c in cells)}|" for r in cells[-1]}
  for name, words in OTHERS.items():
    found = over_dense(name, "bytes", "memory", "peak", "seconds")
    wanted |= {f"| {words} | `{recipe}` |{cells}|" for recipe, cells in found.items()}
  assert wanted == set(re.findall(r"^\| [^|`]* \| `\w+` \|.*\d.*\|$", TEXT, re.MULTILINE))
