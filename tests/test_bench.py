"""nm-sparsity bench: products and whole networks, dense and packed."""

import functools
import json

import jax
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import bench as benches
from nm_sparsity_jax.analysis.bench import layers, timing
from nm_sparsity_jax.core.packed import choice, cpu
from nm_sparsity_jax.models.t5 import T5Config, Transformer


def packed(network, *inputs, **more):
  """Random parameters of a network, the feed-forward kernels packed at 1:8."""
  init = functools.partial(network.init, **more)
  shapes = jax.eval_shape(init, jax.random.key(0), *inputs)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
  rules = nms.configure.rules({"ff": None}, "sr_ste", "1:8", 1)
  return nms.inference_tree.pack_tree(nms.finalize(params, rules, 1), rules)[0]


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


def test_a_t5_reads_inputs_and_decodes_tokens(monkeypatch):
  monkeypatch.setattr(choice, "speed", lambda *_: 2.0)  # no kernel so small stays packed else
  sizes = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, vocab_size=64)
  stacks = dict(num_encoder_layers=2, num_decoder_layers=2)
  network, one = (
    Transformer(T5Config.preset("t5_1_1", "tiny", **sizes, **stacks)),
    np.ones((1, 1), np.int32),
  )
  tree = packed(network, one, one, one, enable_dropout=False)
  found = benches.bench(network, tree, batch=2, inputs=5, tokens=3, turns=3)
  read, decoded = found.timings
  assert (read.what, decoded.what) == ("the inputs", "inputs and 3 tokens")
  assert read.dense_bytes > read.packed_bytes > 0 and read.times == read.dense / read.packed


def test_the_command_measures_shapes(monkeypatch, capsys):
  monkeypatch.setattr(timing, "CACHE", 1 << 20)
  assert cli.main(["bench", "--shapes", "16,8,1", "32,8,1", "--pattern", "1:16", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert [t["dense_bytes"] for t in found["timings"]] == [16 * 8 * 4, 32 * 8 * 4]
  for wrong in ([], ["model", "--shapes", "16,8,1"]):
    with pytest.raises(SystemExit):
      cli.main(["bench", *wrong])
    assert "--shapes" in capsys.readouterr().err
