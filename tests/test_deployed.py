"""Whole trees with packed kernels: what is packed, and networks that run on them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import packed as packing
from nm_sparsity_jax.core.packed import choice, cpu
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.models.t5.layers import SplitDenseGeneral
from nm_sparsity_jax.trainer.workloads import decoding
from nm_sparsity_jax.training import layers

PHASES = nms.Phases(total=1)


def one_shot(pattern):
  return nms.recipe("sr_ste", pattern=pattern, phases=PHASES)


def shape(*axes, dtype="float32"):
  return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype))


# --- what is packed -------------------------------------------------------------------------------


def test_what_is_packed_and_why_not():
  shapes = {
    "a/kernel": shape(16, 8),
    "a/bias": shape(8),
    "narrow/kernel": shape(16, 8, dtype="bfloat16"),
    "out/kernel": shape(16, 8),
    "table/embedding": shape(16, 8),
    "conv/kernel": shape(3, 3, 16, 8),
    "long/kernel": shape(512, 8),
    "off/kernel": shape(16, 8),
  }
  rules = nms.Rules(
    {
      "a/kernel|conv/kernel|table/.*|out/.*": one_shot("1:4"),
      "narrow/.*": one_shot("7:8"),
      "long/.*": one_shot("1:512"),
      "off/.*": nms.recipe("dense"),
    },
    axes={"out/kernel": 1, "table/.*": 0, "conv/kernel": 2},
  )
  packed, dense = inference_tree.decide(shapes, rules)
  assert list(packed) == ["a/kernel"] and packed["a/kernel"].shape == (16, 8)
  layers = "layers take packed only kernels (in, out), with groups along axis 0"
  assert dense == {
    "a/bias": "no rule makes it sparse",
    "narrow/kernel": "7:8 takes 280 bytes packed, and 256 with its zeros",
    **dict.fromkeys(("out/kernel", "table/embedding", "conv/kernel"), layers),
    "long/kernel": "1:512: an index reaches through 256 entries at most",
    "off/kernel": "no rule makes it sparse",
  }
  assert inference_tree.decide(shapes, rules, "int8")[0]["a/kernel"].values.dtype == "int8"


# --- layers ---------------------------------------------------------------------------------------


def weight(seed, *axes, pattern="1:4"):
  """Finalized values; groups along axis 0."""
  w = jnp.asarray(np.random.default_rng(seed).standard_normal(axes).astype(np.float32))
  rules = nms.Rules({"kernel": one_shot(pattern)})
  return np.array(nms.finalize({"kernel": w}, rules, 0, early=True)["kernel"])


def inputs(seed, *axes):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(axes).astype(np.float32))


def close(got, due, tolerance=1e-5):
  got, due = np.asarray(got, np.float64), np.asarray(due, np.float64)
  np.testing.assert_allclose(got, due, rtol=0, atol=tolerance * max(np.abs(due).max(), 1))


LAYERS = {
  "general": (layers.DenseGeneral((2, 3), axis=(-2, -1)), (5, 2, 8), (16, 6)),
  "order": (layers.DenseGeneral(6, axis=(2, 1)), (5, 2, 8), (16, 6)),
  "narrow": (layers.DenseGeneral(6, dtype=jnp.bfloat16), (5, 16), (16, 6)),
  "split": (SplitDenseGeneral((2, 3), axis=(-2, -1)), (5, 2, 8), (2, 8, 2, 3)),
  "bias": (layers.Dense(6), (4, 5, 16), (16, 6)),
  "no_bias": (layers.Dense(6, use_bias=False), (16,), (16, 6)),
  "compute": (layers.Dense(6, dtype=jnp.bfloat16), (5, 16), (16, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_a_packed_kernel_where_it_takes_the_array(name):
  layer, x, stored = LAYERS[name]
  w, x = weight(1, 16, 6), inputs(2, *x)
  beside = {"bias": inputs(3, 6)} if getattr(layer, "use_bias", False) else {}
  due = layer.apply({"params": {"kernel": jnp.asarray(w.reshape(stored)), **beside}}, x)
  packed = {"kernel": packing.pack(w, nms.NM(1, 4)), **beside}
  got = jax.jit(layer.apply)({"params": packed}, x)
  assert got.shape == due.shape and got.dtype == due.dtype
  close(got, due, 0.02 if got.dtype == jnp.bfloat16 else 1e-6)


def test_a_packed_kernel_where_it_does_not_belong():
  kernel = packing.pack(weight(1, 16, 6), nms.NM(1, 4))
  with pytest.raises(ValueError, match=r"the packed kernel is \(16, 6\), .* takes \(24, 6\)"):
    layers.Dense(6).apply({"params": {"kernel": kernel, "bias": inputs(3, 6)}}, inputs(2, 5, 24))


# --- networks -------------------------------------------------------------------------------------

HERE = [
  "xla_scan",
  pytest.param("cpu_ffi", marks=pytest.mark.skipif(bool(cpu.missing()), reason=cpu.missing())),
]
PLACES = nms.Rules({"ff": one_shot("1:8"), "q": one_shot("2:4"), "o": one_shot("1:4")})


@pytest.fixture(params=HERE)
def backend(request, monkeypatch):
  """What layers take, whatever the table has."""
  monkeypatch.setattr(choice, "best", lambda *args, **kwargs: request.param)
  return request.param


def finalized(shapes, rules, scale):
  """Values for a tree of shapes, n:m; compiles nothing."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(0, scale, x.shape).astype(np.float32), shapes)
  return jax.tree.map(np.asarray, nms.finalize(params, rules, 0, early=True))


