"""The examples run as a user would run them, and end as they say."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run(name):
  done = subprocess.run(
    [sys.executable, ROOT / "examples" / name],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    timeout=300,
  )
  assert not done.returncode, done.stderr
  return done.stdout


def test_nnx_mlp_learns_and_ends_with_exact_1_of_4():
  out = run("nnx_mlp.py")
  assert out.rstrip().endswith("\nok")
  losses = [float(x) for x in re.findall(r"^step.* loss (\S+)", out, re.MULTILINE)]
  final = float(re.search(r"^final loss (\S+)", out, re.MULTILINE)[1])
  assert final < losses[0] / 3
  assert out.count("1:4") >= 4  # the plan and the proof name both kernels
