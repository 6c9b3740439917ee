"""Mutated files by every reader: an answer, or one line that names the file, soon and in bounds."""

import os

import fuzz
import pytest

pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's: pip install -e '.[dev]'")
pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_some_mutated_files():
  assert fuzz.run(30, workers=1) == []


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_a_hundred_thousand_mutated_packed_files():
  """What the issue on packed weights asks for; NM_FUZZ=500 reads fewer."""
  assert fuzz.run(int(os.environ.get("NM_FUZZ", "100000")), of="packed") == []


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_ten_thousand_mutated_files():
  """What the issue on hostile input asks for; NM_FUZZ=500 reads fewer."""
  assert fuzz.run(int(os.environ.get("NM_FUZZ", "10000"))) == []
