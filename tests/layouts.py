"""Layers and models of many libraries at tiny sizes, with the axes that hand-made tables say.

    name -> (what makes it, {regex of a path: axes its products sum over})

`tests/test_trace.py` holds them against `for_model` and against their derivatives. The derivatives
tell an axis apart where it is longer than the number of vectors that meet the weight. So there are
two tokens or four pixels, and all that matters is longer.
"""

import math
import re
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
  if isinstance(x, tuple) and all(isinstance(n, int) for n in x):
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
  """Of make(equinox.nn, key), called as call(module, x)."""
  eqx = pytest.importorskip("equinox", reason="no Equinox here: pip install -e '.[dev]'")
  params, rest = eqx.partition(make(eqx.nn, KEY), eqx.is_inexact_array)
  return layout(lambda p, x: call(eqx.combine(p, rest), x), params, shape, rows)


def haiku(call, *shape, rows=None):
  """Of what call(haiku, x) makes and calls."""
  hk = pytest.importorskip("haiku", reason="no Haiku here: pip install -e '.[dev]'")
  net = hk.without_apply_rng(hk.transform(lambda x: call(hk, x)))
  params = jax.eval_shape(lambda: net.init(KEY, jnp.zeros(shape)))
  return layout(net.apply, params, shape, rows)


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


def equinox_stack(nn, key):
  import equinox

  return equinox.filter_vmap(lambda key: nn.Linear(8, 8, key=key))(jax.random.split(key, 2))


def scan_equinox(layers, x):
  step = lambda x, layer: (jax.vmap(layer)(x), None)
  return jax.lax.scan(step, x, layers)[0]


def ensemble():
  dense = nn.vmap(nn.Dense, in_axes=None, out_axes=0, axis_size=3, variable_axes={"params": 0},
                  split_rngs={"params": True})  # fmt: skip
  return dense(8, use_bias=False)


def stacked(p, x):
  return jax.lax.scan(lambda h, w: (h @ w.T, None), x, p["w"])[0]


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


def hypernetwork(p, x):
  return jnp.einsum("bi,bio->bo", x[:, :3], (x @ p["w"]).reshape(-1, 3, 7))


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


def our_vit(**fields):
  sizes = dict(image_size=2, patch=1, channels=5, classes=20, layers=2, embed=25, heads=5, mlp=28)
  model = vit.ViT(vit.ViTConfig(**sizes, class_token=False, **fields))
  return linen(model, 1, 2, 2, 5, rows=8 if fields else 4, train=False)


def our_swin():
  sizes = dict(image_size=4, patch=1, channels=3, classes=20, embed=40, mlp_ratio=1)
  model = swin.Swin(swin.SwinConfig(**sizes, depths=(2, 1), heads=(5, 5), window=2))
  return linen(model, 1, 4, 4, 3, rows=16, train=False)


def our_resnet():
  sizes = dict(image_size=4, channels=3, classes=20, depths=(1, 1), widths=(16, 16), stem=3)
  return linen(resnet.ResNet(resnet.ResNetConfig(**sizes)), 1, 4, 4, 3, rows=4, train=False)


def t5x(name, **fields):
  """One of T5X's own examples."""
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  from t5x.examples.scalable_t5 import network as scalable_t5
  from t5x.examples.t5 import network as t5

  sizes = SIZES | dict(mlp_activations=("gelu", "linear")) | fields
  network = dict(t5=t5, scalable_t5=scalable_t5)[name]
  model = network.Transformer(network.T5Config(**sizes))
  return linen(model, TOKENS, TOKENS, TOKENS, rows=4, enable_dropout=False)


def every(*names, axes=(0,)):
  """A table: these layers' kernels, wherever they are."""
  return {rf"(.*/)?({'|'.join(names)})/kernel": axes}


DENSE = {"kernel": (0,)}
QKV = ("query", "key", "value")
ATTENTION = every(*QKV) | every("out", axes=(0, 1))
# T5 looks its embeddings up by a product with one-hot vectors, which sums over nothing.
T5_ENDS = every("logits_dense")
T5_PLAIN = T5_ENDS | every(*QKV, "wi_0", "wi_1", "wo", "out")
T5_AXIS_0 = (
  T5_ENDS | every(*QKV, "wi_0", "wi_1", "wo", axes=(1,)) | every("out", axes=(1, 2))
)  # fmt: skip

