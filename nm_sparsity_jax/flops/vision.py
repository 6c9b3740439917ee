"""Shapes of ViT, SwinV2 and ResNet: their sizes, and the operations that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from nm_sparsity_jax.flops import parts
from nm_sparsity_jax.flops.ops import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTShape:
  """A Vision Transformer (arXiv 2010.11929); the defaults are ViT-Base/16 at 224 x 224.

  The paper's totals (Tables 1, 17, 18) are `attention` + `ff` without a [CLS] token: patch
  embedding, head, norms and biases are not in them, and are apart here:

  >>> from nm_sparsity_jax.flops import Cost
  >>> paper = Cost(ViTShape().ops()).select("attention", "ff")
  >>> round(paper.flops / 1e9, 2)
  34.71

  Attributes:
    layers: Transformer blocks.
    embed: width d of the residual stream.
    mlp: width of the MLP; 0 = there is none.
    heads: attention heads.
    head_dim: width of a head.
    gated: two input kernels (wi_0 * wi_1) in the MLP instead of one.
    tokens: image patches n.
    class_token: whether a [CLS] token is prepended (n + 1 tokens in every block).
    patch: numbers in a patch, 16 * 16 * 3.
    channels: of an image.
    classes: outputs of the head; 0 = no head.
    bias: whether kernels have one.
  """

  layers: int = 12
  embed: int = 768
  mlp: int = 3072
  heads: int = 12
  head_dim: int = 64
  gated: bool = False
  tokens: int = 196
  class_token: bool = False
  patch: int = 768
  channels: int = 3
  classes: int = 1000
  bias: bool = True

  def __post_init__(self):
    parts.check_sizes(self, zero=("classes", "mlp"))

  @classmethod
  def of(cls, config: Any) -> ViTShape:
    """Returns the shape of a network: of a `models.vit.ViTConfig`, or one with its names."""
    return cls(
      layers=config.layers,
      embed=config.embed,
      mlp=config.mlp,
      heads=config.heads,
      head_dim=config.embed // config.heads,
      tokens=(config.image_size // config.patch) ** 2,
      class_token=config.class_token,
      patch=config.patch**2 * config.channels,
      channels=config.channels,
      classes=config.classes,
    )

  def ops(self) -> tuple[Op, ...]:
    """Returns the dense forward FLOPs for one image, and all parameters."""
    n, d, layers = self.tokens + self.class_token, self.embed, self.layers
    joined = self.heads * self.head_dim
    ff = parts.mlp("encoder", layers, n, d, self.mlp, self.gated) if self.mlp else ()
    biases = (1 + self.gated) * self.mlp + d if self.mlp else 0
    norms = layers * (2 if self.mlp else 1) + 1
    ops = [
      Op(
        name="encoder/patch_embedding",
        role="stem",
        place="encoder",
        flops=2 * self.tokens * self.patch * d,
        params=self.patch * d,
        axis=self.channels,
        prunable=True,
      ),
      Op(name="encoder/position", role="position", place="encoder", params=n * d),
      Op(name="encoder/class_token", role="position", place="encoder", params=d * self.class_token),
      *parts.attention("encoder/self", layers, n, n, d, joined),
      *ff,
      Op(name="encoder/norm", role="norm", place="encoder", params=2 * d * norms),
    ]
    if self.bias:
      ops.append(
        Op(
          name="encoder/bias",
          role="bias",
          place="encoder",
          params=layers * (3 * joined + d + biases) + d + self.classes,
        )
      )
    if self.classes:
      ops.append(
        Op(
          name="encoder/logits",
          role="head",
          place="encoder",
          flops=2 * d * self.classes,
          params=d * self.classes,
          axis=d,
          prunable=True,
        )
      )
    return tuple(ops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwinShape:
  """A Swin Transformer V2 (arXiv 2111.09883); the defaults are SwinV2-B with window 8 at 256.

  Operations are summed over the blocks of a stage, whose tokens and width they share.

  >>> from nm_sparsity_jax.flops import Cost
  >>> round(Cost(SwinShape().ops()).flops / 1e9, 2), Cost(SwinShape().ops()).params
  (40.65, 87918816)

  Attributes:
    image_size: pixels of a side.
    patch: pixels of a side of a patch.
    channels: of an image.
    embed: width of the first stage; each further one is twice as wide and has half the side.
    depths: blocks of each stage.
    heads: of each stage.
    window: tokens of a side of a window, inside which attention looks; at most the stage's side.
    mlp_ratio: width of an MLP over that of its stage.
    hidden: width of the small MLP that makes position biases.
    classes: outputs of the head.
  """

  image_size: int = 256
  patch: int = 4
  channels: int = 3
  embed: int = 128
  depths: tuple[int, ...] = (2, 2, 18, 2)
  heads: tuple[int, ...] = (4, 8, 16, 32)
  window: int = 8
  mlp_ratio: int = 4
  hidden: int = 512
  classes: int = 1000

  def __post_init__(self):
    parts.check_sizes(self)
    parts.check_same_length(self, "depths", "heads")

  @classmethod
  def of(cls, config: Any) -> SwinShape:
    """Returns the shape of a network: of a `models.swin.SwinConfig`, or one with its names."""
    return cls(
      image_size=config.image_size,
      patch=config.patch,
      channels=config.channels,
      embed=config.embed,
      depths=tuple(config.depths),
      heads=tuple(config.heads),
      window=config.window,
      mlp_ratio=config.mlp_ratio,
      classes=config.classes,
    )

  def ops(self) -> tuple[Op, ...]:
    """Returns the dense forward FLOPs for one image, and all parameters."""
    numbers = self.patch**2 * self.channels
    last = self.embed * 2 ** (len(self.depths) - 1)
    patches = (self.image_size // self.patch) ** 2
    stages = (op for stage in range(len(self.depths)) for op in self._stage(stage))
    return (
      parts.kernel("patch_embedding", "stem", "stem", patches, numbers, self.embed, self.channels),
      Op(name="patch_norm", role="norm", place="stem", params=2 * self.embed),
      Op(name="patch_bias", role="bias", place="stem", params=self.embed),
      *stages,
      Op(name="norm", role="norm", place="head", params=2 * last),
      parts.kernel("logits", "head", "head", 1, last, self.classes),
      Op(name="bias", role="bias", place="head", params=self.classes),
    )

  def _stage(self, stage: int) -> Iterator[Op]:
    """Yields the operations of a stage, with the merging of patches before it."""
    place, d = f"layers_{stage}", self.embed * 2**stage
    blocks, heads = self.depths[stage], self.heads[stage]
    side = self.image_size // self.patch // 2**stage
    window, mlp = min(self.window, side), self.mlp_ratio * d
    norms = 4 * d * blocks
    if stage:
      yield parts.kernel(f"{place}/reduction", "merge", place, side**2, 2 * d, d)
      norms += 2 * d
    yield from parts.attention(place, blocks, side**2, side**2, d, d, window**2)
    yield from parts.mlp(place, blocks, side**2, d, mlp, gated=False)
    weights = blocks * self.hidden * (2 + heads)
    offsets = (2 * window - 1) ** 2  # between two tokens of a window
    yield Op(
      name=f"{place}/position",
      role="position",
      place=place,
      flops=2 * offsets * weights,
      params=weights + blocks * self.hidden,
    )
    yield Op(name=f"{place}/scale", role="scale", place=place, params=blocks * heads)
    yield Op(name=f"{place}/norm", role="norm", place=place, params=norms)
    # Of q, v, o and both kernels of the MLP; k has none.
    yield Op(name=f"{place}/bias", role="bias", place=place, params=blocks * (4 * d + mlp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetShape:
  """A ResNet of bottleneck blocks (arXiv 1512.03385); the defaults are ResNet-50 at 224 x 224.

  The 3 x 3 convolution of a stage's first block has the stride, as in timm and torchvision. Each
  convolution is an operation of its own, since first blocks see larger images than the others.

  >>> from nm_sparsity_jax.flops import Cost
  >>> cost = Cost(ResNetShape().ops())
  >>> round(cost.flops / 2e9, 3), cost.params, round(cost.select("conv").flops / cost.flops, 2)
  (4.089, 25557032, 0.88)

  Attributes:
    image_size: pixels of a side.
    channels: of an image.
    depths: blocks of each stage.
    widths: channels inside the blocks of each stage; they put out four times as many.
    stem: side of the first kernel, which puts out as many channels as the first stage's blocks
      have inside.
    classes: outputs of the head.
  """

  image_size: int = 224
  channels: int = 3
  depths: tuple[int, ...] = (3, 4, 6, 3)
  widths: tuple[int, ...] = (64, 128, 256, 512)
  stem: int = 7
  classes: int = 1000

  def __post_init__(self):
    parts.check_sizes(self)
    parts.check_same_length(self, "depths", "widths")

  @classmethod
  def of(cls, config: Any) -> ResNetShape:
    """Returns the shape of a network: of a `models.resnet.ResNetConfig`, or one with its names."""
    return cls(
      image_size=config.image_size,
      channels=config.channels,
      depths=tuple(config.depths),
      widths=tuple(config.widths),
      stem=config.stem,
      classes=config.classes,
    )

  def ops(self) -> tuple[Op, ...]:
    """Returns the dense forward FLOPs for one image, and all parameters."""
    halved = -(-self.image_size // 2)  # by the stem, then by its pooling
    first = self.widths[0]
    ops = [*_conv("conv1", "stem", "stem", halved, self.stem, self.channels, first)]
    side, before = -(-halved // 2), first
    for stage, (blocks, width) in enumerate(zip(self.depths, self.widths, strict=True)):
      for block in range(blocks):
        stride = 2 if stage and not block else 1
        ops += self._block(f"layer{stage + 1}", block, side, stride, before, width)
        side, before = -(-side // stride), 4 * width
    return (
      *ops,
      parts.kernel("fc", "head", "head", 1, before, self.classes),
      Op(name="fc_bias", role="bias", place="head", params=self.classes),
    )

  def _block(
    self, stage: str, block: int, side: int, stride: int, before: int, width: int
  ) -> Iterator[Op]:
    """Yields the convolutions of a block that sees `side` x `side` pixels of `before` channels."""
    name, after, small = f"{stage}_{block}", 4 * width, -(-side // stride)
    yield from _conv(f"{name}/conv1", "conv", stage, side, 1, before, width)
    yield from _conv(f"{name}/conv2", "conv", stage, small, 3, width, width)
    yield from _conv(f"{name}/conv3", "conv", stage, small, 1, width, after)
    if stride > 1 or before != after:
      yield from _conv(f"{name}/downsample_conv", "shortcut", stage, small, 1, before, after)


def _conv(
  name: str, role: str, place: str, side: int, kernel: int, before: int, after: int
) -> Iterator[Op]:
  """Yields a convolution that puts out `side` x `side` pixels, and the norm behind it."""
  yield parts.kernel(name, role, place, side**2, kernel**2 * before, after, axis=before)
  yield Op(name=f"{name}/norm", role="norm", place=place, params=2 * after)
