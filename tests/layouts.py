"""Layers and models of several libraries at tiny sizes, with the axes that hand-made tables say.

    name -> (what makes it, {regex of a path: axes its products sum over})

`tests/test_trace.py` holds them against `for_model` and against their derivatives. The derivatives
tell an axis apart where it is longer than the number of vectors that meet the weight. So there are
two tokens or four pixels, and all that matters is longer.
"""

import math
import re
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found
from flax import nnx

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.training import layers

KEY = jax.random.key(0)


class Layout(NamedTuple):
  """A network: output = function(params, x), in which at most `rows` vectors meet a weight."""

  function: Any
  params: Any
  x: Any
  rows: int


def drawn(tree, seed=0):
  """Numbers for arrays or shapes: normal for matrices, around 1 for what scales and shifts."""
  rng = np.random.default_rng(seed)

  def draw(x):
    z = rng.normal(size=x.shape)
    return jnp.asarray(z / 4 if len(x.shape) > 1 else 1 + z / 10, x.dtype)

  return jax.tree.map(draw, tree)


def layout(function, params, x, rows=None):
  """x is a shape, or what stands in its place; a vector for each index of all axes but its last."""
  if isinstance(x, tuple):
    rows, x = rows or math.prod(x[:-1]), drawn(jax.ShapeDtypeStruct(x, "float32"), 1)
  return Layout(function, drawn(params), x, rows)


def plain(function, x, rows=None, **shapes):
  params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
  return layout(function, params, x, rows)


def linen(module, *x, rows=None, **kwargs):
  """Of a flax module on x, a shape; or on several arrays."""
  arrays = x if hasattr(x[0], "dtype") else [jnp.zeros(x)]
  shapes = dict(jax.eval_shape(lambda: module.init(KEY, *arrays, **kwargs)))
  params = shapes.pop("params")
  rest = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)

  def apply(p, x):
    return module.apply({"params": p, **rest}, *(x if isinstance(x, list) else [x]), **kwargs)

  return layout(apply, nn.unbox(params), list(x) if hasattr(x[0], "dtype") else x, rows)


def of_nnx(module, *shape, rows=None):
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  return layout(lambda p, x: nnx.merge(graph, p, rest)(x), params, shape, rows)


def equinox(make, call, *shape, rows=None):
  """Of make(equinox, key), called as call(module, x)."""
  eqx = pytest.importorskip("equinox", reason="no Equinox here: pip install -e '.[dev]'")
  params, rest = eqx.partition(make(eqx, KEY), eqx.is_inexact_array)
  return layout(lambda p, x: call(eqx.combine(p, rest), x), params, shape, rows)


class Scanned(nn.Module):
  """Two layers that a scan stacks, along an axis of the kernels."""

  axis: int = 0
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        return nn.Dense(8, name="query", use_bias=False)(x), None

    layer = nn.remat(Layer) if self.remat else Layer
    scan = nn.scan(
      layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=2
    )
    return scan(name="layers")(x, None)[0]


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x + nn.MultiHeadDotProductAttention(4, name="attn")(nn.LayerNorm(name="norm")(x))
    return x + nn.Dense(12, name="wo")(nn.gelu(nn.Dense(16, name="wi")(x)))


class Unstacked(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Block(name="blocks")(x)


class Up(nn.Module):
  """As torch stores it: (..., out, in)."""

  @nn.compact
  def __call__(self, x):
    return nn.ConvTranspose(6, (3, 3), transpose_kernel=True)(x)


class Tied(nn.Module):
  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(6, 4, name="embed")
    return embed.attend(embed(ids))


class NnxStack(nnx.Module):
  """Two layers whose kernels are stacked, and which a scan goes through."""

  def __init__(self):
    make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs), in_axes=0, out_axes=0)
    self.layers = make(nnx.Rngs(0).fork(split=2))

  def __call__(self, x):
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
      x, self.layers
    )


def equinox_stack(eqx, key):
  return eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(key, 2))


def ensemble():
  dense = nn.vmap(nn.Dense, in_axes=None, out_axes=0, axis_size=3, variable_axes={"params": 0},
                  split_rngs={"params": True})  # fmt: skip
  return dense(8, use_bias=False)


def by_index(p, x):
  take = lambda i, h: h @ jax.lax.dynamic_index_in_dim(p["w"], i, keepdims=False)
  return jax.lax.fori_loop(0, 3, take, x)


def heads(p, x):
  q = x @ p["q"].reshape(8, 4 * 5)
  return jnp.einsum("bhd,hde->be", q.reshape(-1, 4, 5), p["o"])


def masked(p, x):
  kept = jnp.where(jnp.abs(p["w"]) > 0, p["w"], 0.0)
  return x @ (kept * 2).astype(jnp.bfloat16).astype(jnp.float32)


def standardized(p, x):
  mean, deviation = jax.lax.stop_gradient((p["w"].mean(0), p["w"].std(0)))
  return x @ ((p["w"] - mean) / deviation)