@functools.cache
def t5():
  """(a scanned T5, its finalized parameters, the same network without a scan, its tree)."""
  config = T5Config(
    vocab_size=48, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1,
    num_decoder_layers=1, mlp_activations=("gelu", "linear"), scan_layers=True,
  )  # fmt: skip
  network, one = Transformer(config), jnp.ones((1, 1), jnp.int32)
  init = lambda rng: network.init(rng, one, one, one, enable_dropout=False)
  shapes = jax.eval_shape(init, jax.random.key(0))
  rules = PLACES.with_logical_axes(shapes["params_axes"])
  params = finalized(shapes["params"], rules, 0.3)
  tree, plain = inference_tree.unstacked(params, config)
  return network, params, Transformer(plain), tree


INPUTS = jnp.asarray(np.random.default_rng(5).integers(2, 48, (3, 7)).astype(np.int32))


def logits_and_ids(network):
  """params -> logits of targets, and the ids of greedy and of beam search."""

  @jax.jit
  def run(params):
    arguments = INPUTS, INPUTS[:, :5], INPUTS[:, 1:6]
    logits = network.apply({"params": params}, *arguments, enable_dropout=False)
    ids = decoding.greedy(network, params, INPUTS, 5)[0]
    return logits, ids, decoding.beam_search(network, params, INPUTS, 5, beams=2)[0]

  return run


finalized_t5 = functools.cache(lambda: logits_and_ids(t5()[0])(t5()[1]))


def test_a_packed_t5_says_what_the_finalized_one_says(backend):
  """And its decode loop copies no packed kernel."""
  *_, network, tree = t5()
  packed, report = inference_tree.pack_tree(tree, PLACES)
  assert len(report.packed) == 2 * 3 + 3 + 3
  params = inference_tree.prepare(packed, 3, backend)
  run = logits_and_ids(network).lower(params).compile()
  logits, greedy, beams = run(params)
  due, *said = finalized_t5()
  close(logits, due)
  jax.tree.map(np.testing.assert_array_equal, [greedy, beams], said)
  assert len(np.unique(greedy)) > 3  # it says something
  if backend == "cpu_ffi":
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, packing.NMPacked))
    shapes = {x.values.shape for x in leaves if isinstance(x, packing.NMPacked)}
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", run.as_text())
    assert not shapes & {tuple(map(int, found.split(","))) for found in copied}