VIT_HEAD = {"patch_embed/proj/kernel": (2,)} | every("head")
VIT = VIT_HEAD | every("q", "k", "v", "proj", "fc1", "fc2")
VIT_STACKED = VIT_HEAD | every("q", "k", "v", "proj", "fc1", "fc2", axes=(1,))
SWIN = {"patch_embed/proj/kernel": (2,)} | every("q", "k", "v", "proj", "fc1", "fc2", "fc",
                                                 "reduction")  # fmt: skip
RESNET = every(r"\w*conv\d?", axes=(2,)) | every("fc")
LINEN = {
  "Dense": (lambda: linen(nn.Dense(8), 2, 4), DENSE),
  "DenseGeneral of two axes": (
    lambda: linen(nn.DenseGeneral(5, axis=(-2, -1)), 2, 3, 4, rows=2), {"kernel": (0, 1)}),
  "DenseGeneral to two axes": (lambda: linen(nn.DenseGeneral((3, 5)), 2, 4), DENSE),
  "Conv": (lambda: linen(nn.Conv(6, (3, 3)), 1, 2, 2, 5), {"kernel": (2,)}),
  "Conv, grouped": (
    lambda: linen(nn.Conv(16, (3,), feature_group_count=2), 1, 2, 12, rows=4), {"kernel": (1,)}),
  "ConvTranspose, transpose_kernel": (
    lambda: linen(Up(), 1, 2, 2, 5), every("ConvTranspose_0", axes=(3,))),
  "attention": (lambda: linen(nn.MultiHeadDotProductAttention(4), 1, 2, 12),
                ATTENTION),
  "a block": (lambda: linen(Block(), 1, 2, 12), ATTENTION | every("wi", "wo")),
  "Einsum": (lambda: linen(nn.Einsum((8, 4), "bi,oi->bo", use_bias=False), 2, 4),
             {"kernel": (1,)}),
  "Dense query in a scan": (lambda: linen(Scanned(), 2, 8, rows=4),
                            {"layers/query/kernel": (1,)}),
  "a scan with remat": (lambda: linen(Scanned(remat=True), 2, 8, rows=4),
                        {"layers/query/kernel": (1,)}),
  "an ensemble": (lambda: linen(ensemble(), 2, 4), {"kernel": (1,)}),
  "GRU": (lambda: linen(nn.RNN(nn.GRUCell(5)), 1, 3, 6), every("in", "ir", "iz", "hn", "hr", "hz")),
}  # fmt: skip

NNX = {
  "nnx Linear": (lambda: of_nnx(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), 2, 4), DENSE),
  "nnx Conv": (lambda: of_nnx(nnx.Conv(5, 6, (3, 3), rngs=nnx.Rngs(0)), 1, 2, 2, 5),
               {"kernel": (2,)}),
  "nnx attention": (lambda: of_nnx(
    nnx.MultiHeadAttention(4, 12, decode=False, rngs=nnx.Rngs(0)), 1, 2, 12), ATTENTION),
  "nnx Linear in a scan": (lambda: of_nnx(NnxStack(), 2, 8, rows=4), {"layers/kernel": (1,)}),
}  # fmt: skip

PLAIN = {
  "torch's layout": (lambda: plain(lambda p, x: x @ p["w"].T, (2, 4), w=(8, 4)), {"w": (1,)}),
  "stacked (layers, out, in)": (lambda: plain(stacked, (2, 8), rows=6, w=(3, 8, 8)),
                                {"w": (2,)}),
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
  "a hypernetwork": (lambda: plain(hypernetwork, (2, 4), w=(4, 21)), {"w": (0,)}),
  "an ensemble of convolutions": (lambda: plain(
    ensemble_of_convolutions, (1, 2, 5), w=(3, 3, 5, 6)), {"w": (2,)}),
  "cond": (lambda: plain(
    lambda p, x: jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: -(x @ w), p["w"]), (2, 4),
    w=(4, 3)), {"w": (0,)}),
}  # fmt: skip

