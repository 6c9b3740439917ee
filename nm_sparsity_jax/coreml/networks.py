"""The encoder of a T5 and a ViT in torch, whose parameters have the names that we export.

    T5Config, length -> [encoder] -> module: ids [1, length]      -> [1, length, emb_dim]
    ViTConfig        -> [vit]     ->         images [1, c, h, w]  -> logits [1, classes]

They infer alone, with one example: no dropout, no cache, shapes that are fixed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.models.t5.layers import RelativePositionBiases
from nm_sparsity_jax.models.vit import ViTConfig

torch: Any = importlib.import_module("torch")  # checkers of types do not have it
nn: Any = torch.nn
F: Any = torch.nn.functional

_BUCKETS, _FAR = 32, 128  # of relative positions, in every T5
_EPSILON = 1e-6
_HIDDEN = -3e4  # added to what a padded key is given; float16 holds it
_ACTIVATIONS: dict[str, Callable] = {
  "relu": F.relu,
  "gelu": functools.partial(F.gelu, approximate="tanh"),
  "silu": F.silu,
  "swish": F.silu,
  "linear": lambda x: x,
}


# --- T5 -------------------------------------------------------------------------------------------


def buckets(length: int) -> np.ndarray:
  """Returns the bucket [length, length] of each key - query, as our encoder has it."""
  one_hot = {"params": {"rel_embedding": jnp.eye(_BUCKETS)}}
  bias = RelativePositionBiases(_BUCKETS, _FAR, _BUCKETS, jnp.float32).apply(
    one_hot, length, length
  )
  return np.asarray(bias)[0].argmax(0)


class _Norm(nn.Module):
  def __init__(self, width: int):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(width))

  def forward(self, x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + _EPSILON) * self.weight


class _SelfAttention(nn.Module):
  def __init__(self, cfg: T5Config, is_first: bool):
    super().__init__()
    joined = cfg.num_heads * cfg.head_dim
    self.heads = cfg.num_heads
    self.q, self.k, self.v = (nn.Linear(cfg.emb_dim, joined, bias=False) for _ in range(3))
    self.o = nn.Linear(joined, cfg.emb_dim, bias=False)
    if is_first:
      self.relative_attention_bias = nn.Embedding(_BUCKETS, cfg.num_heads)

  def forward(self, x, bias):
    length = x.shape[1]
    split = lambda y: y.reshape(1, length, self.heads, -1).transpose(1, 2)
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    weights = torch.softmax(q @ k.transpose(2, 3) + bias, -1)
    return self.o((weights @ v).transpose(1, 2).reshape(1, length, -1))


class _FeedForward(nn.Module):
  def __init__(self, cfg: T5Config):
    super().__init__()
    names = [f"wi_{i}" for i in range(len(cfg.mlp_activations))]
    self.names = ["wi"] if len(names) == 1 else names
    for name in self.names:
      setattr(self, name, nn.Linear(cfg.emb_dim, cfg.mlp_dim, bias=False))
    self.wo = nn.Linear(cfg.mlp_dim, cfg.emb_dim, bias=False)
    self.activations = [_activation(name) for name in cfg.mlp_activations]

  def forward(self, x):
    wide = [f(getattr(self, name)(x)) for f, name in zip(self.activations, self.names, strict=True)]
    return self.wo(functools.reduce(lambda a, b: a * b, wide))


def _activation(name: Any) -> Callable:
  if name not in _ACTIVATIONS:
    raise ValueError(
      f"activation {name!r} has no torch module here: take one of {', '.join(_ACTIVATIONS)}."
    )
  return _ACTIVATIONS[name]


class _Encoder(nn.Module):
  """Holds parameters by the names of Hugging Face's T5."""

  def __init__(self, cfg: T5Config, length: int):
    super().__init__()
    self.shared = nn.Embedding(cfg.vocab_size, cfg.emb_dim)
    blocks = []
    for i in range(cfg.num_encoder_layers):
      attention, mlp = nn.Module(), nn.Module()
      attention.SelfAttention = _SelfAttention(cfg, is_first=i == 0)
      mlp.DenseReluDense = _FeedForward(cfg)
      attention.layer_norm, mlp.layer_norm = _Norm(cfg.emb_dim), _Norm(cfg.emb_dim)
      block = nn.Module()
      block.layer = nn.ModuleList([attention, mlp])
      blocks.append(block)
    self.encoder = nn.Module()
    self.encoder.block = nn.ModuleList(blocks)
    self.encoder.final_layer_norm = _Norm(cfg.emb_dim)
    self.register_buffer("buckets", torch.from_numpy(buckets(length)), persistent=False)

  def folded(self):
    """Returns what coremltools computes of parameters: name -> the array in the package."""
    attention = self.encoder.block[0].layer[0].SelfAttention
    bias = attention.relative_attention_bias(self.buckets).permute(2, 0, 1)[None]
    return {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": bias}

  def forward(self, ids):
    """Maps ids [1, length], 0 = padding, to [1, length, emb_dim]."""
    hidden = (ids == 0).to(torch.float32)[:, None, None, :] * _HIDDEN
    (bias,) = self.folded().values()
    bias = bias + hidden
    x = self.shared(ids)
    for block in self.encoder.block:
      attention, mlp = block.layer
      x = x + attention.SelfAttention(attention.layer_norm(x), bias)
      x = x + mlp.DenseReluDense(mlp.layer_norm(x))
    return self.encoder.final_layer_norm(x)


def encoder(config: T5Config, length: int) -> Any:
  """Returns the encoder of a T5, for one text of so many ids; 0 is padding."""
  return _Encoder(config, length).eval()


# --- ViT ------------------------------------------------------------------------------------------


class _Attention(nn.Module):
  def __init__(self, cfg: ViTConfig):
    super().__init__()
    # Numbers, not shapes: coremltools cannot convert what tracing makes of a shape's product.
    self.tokens, self.width, self.heads = cfg.tokens, cfg.embed, cfg.heads
    self.qkv, self.proj = nn.Linear(cfg.embed, 3 * cfg.embed), nn.Linear(cfg.embed, cfg.embed)

  def forward(self, x):
    split = lambda y: y.reshape(1, self.tokens, self.heads, -1).transpose(1, 2)
    q, k, v = (split(y) for y in self.qkv(x).split(self.width, 2))
    scores = (q * (self.width // self.heads) ** -0.5) @ k.transpose(2, 3)
    y = torch.softmax(scores, -1) @ v
    return self.proj(y.transpose(1, 2).reshape(1, self.tokens, self.width))


class _Mlp(nn.Module):
  def __init__(self, cfg: ViTConfig):
    super().__init__()
    self.fc1, self.fc2 = nn.Linear(cfg.embed, cfg.mlp), nn.Linear(cfg.mlp, cfg.embed)

  def forward(self, x):
    return self.fc2(F.gelu(self.fc1(x)))


class _ViT(nn.Module):
  """Holds parameters by timm's names."""

  def __init__(self, cfg: ViTConfig):
    super().__init__()
    norm = lambda: nn.LayerNorm(cfg.embed, _EPSILON)
    self.patch_embed = nn.Module()
    self.patch_embed.proj = nn.Conv2d(cfg.channels, cfg.embed, cfg.patch, cfg.patch)
    if cfg.class_token:
      self.cls_token = nn.Parameter(torch.zeros(1, 1, cfg.embed))
    self.pos_embed = nn.Parameter(torch.zeros(1, cfg.tokens, cfg.embed))
    self.blocks = nn.ModuleList()
    for _ in range(cfg.layers):
      block = nn.Module()
      block.norm1, block.attn = norm(), _Attention(cfg)
      if cfg.mlp:
        block.norm2, block.mlp = norm(), _Mlp(cfg)
      self.blocks.append(block)
    setattr(self, "norm" if cfg.class_token else "fc_norm", norm())
    self.head = nn.Linear(cfg.embed, cfg.classes)
    self.config = cfg

  def folded(self):
    """Returns what coremltools computes of parameters: name -> the array in the package."""
    if not self.config.class_token:
      return {}
    return {"cls_token": F.pad(self.cls_token, (0, 0, 0, self.config.tokens - 1))}

  def forward(self, images):
    """Maps normalized images [1, channels, h, w] to logits [1, classes]."""
    x = self.patch_embed.proj(images).flatten(2).transpose(1, 2)
    if self.config.class_token:
      # A sum, not torch.cat: coremltools looks for weights in no list of arrays.
      x = F.pad(x, (0, 0, 1, 0)) + self.folded()["cls_token"]
    x = x + self.pos_embed
    for block in self.blocks:
      x = x + block.attn(block.norm1(x))
      if self.config.mlp:
        x = x + block.mlp(block.norm2(x))
    if self.config.class_token:
      return self.head(self.norm(x)[:, 0])
    return self.head(self.fc_norm(x.mean(1)))


def vit(config: ViTConfig) -> Any:
  """Returns a ViT, for one image."""
  return _ViT(config).eval()
