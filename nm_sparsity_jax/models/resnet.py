"""The ResNet of bottleneck blocks, with timm's structure and names.

    images -> conv, pool -> four stages of [1x1, 3x3, 1x1 convs; shortcut] -> mean -> logits

Averages of batch statistics are state: `network.init` returns them as 'batch_stats', and
`network.apply(..., train=True, mutable=["batch_stats"])` returns the new ones.

Shapes: batch b, height h, width w, channels c.

Reference: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, arXiv:1512.03385; as
in most libraries the 3x3 conv has the stride.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.models import image_parts as parts
from nm_sparsity_jax.training.layers import Conv

_KEPT = 0.9  # of the old average of batch statistics, at each step; torch calls 1 - 0.9 momentum
_EPSILON = 1e-5
_WIDER = 4  # a bottleneck's output over its width

# As timm starts convs: the variance of the gradient stays.
_conv_init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
  """Sizes and choices of a ResNet; the defaults are ResNet-50.

  >>> ResNetConfig(depths=(3, 4, 23, 3)).widths
  (64, 128, 256, 512)

  Attributes:
    image_size: pixels of a side.
    channels: of an image.
    depths: blocks of each stage.
    widths: of the bottlenecks of each stage; a stage's output is four times as wide. The first conv
      is as wide as the bottlenecks of the first stage.
    classes: logits.
    drop_path: share of the examples that skip the last block; less before.
    dtype: of the computation; parameters, batch statistics and logits are float32.
  """

  image_size: int = 224
  channels: int = 3
  depths: tuple[int, ...] = (3, 4, 6, 3)
  widths: tuple[int, ...] = (64, 128, 256, 512)
  classes: int = 1000
  drop_path: float = 0.0
  dtype: str = "float32"


CONFIGS = {
  "resnet50": ResNetConfig(),
  "resnet_test": ResNetConfig(
    image_size=32, depths=(1, 2, 1, 1), widths=(64, 16, 16, 32), classes=10
  ),
}


def config(name: str, **changes: Any) -> ResNetConfig:
  """Returns one of `CONFIGS`, with some fields changed.

  >>> config("resnet50", classes=10).classes
  10

  Args:
    name: 'resnet50' or 'resnet_test'.
    **changes: fields of `ResNetConfig`.
  """
  return dataclasses.replace(choose(CONFIGS, "network", name), **changes)


def _batch_norm(
  x: jax.Array, name: str, train: bool, dtype: str, scale: Any = nn.initializers.ones
) -> jax.Array:
  """Returns `x` normalized over all but its last axis; its statistics are float32."""
  # flax mixes its float32 statistics with narrower inputs.
  with jax.numpy_dtype_promotion("standard"):
    return nn.BatchNorm(
      use_running_average=not train,
      momentum=_KEPT,
      epsilon=_EPSILON,
      dtype=jnp.dtype(dtype),
      scale_init=scale,
      use_fast_variance=False,
      name=name,
    )(x)


def _conv(features: int, kernel: int, strides: int, dtype: str, name: str):
  # SAME of XLA pads less in front where a stride is 2; torch pads alike on both sides. A norm
  # follows, so no conv has a bias.
  return Conv(
    features,
    (kernel, kernel),
    strides=strides,
    padding=kernel // 2,
    use_bias=False,
    dtype=jnp.dtype(dtype),
    kernel_init=_conv_init,
    name=name,
  )


class Bottleneck(nn.Module):
  """relu(shortcut x + bn . conv 1x1 . relu . bn . conv 3x3 . relu . bn . conv 1x1 . x).

  Attributes:
    width: of the 3x3 conv.
    strides: of the 3x3 conv and of the shortcut.
    config: sizes.
  """

  width: int
  strides: int
  config: ResNetConfig

  @nn.compact
  def __call__(self, x: jax.Array, rate: Any, train: bool) -> jax.Array:
    """Maps [b, h, w, c] to [b, h / strides, w / strides, 4 width].

    Args:
      x: [b, h, w, c].
      rate: of the drop path.
      train: by statistics of the batch; drop path acts.
    """
    cfg = self.config
    conv = functools.partial(_conv, dtype=cfg.dtype)
    norm = functools.partial(_batch_norm, train=train, dtype=cfg.dtype)
    y = nn.relu(norm(conv(self.width, 1, 1, name="conv1")(x), "bn1"))
    y = nn.relu(norm(conv(self.width, 3, self.strides, name="conv2")(y), "bn2"))
    y = conv(_WIDER * self.width, 1, 1, name="conv3")(y)
    y = norm(y, "bn3", scale=nn.initializers.zeros)  # a new block is its shortcut
    y = parts.drop_path(self, y, rate, train)
    if self.strides > 1 or x.shape[-1] != y.shape[-1]:
      x = conv(_WIDER * self.width, 1, self.strides, name="downsample_conv")(x)
      x = norm(x, "downsample_bn")
    return nn.relu(x + y)


class ResNet(nn.Module):
  """A ResNet.

      network = ResNet(config("resnet50"))
      variables = network.init(key, images)  # params, batch_stats
      logits = network.apply(variables, images)
      logits, new = network.apply(variables, images, train=True, mutable=["batch_stats"])

  Attributes:
    config: sizes and choices.
  """

  config: ResNetConfig

  @nn.compact
  def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
    """Maps normalized images [b, image_size, image_size, channels] to float32 logits [b, classes].

    Args:
      images: float32.
      train: normalize by the batch's own statistics and renew the averages; drop path acts, by the
        keys of the stream 'dropout'.
    """
    cfg = self.config
    parts.check_images(images, cfg)
    x = _conv(cfg.widths[0], 7, 2, cfg.dtype, "conv1")(images)
    x = nn.relu(_batch_norm(x, "bn1", train, cfg.dtype))
    # As torch: a border of one that never is the largest.
    padding: Any = ((1, 1), (1, 1))
    x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
    rates = iter(parts.drop_path_rates(cfg.drop_path, sum(cfg.depths)))
    for stage, (depth, width) in enumerate(zip(cfg.depths, cfg.widths, strict=True)):
      for i in range(depth):
        strides = 2 if stage and not i else 1
        block = Bottleneck(width, strides, cfg, name=f"layer{stage + 1}_{i}")
        x = block(x, next(rates), train)
    init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # torch's
    return parts.head(jnp.mean(x, axis=(1, 2)), cfg.classes, "fc", init)
