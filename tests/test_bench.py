"""nm-sparsity bench: products, dense and packed. test_packed_runs.py has whole networks."""

import numpy as np
import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import bench as benches
from nm_sparsity_jax.analysis.bench import layers, timing
from nm_sparsity_jax.core.packed import cpu


def test_a_product_is_the_best_dense_one_beside_the_packed_one(monkeypatch):
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "g++ is not there")
  times = {"x @ W": 9.0, "x @ W.T": 5.0, "xla_scan": 4.0}
  monkeypatch.setattr(timing, "interleave", lambda calls, *_, **__: times.copy())
  found = benches.products([(16, 8, 16), (16, 8, 17)], "1:8")
  few, many = found.timings  # with few rows four weights are a call
  assert (few.dense, few.packed, few.times) == (5 / 4, 1.0, 1.25) and many.dense == 5.0
  assert (few.dense_bytes, few.packed_bytes) == (16 * 8 * 4, 2 * 8 * 4 + 8)
  assert few.ways == "x @ W.T; xla_scan" and "16 x 8, 17 rows" in str(found)


def test_a_product_changes_the_x_of_the_next_one():
  """So each waits for the one before, and none can be left out."""
  x, weights = np.full((2, 4), 5, np.float32), [np.eye(4, dtype=np.float32)] * 2
  call = layers.repeated(lambda x, w: x @ w, x, weights)
  for wanted in ([5, 0], [0, 0]):
    assert [float(product[0, 0]) for product in call()] == wanted


def test_the_command_measures_shapes(monkeypatch, capsys, command):
  monkeypatch.setattr(timing, "CACHE", 1 << 20)
  _, found = command("bench", "--shapes", "16,8,1", "32,8,1", "--pattern", "1:16")
  assert [t["dense_bytes"] for t in found["timings"]] == [16 * 8 * 4, 32 * 8 * 4]
  for wrong in ([], ["model", "--shapes", "16,8,1"]):
    with pytest.raises(SystemExit):
      cli.main(["bench", *wrong])
    assert "--shapes" in capsys.readouterr().err
