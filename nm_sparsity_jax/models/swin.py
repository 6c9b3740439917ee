"""The Swin Transformer V2, with timm's structure and names.

    images -> patches -> stages of [merge 2x2 tokens, but in the first; blocks] -> norm -> mean
      -> logits
    block: x + norm(attention within windows x), then x + norm(mlp x)

Every other block shifts its windows by half of their size. A feature map that is not larger than a
window is one window, and is not shifted.

    [b, h, w, d] -> [to_windows] -> [b z, n, d] -> WindowAttention -> [from_windows] -> [b, h, w, d]

Shapes: batch b, height h, width w, windows z, tokens of a window n, heads a, head_dim k, width d.

Reference: Liu et al., Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022,
arXiv:2111.09883.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.models import image_parts as parts
from nm_sparsity_jax.training.layers import Dense

_EPSILON = 1e-5
_SHARPEST = math.log(100)  # the largest logarithm of the scale of cosines
_APART = -100.0  # added between tokens that the shift made neighbours
_WIDEST_BIAS = 16.0
_HIDDEN = 512  # of the MLP of positions


@dataclasses.dataclass(frozen=True)
class SwinConfig:
  """Sizes and choices of a Swin Transformer V2; the defaults are SwinV2-B with window 8.

  >>> SwinConfig().sides
  (64, 32, 16, 8)

  Attributes:
    image_size: pixels of a side.
    patch: pixels of a side of a patch.
    channels: of an image.
    embed: width of the first stage; each next one is twice as wide.
    depths: blocks of each stage.
    heads: attention heads of each stage.
    window: tokens of a side of a window.
    mlp_ratio: width between the two kernels of an MLP, over that of the stage.
    classes: logits.
    dropout: behind the attention and both kernels of the MLP.
    drop_path: share of the examples that skip a branch of the last block; less before.
    dtype: of the computation; parameters and logits are float32.
  """

  image_size: int = 256
  patch: int = 4
  channels: int = 3
  embed: int = 128
  depths: tuple[int, ...] = (2, 2, 18, 2)
  heads: tuple[int, ...] = (4, 8, 16, 32)
  window: int = 8
  mlp_ratio: int = 4
  classes: int = 1000
  dropout: float = 0.0
  drop_path: float = 0.1
  dtype: str = "float32"

  def __post_init__(self):
    multiple = self.patch * 2 ** (len(self.depths) - 1)
    unfilled = [side for side in self.sides if side > self.window and side % self.window]
    if self.image_size % multiple or unfilled:
      raise ValueError(
        f"SwinConfig(image_size={self.image_size}, patch={self.patch}, window={self.window}): "
        f"image_size must be a multiple of {multiple}, and windows must fill feature maps of "
        f"{self.sides} tokens a side."
      )

  @property
  def sides(self) -> tuple[int, ...]:
    """Returns the tokens of a side of each stage's feature map."""
    return tuple(self.image_size // self.patch // 2**stage for stage in range(len(self.depths)))


CONFIGS = {
  "swinv2_b_w8": SwinConfig(),
  # Windows that are shifted, one that is all of the map, and one that had to shrink.
  "swinv2_test": SwinConfig(
    image_size=32, embed=16, depths=(2, 1, 1), heads=(1, 2, 2), window=4, mlp_ratio=2, classes=10
  ),
}


def config(name: str, **changes: Any) -> SwinConfig:
  """Returns one of `CONFIGS`, with some fields changed.

  >>> config("swinv2_b_w8", classes=10).classes
  10

  Args:
    name: 'swinv2_b_w8' or 'swinv2_test'.
    **changes: fields of `SwinConfig`.
  """
  return dataclasses.replace(choose(CONFIGS, "network", name), **changes)


# --- windows --------------------------------------------------------------------------------------


def _offsets(window: int) -> np.ndarray:
  """Returns the offsets from -(window - 1) to window - 1 in both directions, [2w-1, 2w-1, 2]."""
  # Logarithmic, so that the MLP extrapolates little to a larger window; 1 stands for the distance 8
  # of a window with its edge at 8.
  line = np.arange(1 - window, window, dtype=np.float32) * np.float32(8 / max(window - 1, 1))
  grid = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1)
  return (np.sign(grid) * np.log2(np.abs(grid) + 1) / 3).astype(np.float32)


