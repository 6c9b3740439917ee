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
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import partitioning, spmd
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.layers import DenseGeneral, as_tuple, effective_kernel
from nm_sparsity_jax.rules import Rules

__all__ = [
  "DenseGeneral",
  "Embed",
  "LayerNorm",
  "MlpBlock",
  "MultiHeadDotProductAttention",
  "RelativePositionBiases",
  "SplitDenseGeneral",
  "combine_biases",
  "combine_masks",
  "dot_product_attention",
  "make_attention_mask",
  "make_causal_mask",
  "make_decoder_mask",
]

# Not -inf: the softmax of a query that sees no key must stay finite.
_MASKED = -1e10

default_embed_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class SplitDenseGeneral(DenseGeneral):
  """`DenseGeneral` whose kernel is stored with all its axes, (c, ..., f, ...), not 2-D.

  T5X stores attention kernels so where it scans over layers: (embed, heads, kv) and (heads, kv,
  embed). Initial values, outputs and groups are those of the 2-D kernel: the groups run along the
  contracted axes, read as one.
  """

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Contracts `axis` of `inputs`; the features come last."""
    features = as_tuple(self.features)
    inputs = jnp.asarray(inputs, self.dtype)
    axes = tuple(a % inputs.ndim for a in as_tuple(self.axis))
    contracted = tuple(inputs.shape[a] for a in axes)

    def init(key, shape, dtype):
      flat = self.kernel_init(key, (math.prod(contracted), math.prod(features)), dtype)
      return flat.reshape(shape)

    kernel = partitioning.param_with_axes(
      "kernel", init, (*contracted, *features), self.param_dtype, axes=self.kernel_axes
    )
    own = tuple(range(len(axes)))
    kernel = jnp.asarray(effective_kernel(self, kernel, axis=own), self.dtype)
    return lax.dot_general(inputs, kernel, ((axes, own), ((), ())))


def dot_product_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: jax.Array | None = None,
  dropout_rng: jax.Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: Dtype = jnp.float32,
  float32_logits: bool = False,
) -> jax.Array:
  """softmax(query . key + bias) . value, for each head.

  The logits are not scaled by 1 / sqrt(head_dim): T5 has that in the initializer of the query.

  Args:
    query: [..., q, h, d].
    key: [..., k, h, d].
    value: [..., k, h, d'].
    bias: broadcasts to [..., h, q, k]; masks come in as large negative numbers.
    dropout_rng: for the attention weights; one draw serves all queries of a head.
    dropout_rate: share of the attention weights that is dropped.
    deterministic: no dropout.
    dtype: of the attention weights.
    float32_logits: compute the logits in float32, whatever `dtype` is.

  Returns:
    [..., q, h, d'].
  """
  q, k, v = query.shape, key.shape, value.shape
  if not (q[:-3] == k[:-3] == v[:-3] and q[-2:] == k[-2:] and k[:-1] == v[:-1]):
    raise ValueError(
      f"attention over query {q}, key {k}, value {v}: they must be [..., q, h, d], [..., k, h, d] "
      "and [..., k, h, d'] with equal batch and heads. Check num_heads, head_dim and the batch."
    )
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  logits = jnp.einsum("...qhd,...khd->...hqk", query, key)
  if bias is not None:
    logits = logits + bias.astype(logits.dtype)
  weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
  if dropout_rate > 0.0 and not deterministic:
    if dropout_rng is None:
      raise ValueError(
        f"dropout_rate={dropout_rate} needs a dropout_rng. Pass one, or deterministic=True."
      )
    keep_prob = 1.0 - dropout_rate
    shape = (*weights.shape[:-2], 1, weights.shape[-1])
    keep = jax.random.bernoulli(dropout_rng, keep_prob, shape)
    weights = weights * (keep.astype(dtype) / jnp.asarray(keep_prob, dtype))
  return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class MultiHeadDotProductAttention(nn.Module):
  """Attention of `inputs_q` over `inputs_kv`, with a cache for decoding one token at a time.

  Parameters: `query`, `key`, `value` (embed, joined_kv) and `out` (joined_kv, embed).

  The cache of b sequences holds, for the k positions that the creating call was given,

      cached_key, cached_value   [b, h, d, k], zeros until written
      cache_index                int32 scalar, the position to write next

  Attributes:
    num_heads: h.
    head_dim: d.
    dtype: of the computation.
    dropout_rate: of the attention weights.
    kernel_init: initializer of the kernels; the query's is divided by sqrt(d).
    float32_logits: compute the logits in float32.
    split_kernels: store heads and head_dim as two axes, as T5X does where it scans over layers.
    rules: what is sparse, and how; None = dense.
  """

  num_heads: int
  head_dim: int
  dtype: Dtype = jnp.float32
  dropout_rate: float = 0.0
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
  float32_logits: bool = False
  split_kernels: bool = False
  rules: Rules | None = None

  @nn.compact
  def __call__(
    self,
    inputs_q: jax.Array,
    inputs_kv: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
  ) -> jax.Array:
    """Attends.

    Args:
      inputs_q: [b, q, e].
      inputs_kv: [b, k, features].
      mask: broadcasts to [b, h, q, k].
      bias: broadcasts to [b, h, q, k]; while decoding it has all q = k positions of the cache.
      decode: the first such call makes the cache, as long as `inputs_kv`; later calls bring one
        position each, add it and see those before.
      deterministic: no dropout.

    Returns:
      [b, q, e].
    """
    heads = ("heads", "kv") if self.split_kernels else ("joined_kv",)
    dense = functools.partial(
      SplitDenseGeneral if self.split_kernels else DenseGeneral, dtype=self.dtype, rules=self.rules
    )

    def project(name, inputs, kernel_init):
      features = (self.num_heads, self.head_dim)
      layer = dense(features, kernel_init=kernel_init, kernel_axes=("embed", *heads), name=name)
      return spmd.with_logical_constraint(layer(inputs), ("batch", "length", "heads", "kv"))

    def query_init(key, shape, dtype):
      # T5X rounds the divisor to the compute dtype; equal keys shall give equal parameters.
      divisor = jnp.sqrt(jnp.float32(self.head_dim)).astype(self.dtype)
      return self.kernel_init(key, shape, dtype) / divisor.astype(dtype)

    query = project("query", inputs_q, query_init)
    key = project("key", inputs_kv, self.kernel_init)
    value = project("value", inputs_kv, self.kernel_init)
    if decode:
      key, value, mask, bias = self._through_cache(query, key, value, mask, bias)
    if mask is not None:
      seen = jnp.where(mask > 0, 0.0, _MASKED).astype(self.dtype)
      bias = combine_biases(seen, bias)
    dropout = self.dropout_rate > 0.0 and not deterministic
    x = dot_product_attention(
      query,
      key,
      value,
      bias=bias,
      dropout_rng=self.make_rng("dropout") if dropout else None,
      dropout_rate=self.dropout_rate,
      deterministic=deterministic,
      dtype=self.dtype,
      float32_logits=self.float32_logits,
    )
    return dense(
      inputs_q.shape[-1],
      (-2, -1),
      kernel_init=self.kernel_init,
      kernel_axes=(*heads, "embed"),
      name="out",
    )(x)

  def _through_cache(self, query, key, value, mask, bias):
    """Keys, values, mask and bias for one decoded position; makes the cache where there is none."""
    made = self.has_variable("cache", "cached_key")
    # The length is the last axis: lanes of a TPU then run along it.
    last = lambda x: jnp.moveaxis(x, -3, -1)
    keys = self.variable("cache", "cached_key", jnp.zeros_like, last(key))
    values = self.variable("cache", "cached_value", jnp.zeros_like, last(value))
    index = self.variable("cache", "cache_index", lambda: jnp.int32(0))
    if not made:
      return key, value, mask, bias
    length = keys.value.shape[-1]
    expected = (keys.value.shape[0], 1, *keys.value.shape[1:3])
    if query.shape != expected:
      raise ValueError(
        f"decoding: the query has shape {query.shape}, but the cache {keys.value.shape} takes "
        f"{expected}, one position a call. Pass one token for each sequence, or make a new cache "
        "by init with decode=True and inputs of the full length."
      )
    if bias is not None and bias.shape[-2:] != (length, length):
      raise ValueError(
        f"decoding: the bias has shape {bias.shape}, but the cache has {length} positions, so its "
        f"last two axes must be {(length, length)}. Pass max_decode_length={length}."
      )
    now = index.value
    # A choice and no scatter: it fuses, and a TPU likes it.
    here = lax.broadcasted_iota(jnp.int32, keys.value.shape, keys.value.ndim - 1) == now
    keys.value = jnp.where(here, last(key), keys.value)
    values.value = jnp.where(here, last(value), values.value)
    index.value = now + 1
    past = lax.broadcasted_iota(jnp.int32, (expected[0], 1, 1, length), 3) <= now
    if bias is not None:
      bias = lax.dynamic_slice_in_dim(bias, now, 1, axis=-2)
    first = lambda x: jnp.moveaxis(x, -1, -3)
    return first(keys.value), first(values.value), combine_masks(mask, past), bias


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
    """[b, q, e] -> [b, q, e]. `decode` changes nothing; T5X passes it."""
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
    y = nn.Dropout(self.intermediate_dropout_rate, broadcast_dims=(-2,))(y, deterministic)
    y = spmd.with_logical_constraint(y, ("batch", "length", "mlp"))
    return dense(inputs.shape[-1], kernel_axes=("mlp", "embed"), name="wo")(y)


def _activation(name: str | Callable) -> Callable:
  if callable(name):
    return name
  if name == "linear":
    return lambda x: x
  if not callable(getattr(nn, name, None)):
    raise ValueError(
      f"activation {name!r}: give 'linear', a function of flax.linen by its name ('relu', 'gelu', "
      "'silu', ...), or a function."
    )
  return getattr(nn, name)


class Embed(nn.Module):
  """Token ids to vectors, and vectors back to logits.

  Parameter: `embedding` (vocab, embed), float32.

  Attributes:
    num_embeddings: size of the vocabulary.
    features: length of a vector.
    cast_input_dtype: if given, ids are cast to it first.
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
    """The table."""
    shape = (self.num_embeddings, self.features)
    self.embedding = partitioning.param_with_axes(
      "embedding", self.embedding_init, shape, jnp.float32, axes=("vocab", "embed")
    )

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Ids [...] -> vectors [..., features]."""
    if self.cast_input_dtype:
      inputs = inputs.astype(self.cast_input_dtype)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
      # T5X's tests, like flax's, look for this sentence.
      raise ValueError(
        f"Embed got ids of dtype {inputs.dtype}. Input type must be an integer or unsigned integer."
        " Cast them, or set cast_input_dtype."
      )
    table = jnp.asarray(self.embedding, self.dtype)
    if self.one_hot:
      return jnp.dot(jax.nn.one_hot(inputs, self.num_embeddings, dtype=self.dtype), table)
    return spmd.with_logical_constraint(table[inputs], ("batch", "length", "embed"))

  def attend(self, query: jax.Array) -> jax.Array:
    """Vectors [..., features] -> their products with every row of the table [..., vocab]."""
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
    """The bias [1, h, qlen, klen].

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
    """Buckets of distances key - query, numpy integers of any shape.

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
  """y = x / sqrt(mean(x^2) + epsilon) * scale over the last axis; no mean is taken off, no bias.

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
    """[..., e] -> [..., e]."""
    x = jnp.asarray(x, jnp.float32)
    scale = partitioning.param_with_axes(
      "scale", self.scale_init, (x.shape[-1],), jnp.float32, axes=("embed",)
    )
    square = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    y = jnp.asarray(x * lax.rsqrt(square + self.epsilon), self.dtype)
    return y * jnp.broadcast_to(jnp.asarray(scale, self.dtype), y.shape)


def make_attention_mask(
  query_input: jax.Array,
  key_input: jax.Array,
  pairwise_fn: Callable = jnp.multiply,
  extra_batch_dims: int = 0,
  dtype: Dtype = jnp.float32,
) -> jax.Array:
  """pairwise_fn of every query with every key.

  Args:
    query_input: [..., q].
    key_input: [..., k].
    pairwise_fn: elementwise, of [..., q, 1] and [..., 1, k].
    extra_batch_dims: axes of length 1 to put in front.
    dtype: of the mask.

  Returns:
    [..., 1, q, k]; the 1 stands for all heads.

  >>> make_attention_mask(jnp.array([1, 1, 2]), jnp.array([1, 2]), jnp.equal)[0].tolist()
  [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
  """
  mask = pairwise_fn(jnp.expand_dims(query_input, -1), jnp.expand_dims(key_input, -2))
  mask = jnp.expand_dims(mask, (*range(extra_batch_dims), extra_batch_dims + mask.ndim - 2))
  return mask.astype(dtype)


def make_causal_mask(
  x: jax.Array, extra_batch_dims: int = 0, dtype: Dtype = jnp.float32
) -> jax.Array:
  """1 where the key is not after the query; x [..., q], only its shape counts -> [..., 1, q, q]."""
  position = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  return make_attention_mask(position, position, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: jax.Array | None, dtype: Dtype = jnp.float32) -> jax.Array | None:
  """1 where every mask is not 0; masks of equal rank, None is left out; None if none is given."""
  given = _of_equal_rank(masks)
  if not given:
    return None
  return functools.reduce(jnp.logical_and, [m.astype(bool) for m in given]).astype(dtype)


def combine_biases(*masks: jax.Array | None) -> jax.Array | None:
  """The sum of the biases; equal rank, None is left out; None if none is given."""
  given = _of_equal_rank(masks)
  return functools.reduce(operator.add, given) if given else None


def _of_equal_rank(arrays: Sequence[Any]) -> list[Any]:
  given = [x for x in arrays if x is not None]
  if len({x.ndim for x in given}) > 1:
    raise ValueError(
      f"cannot combine masks or biases of shapes {[tuple(x.shape) for x in given]}: their ranks "
      "differ. Make each [b, h, q, k], with 1 where it holds for all."
    )
  return given


def make_decoder_mask(
  decoder_target_tokens: jax.Array,
  dtype: Dtype,
  decoder_causal_attention: jax.Array | None = None,
  decoder_segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Who may see whom in the decoder: the past, no padding, one's own packed example.

  >>> tokens, segments = jnp.array([[5, 6, 7, 8, 0]]), jnp.array([[1, 1, 2, 2, 0]])
  >>> for row in make_decoder_mask(tokens, int, decoder_segment_ids=segments)[0, 0].tolist():
  ...   print(row)
  [1, 0, 0, 0, 0]
  [1, 1, 0, 0, 0]
  [0, 0, 1, 0, 0]
  [0, 0, 1, 1, 0]
  [0, 0, 0, 0, 0]

  Args:
    decoder_target_tokens: [..., q], 0 = padding.
    dtype: of the mask.
    decoder_causal_attention: [..., q], 1 for positions that see each other in both directions, as
      the inputs of a prefix language model do. (The name is T5X's.)
    decoder_segment_ids: [..., q], the number of the packed example.

  Returns:
    [..., 1, q, q].
  """
  seen = make_causal_mask(decoder_target_tokens, dtype=bool)
  if decoder_causal_attention is not None:
    prefix = decoder_causal_attention.astype(bool)
    seen = jnp.logical_or(seen, make_attention_mask(prefix, prefix, dtype=bool))
  tokens, ids = decoder_target_tokens > 0, decoder_segment_ids
  filled = make_attention_mask(tokens, tokens, dtype=bool)
  packed = None if ids is None else make_attention_mask(ids, ids, jnp.equal, dtype=bool)
  mask = combine_masks(seen, filled, packed, dtype=dtype)
  assert mask is not None
  return mask
