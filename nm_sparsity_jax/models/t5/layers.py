"""The other parts of T5: feed-forward, embeddings, relative positions, norms.

    tokens -> [Embed] -> layers of [LayerNorm, Attention, MlpBlock] -> logits

Parameter trees, logical axes and numbers are those of T5X's `examples/t5/layers.py`.

Shapes: batch b, query length q, key length k, heads h, emb_dim e.

Reference: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer, JMLR 2020, arXiv:1910.10683.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import partitioning, spmd
from flax.typing import Dtype
from jax import lax

from nm_sparsity_jax.models.t5.config import T5Config
from nm_sparsity_jax.training.layers import DenseGeneral

# Of relative positions; those of every published T5, and no fields of T5X's config.
_BUCKETS, _MAX_DISTANCE = 32, 128


class MlpBlock(nn.Module):
  """wo(dropout(act_0(wi_0 x) * act_1(wi_1 x) * ...)).

  Parameters: `wi` for one activation, `wi_0`, `wi_1`, ... for several, (embed, mlp); `wo` (mlp,
  embed).
  """

  config: T5Config

  @nn.compact
  def __call__(self, inputs: jax.Array, deterministic: bool = False) -> jax.Array:
    """Maps [b, q, e] to [b, q, e]."""
    cfg = self.config
    dense = functools.partial(DenseGeneral, dtype=cfg.dtype)
    wide = []
    for i, activation in enumerate(cfg.mlp_activations):
      name = f"wi_{i}" if len(cfg.mlp_activations) > 1 else "wi"
      y = dense(cfg.mlp_dim, kernel_axes=("embed", "mlp"), name=name)(inputs)
      wide.append(_activation(activation)(y))
    y = functools.reduce(operator.mul, wide)
    # One draw for all positions, as in T5X.
    y = nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))(y, deterministic)
    y = spmd.with_logical_constraint(y, ("batch", "length", "mlp"))
    return dense(inputs.shape[-1], kernel_axes=("mlp", "embed"), name="wo")(y)


def _activation(name: str | Callable) -> Callable:
  if name == "linear":
    return lambda x: x
  return name if callable(name) else getattr(nn, name)


class Embed(nn.Module):
  """Token ids to vectors, and vectors back to logits.

  Parameter: `embedding` (vocab, embed), float32.
  """

  config: T5Config

  def setup(self):
    """Makes the table."""
    shape = (self.config.vocab_size, self.config.emb_dim)
    self.embedding = partitioning.param_with_axes(
      "embedding", nn.initializers.normal(1.0), shape, jnp.float32, axes=("vocab", "embed")
    )

  def __call__(self, ids: jax.Array, gather: bool = False) -> jax.Array:
    """Maps ids [...] to vectors [..., e].

    Args:
      ids: integers.
      gather: look up by a gather, which reads the rows of these ids alone; an id outside of the
        table has a row of zeros, as by a product.
    """
    dtype = self.config.dtype
    if gather:
      rows = jnp.asarray(self.embedding).at[ids].get(mode="fill", fill_value=0)
      return spmd.with_logical_constraint(rows.astype(dtype), ("batch", "length", "embed"))
    # A gather from a partitioned table would bring all of it to each device.
    rows = jax.nn.one_hot(ids, self.config.vocab_size, dtype=dtype)
    return jnp.dot(rows, jnp.asarray(self.embedding, dtype))

  def attend(self, query: jax.Array) -> jax.Array:
    """Returns the products of vectors [..., e] with every row of the table, [..., vocab]."""
    # In float32, for a stable loss.
    return jnp.dot(jnp.asarray(query, jnp.float32), jnp.asarray(self.embedding).T)


class RelativePositionBiases(nn.Module):
  """A learnt bias on the attention logits for each head and bucket of key - query distance.

  Parameter: `rel_embedding` (heads, relpos_buckets), float32.
  """

  config: T5Config

  @nn.compact
  def __call__(self, distance: np.ndarray, bidirectional: bool) -> jax.Array:
    """Returns the bias [1, h, q, k].

    Args:
      distance: [q, k], key - query. Numpy: a constant of the program, computed on the host.
      bidirectional: keys after the query have buckets of their own; else they share bucket 0.
    """
    table = partitioning.param_with_axes(
      "rel_embedding",
      nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
      (self.config.num_heads, _BUCKETS),
      jnp.float32,
      axes=("heads", "relpos_buckets"),
    )
    bucket = relative_position_bucket(distance, bidirectional)
    # A product with one-hot columns, not a gather: cheap on a TPU, forward and backward.
    dtype = self.config.dtype
    chosen = jax.nn.one_hot(bucket, _BUCKETS, axis=0, dtype=dtype)
    return jnp.einsum("hn,nqk->hqk", jnp.asarray(table, dtype), chosen)[None]


def relative_position_bucket(distance: np.ndarray, bidirectional: bool) -> np.ndarray:
  """Returns the buckets of distances key - query, integers of any shape.

  With B buckets for a direction, s = B // 2, r = max_distance / s and a distance x >= 0: x itself
  for x < s, else min(B - 1, s + floor((B - s) * log(x / s) / log(r))). Distances forward, x > 0,
  use the second half of the table, or 0 where they are never seen.
  """
  buckets, forward = _BUCKETS, distance > 0
  if bidirectional:
    buckets //= 2
    offset, x = forward * buckets, np.abs(distance)
  else:
    offset, x = 0, np.where(forward, 0, -distance)
  small = buckets // 2
  # In float32, as T5X and the public checkpoints: a distance on the edge of two buckets, such as
  # x = s * sqrt(r), must fall into theirs.
  ratio = np.maximum(x, 1).astype(np.float32) / np.float32(small)
  steps = np.log(ratio) / np.log(_MAX_DISTANCE / small) * (buckets - small)
  far = np.minimum(small + steps.astype(np.int32), buckets - 1)
  return offset + np.where(x < small, x, far)


class LayerNorm(nn.Module):
  """y = x / sqrt(mean(x^2) + 1e-6) * scale over the last axis; nothing is subtracted, no bias.

  Computed in float32 up to the scale. Parameter: `scale` (embed,), float32.

  Reference: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467.

  Attributes:
    dtype: of the result.
  """

  dtype: Dtype

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., e] to [..., e]."""
    x = jnp.asarray(x, jnp.float32)  # squares of bfloat16 would lose the sum
    scale = partitioning.param_with_axes(
      "scale", nn.initializers.ones, (x.shape[-1],), jnp.float32, axes=("embed",)
    )
    square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    y = jnp.asarray(x * lax.rsqrt(square + 1e-6), self.dtype)
    return y * jnp.broadcast_to(jnp.asarray(scale, self.dtype), y.shape)
