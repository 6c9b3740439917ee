"""What the networks for images share: named sizes, checks, norms, drop path, the MLP, patches.

Shapes: batch b, height h, width w, channels c, tokens n, width of the residual stream d.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import checkpoint_policies as keep

from nm_sparsity_jax.training.layers import Conv, Dense
from nm_sparsity_jax.training.rules import Rules

_Config = TypeVar("_Config")

DTYPES = ("float32", "bfloat16", "float16")
# What the backward pass of a block under remat finds stored, beside its input.
_STORED = keep.save_only_these_names("nm_mask")
STD = 0.02  # of new kernels, as timm starts its transformers
kernel_init = nn.initializers.normal(STD)


# --- configs ----------------------------------------------------------------------------------


def choose(configs: Mapping[str, _Config], name: str, changes: Mapping[str, Any]) -> _Config:
  """Returns the config of a name, with some fields changed.

  Args:
    configs: name -> config, all of one class.
    name: one of them.
    changes: field -> its value.
  """
  if name not in configs:
    raise ValueError(f"there is no network {name!r} here: choose one of {', '.join(configs)}.")
  config: Any = configs[name]
  return dataclasses.replace(config, **changes)


def check_config(config: Any, sizes: tuple[str, ...], rates: tuple[str, ...]) -> None:
  """Refuses sizes below 1, rates outside [0, 1) and an unknown dtype.

  Args:
    config: with fields of these names, and `dtype`.
    sizes: fields that are a whole number, or several.
    rates: fields that are a share.
  """
  name = type(config).__name__
  for field in sizes:
    value = getattr(config, field)
    if any(x < 1 for x in (value if isinstance(value, tuple) else (value,))):
      raise ValueError(f"{name}({field}={value!r}): a size is a whole number from 1 on.")
  for field in rates:
    value = getattr(config, field)
    if not 0 <= value < 1:
      raise ValueError(f"{name}({field}={value!r}): it is a share, at least 0 and below 1.")
  if config.dtype not in DTYPES:
    raise ValueError(f"{name}(dtype={config.dtype!r}): choose one of {', '.join(DTYPES)}.")


def make_tuples(config: Any, *fields: str) -> None:
  """Makes tuples of fields that have an entry for each stage: gin makes lists of them.

  Args:
    config: frozen, with fields of these names.
    *fields: equally long.
  """
  for field in fields:
    object.__setattr__(config, field, tuple(getattr(config, field)))
  if len({len(getattr(config, field)) for field in fields}) > 1:
    each = ", ".join(f"{field}={getattr(config, field)}" for field in fields)
    raise ValueError(f"{type(config).__name__}({each}): give each stage one of each.")


def check_divides(config: Any, field: str, by: str) -> None:
  """Refuses a size that another one does not divide.

  Args:
    config: with fields of these names.
    field: the size.
    by: what must divide it.
  """
  size, part = getattr(config, field), getattr(config, by)
  if size % part:
    raise ValueError(f"{type(config).__name__}({field}={size}, {by}={part}): {by} must divide it.")


def check_images(images: jax.Array, config: Any) -> None:
  """Refuses images of a shape or of a type that the network is not made for.

  Args:
    images: [b, h, w, c].
    config: with `image_size` and `channels`.
  """
  want = config.image_size, config.image_size, config.channels
  if images.ndim != 4 or images.shape[1:] != want:
    raise ValueError(
      f"images of shape {images.shape}: the network takes [batch, {', '.join(map(str, want))}]. "
      "Resize them, or set image_size and channels of its config."
    )
  if not jnp.issubdtype(images.dtype, jnp.floating):
    raise ValueError(
      f"images of {images.dtype}: the network takes floats about 0, such as those that "
      "nm_sparsity_jax.trainer.images.augment.normalized makes of uint8."
    )


# --- parts ------------------------------------------------------------------------------------


def layer_norm(
  x: jax.Array, name: str, epsilon: float, dtype: str, zero: bool = False
) -> jax.Array:
  """Returns `x` normalized over its last axis, with a scale and a bias of its own.

  Args:
    x: [..., d].
    name: of the norm among the parameters.
    epsilon: added to the variance.
    dtype: of the result; mean and variance are float32.
    zero: start from a scale of 0.
  """
  # flax mixes its float32 statistics with narrower inputs.
  with jax.numpy_dtype_promotion("standard"):
    return nn.LayerNorm(
      epsilon,
      dtype=jnp.dtype(dtype),
      scale_init=nn.initializers.zeros if zero else nn.initializers.ones,
      use_fast_variance=False,
      name=name,
    )(x)


def drop_path_rates(most: float, depth: int) -> np.ndarray:
  """Returns the rate of each block, float32 [depth]: from 0 in the first to `most` in the last."""
  return np.linspace(0.0, most, depth, dtype=np.float32)


def drop_path(module: nn.Module, x: jax.Array, rate: Any) -> jax.Array:
  """Returns `x`, with 0 for some examples as a whole and the others scaled up.

  Args:
    module: brings the key, of the stream 'dropout'.
    x: [b, ...].
    rate: share of examples that get 0; a number, or a float32 scalar of a scan.
  """
  kept = 1 - jnp.asarray(rate, jnp.float32)
  shape = (x.shape[0],) + (1,) * (x.ndim - 1)
  alive = jax.random.bernoulli(module.make_rng("dropout"), kept, shape)
  return jnp.where(alive, x / kept.astype(x.dtype), jnp.zeros((), x.dtype))


def run_block(remat: bool, train: bool, scanned: bool = False) -> Callable[..., jax.Array]:
  """Returns (block, x, rate) -> block(x, rate, train), under remat where it is asked for.

  The backward pass then computes a block again from its input, and finds its N:M masks stored.

  Args:
    remat: compute again instead of storing.
    train: as the block's call takes it.
    scanned: within a scan, which keeps XLA from undoing the remat by itself.
  """

  def run(block, x, rate):
    return block(x, rate, train)

  return nn.remat(run, prevent_cse=not scanned, policy=_STORED) if remat else run


def gelu(x: jax.Array) -> jax.Array:
  """Returns x P(X <= x) of a standard normal X (Hendrycks & Gimpel, 2016, arXiv:1606.08415).

      gelu(x) = x (1 + erf(x / sqrt 2)) / 2

  PyTorch has this form too. `jax.nn.gelu(approximate=False)` uses erfc, which keeps the digits of
  tiny results and takes more than twice as long on a CPU.

  >>> np.asarray(gelu(jnp.array([-1.0, 0.0, 1.0]))).round(4)
  array([-0.1587,  0.    ,  0.8413], dtype=float32)

  Args:
    x: any shape. The sum is float32 or wider: in bfloat16 1 + erf has no digits left below -2.
  """
  wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
  return (wide * (0.5 + 0.5 * jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


class Mlp(nn.Module):
  """fc2 . gelu(fc1 . x), with dropout behind both.

  Attributes:
    hidden: width between the two.
    dropout: share of the values that is dropped.
    dtype: of the computation.
    rules: what is sparse, and how; None = dense.
    std: deviation of new kernels.
  """

  hidden: int
  dropout: float = 0.0
  dtype: str = "float32"
  rules: Rules | None = None
  std: float = STD

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Maps [..., d] to [..., d]."""
    init = nn.initializers.normal(self.std)
    dense = functools.partial(
      Dense, dtype=jnp.dtype(self.dtype), kernel_init=init, rules=self.rules
    )
    x, width = dense(self.hidden, name="fc1")(x), x.shape[-1]
    x = nn.Dropout(self.dropout)(gelu(x), not train)
    return nn.Dropout(self.dropout)(dense(width, name="fc2")(x), not train)


