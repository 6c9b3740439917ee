"""What the networks for images share: named sizes, checks, norms, drop path, the MLP, patches.

Shapes: batch b, height h, width w, channels c, tokens n, width of the residual stream d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.training.layers import Conv, Dense

STD = 0.02  # of new kernels, as timm starts its transformers
kernel_init = nn.initializers.normal(STD)


# --- configs ----------------------------------------------------------------------------------


def check_images(images: jax.Array, config: Any) -> None:
  """Refuses images of a shape or of a type that the network is not made for.

  Args:
    images: [b, h, w, c].
    config: with `image_size` and `channels`.
  """
  want = config.image_size, config.image_size, config.channels
  if images.shape[1:] != want or not jnp.issubdtype(images.dtype, jnp.floating):
    raise ValueError(
      f"images {images.shape} of {images.dtype}: the network takes [batch, "
      f"{', '.join(map(str, want))}] of floats about 0. Resize and normalize them, or set "
      "image_size and channels of its config."
    )


# --- parts ------------------------------------------------------------------------------------


def layer_norm(
  x: jax.Array, name: str, epsilon: float, dtype: str, scale: Any = nn.initializers.ones
) -> jax.Array:
  """Returns `x` normalized over its last axis, with a scale and a bias of its own.

  Args:
    x: [..., d].
    name: of the norm among the parameters.
    epsilon: added to the variance.
    dtype: of the result; mean and variance are float32.
    scale: initializer of the scale.
  """
  # flax mixes its float32 statistics with narrower inputs.
  with jax.numpy_dtype_promotion("standard"):
    return nn.LayerNorm(
      epsilon,
      dtype=jnp.dtype(dtype),
      scale_init=scale,
      use_fast_variance=False,  # E[x^2] - E[x]^2 loses the digits of a small variance
      name=name,
    )(x)


def drop_path_rates(most: float, depth: int) -> np.ndarray:
  """Returns the rate of each block, float32 [depth]: from 0 in the first to `most` in the last."""
  # Numpy: a constant of the program, as timm's list is.
  return np.linspace(0.0, most, depth, dtype=np.float32)


def drop_path(module: Any, x: jax.Array, rate: float, train: bool) -> jax.Array:
  """Returns `x`; in training with 0 for some examples as a whole, and the others scaled up.

  Args:
    module: has a config, and brings the key, of the stream 'dropout'.
    x: [b, ...].
    rate: share of examples that get 0.
    train: whether this acts.
  """
  if not train or not module.config.drop_path:
    return x
  kept = 1 - jnp.asarray(rate, jnp.float32)
  # One draw an example: its branch is skipped as a whole, and the mean stays what it was.
  shape = (x.shape[0],) + (1,) * (x.ndim - 1)
  alive = jax.random.bernoulli(module.make_rng("dropout"), kept, shape)
  return jnp.where(alive, x / kept.astype(x.dtype), jnp.zeros((), x.dtype))


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


def dense(config: Any, std: float = STD) -> Callable[..., Dense]:
  """Returns (features, name=...) -> a layer of a transformer, by the dtype of its config."""
  init = nn.initializers.normal(std)
  return functools.partial(Dense, dtype=jnp.dtype(config.dtype), kernel_init=init)


class SelfAttention(nn.Module):
  """softmax(scores(q, k)) . v, for each head; the softmax is float32.

  A subclass has `scores`: float32 [b, h, n, n] of q and k [b, n, h, d / h].

  Attributes:
    heads: how many.
    config: of the network: dropout and dtype.
    std: deviation of new kernels.
    key_bias: whether k has a bias.
  """

  heads: int
  config: Any
  std: float = STD
  key_bias: bool = True

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Maps [b, n, d] to [b, n, d]."""
    layer = dense(self.config, self.std)
    width = x.shape[-1]
    q, k, v = (
      layer(width, use_bias=name != "k" or self.key_bias, name=name)(x).reshape(
        *x.shape[:-1], self.heads, width // self.heads
      )
      for name in "qkv"
    )
    scores = self.scores(q, k)  # type: ignore
    weights = jax.nn.softmax(scores).astype(v.dtype)
    y = jnp.einsum("bhqn,bnhk->bhqk", weights, v)  # then swapped: XLA on a CPU is faster so
    y = layer(width, name="proj")(y.swapaxes(1, 2).reshape(x.shape))
    return nn.Dropout(self.config.dropout)(y, not train)


class Mlp(nn.Module):
  """fc2 . gelu(fc1 . x), with dropout behind both.

  Attributes:
    hidden: width between the two.
    config: of the network: dropout and dtype.
    std: deviation of new kernels.
  """

  hidden: int
  config: Any
  std: float = STD

  @nn.compact
  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    """Maps [..., d] to [..., d]."""
    layer, drop = dense(self.config, self.std), nn.Dropout(self.config.dropout)
    y = drop(gelu(layer(self.hidden, name="fc1")(x)), not train)
    return drop(layer(x.shape[-1], name="fc2")(y), not train)


class PatchEmbed(nn.Module):
  """A token of each square patch: a convolution with a stride of its size.

  Attributes:
    config: of the network: patch, embed and dtype.
    epsilon: of a norm over the token; None = no norm.
  """

  config: Any
  epsilon: float | None = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Maps [b, h, w, c] to [b, h / patch, w / patch, embed]."""
    cfg = self.config
    # A bias that is not 0 keeps a token of a black patch from being 0, where cosine attention has
    # no direction.
    edge = 1 / math.sqrt(cfg.patch**2 * images.shape[-1])
    uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -edge, edge)
    x = Conv(
      cfg.embed,
      (cfg.patch, cfg.patch),
      strides=cfg.patch,
      padding="VALID",
      dtype=jnp.dtype(cfg.dtype),
      kernel_init=uniform,
      bias_init=uniform,
      name="proj",
    )(images)
    return x if self.epsilon is None else layer_norm(x, "norm", self.epsilon, cfg.dtype)


def head(x: jax.Array, classes: int, name: str, init: Any = kernel_init) -> jax.Array:
  """Returns logits [b, classes] of features [b, d]: float32, for a stable loss."""
  return Dense(classes, dtype=jnp.float32, kernel_init=init, name=name)(x)
