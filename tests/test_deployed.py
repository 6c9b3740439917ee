"""Whole trees with packed kernels: what is packed, and networks that run on them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import assert_close, drawn
from test_packed_dot import there

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import packed as packing
from nm_sparsity_jax.core.packed import choice
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads import decoding

rules_of = functools.partial(nms.configure.rules, recipe="sr_ste", sparse_steps=1)


def finalized(shapes, rules, scale=0.3):
  """Values for a tree of shapes, n:m; compiles nothing."""
  return jax.tree.map(np.asarray, nms.finalize(drawn(shapes, scale), rules, 1))


# --- what is packed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "shape, pattern, axis, why",
  [
    ((16, 8), "7:8", 0, "280 bytes packed, and 256 with its zeros"),
    ((512, 8), "1:512", 0, "256 entries at most"),
    ((16, 8), "1:4", 1, "groups along axis 0"),
  ],
)
def test_why_a_kernel_is_not_packed(shape, pattern, axis, why):
  rules = rules_of({"kernel": pattern}, axes={"kernel": axis})
  like = jax.ShapeDtypeStruct
  shapes = {"kernel": like(shape, jnp.bfloat16), "bias": like((8,), jnp.float32)}
  packed, dense = inference_tree.decide(shapes, rules)
  assert not packed and why in dense["kernel"] and "no rule" in dense["bias"]


# --- networks -------------------------------------------------------------------------------------

RULES = rules_of({"ff": "1:8", "q": "2:4", "o": "1:4"})
CONVS = rules_of({"conv": "1:4", "head": "1:4"})


@pytest.fixture(params=["xla_scan", pytest.param("cpu_ffi", marks=there)])
def backend(request, monkeypatch):
  """What layers take, whatever the table has."""
  monkeypatch.setattr(choice, "best", lambda *args, **kwargs: request.param)
  return request.param


def test_a_packed_t5_says_what_the_finalized_one_says(backend):
  """Without its scan; and its decode loop copies no packed kernel."""
  config = T5Config(
    vocab_size=48, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1,
    num_decoder_layers=1, mlp_activations=("gelu", "linear"), scan_layers=True,
  )  # fmt: skip
  inputs = jnp.asarray(np.random.default_rng(5).integers(2, 48, (3, 7)).astype(np.int32))

  def logits_and_ids(network):
    def run(params):
      arguments = inputs, inputs[:, :5], inputs[:, 1:6]
      logits = network.apply({"params": params}, *arguments, enable_dropout=False)
      ids = decoding.greedy(network, params, inputs, 5)[0]
      return logits, ids, decoding.beam_search(network, params, inputs, 5, beams=2)[0]

    return jax.jit(run)

  scanned, one = Transformer(config), jnp.ones((1, 1), jnp.int32)
  init = lambda rng: scanned.init(rng, one, one, one, enable_dropout=False)
  shapes = jax.eval_shape(init, jax.random.key(0))
  params = finalized(shapes["params"], RULES.with_logical_axes(shapes["params_axes"]))
  tree, plain = inference_tree.unstacked(params, config)
  packed, report = inference_tree.pack_tree(tree, RULES)
  assert len(report.packed) == 2 * 3 + 3 + 3
  ready = inference_tree.prepare(packed, 3, backend)
  run = logits_and_ids(Transformer(plain)).lower(ready).compile()
  (logits, *ids), (want, *wanted) = run(ready), logits_and_ids(scanned)(params)
  assert_close(logits, want)
  jax.tree.map(np.testing.assert_array_equal, ids, wanted)
  assert len(np.unique(ids[0])) > 3  # it says something
  if backend == "cpu_ffi":
    is_packed = lambda x: isinstance(x, packing.NMPacked)
    leaves = [x for x in jax.tree.leaves(ready, is_leaf=is_packed) if is_packed(x)]
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", run.as_text())
    assert not {",".join(map(str, x.values.shape)) for x in leaves} & {*copied}


@pytest.mark.parametrize(
  "network, rules, count",
  [
    (vit.ViT(vit.config("vit_test", layers=1)), RULES, 4),
    (swin.Swin(swin.config("swinv2_test", depths=(1,), heads=(2,))), RULES, 4),
    (resnet.ResNet(resnet.config("resnet_test", image_size=8, depths=(1,), widths=(8,))), CONVS, 1),
  ],
)
def test_a_packed_network_sees_what_the_finalized_one_sees(network, rules, count, monkeypatch):
  monkeypatch.setattr(choice, "best", lambda *args, **kwargs: "xla_scan")
  size = network.config.image_size
  images = jnp.asarray(np.random.default_rng(7).normal(size=(3, size, size, 3)), jnp.float32)
  shapes = dict(jax.eval_shape(network.init, jax.random.key(0), images))
  params = finalized(shapes.pop("params"), rules, 0.1)
  state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
  assert inference_tree.unstacked(params, network.config) == (params, network.config)
  packed, report = inference_tree.pack_tree(params, rules)
  assert len(report.packed) == count
  ready = inference_tree.prepare(packed, inference_tree.rows_of(network.config, batch=3))
  apply = jax.jit(lambda params: network.apply({**state, "params": params}, images))
  assert_close(apply(ready), apply(params))
