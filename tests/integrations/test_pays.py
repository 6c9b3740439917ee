"""The examples of hardware that gains from n:m end as docs/deploy.md says, in its environment."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def needs(*names):
  for name in names:  # not importorskip: tensorflow and torch in one process end it
    if not importlib.util.find_spec(name):
      pytest.skip(f"could not import {name!r}")


def rows(name, *cases):
  """Types an example; returns what it prints as {case: the rest of the line}."""
  done = subprocess.run(
    [sys.executable, ROOT / "examples" / name, *cases],
    capture_output=True, text=True, cwd=ROOT, timeout=900,
    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
  )  # fmt: skip
  assert not done.returncode, done.stderr
  found = re.findall(r"^(dense|\d+:\d+(?: \w+)?):? +(.*)", done.stdout, re.MULTILINE)
  assert len(found) == len(cases)
  return dict(found)


def counts(row):
  return [int(x) for x in re.findall(r"\d+", row.replace(",", ""))]


def test_vela_expects_fewer_cycles_of_2_4_along_the_inputs_and_int8_keeps_it():
  needs("tensorflow", "ethosu")
  found = rows("ethos_u85.py", "dense", "2:4", "2:4 outputs")
  assert [row[:6] for row in found.values()] == ["4 of 4", "2 of 4", "4 of 4"]
  assert all(float(row.split()[3]) > 0.9 for row in found.values())  # the int8 networks classify
  dense, inputs, outputs = (counts(row)[-4:] for row in found.values())
  for products in (0, 2):  # of 1 row, and of 196
    assert inputs[products] < 0.55 * dense[products] <= 0.55 * outputs[products]
  assert inputs[1] < 0.7 * dense[1] and outputs[1] < 0.7 * dense[1]  # the traffic of the weights
  assert inputs[3] < 0.7 * dense[3] and outputs[3] > 0.9 * dense[3]


def test_core_ai_stores_and_runs_what_is_n_of_m_along_the_inputs():
  needs("coreai_opt", "coreai_torch")
  found = rows("core_ai.py", "dense", "2:4", "1:8", "2:4 outputs")
  assert "refused" in found.pop("2:4 outputs")
  smaller = [float(row.split()[1]) for row in found.values()]
  # Values of 4 bytes, and a bit for each place.
  assert smaller == pytest.approx([1, 32 / 17, 32 / 5], rel=0.02)
  assert all(float(row.split()[2]) < 1e-5 for row in found.values())


def test_torch_stores_2_of_any_4_and_the_rest_is_refused():
  needs("torch")
  fits, others = ("2:4", "1:4", "1:8", "2:8"), ("4:8", "3:8", "2:4 float32")
  found = rows("torch_24.py", *fits, *others)
  assert {found[case] for case in fits} == {"0% lost, 1.78 times smaller"}
  for case in others:
    assert counts(found[case])[0] > 0 and "Refused" in found[case]
