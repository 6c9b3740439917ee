"""Windows of Swin V2's feature maps, and the attention within them.

    [b, h, w, d] -> [to_windows] -> [b z, n, d] -> WindowAttention -> [from_windows] -> [b, h, w, d]

Shapes: batch b, height h, width w, windows z, tokens of a window n, heads a, head_dim k, width d.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.models import image_parts as parts
from nm_sparsity_jax.training.layers import Dense
from nm_sparsity_jax.training.rules import Rules

_SHARPEST = math.log(100)  # the largest logarithm of the scale of cosines
_APART = -100.0  # added between tokens that the shift made neighbours
_WIDEST_BIAS = 16.0
_HIDDEN = 512  # of the MLP of positions


def _offsets(window: int) -> np.ndarray:
  """Returns the offsets from -(window - 1) to window - 1 in both directions, [2w-1, 2w-1, 2].

  They are logarithmic, and 1 stands for the distance 8 of a window whose edge is at 8.
  """
  line = np.arange(1 - window, window, dtype=np.float32) * np.float32(8 / max(window - 1, 1))
  grid = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1)
  return (np.sign(grid) * np.log2(np.abs(grid) + 1) / 3).astype(np.float32)


def _pairs(window: int) -> np.ndarray:
  """Returns which of the flattened `_offsets` lies between two tokens, int32 [n, n]."""
  y, x = np.divmod(np.arange(window**2), window)
  apart = lambda at: at[:, None] - at[None, :] + window - 1
  return (apart(y) * (2 * window - 1) + apart(x)).astype(np.int32)


def shift_bias(side: int, window: int, shift: int) -> np.ndarray:
  """Returns 0 within a region of the map and `_APART` between two, float32 [z, n, n].

  A shift moves rows and columns from one edge to the other, and leaves windows of several regions.
  """
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
  squares = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


class WindowAttention(nn.Module):
  """Attention within windows: softmax(scale cos(q, k) + positions) . v, for each head.

  The biases of positions come from an MLP of the logarithmic offsets. k has no bias.

  Attributes:
    heads: a.
    window: tokens of a side of a window.
    dropout: of the result.
    dtype: of the computation; cosines, scale and softmax are float32.
    rules: what is sparse, and how; None = dense.
  """

  heads: int
  window: int
  dropout: float = 0.0
  dtype: str = "float32"
  rules: Rules | None = None

  @nn.compact
  def __call__(self, x: jax.Array, train: bool, shift_bias: np.ndarray | None = None) -> jax.Array:
    """Maps [b z, n, d] to [b z, n, d].

    Args:
      x: the windows of all examples.
      train: dropout acts.
      shift_bias: [z, n, n]; None = windows of one region.
    """
    width, dtype = x.shape[-1], jnp.dtype(self.dtype)
    dense = functools.partial(
      Dense, width, dtype=dtype, kernel_init=parts.kernel_init, rules=self.rules
    )
    split = lambda y: y.reshape(*y.shape[:-1], self.heads, width // self.heads)
    q, v = split(dense(name="q")(x)), split(dense(name="v")(x))
    k = split(dense(use_bias=False, name="k")(x))
    cosines = jnp.einsum("bqak,bnak->baqn", _direction(q), _direction(k))
    scale = self.param("logit_scale", nn.initializers.constant(math.log(10)), (self.heads, 1, 1))
    scores = cosines * jnp.exp(jnp.minimum(scale, _SHARPEST))[None] + self._positions()[None]
    if shift_bias is not None:
      z, n, _ = shift_bias.shape
      scores = scores.reshape(-1, z, self.heads, n, n) + shift_bias[None, :, None]
      scores = scores.reshape(-1, self.heads, n, n)
    weights = jax.nn.softmax(scores).astype(dtype)
    y = jnp.einsum("baqn,bnak->baqk", weights, v)  # then swapped: XLA on a CPU is faster so
    y = y.swapaxes(1, 2).reshape(x.shape)
    return nn.Dropout(self.dropout)(dense(name="proj")(y), not train)

  def _positions(self) -> jax.Array:
    """Returns the bias between two tokens, float32 [a, n, n]."""
    dense = functools.partial(Dense, kernel_init=parts.kernel_init, rules=self.rules)
    offsets = jnp.asarray(_offsets(self.window)).reshape(-1, 2)
    hidden = nn.relu(dense(_HIDDEN, name="cpb_mlp_0")(offsets))
    table = dense(self.heads, use_bias=False, name="cpb_mlp_2")(hidden)
    pairs = jnp.take(table, jnp.asarray(_pairs(self.window)), axis=0)
    return _WIDEST_BIAS * jax.nn.sigmoid(pairs).transpose(2, 0, 1)
