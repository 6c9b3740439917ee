"""The parts of T5: attention with a cache, feed-forward, embeddings, relative positions, masks.

    tokens -> [Embed] -> layers of [LayerNorm, attention, MlpBlock] -> logits

Every projection is a `DenseGeneral` of this package, so `rules` reach each of them. Fields, call
signatures, parameter trees and logical axes are those of T5X's `examples/t5/layers.py`, and so are
the numbers; `rules` (None = dense) comes last.

Shapes: batch b, query length q, key length k, heads h, head_dim d, emb_dim e. A mask is not 0
where attention is allowed; a bias is added to the logits.

Reference: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer, JMLR 2020, arXiv:1910.10683.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import partitioning, spmd
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.models.t5.attention import (
  MultiHeadDotProductAttention,
  SplitDenseGeneral,
  combine_biases,
  combine_masks,
  dot_product_attention,
  make_attention_mask,
  make_causal_mask,
  make_decoder_mask,
)
from nm_sparsity_jax.training.layers import DenseGeneral
from nm_sparsity_jax.training.rules import Rules

# T5X's module of this name offers attention and masks as well.
__all__ = [
  "DenseGeneral", "Embed", "LayerNorm", "MlpBlock", "MultiHeadDotProductAttention",
  "RelativePositionBiases", "SplitDenseGeneral", "combine_biases", "combine_masks",
  "dot_product_attention", "make_attention_mask", "make_causal_mask", "make_decoder_mask",
]  # fmt: skip

default_embed_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class MlpBlock(nn.Module):
  """wo(dropout(act_0(wi_0 x) * act_1(wi_1 x) * ...)).

  Parameters: `wi` for one activation, `wi_0`, `wi_1`, ... for several, (embed, mlp); `wo` (mlp,
  embed).

  Attributes:
    intermediate_dim: the width between.
    activations: 'linear', the name of a function in flax.linen, or a function; one a projection.
    kernel_init: initializer of the kernels.
    intermediate_dropout_rate: dropout before `wo`; one draw serves all positions.
    dtype: of the computation.
    rules: what is sparse, and how; None = dense.
  """

  intermediate_dim: int = 2048
  activations: Sequence[str | Callable] = ("relu",)
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
  intermediate_dropout_rate: float = 0.1
  dtype: Dtype = jnp.float32
  rules: Rules | None = None

  @nn.compact
  def __call__(
    self, inputs: jax.Array, decode: bool = False, deterministic: bool = False
  ) -> jax.Array:
    """Maps [b, q, e] to [b, q, e]. `decode` changes nothing; T5X passes it."""
    del decode
    dense = functools.partial(
      DenseGeneral, dtype=self.dtype, kernel_init=self.kernel_init, rules=self.rules
    )
    wide = []
    for i, activation in enumerate(self.activations):
      name = f"wi_{i}" if len(self.activations) > 1 else "wi"
      y = dense(self.intermediate_dim, kernel_axes=("embed", "mlp"), name=name)(inputs)
      wide.append(_activation(activation)(y))
    y = functools.reduce(operator.mul, wide)
    # One draw for all positions, as in T5X.
    y = nn.Dropout(self.intermediate_dropout_rate, broadcast_dims=(-2,))(y, deterministic)
    y = spmd.with_logical_constraint(y, ("batch", "length", "mlp"))
    return dense(inputs.shape[-1], kernel_axes=("mlp", "embed"), name="wo")(y)


def _activation(name: str | Callable) -> Callable:
  if name == "linear":
    return lambda x: x
  return name if callable(name) else getattr(nn, name)


class Embed(nn.Module):
  """Token ids to vectors, and vectors back to logits.

  Parameter: `embedding` (vocab, embed), float32.

  Attributes:
    num_embeddings: size of the vocabulary.
    features: length of a vector.
    cast_input_dtype: ids are cast to it first; None = they stay.
    dtype: of the vectors.
    attend_dtype: of `attend`; None = `dtype`.
    embedding_init: initializer of the table.
    one_hot: look up by a product with one-hot rows, which a partitioned table wants, instead of a
      gather.
  """

  num_embeddings: int
  features: int
  cast_input_dtype: Dtype | None = None
  dtype: Dtype = jnp.float32
  attend_dtype: Dtype | None = None
  embedding_init: Initializer = default_embed_init
  one_hot: bool = False

  def setup(self):
    """Makes the table."""
    shape = (self.num_embeddings, self.features)
    self.embedding = partitioning.param_with_axes(
      "embedding", self.embedding_init, shape, jnp.float32, axes=("vocab", "embed")
    )

  def __call__(self, inputs: jax.Array, gather: bool = False) -> jax.Array:
    """Maps ids [...] to vectors [..., features].

    Args:
      inputs: the ids.
      gather: look up by a gather, whatever `one_hot` says. It reads the rows of these ids alone;
        an id outside of the table has a row of zeros, as by a product.
    """
    if self.cast_input_dtype:
      inputs = inputs.astype(self.cast_input_dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      # T5X's tests, like flax's, look for this sentence.
      raise ValueError(
        f"Embed got ids of dtype {inputs.dtype}. Input type must be an integer or unsigned integer."
        " Cast them, or set cast_input_dtype."
      )
    if gather:
      rows = jnp.asarray(self.embedding).at[inputs].get(mode="fill", fill_value=0)
      return spmd.with_logical_constraint(rows.astype(self.dtype), ("batch", "length", "embed"))
    table = jnp.asarray(self.embedding, self.dtype)
    # A gather from a partitioned table would bring all of it to each device.
    if self.one_hot:
      return jnp.dot(jax.nn.one_hot(inputs, self.num_embeddings, dtype=self.dtype), table)
    return spmd.with_logical_constraint(table[inputs], ("batch", "length", "embed"))

  def attend(self, query: jax.Array) -> jax.Array:
    """Returns the products of vectors [..., features] with every row of the table, [..., vocab]."""
    dtype = self.dtype if self.attend_dtype is None else self.attend_dtype
    return jnp.dot(jnp.asarray(query, dtype), jnp.asarray(self.embedding, dtype).T)


class RelativePositionBiases(nn.Module):
  """A learnt bias on the attention logits for each head and bucket of key - query distance.

  Parameter: `rel_embedding` (heads, relpos_buckets), float32.

  Attributes:
    num_buckets: buckets that distances share; half of them for each direction if both are seen.
    max_distance: from here on all distances fall into the last bucket.
    num_heads: h.
    dtype: of the bias.
    embedding_init: initializer of the table.
  """

  num_buckets: int
  max_distance: int
  num_heads: int
  dtype: Dtype
  embedding_init: Initializer = nn.linear.default_embed_init

  @nn.compact
  def __call__(self, qlen: int, klen: int, bidirectional: bool = True) -> jax.Array:
    """Returns the bias [1, h, qlen, klen].

    Args:
      qlen: number of queries.
      klen: number of keys.
      bidirectional: keys after the query have buckets of their own; else they share bucket 0.
    """
    table = partitioning.param_with_axes(
      "rel_embedding",
      self.embedding_init,
      (self.num_heads, self.num_buckets),
      jnp.float32,
      axes=("heads", "relpos_buckets"),
    )
    # Numpy: a constant of the program, computed once on the host.
    distance = np.arange(klen, dtype=np.int32)[None, :] - np.arange(qlen, dtype=np.int32)[:, None]
    bucket = self._relative_position_bucket(
      distance, bidirectional, self.num_buckets, self.max_distance
    )
    # A product with one-hot columns, not a gather: cheap on a TPU, forward and backward.
    chosen = jax.nn.one_hot(bucket, self.num_buckets, axis=0, dtype=self.dtype)
    return jnp.einsum("hn,nqk->hqk", jnp.asarray(table, self.dtype), chosen)[None]

  @staticmethod
  def _relative_position_bucket(
    relative_position, bidirectional=True, num_buckets=32, max_distance=128
  ):
    """Returns the buckets of distances key - query, which are numpy integers of any shape.

    With B buckets for a direction, s = B // 2, r = max_distance / s and a distance x >= 0:
    x itself for x < s, else min(B - 1, s + floor((B - s) * log(x / s) / log(r))). Distances
    forward, x > 0, use the second half of the table, or 0 where they are never seen.
    """
    forward = relative_position > 0
    if bidirectional:
      num_buckets //= 2
      offset, x = forward * num_buckets, np.abs(relative_position)
    else:
      offset, x = 0, np.where(forward, 0, -relative_position)
    small = num_buckets // 2
    # In float32, as T5X and the public checkpoints: a distance on the edge of two buckets, such as
    # x = s * sqrt(r), must fall into theirs.
    ratio = np.maximum(x, 1).astype(np.float32) / np.float32(small)
    steps = np.log(ratio) / np.log(max_distance / small) * (num_buckets - small)
    far = np.minimum(small + steps.astype(np.int32), num_buckets - 1)
    return offset + np.where(x < small, x, far)


class LayerNorm(nn.Module):
  """y = x / sqrt(mean(x^2) + epsilon) * scale over the last axis; nothing is subtracted, no bias.

  Computed in float32 up to the scale. Parameter: `scale` (embed,), float32.

  Reference: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467.

  Attributes:
    epsilon: keeps the root from 0.
    dtype: of the result.
    scale_init: initializer of the scale.
  """

  epsilon: float = 1e-6
  dtype: Dtype = jnp.float32
  scale_init: Initializer = nn.initializers.ones

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., e] to [..., e]."""
    x = jnp.asarray(x, jnp.float32)  # squares of bfloat16 would lose the sum
    scale = partitioning.param_with_axes(
      "scale", self.scale_init, (x.shape[-1],), jnp.float32, axes=("embed",)
    )
    square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    y = jnp.asarray(x * lax.rsqrt(square + self.epsilon), self.dtype)
    return y * jnp.broadcast_to(jnp.asarray(scale, self.dtype), y.shape)
