"""A run that is killed again and again ends with the bits of one that was not."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from checkpoint_files import assert_same, read

from nm_sparsity_jax.runs import folders

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# What it imports warns on its own account.
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = pathlib.Path(__file__).resolve().parent


@contextlib.contextmanager
def started(script, tmp_path_factory):
  """A process of a script that forks runs."""
  env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
  errors = (tmp_path_factory.mktemp("worker") / "stderr").open("w+")
  command = [sys.executable, str(HERE / script), str(tmp_path_factory.mktemp("xla"))]
  pipe = subprocess.PIPE
  with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env) as p:
    try:
      yield p
    finally:
      p.stdin.close()
      p.wait(60)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
  with started("local_worker.py", tmp_path_factory) as process:
    yield process


def run(worker, folder, steps, kill_after=None, delay=0.0, kill_at=None):
  """One process; killed `delay` seconds after so many steps, or after the step with a number.

  Returns its status, and the last step that it told.
  """
  folder.mkdir(exist_ok=True)
  worker.stdin.write(f"{steps} {folder}\n")
  worker.stdin.flush()
  seen, last = 0, None
  for line in worker.stdout:
    word, number = line.split()
    if word == "ended":
      return int(number), last
    last, seen = int(number), seen + 1
    if seen == kill_after or last == kill_at:
      time.sleep(delay)
      children = pathlib.Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
      for child in children:
        with contextlib.suppress(ProcessLookupError):
          os.kill(int(child), signal.SIGKILL)
  raise AssertionError("the worker has ended")


@pytest.mark.parametrize(
  "kills, steps, seed",
  # The loop is one for all workloads, and test_workloads.py kills a process of it in `make test`. A
  # text goes on in test_local.py, and in a new process in test_quickstart.py.
  [
    pytest.param(2, 42, 0, marks=pytest.mark.slow),
    pytest.param(20, 120, 1, marks=pytest.mark.slow),
  ],
  ids=["2", "20"],
)
def test_killed_and_resumed_is_uninterrupted(kills, steps, seed, worker, tmp_path):
  whole, folder = tmp_path / "whole", tmp_path / "killed"
  assert run(worker, whole, steps) == (0, steps - 1)
  rng = random.Random(seed)
  left_behind = 0
  for i in range(kills):
    after, delay = rng.randint(4, (steps - 20) // kills), rng.uniform(0, 0.05)
    status, last = run(worker, folder, steps, after, delay)
    assert status == signal.SIGKILL
    found = folders.steps(folder)
    assert not found or found[-1] <= last + 4, i
    for step in found:  # whole, though the kill may have come while one was removed
      assert int(read(folder, step)["state/step"]) == step
    left_behind += any("tmp" in p.name for p in folder.iterdir())
  assert run(worker, folder, steps) == (0, steps - 1)
  assert_same(read(folder, steps), read(whole, steps))
  assert folders.steps(folder) == [steps - 3, steps]
  assert not any("tmp" in p.name or "removed" in p.name for p in folder.iterdir())
  assert kills == 2 or left_behind  # some were hit while they wrote