class PatchEmbed(nn.Module):
  """A token of each square patch: a convolution whose stride is its size.

  Attributes:
    patch: pixels of a side.
    embed: width of a token.
    dtype: of the computation.
    rules: what is sparse, and how; None = dense.
    epsilon: of a norm over the token; None = no norm.
  """

  patch: int
  embed: int
  dtype: str = "float32"
  rules: Rules | None = None
  epsilon: float | None = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Maps [b, h, w, c] to [b, h / patch, w / patch, embed]."""
    # A bias that is not 0 keeps a token of a black patch from being 0, where cosine attention has
    # no direction.
    edge = 1 / math.sqrt(self.patch**2 * images.shape[-1])
    uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -edge, edge)
    x = Conv(
      self.embed,
      (self.patch, self.patch),
      strides=self.patch,
      padding="VALID",
      dtype=jnp.dtype(self.dtype),
      kernel_init=uniform,
      bias_init=uniform,
      rules=self.rules,
      name="proj",
    )(images)
    return x if self.epsilon is None else layer_norm(x, "norm", self.epsilon, self.dtype)


def head(x: jax.Array, classes: int, name: str, rules: Rules | None, init: Any = None) -> jax.Array:
  """Returns float32 logits [b, classes] of features [b, d].

  Args:
    x: [b, d].
    classes: how many.
    name: of the layer among the parameters.
    rules: what is sparse, and how; None = dense.
    init: initializer of the kernel; None = that of the other kernels.
  """
  layer = Dense(
    classes, dtype=jnp.float32, kernel_init=init or kernel_init, rules=rules, name=name
  )  # float32: for a stable loss
  return layer(x)
