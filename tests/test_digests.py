"""What is trained has the bits that tests/digests.json notes (slowly)."""

import pathlib
import subprocess
import sys

import pytest
import t5x_found

SCRIPT = pathlib.Path(__file__).with_name("digests.py")


def check(only):
  """Runs `digests.py --check`; returns its exit code and what it prints."""
  words = [sys.executable, str(SCRIPT), "--check", "--only", only]
  ran = subprocess.run(words, capture_output=True, text=True)
  return ran.returncode, ran.stdout or ran.stderr


@pytest.mark.slow
@pytest.mark.t5x
def test_every_recipe_trains_to_the_bits_of_before():
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  _, said = check("^$")
  if "another " in said:
    pytest.skip(f"the bits were noted on another machine: {said}")
  code, said = check("^(local|finalize|t5x)/")
  assert code == 0, said
