"""T5's attention: masks and biases, projections of our layers, caches for decoding.

Shapes: batch b, query length q, key length k, heads h, head_dim d, emb_dim e. A mask is not 0
where attention is allowed; a bias is added to the logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning, spmd
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.training.layers import DenseGeneral, as_tuple, effective_kernel
from nm_sparsity_jax.training.rules import Rules

# What the fast decoding step keeps, and not in T5X's 'cache': see `Transformer.start`.
PREPARED = "prepared"  # computed once a sequence
DECODED = "decoded"  # grows by a position at each token
# Not -inf: the softmax of a query that sees no key must stay finite.
_MASKED = -1e10


# --- who may see whom: names and numbers are those of T5X's examples/t5/layers.py -----------------


def make_attention_mask(
  query_input: jax.Array,
  key_input: jax.Array,
  pairwise_fn: Callable = jnp.multiply,
  extra_batch_dims: int = 0,
  dtype: Dtype = jnp.float32,
) -> jax.Array:
  """Returns pairwise_fn of every query with every key.

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
  """Returns [..., 1, q, q], 1 where the key is not after the query; only x's shape counts."""
  position = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  return make_attention_mask(position, position, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: jax.Array | None, dtype: Dtype = jnp.float32) -> jax.Array | None:
  """Returns 1 where every mask is not 0. Masks have one rank; None is left out."""
  present = [mask.astype(bool) for mask in masks if mask is not None]
  return functools.reduce(jnp.logical_and, present).astype(dtype) if present else None


def combine_biases(*masks: jax.Array | None) -> jax.Array | None:
  """Returns the sum of the biases. They have one rank; None is left out."""
  present = [bias for bias in masks if bias is not None]
  return functools.reduce(jnp.add, present) if present else None


def make_decoder_mask(
  decoder_target_tokens: jax.Array,
  dtype: Dtype,
  decoder_causal_attention: jax.Array | None = None,
  decoder_segment_ids: jax.Array | None = None,
) -> jax.Array:
  """Returns who may see whom in the decoder: the past, no padding, and only its own packed example.

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
  seen: Any = make_causal_mask(decoder_target_tokens, dtype=bool)
  if (prefix := decoder_causal_attention) is not None:
    seen = jnp.logical_or(seen, make_attention_mask(prefix, prefix, dtype=bool))
  tokens, ids = decoder_target_tokens > 0, decoder_segment_ids
  filled = make_attention_mask(tokens, tokens, dtype=bool)
  packed = None if ids is None else make_attention_mask(ids, ids, jnp.equal, dtype=bool)
  return combine_masks(seen, filled, packed, dtype=dtype)  # type: ignore


# --- attention ------------------------------------------------------------------------------------


class SplitDenseGeneral(DenseGeneral):
  """`DenseGeneral` with a kernel that is stored with all its axes, (c, ..., f, ...), not 2-D.

  T5X stores attention kernels so where it scans over layers: (embed, heads, kv) and (heads, kv,
  embed). Initial values, outputs and groups are those of the 2-D kernel: the groups run along the
  contracted axes, read as one. No kernel is packed: a deployed network does not scan.
  """

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Contracts `axis` of `inputs`; the features come last."""
    features = as_tuple(self.features)
    inputs = jnp.asarray(inputs, self.dtype)
    axes = tuple(a % inputs.ndim for a in as_tuple(self.axis))
    contracted = tuple(inputs.shape[a] for a in axes)

    def init(key, shape, dtype):
      # Drawn flat: fan-in is that of all contracted axes, and numbers are those of a 2-D kernel.
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
  length_last: bool = False,
) -> jax.Array:
  """Returns softmax(query . key + bias) . value, for each head.

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
    length_last: key and value come as they are kept for decoding, [..., h, d, k]. XLA then
      multiplies them as they lie; turned in a loop, it would copy them at each token.

  Returns:
    [..., q, h, d'].
  """
  if float32_logits:
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
  kept = "...hdk" if length_last else "...khd"
  logits = jnp.einsum(f"...qhd,{kept}->...hqk", query, key)
  if bias is not None:
    logits = logits + bias.astype(logits.dtype)
  weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
  if dropout_rate > 0.0 and not deterministic:
    assert dropout_rng is not None
    # One draw for all queries, as in T5X: fewer random bits, which are slow on a TPU.
    keep_prob = 1.0 - dropout_rate
    shape = (*weights.shape[:-2], 1, weights.shape[-1])
    keep = jax.random.bernoulli(dropout_rng, keep_prob, shape)
    weights = weights * (keep.astype(dtype) / jnp.asarray(keep_prob, dtype))
  return jnp.einsum(f"...hqk,{kept}->...qhd", weights, value)


