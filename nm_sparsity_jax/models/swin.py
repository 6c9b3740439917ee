"""The Swin Transformer V2, with timm's structure and names.

    images -> patches -> stages of [merge 2x2 tokens, but in the first; blocks] -> norm -> mean
      -> logits
    block: x + norm(attention within windows x), then x + norm(mlp x)

Every other block shifts its windows by half of their size. A feature map that is not larger than a
window is one window, and is not shifted. `swin_windows` has the attention within windows.

Shapes: batch b, height h, width w, width d.

Reference: Liu et al., Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022,
arXiv:2111.09883.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.models import image_parts as parts
from nm_sparsity_jax.models import swin_windows as windows
from nm_sparsity_jax.training.layers import Dense
from nm_sparsity_jax.training.rules import Rules

_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class SwinConfig:
  """Sizes and choices of a Swin Transformer V2; the defaults are SwinV2-B with window 8.

  >>> SwinConfig().widths
  (128, 256, 512, 1024)

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
    remat: the backward pass computes each block again.
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
  remat: bool = False

  def __post_init__(self):
    parts.make_tuples(self, "depths", "heads")
    sizes = ("image_size", "patch", "channels", "embed", "depths", "heads", "window", "mlp_ratio")
    parts.check_config(self, (*sizes, "classes"), ("dropout", "drop_path"))
    parts.check_divides(self, "image_size", "patch")
    for stage, (width, heads, side) in enumerate(
      zip(self.widths, self.heads, self.sides, strict=True)
    ):
      if width % heads:
        raise ValueError(
          f"SwinConfig(embed={self.embed}, heads={self.heads}): the {heads} heads of stage {stage} "
          f"must divide its {width} channels."
        )
      if side > self.window and side % self.window:
        raise ValueError(
          f"SwinConfig(image_size={self.image_size}, patch={self.patch}, window={self.window}): "
          f"stage {stage} has {side} x {side} tokens, which windows of {self.window} do not fill."
        )

  @property
  def widths(self) -> tuple[int, ...]:
    """Returns the width of each stage."""
    return tuple(self.embed * 2**stage for stage in range(len(self.depths)))

  @property
  def sides(self) -> tuple[int, ...]:
    """Returns the tokens of a side of each stage's feature map."""
    side = self.image_size // self.patch
    halvings = len(self.depths) - 1
    if side % 2**halvings:
      raise ValueError(
        f"SwinConfig(image_size={self.image_size}, patch={self.patch}): image_size must be a "
        f"multiple of {self.patch * 2**halvings}, for {side} x {side} tokens are halved {halvings} "
        "times."
      )
    return tuple(side // 2**stage for stage in range(len(self.depths)))


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
  return parts.choose(CONFIGS, name, changes)


class Block(nn.Module):
  """x + norm(attention x), then x + norm(mlp x).

  Attributes:
    heads: of the stage.
    shifted: whether the windows are, where the map is larger than one.
    config: sizes.
    rules: what is sparse, and how; None = dense.
  """

  heads: int
  shifted: bool
  config: SwinConfig
  rules: Rules | None = None

  @nn.compact
  def __call__(self, x: jax.Array, rate: Any, train: bool) -> jax.Array:
    """Maps [b, h, w, d] to [b, h, w, d].

    Args:
      x: [b, h, w, d].
      rate: of the drop path.
      train: dropout and drop path act.
    """
    cfg, (side, width) = self.config, x.shape[2:]
    window = min(cfg.window, side)
    shift = cfg.window // 2 if self.shifted and side > window else 0
    common: dict[str, Any] = dict(dropout=cfg.dropout, dtype=cfg.dtype, rules=self.rules)
    drops = train and cfg.drop_path > 0
    drop = (lambda y: parts.drop_path(self, y, rate)) if drops else (lambda y: y)
    norm = lambda y, name: drop(_norm(cfg, y, name, zero=True))

    y = jnp.roll(x, (-shift, -shift), (1, 2)) if shift else x
    attention = windows.WindowAttention(self.heads, window, **common, name="attn")
    bias = windows.shift_bias(side, window, shift) if shift else None
    y = windows.from_windows(attention(windows.to_windows(y, window), train, bias), window, side)
    y = jnp.roll(y, (shift, shift), (1, 2)) if shift else y
    x = x + norm(y, "norm1")
    return x + norm(parts.Mlp(cfg.mlp_ratio * width, **common, name="mlp")(x, train), "norm2")


class Merge(nn.Module):
  """Makes one token of each 2 x 2, twice as wide.

  Attributes:
    config: sizes.
    rules: what is sparse, and how; None = dense.
  """

  config: SwinConfig
  rules: Rules | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [b, h, w, d] to [b, h / 2, w / 2, 2 d]."""
    b, h, w, d = x.shape
    # Of the four, the row changes first: timm's order.
    x = x.reshape(b, h // 2, 2, w // 2, 2, d).transpose(0, 1, 3, 4, 2, 5)
    reduction = Dense(
      2 * d,
      use_bias=False,
      dtype=jnp.dtype(self.config.dtype),
      kernel_init=parts.kernel_init,
      rules=self.rules,
      name="reduction",
    )
    return _norm(self.config, reduction(x.reshape(b, h // 2, w // 2, 4 * d)), "norm")


class Stage(nn.Module):
  """A merge, but in the first stage, and blocks.

  Attributes:
    stage: its number.
    config: sizes.
    rules: what is sparse, and how; None = dense.
  """

  stage: int
  config: SwinConfig
  rules: Rules | None = None

  @nn.compact
  def __call__(self, x: jax.Array, rates: np.ndarray, train: bool) -> jax.Array:
    """Maps [b, h, w, d] to [b, h, w, d], or to [b, h / 2, w / 2, 2 d] with a merge.

    Args:
      x: [b, h, w, d].
      rates: of the drop path, of each block.
      train: dropout and drop path act.
    """
    cfg = self.config
    if self.stage:
      x = Merge(cfg, self.rules, name="downsample")(x)
    run = parts.run_block(cfg.remat, train)
    for i, rate in enumerate(rates):
      block = Block(cfg.heads[self.stage], i % 2 == 1, cfg, self.rules, name=f"blocks_{i}")
      x = run(block, x, rate)
    return x


class _Head(nn.Module):
  """float32 logits [b, classes] of the mean over a feature map [b, h, w, d]."""

  classes: int
  rules: Rules | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return parts.head(jnp.mean(x, axis=(1, 2)), self.classes, "fc", self.rules)


class Swin(nn.Module):
  """A Swin Transformer V2.

      network = Swin(config("swinv2_b_w8"))
      variables = network.init(key, images)
      logits = network.apply(variables, images)
      logits = network.apply(variables, images, train=True, rngs={"dropout": key})

  Where `rules` name a kernel, `variables` must hold the step: `nms.layers.with_step`.

  Attributes:
    config: sizes and choices.
    rules: what is sparse, and how; None = dense.
  """

  config: SwinConfig
  rules: Rules | None = None

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Maps normalized images [b, image_size, image_size, channels] to float32 logits [b, classes].

    Args:
      images: float32.
      train: dropout and drop path act, by the keys of the stream 'dropout'.
    """
    cfg = self.config
    parts.check_images(images, cfg)
    x = parts.PatchEmbed(
      cfg.patch, cfg.embed, cfg.dtype, self.rules, _EPSILON, name="patch_embed"
    )(images)  # fmt: skip
    rates = parts.drop_path_rates(cfg.drop_path, sum(cfg.depths))
    rates = np.split(rates, np.cumsum(cfg.depths)[:-1])
    for i in range(len(cfg.depths)):
      x = Stage(i, cfg, self.rules, name=f"layers_{i}")(x, rates[i], train)
    return _Head(cfg.classes, self.rules, name="head")(_norm(cfg, x, "norm"))


def _norm(cfg: SwinConfig, x: jax.Array, name: str, zero: bool = False) -> jax.Array:
  """Returns `x` normalized; `zero`: a new norm gives 0, so that a new block is the identity."""
  return parts.layer_norm(x, name, _EPSILON, cfg.dtype, zero)
