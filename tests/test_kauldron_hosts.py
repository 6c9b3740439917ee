"""Kauldron in two processes that find each other, as two hosts do, by the launcher of users."""

import hosts
import kauldron_found
import numpy as np
import pytest
from test_kauldron import ROOT, arrays, environment

pytestmark = [
  pytest.mark.kauldron,
  pytest.mark.slow,
  pytest.mark.skipif(bool(kauldron_found.REASON), reason=kauldron_found.REASON),
]


def launched(folder, processes, *flags):
  """Runs the launcher in so many processes of one cluster, to the end."""
  launch = [kauldron_found.PYTHON, "-m", "nm_sparsity_jax.integrations.kauldron.launch"]
  launch += [f"--cfg={ROOT}/tests/kauldron_tiny.py", f"--cfg.workdir={folder}", *flags]

  def commands(address):
    if processes == 1:
      return [launch]
    own = ["--distributed", f"--coordinator_address={address}", f"--process_count={processes}"]
    return [[*launch, *own, f"--process_index={i}"] for i in range(processes)]

  hosts.run(folder.parent, commands, **environment())


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
