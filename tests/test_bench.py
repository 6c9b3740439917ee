"""nm-sparsity bench: each product and the whole, dense and packed."""

import functools
import json

import jax
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import bench as benches
from nm_sparsity_jax.analysis.bench import layers, networks, timing
from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.models import vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer


def packed(network, *inputs, dtype=None, **more):
  """Random parameters of a network, the feed-forward kernels packed at 1:8."""
  init = functools.partial(network.init, **more)
  shapes = jax.eval_shape(init, jax.random.key(0), *inputs)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
  rules = nms.configure.rules({"ff": None}, "sr_ste", "1:8", 1)
  return nms.inference_tree.pack_tree(nms.finalize(params, rules, 1), rules, dtype)[0]


# --- what is timed --------------------------------------------------------------------------------


def test_calls_take_turns_and_the_cold_ones_find_no_weight_in_the_cache(monkeypatch):
  called = []
  monkeypatch.setattr(timing, "_SECONDS", 0.0)
  calls = {name: lambda name=name: called.append(name) for name in "abc"}
  found = timing.interleave(calls, 3)
  assert "".join(called) == "aabbcc" + "abc" + "bca" + "cab"
  assert {name: len(times) for name, times in found.items()} == dict.fromkeys("abc", 3)
  read = []
  other = lambda size, _: type("", (), {"max": lambda self: read.append(size)})()
  monkeypatch.setattr(timing.np, "ones", other)
  timing.interleave({"a": lambda: None}, 3, cold=timing.CACHE)
  assert read == [timing.CACHE // 4] * 4


def test_a_product_is_the_best_dense_one_beside_the_packed_one(monkeypatch):
  known = {"x @ W": 9.0, "x @ W.T": 5.0, "xla_scan": 3.0, "nothing": 1.0}
  times = lambda calls, turns, **_: {name: [known[name]] * turns for name in calls}
  monkeypatch.setattr(timing, "interleave", times)
  kernel = layers.random(16, 8, nms.NM(1, 8))
  found = layers.measured("k", [kernel], 16, 3, 3, "xla_scan", beside=1 << 30)
  # What a call without a product takes is no part of one; 16 weights are a call.
  assert found.dense == 4.0 / 16 and found.dense_way == "x @ W.T" and found.times == 2.0
  assert found.packed_way == "xla_scan" and found.kernels == 3
  assert (found.dense_bytes, found.packed_bytes) == (16 * 8 * 4, 2 * 8 * 4 + 8)
  known["xla_scan"] = 2.9  # less than three calls without a product: too short to time
  found = benches.products([(16, 8, 1)], "1:8", turns=3, backend="xla_scan")
  assert found.products[0].times == 0.0 and "too short to time" in str(found)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_makes_every_product_with_another_x(threads, monkeypatch):
  """The x of a turn is changed by the turn before, so no product can be left out."""
  monkeypatch.setenv("PJRT_NPROC", str(threads))
  seen = []

  def multiplied(x, w):
    seen.append((float(x[0, 0]), float(w[0, 0])))
    return np.full((2, 3), np.inf if len(seen) > 6 else 1.0, np.float32)

  def product(x, w):
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    return jax.pure_callback(multiplied, shape, x, w, vmap_method="sequential")

  weights = [np.full((4, 3), value, np.float32) for value in (1, 2)]
  call = layers.repeated(product, np.full((2, 4), 5, np.float32), weights, again=5)
  assert [np.asarray(x).shape for x in call()] == [(2, 3)] * 2
  assert sorted(w for _, w in seen) == [1.0] * 5 + [2.0] * 5
  xs = [x for x, _ in seen]
  assert xs[0] == 5.0 and xs[2] == 0.0  # of the turn before
  assert np.isnan(xs[8:]).all()  # 0 * inf: x is what a product gave


def test_the_calls_that_are_timed_give_the_same_products(monkeypatch):
  monkeypatch.setenv("PJRT_NPROC", "1")
  kernel = layers.random(32, 8, nms.NM(2, 8), "int8")
  x = np.random.default_rng(0).standard_normal((4, 32), np.float32)
  calls = layers._calls(jax.numpy.asarray(x), [kernel] * 2, "xla_scan", 1)
  seen = {name: [np.array(x) for x in call()] for name, call in calls.items()}
  assert not np.any(seen.pop("nothing"))
  for products in seen.values():
    wanted = x @ np.asarray(nms.packed.unpack(kernel), np.float32)
    np.testing.assert_allclose(products, [wanted] * 2, rtol=1e-4, atol=1e-4)


def test_a_bound_is_the_share_of_bytes_and_a_token_what_more_of_them_take():
  assert networks.bound(10.0, [(6.0, 0.25), (2.0, 0.25)]) == 2.5
  # Measured alone they took longer: nobody knows what the rest takes.
  assert networks.bound(1.0, [(2.0, 0.5)]) == networks.bound(0.0, []) == 0.0
  work = networks.Work("a token", lambda params, n: n, lambda path: True, (1, 5))
  assert networks._each(work, {1: [1.0, 9.0], 5: [3.0, 12.0]}) == [0.5, 0.75]


# --- networks -------------------------------------------------------------------------------------


def test_a_t5_reads_inputs_and_decodes_a_token():
  sizes = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, vocab_size=64)
  stacks = dict(num_encoder_layers=2, num_decoder_layers=2)
  network, one = Transformer(T5Config.t5_1_1("tiny", **sizes, **stacks)), np.ones((1, 1), np.int32)
  tree = packed(network, one, one, one, dtype="int8", enable_dropout=False)
  backend = "xla_scan" if cpu.missing() else "cpu_ffi"
  found = benches.bench(network, tree, batch=2, inputs=5, tokens=3, turns=3, backend=backend)
  assert [w.name for w in found.wholes] == ["the inputs", "a token"]
  # wi_0, wi_1 and wo of two layers: 2 * 5 rows in the encoder, 2 in the decoder.
  kernels = {(p.depth, p.rows): p.kernels for p in found.products}
  assert kernels == {(16, 10): 4, (32, 10): 2, (16, 2): 4, (32, 2): 2}
  assert {(p.pattern, p.values) for p in found.products} == {("1:8", "int8")}
  alone = {(p.depth, p.rows): p.dense for p in found.products}
  for whole, rows in zip(found.wholes, (10, 2), strict=True):
    # The encoder is not read at each token, and XLA leaves the decoder out of the inputs.
    assert whole.products == pytest.approx(4 * alone[16, rows] + 2 * alone[32, rows])
    # On a busy machine products alone may take longer than the whole.
    assert (whole.bound >= 1) is (whole.products < whole.dense)
  # Each value has a byte, eight weights one, and all else is float32 on both sides.
  spared = 6 * (2 * 16 * 32 * 4) - sum(p.kernels * p.packed_bytes for p in found.products)
  assert found.dense_bytes - found.packed_bytes == spared
  assert found.wholes[0].dense_memory > found.wholes[0].packed_memory