OURS = {
  "our Dense": (lambda: linen(layers.Dense(8), 2, 4), DENSE),
  "our Conv": (lambda: linen(layers.Conv(6, (3, 3)), 1, 2, 2, 5), {"kernel": (2,)}),
  "our T5": (t5, T5_PLAIN),
  "our T5, scanned along axis 0": (lambda: t5(scan_layers=True, param_scan_axis=0), T5_AXIS_0),
  "our ViT": (lambda: our_vit(), VIT),
  "our ViT, scanned": (lambda: our_vit(scan=True), VIT_STACKED),
  "our Swin": (our_swin, SWIN),
  "our ResNet": (our_resnet, RESNET),
}  # fmt: skip

T5X = {
  "T5X's T5": (lambda: t5x("t5"), T5_PLAIN),
  "T5X's scalable T5, scanned along axis 0": (
    lambda: t5x("scalable_t5", param_scan_axis=0, remat_policy="minimal"), T5_AXIS_0),
}  # fmt: skip

EQUINOX = {
  "equinox Linear": (lambda: equinox(
    lambda nn, key: nn.Linear(4, 8, key=key), lambda m, x: jax.vmap(m)(x), 2, 4), {"weight": (1,)}),
  "equinox Conv2d": (lambda: equinox(
    lambda nn, key: nn.Conv2d(5, 6, 3, padding=1, key=key), lambda m, x: m(x), 5, 2, 2, rows=4),
    {"weight": (1,)}),
  "equinox attention": (lambda: equinox(
    lambda nn, key: nn.MultiheadAttention(4, 12, key=key), lambda m, x: m(x, x, x), 2, 12),
    {".*_proj/weight": (1,)}),
  "equinox GRUCell": (lambda: equinox(
    lambda nn, key: nn.GRUCell(4, 5, key=key),
    lambda m, x: jax.lax.scan(lambda h, x: (m(x, h),) * 2, jnp.zeros(5), x)[1], 3, 4),
    {"weight_(ih|hh)": (1,)}),
  "equinox Linear in a scan": (lambda: equinox(equinox_stack, scan_equinox, 2, 8, rows=4),
                               {"weight": (2,)}),
}  # fmt: skip

HAIKU = {
  "haiku Linear": (lambda: haiku(lambda hk, x: hk.Linear(8)(x), 2, 4), {"linear/w": (0,)}),
  "haiku Conv2D": (lambda: haiku(lambda hk, x: hk.Conv2D(6, 3)(x), 1, 2, 2, 5),
                   {"conv2_d/w": (2,)}),
  "haiku attention": (lambda: haiku(
    lambda hk, x: hk.MultiHeadAttention(4, 3, w_init=hk.initializers.Constant(1))(x, x, x), 2, 12),
    {"multi_head_attention/(query|key|value|linear)/w": (0,)}),
  "haiku LSTM": (lambda: haiku(
    lambda hk, x: hk.dynamic_unroll(hk.LSTM(5), x, hk.LSTM(5).initial_state(None))[0], 3, 4),
    {"lstm/linear/w": (0,)}),
  "haiku Linear in a scan": (lambda: haiku(
    lambda hk, x: hk.experimental.layer_stack(2)(lambda x: hk.Linear(8)(x))(x), 2, 8, rows=4),
    {".*/linear/w": (1,)}),
}  # fmt: skip

CASES = LINEN | NNX | PLAIN | OURS | T5X | EQUINOX | HAIKU
MARKS = dict.fromkeys(T5X, pytest.mark.t5x)


def wanted(table, params):
  """path -> axes: those of the first regex of the table that names it."""
  paths = [path for path, _ in flatten(params)]
  found = {path: next((r for r in table if re.fullmatch(r, path)), None) for path in paths}
  assert set(table) == set(found.values()) - {None}, "a line of the table names no parameter"
  return {path: table[regex] for path, regex in found.items() if regex and table[regex]}
