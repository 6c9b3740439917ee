"""T5's attention: projections of our layers, a cache for decoding one token at a time.

Shapes: batch b, query length q, key length k, heads h, head_dim d, emb_dim e. A mask is not 0
where attention is allowed; a bias is added to the logits.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import partitioning, spmd
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.models.t5.masks import combine_biases, combine_masks
from nm_sparsity_jax.training.layers import DenseGeneral, as_tuple, effective_kernel, packed_product
from nm_sparsity_jax.training.rules import Rules

# What the fast decoding step keeps, beside T5X's own 'cache': see `Transformer.start`.
PREPARED = "prepared"  # computed once a sequence
DECODED = "decoded"  # grows by a position at each token
# Not -inf: the softmax of a query that sees no key must stay finite.
_MASKED = -1e10


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
    if (y := packed_product(self, inputs, features, axes)) is not None:
      return y
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
    if dropout_rng is None:
      raise ValueError("dropout_rate needs a dropout_rng, or deterministic=True.")
    keep_prob = 1.0 - dropout_rate
    shape = (*weights.shape[:-2], 1, weights.shape[-1])
    keep = jax.random.bernoulli(dropout_rng, keep_prob, shape)
    weights = weights * (keep.astype(dtype) / jnp.asarray(keep_prob, dtype))
  return jnp.einsum(f"...hqk,{kept}->...qhd", weights, value)


class MultiHeadDotProductAttention(nn.Module):
  """Attention of `inputs_q` over `inputs_kv`, with a cache for decoding one token at a time.

  Parameters: `query`, `key`, `value` (embed, joined_kv) and `out` (joined_kv, embed).

  The cache of b sequences holds, for the k positions that the creating call was given,

      cached_key, cached_value   [b, h, d, k], zeros until written
      cache_index                int32 scalar, the position to write next

  This is T5X's. The step of `Transformer.start` keeps other ones, where a token writes one place:

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
      position: int32 scalar: q = k = 1, and this is the place of the one in its sequence. The first
        such call makes room for `length` places, all zeros, and later ones fill them and see those
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

    def query_init(key, shape, dtype):
      # T5X rounds the divisor to the compute dtype; equal keys shall give equal parameters.
      divisor = jnp.sqrt(jnp.float32(self.head_dim)).astype(self.dtype)
      return self.kernel_init(key, shape, dtype) / divisor.astype(dtype)

    query = project("query", inputs_q, query_init)
    key_and_value = lambda: tuple(project(x, inputs_kv, self.kernel_init) for x in ("key", "value"))
    key, value = self._prepared(key_and_value) if once else key_and_value()
    if position is not None:
      key, value, mask = self._decoded(key, value, position, length)
    elif decode:
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
      length_last=once or position is not None,
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

  def _decoded(self, key, value, position, length):
    """Returns keys, values [b, h, d, length] and mask of all; puts these at `position`."""
    made = self.has_variable(DECODED, "keys")
    rows, _, heads, width = key.shape
    found = []
    for name, new in (("keys", key), ("values", value)):
      kept = self.variable(DECODED, name, jnp.zeros, (rows, heads, width, length), new.dtype)
      if made:
        kept.value = lax.dynamic_update_slice_in_dim(
          kept.value, _length_last(new), position, axis=3
        )
      found.append(kept.value)
    past = lax.broadcasted_iota(jnp.int32, (1, 1, 1, found[0].shape[-1]), 3) <= position
    return *found, past.astype(jnp.float32)

  def _through_cache(self, query, key, value, mask, bias):
    """Returns keys, values, mask and bias for one decoded position; makes a missing cache."""
    made = self.has_variable("cache", "cached_key")
    keys = self.variable("cache", "cached_key", jnp.zeros_like, _length_last(key))
    values = self.variable("cache", "cached_value", jnp.zeros_like, _length_last(value))
    index = self.variable("cache", "cache_index", lambda: jnp.int32(0))
    if not made:
      return key, value, mask, bias
    length = keys.value.shape[-1]
    expected = (keys.value.shape[0], 1, *keys.value.shape[1:3])
    if query.shape != expected:
      raise ValueError(
        f"decoding: the query has shape {query.shape}, but the cache takes {expected}: pass one "
        "token for each sequence."
      )
    if bias is not None and bias.shape[-2:] != (length, length):
      raise ValueError(
        f"decoding: the bias has shape {bias.shape}, but the cache has {length} positions: pass "
        f"max_decode_length={length}."
      )
    now = index.value
    # A choice and no scatter: it fuses, and a TPU likes it.
    here = lax.broadcasted_iota(jnp.int32, keys.value.shape, keys.value.ndim - 1) == now
    keys.value = jnp.where(here, _length_last(key), keys.value)
    values.value = jnp.where(here, _length_last(value), values.value)
    index.value = now + 1
    past = lax.broadcasted_iota(jnp.int32, (expected[0], 1, 1, length), 3) <= now
    if bias is not None:
      bias = lax.dynamic_slice_in_dim(bias, now, 1, axis=-2)
    first = lambda x: jnp.moveaxis(x, -1, -3)
    return first(keys.value), first(values.value), combine_masks(mask, past), bias


def _length_last(x: jax.Array) -> jax.Array:
  """Returns keys or values [b, k, h, d] as they are kept, [b, h, d, k]: for the lanes of a TPU."""
  return jnp.moveaxis(x, -3, -1)
