"""A run on images that is killed in every phase ends with the bits of one that was not."""

import random
import signal

import pytest
import test_local_killed as killed
from checkpoint_files import assert_same, read

from nm_sparsity_jax.runs import folders

pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
  with killed.started("vision_worker.py", tmp_path_factory) as process:
    yield process


@pytest.mark.slow
def test_killed_and_resumed_has_the_same_bits(worker, tmp_path, steps=96):
  """Dense until a third of the steps, the pattern from two thirds on."""
  at = sorted(random.Random(15).sample(range(4, steps - 4), 15))
  whole, folder = tmp_path / "whole", tmp_path / "killed"
  assert killed.run(worker, whole, steps) == (0, steps - 1)
  left = 0
  for step in at:
    status, last = killed.run(worker, folder, steps, kill_at=step)
    assert status == signal.SIGKILL and last >= step  # a step or two pass before the signal
    found = folders.steps(folder)
    assert not found or 0 < found[-1] <= last + 4  # the loop looks at sums two steps later
    left += bool(found)
  assert left > len(at) / 2  # an early kill may find the first checkpoint half written
  assert killed.run(worker, folder, steps) == (0, steps - 1)
  saved = read(folder, steps)
  assert_same(saved, read(whole, steps))
  for kept in ("batch_stats", "/average/", "/mask/"):
    assert any(kept in key for key in saved)
  curve = "train/metrics.jsonl"
  assert (folder / curve).read_text() == (whole / curve).read_text()
