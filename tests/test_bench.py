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

PHASES = nms.Phases(total=1)


def rules_of(pattern="1:8", place="ff"):
  return nms.Rules({place: nms.recipe("sr_ste", pattern=pattern, phases=PHASES)})


def finalized(network, *inputs, **more):
  """Random parameters of a network, finalized."""
  init = functools.partial(network.init, **more)
  shapes = jax.eval_shape(init, jax.random.key(0), *inputs)["params"]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
  apply = lambda p, *a: network.apply({"params": p}, *a, **more)
  rules = rules_of().for_model(apply, params, *inputs)
  return jax.device_get(nms.finalize(params, rules, 1))


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
  assert timing.middle([1.0, 2.0, 3.0, 4.0, 9.0, 0.0], [1.0] * 6) == (2.0, 4.0)
  assert timing.middle([1.0], [1.0]) == (0.0, 0.0)


def test_a_product_is_the_best_dense_one_beside_the_packed_one(monkeypatch):
  known = {"x @ W": 9.0, "x @ W.T": 5.0, "xla_scan": 3.0, "nothing": 1.0}
  times = lambda calls, turns, **_: {name: [known[name]] * turns for name in calls}
  monkeypatch.setattr(timing, "interleave", times)
  kernel = layers.random(16, 8, nms.NM(1, 8))
  found = layers.measured("k", [kernel], 16, 3, 3, "xla_scan", beside=1 << 30)
  # What a call without a product takes is no part of one; 16 weights are a call.
  assert found.dense == 4.0 / 16 and found.dense_way == "x @ W.T" and found.times == 2.0
  assert found.half == (2.0, 2.0) and found.packed_way == "xla_scan" and found.kernels == 3
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


@pytest.mark.parametrize("values, threads", [("float32", 1), ("int8", 2)])
def test_what_is_timed_are_products_of_one_weight(values, threads, monkeypatch):
  monkeypatch.setenv("PJRT_NPROC", str(threads))
  kernel = layers.random(32, 8, nms.NM(2, 8), values)
  x = np.random.default_rng(0).standard_normal((4, 32), np.float32)
  calls = layers._calls(jax.numpy.asarray(x), [kernel] * 4, "xla_scan", 1)
  seen = {name: [np.array(x) for x in call()] for name, call in calls.items()}
  assert not np.any(seen.pop("nothing"))
  first, *others = seen.values()
  assert len(first) == 4 and np.abs(first[0]).max() > 1
  # With several threads a product reads an x that the one before has changed.
  assert np.array_equal(first[0], first[1]) == (threads == 1)
  for other in others:
    np.testing.assert_allclose(first, other, rtol=1e-4, atol=1e-4)


def test_a_bound_is_the_share_of_bytes():
  # A token that only reads weights: 10 s, of which 8 are products of a quarter of the bytes.
  assert networks.bound(10.0, [(6.0, 0.25), (2.0, 0.25)]) == 10 / (2 + 2)
  # Measured alone they took longer: nobody knows what the rest takes.
  assert networks.bound(1.0, [(2.0, 0.5)]) == networks.bound(0.0, []) == 0.0


def test_a_token_is_what_more_of_them_take():
  work = networks.Work("a token", lambda params, n: n, lambda path: True, (1, 5))
  assert networks._each(work, {1: [1.0, 9.0], 5: [3.0, 12.0]}) == [0.5, 0.75]


# --- networks -------------------------------------------------------------------------------------


def test_a_t5_reads_inputs_and_decodes_a_token():
  sizes = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, vocab_size=64)
  stacks = dict(num_encoder_layers=2, num_decoder_layers=2)
  network, one = Transformer(T5Config.t5_1_1("tiny", **sizes, **stacks)), np.ones((1, 1), np.int32)
  params = finalized(network, one, one, one, enable_dropout=False)
  found = benches.bench(
    network, params, rules_of(), dtype="int8", batch=2, inputs=5, tokens=3, turns=3,
    backend="unpack" if cpu.missing() else "cpu_ffi",
  )  # fmt: skip
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


def test_a_network_of_images_and_what_it_needs():
  network = vit.ViT(vit.config("vit_test"))
  images = np.ones((1, 16, 16, 3), np.float32)
  params = finalized(network, images, train=False)
  found = benches.bench(network, params, rules_of(), batch=2, turns=3)
  (whole,) = found.wholes
  assert whole.name == "a forward pass" and whole.packed > 0 and whole.half[0] > 0
  assert {p.rows for p in found.products} == {2 * 17}
  assert "end to end" in str(found) and "half of the turns" in str(found)
  with pytest.raises(ValueError, match="no rules say what is n:m"):
    benches.bench(network, params)
  with pytest.raises(ValueError, match="'blocks_0/attn/k/kernel'.* is not 1:8"):
    benches.bench(network, params, rules_of(place="k"))
  tree, _ = nms.inference_tree.pack_tree(params, rules_of())
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
    (["--shapes", "512,8,1", "--pattern", "1:512"], "256"),
    (["--shapes", "12,8,1", "--pattern", "1:8"], "multiple of 8"),
    (["--shapes", "16,8,1", "--pattern", "8:1"], "8:1"),
  ],
)
def test_what_is_typed_wrong_is_one_line(argv, word, capsys):
  assert cli.main(["bench", *argv]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1