def test_a_packed_vit_sees_what_the_finalized_one_sees(backend):
  network = vit.ViT(vit.config("vit_test", layers=1))
  images = inputs(7, 3, 16, 16, 3)
  shapes = jax.eval_shape(network.init, jax.random.key(0), images)["params"]
  params = finalized(shapes, PLACES, 0.1)
  assert inference_tree.unstacked(params, network.config) == (params, network.config)
  packed, report = inference_tree.pack_tree(params, PLACES)
  assert len(report.packed) == 4
  rows = inference_tree.rows_of(network.config, batch=3)
  prepared = inference_tree.prepare(packed, rows, backend)
  apply = jax.jit(network.apply)
  close(apply({"params": prepared}, images), apply({"params": params}, images))


@pytest.mark.parametrize(
  "network, places, count",
  [
    (swin.Swin(swin.config("swinv2_test")), ("ff", "qkv", "o", "merge"), 4 * 6 + 2),
    (resnet.ResNet(resnet.config("resnet_test")), ("conv", "head"), 1),
  ],
)
def test_other_networks_take_packed_kernels(network, places, count):
  images = jnp.zeros((2, network.config.image_size, network.config.image_size, 3))
  variables = jax.eval_shape(network.init, jax.random.key(0), images)
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), variables)
  rules = nms.Rules(dict.fromkeys(places, one_shot("1:4")))
  tree, report = inference_tree.pack_tree(zeros["params"], rules)
  assert len(report.packed) == count
  apply = lambda tree: network.apply({**zeros, "params": tree}, images)
  assert jax.eval_shape(apply, tree).shape == (2, 10)


# --- trees ----------------------------------------------------------------------------------------


RULES_OF_A = nms.Rules({"a/kernel": one_shot("1:4")})


@pytest.mark.parametrize("dtype, size", [(None, 136), ("int8", 72)])
def test_a_report_says_what_was_packed_and_what_it_saves(dtype, size):
  w = weight(1, 16, 8)
  w[0] = -0.0
  tree = {"a": {"kernel": w, "bias": np.zeros(8, np.float32)}}
  packed, report = inference_tree.pack_tree(tree, RULES_OF_A, dtype)
  assert report.packed == {"a/kernel": inference_tree.Kernel("1:4", 128, size, 512)}
  assert report.total == size + 32 and report.zeros == 512 + 32
  assert "a/kernel  1:4" in str(report) and f"in all {size + 32} bytes, and 544" in str(report)
  assert packed["a"]["bias"] is tree["a"]["bias"]
  restored = inference_tree.unpack_tree(packed)["a"]["kernel"]
  close(restored, w, 0 if dtype is None else 0.01)


def test_a_tree_that_is_not_n_m_names_the_kernel():
  tree = {"a": {"kernel": np.ones((16, 8), np.float32)}}
  with pytest.raises(ValueError, match=r"'a/kernel' is not 1:4 along axis 0: 4 of the 4"):
    inference_tree.pack_tree(tree, RULES_OF_A)


def test_prepare_unpacks_where_a_dense_product_is_faster(monkeypatch):
  monkeypatch.setattr(choice, "best", lambda packed, batch, dense: "dense" if dense else "unpack")
  tree, _ = inference_tree.pack_tree({"a": {"kernel": weight(1, 16, 8)}}, RULES_OF_A)
  assert isinstance(inference_tree.prepare(tree, 4)["a"]["kernel"], jax.Array)
  assert inference_tree.is_packed(inference_tree.prepare(tree, 4, memory=True))


def test_rows_are_those_that_a_kernel_sees():
  config = T5Config.t5_1_1("tiny")
  rows = inference_tree.rows_of(config, batch=2, inputs=10, beams=3)
  assert rows("encoder/layers_0/attention/key/kernel") == 20
  assert rows("decoder/layers_0/encoder_decoder_attention/key/kernel") == 60
  assert rows("decoder/layers_0/encoder_decoder_attention/query/kernel") == 6
  rows = inference_tree.rows_of(vit.config("vit_test"), batch=2)
  assert (rows("blocks_0/mlp/fc1/kernel"), rows("head/kernel")) == (34, 2)
  assert inference_tree.rows_of(None, batch=2)("a/kernel") == 2
