"""Kauldron in two processes that find each other, as two hosts do, by the launcher of users."""

import os
import pathlib
import socket
import subprocess

import kauldron_found
import numpy as np
import pytest
from test_kauldron import arrays, environment

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = [
  pytest.mark.kauldron,
  pytest.mark.slow,
  pytest.mark.skipif(bool(kauldron_found.REASON), reason=kauldron_found.REASON),
]


def launched(folder, processes, *flags):
  """Runs the launcher in so many processes of one cluster, to the end."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  launch = [kauldron_found.PYTHON, "-m", "nm_sparsity_jax.integrations.kauldron.launch"]
  launch += [f"--cfg={ROOT}/tests/kauldron_tiny.py", f"--cfg.workdir={folder}", *flags]
  cluster = ["--distributed", f"--coordinator_address={address}", f"--process_count={processes}"]

  def start(index):
    log = folder.parent / f"{folder.name}{index}.log"
    own = [*cluster, f"--process_index={index}"] if processes > 1 else []
    with log.open("w") as out:
      env = {**os.environ, **environment()}
      return log, subprocess.Popen([*launch, *own], env=env, stdout=out, stderr=out)

  started = [start(index) for index in range(processes)]
  try:
    for log, process in started:
      code = process.wait(timeout=600)  # one whose partner died waits for it
      assert not code, log.read_text()[-3000:]
  finally:
    for _, process in started:
      process.kill()
      process.wait()


def test_two_processes_train_and_resume_and_one_finds_the_same(tmp_path):
  launched(tmp_path / "one", 1)
  launched(tmp_path / "two", 2)
  launched(tmp_path / "cut", 2, "--cfg.stop_after_steps=5")
  launched(tmp_path / "cut", 2)
  one, two, cut = (arrays(tmp_path / name, 12) for name in ("one", "two", "cut"))
  for key, x in two.items():
    np.testing.assert_array_equal(cut[key], x, err_msg=key)
    if key.startswith("params/"):
      assert x.shape == one[key].shape and np.isfinite(x).all()
  assert int(two["opt_state/count"]) == 12
