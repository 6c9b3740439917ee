"""nm-sparsity bench: each product and the whole, dense and packed; a page with bars."""

import functools
import html
import json
import time
from typing import Any

import jax
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import bench as benches
from nm_sparsity_jax.analysis.bench import layers, measuring, networks, results, timing
from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.models import swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer

PHASES = nms.Phases(total=1)


def rules_of(pattern="1:8", place="ff"):
  return nms.Rules({place: nms.recipe("sr_ste", pattern=pattern, phases=PHASES)})


TINY = T5Config.t5_1_1(
  "tiny", vocab_size=64, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=2,
  num_decoder_layers=2,
)  # fmt: skip


def finalized(network, rules, *given, **more):
  """Random parameters of a network, finalized, and its other collections."""
  init = functools.partial(network.init, **more)
  shapes = jax.eval_shape(init, jax.random.key(0), *given)
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32)
  made = {name: jax.tree.map(draw, x) for name, x in shapes.items() if name != "params_axes"}
  params = made.pop("params")
  rules = rules.for_model(
    lambda p, *a: network.apply({"params": p, **made}, *a, **more), params, *given
  )
  return jax.device_get(nms.finalize(params, rules, 1)), made


@pytest.fixture(scope="module")
def of_t5():
  """A bench of a tiny T5."""
  one = np.ones((1, 1), np.int32)
  params, _ = finalized(Transformer(TINY), rules_of(), one, one, one, enable_dropout=False)
  found = benches.bench(
    Transformer(TINY), params, rules_of(), dtype="int8", batch=2, inputs=5, tokens=3, turns=3,
    backend="unpack" if cpu.missing() else "cpu_ffi", title="tiny <b>",
  )  # fmt: skip
  return found


# --- what is timed --------------------------------------------------------------------------------