def test_a_network_of_images_and_what_is_no_network():
  network, images = vit.ViT(vit.config("vit_test")), np.ones((1, 16, 16, 3), np.float32)
  tree = packed(network, images, train=False)
  found = benches.bench(network, tree, batch=2, turns=3)
  (whole,) = found.wholes
  assert whole.name == "a forward pass" and whole.packed > 0 and "end to end" in str(found)
  assert {p.rows for p in found.products} == {2 * 17}
  with pytest.raises(ValueError, match="nothing is packed"):
    benches.bench(network, nms.inference_tree.unpack_tree(tree))
  with pytest.raises(ValueError, match="object: nobody knows what to feed it"):
    benches.bench(object(), tree, turns=3)


# --- the command ----------------------------------------------------------------------------------


def test_without_a_compiler_it_says_so_and_scans(monkeypatch, capsys):
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "g++ is not there")
  assert cli.main(["bench", "--shapes", "16,8,1", "--turns", "3", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert {p["packed_way"] for p in found["products"]} == {"xla_scan"}
  assert "g++ is not there" in found["notes"][0]


@pytest.mark.parametrize(
  "argv, word",
  [
    ([], "--shapes"),
    (["F", "--shapes", "8,8,1"], "--shapes"),
    (["--shapes", "12,8,1", "--pattern", "1:8"], "multiple of 8"),
    (["--shapes", "16,8,1", "--pattern", "8:1"], "8:1"),
  ],
)
def test_what_is_typed_wrong_is_one_line(argv, word, capsys):
  assert cli.main(["bench", *argv]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1