def _pairs(window: int) -> np.ndarray:
  """Returns which of the flattened `_offsets` lies between two tokens, int32 [n, n]."""
  y, x = np.divmod(np.arange(window**2), window)
  apart = lambda at: at[:, None] - at[None, :] + window - 1
  return (apart(y) * (2 * window - 1) + apart(x)).astype(np.int32)


def shift_bias(side: int, window: int, shift: int) -> np.ndarray:
  """Returns 0 within a region of the map and `_APART` between two, float32 [z, n, n]."""
  # A shift moves rows and columns from one edge to the other, so the last windows hold tokens of
  # several regions, which were no neighbours before.
  part = np.zeros(side, np.int32)
  part[side - window :] = 1
  part[side - shift :] = 2
  regions = part[:, None] * 3 + part[None, :]
  windows = np.asarray(to_windows(regions[None, ..., None], window))[..., 0]
  same = windows[:, :, None] == windows[:, None, :]
  return np.where(same, 0, _APART).astype(np.float32)


def to_windows(x: Any, window: int) -> Any:
  """Cuts [b, h, w, d] into [b z, n, d]."""
  b, h, w, d = x.shape
  x = x.reshape(b, h // window, window, w // window, window, d)
  return x.swapaxes(2, 3).reshape(-1, window**2, d)


def from_windows(x: jax.Array, window: int, side: int) -> jax.Array:
  """Joins [b z, n, d] to [b, side, side, d]."""
  parts_of_a_side = side // window
  x = x.reshape(-1, parts_of_a_side, parts_of_a_side, window, window, x.shape[-1])
  return x.swapaxes(2, 3).reshape(-1, side, side, x.shape[-1])


def _direction(x: jax.Array) -> jax.Array:
  """Returns x / |x| over the last axis, in float32; 0 stays 0, with a finite gradient."""
  x = x.astype(jnp.float32)
  # The maximum before the root: the gradient of a root is inf at 0, and inf * 0 is NaN.
  squares = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


class WindowAttention(parts.SelfAttention):
  """Attention within windows: softmax(scale cos(q, k) + positions) . v, for each head.

  The biases of positions come from an MLP of the logarithmic offsets. k has no bias. Cosines and
  scale are float32.

  Attributes:
    side: tokens of a side of the map.
    window: tokens of a side of a window.
    shift: by how many tokens the map was shifted.
  """

  key_bias: bool = False
  side: int = 0
  window: int = 0
  shift: int = 0

  def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
    """Returns scale cos(q, k) + positions, of the windows of all examples."""
    # Cosines, not products: Swin V2's answer to scores that grow with the network.
    cosines = jnp.einsum("bqak,bnak->baqn", _direction(q), _direction(k))
    scale = self.param("logit_scale", nn.initializers.constant(math.log(10)), (self.heads, 1, 1))
    scores = cosines * jnp.exp(jnp.minimum(scale, _SHARPEST))[None] + self._positions()[None]
    if not self.shift:
      return scores
    bias = shift_bias(self.side, self.window, self.shift)[None, :, None]
    return (scores.reshape(-1, bias.shape[1], *scores.shape[1:]) + bias).reshape(scores.shape)

  def _positions(self) -> jax.Array:
    """Returns the bias between two tokens, float32 [a, n, n]."""
    dense = functools.partial(Dense, kernel_init=parts.kernel_init)  # float32
    offsets = jnp.asarray(_offsets(self.window)).reshape(-1, 2)
    hidden = nn.relu(dense(_HIDDEN, name="cpb_mlp_0")(offsets))
    table = dense(self.heads, use_bias=False, name="cpb_mlp_2")(hidden)
    # The MLP runs once for each offset, not for each of the n * n pairs that share them.
    pairs = jnp.take(table, jnp.asarray(_pairs(self.window)), axis=0)
    return _WIDEST_BIAS * jax.nn.sigmoid(pairs).transpose(2, 0, 1)


# --- stages ---------------------------------------------------------------------------------------


class Block(nn.Module):
  """x + norm(attention x), then x + norm(mlp x).

  Attributes:
    heads: of the stage.
    shifted: whether the windows are, where the map is larger than one.
    config: sizes.
  """

  heads: int
  shifted: bool
  config: SwinConfig

  @nn.compact
  def __call__(self, x: jax.Array, rate: Any, train: bool) -> jax.Array:
    """Maps [b, h, w, d] to [b, h, w, d].

    Args:
      x: [b, h, w, d].
      rate: of the drop path.
      train: dropout and drop path act.
    """
    cfg, (side, width) = self.config, x.shape[2:]
    window = min(cfg.window, side)  # the last maps are smaller than a window
    shift = cfg.window // 2 if self.shifted and side > window else 0
    # A new norm gives 0, so that a new block is the identity.
    norm = lambda y, name: parts.drop_path(
      self, parts.layer_norm(y, name, _EPSILON, cfg.dtype, nn.initializers.zeros), rate, train
    )
    y = jnp.roll(x, (-shift, -shift), (1, 2)) if shift else x
    attention = WindowAttention(self.heads, cfg, side=side, window=window, shift=shift, name="attn")
    y = from_windows(attention(to_windows(y, window), train), window, side)
    y = jnp.roll(y, (shift, shift), (1, 2)) if shift else y
    x = x + norm(y, "norm1")
    mlp = parts.Mlp(cfg.mlp_ratio * width, cfg, name="mlp")
    return x + norm(mlp(x, train), "norm2")


class Merge(nn.Module):
  """Makes one token of each 2 x 2, twice as wide.

  Attributes:
    config: sizes.
  """

  config: SwinConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [b, h, w, d] to [b, h / 2, w / 2, 2 d]."""
    b, h, w, d = x.shape
    # Of the four, the row changes first: timm's order.
    x = x.reshape(b, h // 2, 2, w // 2, 2, d).transpose(0, 1, 3, 4, 2, 5)
    dense = parts.dense(self.config)
    x = dense(2 * d, use_bias=False, name="reduction")(x.reshape(b, h // 2, w // 2, 4 * d))
    return parts.layer_norm(x, "norm", _EPSILON, self.config.dtype)


class Scope(nn.Module):
  """Gives the modules that a function makes a name in front of theirs, as timm has it.

  Attributes:
    body: the function.
  """

  body: Callable[[jax.Array], jax.Array]

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns body(x)."""
    return self.body(x)


class Swin(nn.Module):
  """A Swin Transformer V2.

      network = Swin(config("swinv2_b_w8"))
      variables = network.init(key, images)
      logits = network.apply(variables, images)
      logits = network.apply(variables, images, train=True, rngs={"dropout": key})

  Attributes:
    config: sizes and choices.
  """

  config: SwinConfig

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Maps normalized images [b, image_size, image_size, channels] to float32 logits [b, classes].

    Args:
      images: float32.
      train: dropout and drop path act, by the keys of the stream 'dropout'.
    """
    cfg = self.config
    parts.check_images(images, cfg)
    x = parts.PatchEmbed(cfg, _EPSILON, name="patch_embed")(images)
    rates = iter(parts.drop_path_rates(cfg.drop_path, sum(cfg.depths)))

    # Each block takes the next rate, so stages run once and in their order.
    def stage(i, x):
      if i:
        x = Merge(cfg, name="downsample")(x)
      for j in range(cfg.depths[i]):
        block = Block(cfg.heads[i], j % 2 == 1, cfg, name=f"blocks_{j}")
        x = block(x, next(rates), train)
      return x

    for i in range(len(cfg.depths)):
      x = Scope(functools.partial(stage, i), name=f"layers_{i}")(x)
    x = jnp.mean(parts.layer_norm(x, "norm", _EPSILON, cfg.dtype), axis=(1, 2))
    return Scope(lambda x: parts.head(x, cfg.classes, "fc"), name="head")(x)