def test_calls_take_turns_and_the_cold_ones_find_no_weight_in_the_cache(monkeypatch):
  called = []
  monkeypatch.setattr(timing, "_SECONDS", 0.0)
  calls = {name: lambda name=name: called.append(name) for name in "abc"}
  found = timing.interleave(calls, 3)
  assert "".join(called) == "aabbcc" + "abc" + "bca" + "cab"
  assert {name: len(times) for name, times in found.items()} == dict.fromkeys("abc", 3)
  read = []
  monkeypatch.setattr(
    timing.np, "ones", lambda size, _: type("", (), {"max": lambda self: read.append(size)})()
  )
  timing.interleave({"a": lambda: None}, 3, cold=timing.CACHE)
  assert read == [timing.CACHE // 4] * 4 and timing.CACHE >= 1 << 27
  timing.interleave({"a": lambda: None}, 3)
  assert len(read) == 4


def test_one_thread_is_timed_by_its_own_time(monkeypatch):
  monkeypatch.setenv("PJRT_NPROC", "1")
  assert timing.threads() == 1 and timing.clock() is time.process_time
  monkeypatch.setenv("PJRT_NPROC", "2")
  assert timing.threads() == 2 and timing.clock() is time.perf_counter


def test_a_bound_is_the_share_of_bytes():
  # A token that only reads weights: 10 s, of which 8 are products of a quarter of the bytes.
  assert results.bound(10.0, [(6.0, 0.25), (2.0, 0.25)]) == (8.0, 10 / (2 + 2))
  assert results.bound(10.0, []) == (0, 1.0)
  # Measured alone they took longer: nobody knows what the rest takes.
  assert results.bound(1.0, [(2.0, 0.5)]) == (2.0, 0.0)
  assert results.bound(0.0, []) == (0, 0.0)


def test_a_product_is_the_best_dense_one_beside_the_packed_one(monkeypatch):
  told = {"x @ W": 9.0, "x @ W.T": 5.0, "xla_scan": 3.0, "nothing": 1.0}
  monkeypatch.setattr(timing, "interleave", lambda calls, turns, **_: times_of(told, calls, turns))
  kernel = layers.random(16, 8, nms.NM(1, 8))
  found = layers.measured("k", [kernel], 16, 3, 3, "xla_scan", beside=1 << 30)
  # What a call without a product takes is no part of one; 16 weights are a call.
  assert found.dense == 4.0 / 16 and found.dense_way == "x @ W.T" and found.times == 2.0
  assert found.call == 1.0 / 16 and found.half == (2.0, 2.0) and not found.is_short
  assert found.packed_way == "xla_scan" and found.kernels == 3
  assert (found.dense_bytes, found.packed_bytes) == (16 * 8 * 4, 2 * 8 * 4 + 8)


def times_of(told, calls, turns):
  return {name: [told[name]] * turns for name in calls}


def test_a_product_that_a_call_hides_has_no_ratio(monkeypatch):
  """Less than three calls without a product is too short."""
  told = {"x @ W": 9.0, "x @ W.T": 5.0, "xla_scan": 2.9, "nothing": 1.0}
  monkeypatch.setattr(timing, "interleave", lambda calls, turns, **_: times_of(told, calls, turns))
  found = benches.products([(16, 8, 1)], "1:8", turns=3, backend="xla_scan")
  (product,) = found.products
  assert product.is_short and product.times == 0.0
  assert "too short to time" in str(found) and "2.11x" not in str(found)
  assert "1 of 1 products: too short to time" in found.notes[-1]
  assert found.as_dict()["products"][0]["is_short"]
  told["xla_scan"] = 3.1
  (product,) = benches.products([(16, 8, 1)], "1:8", turns=3, backend="xla_scan").products
  assert not product.is_short and product.times == pytest.approx(4 / 2.1)


def test_weights_that_a_cache_holds_stay_there_and_others_come_from_memory():
  many = layers._plan(64, 64, 1, None)
  assert many.copies * many.again >= 256 and many.cold == 0
  assert layers._plan(64, 64, 1, 1 << 29) == layers._Plan(16, 1, timing.CACHE)
  assert layers._plan(64, 64, 1, 1 << 23) == layers._Plan(16, 1, 1 << 23)
  assert layers._plan(1024, 4096, 1, None) == layers._Plan(4, 1, timing.CACHE)
  assert layers._plan(1024, 4096, 128, None) == layers._Plan(1, 1, timing.CACHE)
  assert layers._plan(256, 256, 4096, None).again == 1  # a call of milliseconds is long enough


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
  call = layers._call(product, np.full((2, 4), 5, np.float32), weights, 3, again=5)
  assert [np.asarray(x).shape for x in call()] == [(2, 3)] * 2
  assert sorted(w for _, w in seen) == [1.0] * 5 + [2.0] * 5
  xs = [x for x, _ in seen]
  assert xs[0] == 5.0 and xs[2] == 0.0  # of the turn before
  assert np.isnan(xs[8:]).all()  # 0 * inf: x is what a product gave
  empty = layers._call(None, np.ones((2, 4), np.float32), weights, 3, again=5)
  assert not np.any(empty()) and len(seen) == 10


@pytest.mark.parametrize("values, threads", [("float32", 1), ("float32", 2), ("int8", 2)])
def test_what_is_timed_are_products_of_one_weight(values, threads, monkeypatch):
  monkeypatch.setenv("PJRT_NPROC", str(threads))
  monkeypatch.setattr(layers, "_NEAR", 0)
  monkeypatch.setattr(layers, "_ROOM", 0)
  seen = {}

  def once(name, call):
    seen[name] = [np.array(x) for x in call()]
    return [1.0]

  monkeypatch.setattr(
    timing, "interleave", lambda calls, *_, **__: {n: once(n, call) for n, call in calls.items()}
  )
  kernel = layers.random(32, 8, nms.NM(2, 8), values)
  layers.measured("k", [kernel], 4, 1, 3, "xla_scan")
  assert not np.any(seen.pop("nothing"))
  first, *others = seen.values()
  assert len(first) == 4 and np.abs(first[0]).max() > 1
  # With several threads a product reads an x that the one before has changed.
  assert np.array_equal(first[0], first[1]) == (threads == 1)
  for other in others:
    np.testing.assert_allclose(first, other, rtol=1e-4, atol=1e-4)


# --- networks -------------------------------------------------------------------------------------


def test_a_t5_reads_inputs_and_decodes_a_token(of_t5):
  assert [w.name for w in of_t5.wholes] == ["the inputs", "a token"]
  # wi_0, wi_1 and wo of two layers: 2 * 5 rows in the encoder, 2 in the decoder.
  told = {(p.shape, p.rows): p.kernels for p in of_t5.products}
  assert told == {
    ("16 x 32", 10): 4, ("32 x 16", 10): 2, ("16 x 32", 2): 4, ("32 x 16", 2): 2,
  }  # fmt: skip
  assert {(p.pattern, p.values) for p in of_t5.products} == {("1:8", "int8")}
  inputs, token = of_t5.wholes
  alone = {(p.shape, p.rows): p.dense for p in of_t5.products}
  in_token = 4 * alone["16 x 32", 2] + 2 * alone["32 x 16", 2]
  assert token.products == pytest.approx(in_token)  # the encoder is not read at each token
  in_inputs = 4 * alone["16 x 32", 10] + 2 * alone["32 x 16", 10]
  assert inputs.products == pytest.approx(in_inputs)  # and XLA leaves the decoder out
  assert inputs.dense > 0 < inputs.packed
  for whole in of_t5.wholes:  # on a busy machine products alone may take longer than the whole
    assert whole.bytes_bound >= whole.bound and (whole.bound >= 1) is (whole.products < whole.dense)
  # Each value has a byte, eight weights one, and all else is float32 on both sides.
  spared = 6 * (2 * 16 * 32 * 4) - sum(p.kernels * p.packed_bytes for p in of_t5.products)
  assert of_t5.dense_bytes - of_t5.packed_bytes == spared
  assert inputs.dense_memory > inputs.packed_memory


def whole(name, dense, packed, products, bound, **more):
  return results.Whole(name, dense, packed, products, bound, 0, 0, **more)


def test_a_bound_that_is_not_known_is_said_to_be_so(tmp_path):
  """Products alone that take longer than the whole leave no bound: in the table, in the lines."""
  inputs = whole("the inputs", 1.0, 0.5, 0.8, 4.0, bytes_bound=6.0)
  token = whole("a token", 1.0, 0.5, 2.0, 0.0, bytes_bound=6.0)
  found = results.Found(
    "T5", [], [inputs, token], 8, 2, 1, 3, measuring._unknown([inputs, token]), {}
  )
  (note,) = found.notes
  assert note.startswith("a token: the bound is not known. ") and "from memory" not in note
  assert measuring._unknown([inputs]) == []
  lost = measuring._unknown([inputs, whole("a token", 0.0, 0.5, 2.0, 0.0)])
  assert lost == ["a token: too short to time. Decode more tokens, or repeat it."]
  row = next(line for line in str(found).splitlines() if line.startswith("a token  "))
  assert "not known" in row
  assert "softmax, norms are dense): the inputs 4.00x, a token not known." in str(found)
  assert "not known" in benches.write(found, tmp_path / "bench.html").read_text("utf-8")


def test_turns_that_differ_are_told(monkeypatch):
  monkeypatch.setenv("PJRT_NPROC", "2")
  assert timing.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
  assert timing.quartiles([1.0]) == (0.0, 0.0)
  calm, wide = (whole(n, 2.0, 1.0, 1.0, 2.0, half=x) for n, x in (("a", (1.9, 2.1)), ("b", (1, 3))))
  assert measuring._noise([("a", calm)]) == []
  (told,) = measuring._noise([("a", calm), ("b", wide)])
  assert "b lie in 1.00x to 3.00x" in told
  assert "1.90x to 2.10x" in str(results.Found("T5", [], [calm], 8, 2, 1, 3, [], {}))


def test_the_lines_at_the_end_are_the_bounds_and_what_was_reached():
  shares = [(8.0, 0.125)]
  assert results.bytes_bound(shares) == 8.0 and results.bytes_bound([]) == 0.0
  bound = results.bound(10.0, shares)[1]
  token = whole("a token", 10.0, 4.0, 8.0, bound, bytes_bound=results.bytes_bound(shares))
  inputs = whole("the inputs", 1.0, 0.5, 0.8, 4.0, bytes_bound=6.0)
  said = str(results.Found("T5", [], [inputs, token], 8, 2, 1, 3, ["A note."], {})).splitlines()
  assert said[-4] == "A note."
  assert said[-3].endswith("the inputs 6.00x, a token 8.00x.")
  assert said[-2].endswith("the inputs 4.00x, a token 3.33x.")
  assert said[-1] == "Reached: the inputs 2.00x, a token 2.50x."


def test_a_token_is_what_more_of_them_take():
  work = networks.Work("a token", lambda params, n: n, (1, 5), lambda path: True)
  assert work.seconds({1: [1.0, 9.0, 2.0], 5: [3.0, 12.0, 3.0]}) == 0.5
  assert work.seconds({1: [1.0], 5: [0.5]}) == 0.0  # too short to be measured
  assert timing.ratios(work.each({1: [1.0, 1.0], 5: [3.0, 0.5]}), [0.25, 1.0]) == [2.0]


NETWORKS = {
  "vit": (vit.ViT(vit.config("vit_test")), 2 * 17),
  "swin": (
    swin.Swin(swin.config("swinv2_test")),
    2,
  ),  # windows of other sizes: `rows_of` says batch
}


@pytest.mark.parametrize("name", ["vit", pytest.param("swin", marks=pytest.mark.slow)])
def test_a_network_of_images_makes_a_forward_pass(name):
  network, rows = NETWORKS[name]
  config = network.config
  images = np.ones((1, config.image_size, config.image_size, config.channels), np.float32)
  params, state = finalized(network, rules_of(), images, train=False)
  found = benches.bench(network, params, rules_of(), state=state, batch=2, turns=3)
  (whole,) = found.wholes
  assert whole.name == "a forward pass" and whole.packed > 0 and whole.half[0] > 0
  assert whole.bound > 1 or whole.products > whole.dense
  assert {p.rows for p in found.products} == {rows}


def test_a_packed_tree_needs_no_rules_and_a_kernel_that_is_not_nm_is_named():
  network = NETWORKS["vit"][0]
  images = np.ones((1, 16, 16, 3), np.float32)
  params, _ = finalized(network, rules_of(), images, train=False)
  bench: Any = functools.partial(benches.bench, network, turns=3)
  with pytest.raises(ValueError, match="nothing is packed here, and no rules say what is n:m"):
    bench(params)
  with pytest.raises(ValueError, match="'blocks_0/attn/k/kernel'.* is not 1:8 .* begins at"):
    bench(params, rules_of(place="k"))
  keeps = "no kernel of this network is packed: .*8:8 takes"
  with pytest.raises(ValueError, match=keeps):
    bench(params, rules_of("8:8"))
  for name, value in (("batch", 0), ("inputs", 0), ("turns", 2), ("tokens", 1)):
    with pytest.raises(ValueError, match=f"{name}={value}: "):
      bench(params, rules_of(), **{name: value})
  with pytest.raises(ValueError, match="backend 'cublas' is unknown: take one of auto"):
    bench(params, rules_of(), backend="cublas")
  tree, _ = nms.inference_tree.pack_tree(params, rules_of())
  with pytest.raises(ValueError, match="object: nobody knows what to feed it"):
    benches.bench(object(), tree, turns=3)


# --- what is shown --------------------------------------------------------------------------------


def test_text_json_and_page_say_the_same(of_t5, tmp_path):
  text, told = str(of_t5), of_t5.as_dict()
  assert json.loads(json.dumps(told)) == told
  assert [whole["dense"] for whole in told["wholes"]] == [whole.dense for whole in of_t5.wholes]
  page = html.unescape(benches.write(of_t5, tmp_path / "new/bench.html").read_text("utf-8"))
  for one in of_t5.wholes:
    for number in (results.milli(one.dense), results.at_most(one), results.half(one)):
      assert number in text and number in page
  for line in results.lines(of_t5):
    assert line in text and line in page
  assert page.count('class="bar"') > 20