def recurrent(p, x):
  """From a first state that is learned."""
  step = lambda h, x: (jnp.tanh(h @ p["hh"] + x @ p["xh"]),) * 2
  return jax.lax.scan(step, p["first"], x[:, None])[1]


def ensemble_of_convolutions(p, x):
  numbers = ("NWC", "WIO", "NWC")
  conv = lambda w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers)
  return jax.vmap(conv)(p["w"])


# --- whole models ---------------------------------------------------------------------------------

SIZES = dict(
  vocab_size=12, emb_dim=10, num_heads=6, head_dim=5, mlp_dim=14,
  num_encoder_layers=2, num_decoder_layers=2,
)  # fmt: skip
TOKENS = jnp.asarray([[3, 7]])  # of one example: two vectors meet a weight


def t5(**fields):
  model = Transformer(T5Config.t5_1_1("tiny", **SIZES | fields))
  return linen(model, TOKENS, TOKENS, TOKENS, rows=4, enable_dropout=False)


def our_vit():
  sizes = dict(image_size=2, patch=1, channels=5, classes=20, layers=2, embed=25, heads=5, mlp=28)
  model = vit.ViT(vit.ViTConfig(**sizes, class_token=False))
  return linen(model, 1, 2, 2, 5, rows=4, train=False)


def our_swin():
  sizes = dict(image_size=4, patch=1, channels=3, classes=20, embed=40, mlp_ratio=1)
  model = swin.Swin(swin.SwinConfig(**sizes, depths=(2, 1), heads=(5, 5), window=2))
  return linen(model, 1, 4, 4, 3, rows=16, train=False)


def our_resnet():
  sizes = dict(image_size=4, channels=3, classes=20, depths=(1, 1), widths=(16, 16), stem=3)
  return linen(resnet.ResNet(resnet.ResNetConfig(**sizes)), 1, 4, 4, 3, rows=4, train=False)


def big_vision():
  """Pooled by attention: the query that it pools by is a product of parameters alone: refused."""
  folder = t5x_found.folder() / "big_vision"
  if not folder.is_dir():
    pytest.skip(f"big_vision is not here: clone google-research/big_vision to {folder}")
  sys.path.append(str(folder))
  needs = "big_vision needs tensorflow, einops and ml_collections: pip install them"
  module = pytest.importorskip("big_vision.models.vit", reason=needs)
  sizes = dict(patch_size=(1, 1), width=30, depth=2, mlp_dim=16, num_heads=6, pool_type="map")
  both = linen(module.Model(20, **sizes), 1, 1, 2, 5, rows=12)
  return both._replace(function=lambda p, x: both.function(p, x)[0])


def every(*names, axes=(0,)):
  """A table: these layers' kernels, wherever they are."""
  return {rf"(.*/)?({'|'.join(names)})/kernel": axes}


