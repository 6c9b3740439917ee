"""The Vision Transformer, with timm's structure and names.

    images -> patches -> + positions -> blocks of [norm, attention; norm, MLP] -> norm -> logits

Shapes: batch b, tokens n, heads h, head_dim k, width d.

Reference: Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale, ICLR 2021, arXiv:2010.11929.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.models import image_parts as parts

_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class ViTConfig:
  """Sizes and choices of a Vision Transformer; the defaults are ViT-Base/16.

  >>> ViTConfig(image_size=32, patch=4).tokens
  65

  Attributes:
    image_size: pixels of a side.
    patch: pixels of a side of a patch.
    channels: of an image.
    layers: blocks.
    embed: width d of the residual stream.
    heads: attention heads.
    mlp: width between the two kernels of the MLP; 0 = the blocks have none.
    classes: logits.
    class_token: the logits come from a token of their own; else from the mean of all tokens.
    dropout: behind the positions, the attention and both kernels of the MLP.
    drop_path: share of the examples that skip a branch of the last block; less before.
    dtype: of the computation; parameters and logits are float32.
    std: deviation of new kernels in the blocks; timm's. A small network learns faster from more.
  """

  image_size: int = 224
  patch: int = 16
  channels: int = 3
  layers: int = 12
  embed: int = 768
  heads: int = 12
  mlp: int = 3072
  classes: int = 1000
  class_token: bool = True
  dropout: float = 0.0
  drop_path: float = 0.0
  dtype: str = "float32"
  std: float = parts.STD

  def __post_init__(self):
    if self.image_size % self.patch:  # a convolution would leave pixels of the edge out
      raise ValueError(
        f"ViTConfig(image_size={self.image_size}, patch={self.patch}): patch must divide it."
      )

  @property
  def tokens(self) -> int:
    """Returns how many tokens a block sees."""
    return (self.image_size // self.patch) ** 2 + self.class_token


CONFIGS = {
  # The N:M paper's for CIFAR-10, at 224 pixels.
  "vit_tiny_3": ViTConfig(layers=3, embed=192, heads=3, mlp=768, classes=10),
  "vit_b16": ViTConfig(),
  "vit_test": ViTConfig(
    image_size=16, patch=4, layers=2, embed=32, heads=2, mlp=64, classes=10
  ),
}  # fmt: skip


def config(name: str, **changes: Any) -> ViTConfig:
  """Returns one of `CONFIGS`, with some fields changed.

  >>> config("vit_b16", classes=10).classes
  10

  Args:
    name: 'vit_b16', 'vit_tiny_3' or 'vit_test'.
    **changes: fields of `ViTConfig`.
  """
  return dataclasses.replace(choose(CONFIGS, "network", name), **changes)


class Attention(parts.SelfAttention):
  """Self-attention: softmax(q . k / sqrt(head_dim)) . v, for each head."""

  def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns q . k / sqrt(head_dim)."""
    # q is scaled, not the scores: fewer products, and timm's order.
    return jnp.einsum("bqhk,bnhk->bhqn", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)


class Block(nn.Module):
  """x + attention(norm x), then x + mlp(norm x).

  Attributes:
    config: sizes.
  """

  config: ViTConfig

  @nn.compact
  def __call__(self, x: jax.Array, rate: Any, train: bool) -> jax.Array:
    """Maps [b, n, d] to [b, n, d].

    Args:
      x: [b, n, d].
      rate: of the drop path.
      train: dropout and drop path act.
    """
    cfg = self.config
    norm = lambda x, name: parts.layer_norm(x, name, _EPSILON, cfg.dtype)
    drop = lambda y: parts.drop_path(self, y, rate, train)
    attention = Attention(cfg.heads, cfg, cfg.std, name="attn")
    x = x + drop(attention(norm(x, "norm1"), train))
    if not cfg.mlp:
      return x
    mlp = parts.Mlp(cfg.mlp, cfg, cfg.std, name="mlp")
    return x + drop(mlp(norm(x, "norm2"), train))


class ViT(nn.Module):
  """A Vision Transformer.

      network = ViT(config("vit_b16"))
      variables = network.init(key, images)
      logits = network.apply(variables, images)
      logits = network.apply(variables, images, train=True, rngs={"dropout": key})

  Attributes:
    config: sizes and choices.
  """

  config: ViTConfig

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Maps normalized images [b, image_size, image_size, channels] to float32 logits [b, classes].

    Args:
      images: float32.
      train: dropout and drop path act, by the keys of the stream 'dropout'.
    """
    cfg = self.config
    parts.check_images(images, cfg)
    dtype = jnp.dtype(cfg.dtype)
    patches = parts.PatchEmbed(cfg, name="patch_embed")
    x = patches(images).reshape(len(images), -1, cfg.embed)
    if cfg.class_token:
      # Near 0, as in timm: its position makes it differ from the patches.
      token = self.param("cls_token", nn.initializers.normal(1e-6), (1, 1, cfg.embed))
      token = jnp.broadcast_to(token.astype(dtype), (len(images), 1, cfg.embed))
      x = jnp.concatenate([token, x], axis=1)
    positions = self.param("pos_embed", parts.kernel_init, (1, cfg.tokens, cfg.embed))
    x = nn.Dropout(cfg.dropout)(x + positions.astype(dtype), not train)
    for i, rate in enumerate(parts.drop_path_rates(cfg.drop_path, cfg.layers)):
      x = Block(cfg, name=f"blocks_{i}")(x, rate, train)
    if cfg.class_token:
      x = parts.layer_norm(x, "norm", _EPSILON, cfg.dtype)[:, 0]
    else:  # timm's names and order
      x = parts.layer_norm(jnp.mean(x, axis=1), "fc_norm", _EPSILON, cfg.dtype)
    return parts.head(x, cfg.classes, "head")