class MultiHeadDotProductAttention(nn.Module):
  """Attention of `inputs_q` over `inputs_kv`, with a cache for decoding one token at a time.

  Parameters: `query`, `key`, `value` (embed, joined_kv) and `out` (joined_kv, embed).

  The cache of b sequences holds, for the k positions of the call that made it,

      cached_key, cached_value   [b, h, d, k], zeros until written
      cache_index                int32 scalar, the position to write next

  This is T5X's. The step of `Transformer.start` keeps others, where a token writes one position:

      decoded/keys, values       [b, h, d, length], of the decoder over itself
      prepared/keys_and_values   two of [b, h, d, k], of the decoder over what the encoder read

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
    inputs_kv: jax.Array | None,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    decode: bool = False,
    deterministic: bool = False,
    position: jax.Array | None = None,
    length: int | None = None,
    once: bool = False,
  ) -> jax.Array:
    """Attends.

    Args:
      inputs_q: [b, q, e].
      inputs_kv: [b, k, features]; None = see `once`.
      mask: broadcasts to [b, h, q, k].
      bias: broadcasts to [b, h, q, k]; while decoding it has all q = k positions of the cache.
      decode: the first such call makes the cache, as long as `inputs_kv`; later calls bring one
        position each, add it and see those before.
      deterministic: no dropout.
      position: int32 scalar: q = k = 1, and this is the position in its sequence. The first such
        call makes room for `length` positions, all zeros, and later ones fill them and see those
        before.
      length: positions to decode at most.
      once: keys and values are computed by the first such call; later ones need no `inputs_kv`.

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

    # 1 / sqrt(d) is part of the query's initial value, so the logits are not divided later.
    def query_init(key, shape, dtype):
      # T5X rounds the divisor to the compute dtype; equal keys shall give equal parameters.
      divisor = jnp.sqrt(jnp.float32(self.head_dim)).astype(self.dtype)
      return self.kernel_init(key, shape, dtype) / divisor.astype(dtype)

    query = project("query", inputs_q, query_init)
    key_and_value = lambda: tuple(project(x, inputs_kv, self.kernel_init) for x in ("key", "value"))
    key, value = self._prepared(key_and_value) if once else key_and_value()
    cache = None
    if position is not None:
      cache = DECODED, ("keys", "values")
    elif decode:
      cache = "cache", ("cached_key", "cached_value")
      made = self.has_variable("cache", "cache_index")
      index = self.variable("cache", "cache_index", lambda: jnp.int32(0))
      position, length = index.value, key.shape[-3]
      index.value = position + int(made)  # the call that makes the cache writes nothing
      if bias is not None:  # of all queries: this token's row
        bias = lax.dynamic_slice_in_dim(bias, position, 1, axis=-2)
    if cache is not None:
      key, value, past = self._cached(*cache, key, value, position, length)
      mask = combine_masks(mask, past)
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
      length_last=once or cache is not None,
    )
    return dense(
      inputs_q.shape[-1],
      (-2, -1),
      kernel_init=self.kernel_init,
      kernel_axes=(*heads, "embed"),
      name="out",
    )(x)

  def _prepared(self, make):
    """Returns the keys and values [b, h, d, k] that `make` computes in the first call alone."""
    last = lambda: tuple(_length_last(x) for x in make())
    return self.variable(PREPARED, "keys_and_values", last).value

  def _cached(self, collection, names, key, value, position, length):
    """Puts a key and a value at `position`; returns all [b, h, d, length], and who is seen."""
    made = self.has_variable(collection, names[0])
    rows, _, heads, width = key.shape
    found = []
    for name, new in zip(names, (key, value), strict=True):
      kept = self.variable(collection, name, jnp.zeros, (rows, heads, width, length), new.dtype)
      if made:
        kept.value = lax.dynamic_update_slice_in_dim(
          kept.value, _length_last(new), position, axis=3
        )
      found.append(kept.value)
    # Places that are not written yet are zeros, and must not be seen.
    past = lax.broadcasted_iota(jnp.int32, (1, 1, 1, found[0].shape[-1]), 3) <= position
    return *found, past


def _length_last(x: jax.Array) -> jax.Array:
  # [b, k, h, d] -> [b, h, d, k]: the lanes of a TPU want a long last axis, and d is 64.
  return jnp.moveaxis(x, -3, -1)