DENSE = {"kernel": (0,)}
QKV = ("query", "key", "value")
ATTENTION = every(*QKV) | every("out", axes=(0, 1))
# T5 looks its embeddings up by a product with one-hot vectors, which sums over nothing.
T5_PLAIN = every("logits_dense", *QKV, "wi_0", "wi_1", "wo", "out")
T5_AXIS_1 = every("logits_dense", *QKV, "wi_0", "wi_1", "wo") | every("out", axes=(0, 2))
PATCHES = {"patch_embed/proj/kernel": (2,)}
BLOCK = ("q", "k", "v", "proj", "fc1", "fc2")
BIG_VIT = {"embedding/kernel": (2,)} | ATTENTION | every("head", r"Dense_\d")
CASES = {
  # flax Linen
  "Dense": (lambda: linen(nn.Dense(8), 2, 4), DENSE),
  "DenseGeneral of two axes": (
    lambda: linen(nn.DenseGeneral(5, axis=(-2, -1)), 2, 3, 4, rows=2), {"kernel": (0, 1)}),
  "Conv, grouped": (
    lambda: linen(nn.Conv(16, (3,), feature_group_count=2), 1, 2, 12, rows=4), {"kernel": (1,)}),
  "Conv, strided": (lambda: linen(nn.Conv(6, (2, 2), (2, 2)), 1, 2, 2, 5), {"kernel": (2,)}),
  "ConvTranspose, transpose_kernel": (
    lambda: linen(Up(), 1, 2, 2, 5), every("ConvTranspose_0", axes=(3,))),
  "a block": (lambda: linen(Block(), 1, 2, 12), ATTENTION | every("wi", "wo")),
  "an unstacked block": (lambda: linen(Unstacked(), 1, 2, 12), ATTENTION | every("wi", "wo")),
  "Einsum": (lambda: linen(nn.Einsum((8, 4), "bi,oi->bo", use_bias=False), 2, 4),
             {"kernel": (1,)}),
  "Dense query in a scan": (lambda: linen(Scanned(), 2, 8, rows=4),
                            {"layers/query/kernel": (1,)}),
  "a scan along axis 1 with remat": (lambda: linen(Scanned(axis=1, remat=True), 2, 8, rows=4),
                                     {"layers/query/kernel": (0,)}),
  "an ensemble": (lambda: linen(ensemble(), 2, 4), {"kernel": (1,)}),
  "GRU": (lambda: linen(nn.RNN(nn.GRUCell(5)), 1, 3, 6), every("in", "ir", "iz", "hn", "hr", "hz")),
  # flax NNX
  "nnx attention": (lambda: of_nnx(
    nnx.MultiHeadAttention(4, 12, decode=False, rngs=nnx.Rngs(0)), 1, 2, 12), ATTENTION),
  "nnx Linear in a scan": (lambda: of_nnx(NnxStack(), 2, 8, rows=4), {"layers/kernel": (1,)}),
  # Equinox
  "equinox Linear in a scan": (lambda: equinox(
    equinox_stack, lambda m, x: jax.lax.scan(lambda x, m: (jax.vmap(m)(x), None), x, m)[0],
    2, 8, rows=4), {"weight": (2,)}),
  "equinox ConvTranspose2d": (lambda: equinox(
    lambda eqx, key: eqx.nn.ConvTranspose2d(5, 6, 3, key=key), lambda m, x: m(x), 5, 2, 2, rows=4),
    {"weight": (1,)}),
  "equinox attention": (lambda: equinox(
    lambda eqx, key: eqx.nn.MultiheadAttention(4, 12, key=key), lambda m, x: m(x, x, x), 2, 12),
    {".*_proj/weight": (1,)}),
  # jax alone
  "torch's layout": (lambda: plain(lambda p, x: x @ p["w"].T, (2, 4), w=(8, 4)), {"w": (1,)}),
  "stacked (layers, out, in)": (lambda: plain(
    lambda p, x: jax.lax.scan(lambda h, w: (h @ w.T, None), x, p["w"])[0], (2, 8), rows=6,
    w=(3, 8, 8)), {"w": (2,)}),
  "layers by index": (lambda: plain(by_index, (2, 8), rows=6, w=(3, 8, 8)), {"w": (1,)}),
  "fused qkv, split": (lambda: plain(
    lambda p, x: sum(x @ w for w in jnp.split(p["qkv"], 3, axis=1)), (2, 4), qkv=(4, 12)),
    {"qkv": (0,)}),
  "joined kernels": (lambda: plain(
    lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1), (2, 4), q=(4, 3), k=(4, 5)),
    {"q": (0,), "k": (0,)}),
  "heads by reshape": (lambda: plain(heads, (2, 8), q=(8, 4, 5), o=(4, 5, 6)),
                       {"q": (0,), "o": (0, 1)}),
  "masked and scaled": (lambda: plain(masked, (2, 4), w=(4, 3)), {"w": (0,)}),
  "standardized": (lambda: plain(standardized, (2, 4), w=(4, 3)), {"w": (0,)}),
  "binary features": (lambda: plain(lambda p, x: (x == 1) @ p["w"] + x @ p["w"], (2, 4), w=(4, 3)),
                      {"w": (0,)}),
  "a learned first state": (lambda: plain(
    recurrent, (2, 4), first=(1, 5), hh=(5, 5), xh=(4, 5)), {"[hx]h": (0,)}),
  "an ensemble of convolutions": (lambda: plain(
    ensemble_of_convolutions, (1, 2, 5), w=(3, 3, 5, 6)), {"w": (2,)}),
  "cond": (lambda: plain(
    lambda p, x: jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: -(x @ w), p["w"]), (2, 4),
    w=(4, 3)), {"w": (0,)}),
  # the networks and layers of this package
  "our DenseGeneral": (
    lambda: linen(layers.DenseGeneral((3, 5), axis=(-2, -1)), 2, 3, 4, rows=2), DENSE),
  "our T5": (t5, T5_PLAIN),
  "our T5, scanned": (lambda: t5(scan_layers=True), T5_AXIS_1),
  "our ViT": (our_vit, PATCHES | every(*BLOCK, "head")),
  "our Swin": (our_swin, PATCHES | every(*BLOCK, "fc", "reduction")),
  "our ResNet": (our_resnet, every(r"\w*conv\d?", axes=(2,)) | every("fc")),
  "big_vision's ViT": (
    big_vision, {"MAPHead_0/.*/query/bias": (1,), "MAPHead_0/.*/query/kernel": None} | BIG_VIT),
}  # fmt: skip


def wanted(table, params):
  """path -> axes: those of the first regex of the table that names it."""
  paths = [path for path, _ in flatten(params)]
  found = {path: next((r for r in table if re.fullmatch(r, path)), None) for path in paths}
  assert set(table) == set(found.values()) - {None}, "a line of the table names no parameter"
  return {path: table[regex] for path, regex in found.items() if regex and table[regex]}
