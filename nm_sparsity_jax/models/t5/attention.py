"""T5's attention: who sees whom, projections of our layers, caches for decoding.

Shapes: batch b, query length q, key length k, heads h, head_dim d, emb_dim e. A mask is True where
attention is allowed; a bias is added to the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import spmd
from jax import lax

from nm_sparsity_jax.models.t5.config import T5Config
from nm_sparsity_jax.training.layers import DenseGeneral

# What decoding computes once a sequence: see `Transformer.start`.
PREPARED = "prepared"
# Not -inf: the softmax of a query that sees no key must stay finite.
_MASKED = -1e10

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def pairs(
  queries: jax.Array, keys: jax.Array, allowed: Callable[..., jax.Array] = jnp.logical_and
) -> jax.Array:
  """Returns allowed(query, key) of every pair, a mask [b, 1, q, k]; the 1 stands for all heads.

  >>> pairs(jnp.array([[1, 1, 2]]), jnp.array([[1, 2]]), jnp.equal)[0, 0].tolist()
  [[True, False], [True, False], [False, True]]

  Args:
    queries: [b, q].
    keys: [b, k].
    allowed: elementwise.
  """
  return allowed(queries[:, None, :, None], keys[:, None, None, :])


def decoder_mask(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
  """Returns who sees whom in the decoder: the past, no padding, and only its own packed example.

  >>> tokens, segments = jnp.array([[5, 6, 7, 8, 0]]), jnp.array([[1, 1, 2, 2, 0]])
  >>> for row in decoder_mask(tokens, segments)[0, 0].astype(int).tolist():
  ...   print(row)
  [1, 0, 0, 0, 0]
  [1, 1, 0, 0, 0]
  [0, 0, 1, 0, 0]
  [0, 0, 1, 1, 0]
  [0, 0, 0, 0, 0]

  Args:
    tokens: [b, q], 0 = padding.
    segments: [b, q], the number of the packed example.

  Returns:
    [b, 1, q, q].
  """
  position = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
  mask = pairs(position, position, jnp.greater_equal) & pairs(tokens > 0, tokens > 0)
  return mask if segments is None else mask & pairs(segments, segments, jnp.equal)


class Attention(nn.Module):
  """softmax(query . key + bias) . value for each head, with a cache for decoding token by token.

  Parameters: `query`, `key`, `value` (embed, joined_kv) and `out` (joined_kv, embed); where T5X
  scans over layers it has heads and kv as two axes.

  The cache of b sequences is T5X's. It holds, for the k positions of the call that made it,

      cached_key, cached_value   [b, h, d, k], zeros until written
      cache_index                int32 scalar, the position to write next

  `Transformer.start` also keeps `prepared/keys_and_values`, two of [b, h, d, k], of the decoder
  over what the encoder read.
  """

  config: T5Config

  @nn.compact
  def __call__(
    self,
    inputs_q: jax.Array,
    inputs_kv: jax.Array | None,
    mask: jax.Array | None,
    bias: jax.Array | None = None,
    *,
    deterministic: bool = False,
    decode: bool = False,
    once: bool = False,
  ) -> jax.Array:
    """Attends.

    Args:
      inputs_q: [b, q, e].
      inputs_kv: [b, k, features]; None = see `once`.
      mask: broadcasts to [b, h, q, k]; None = while decoding, that of the cache.
      bias: broadcasts to [b, h, q, k]; while decoding [1, h, 1, 2 k - 1], of all distances.
      deterministic: no dropout.
      decode: the first such call makes the cache, as long as `inputs_kv`; later calls bring one
        position each, add it and see those before.
      once: keys and values are computed by the first such call; later ones need no `inputs_kv`.

    Returns:
      [b, q, e].
    """
    cfg = self.config
    heads = ("heads", "kv") if cfg.scan_layers else ("joined_kv",)
    dense = functools.partial(DenseGeneral, dtype=cfg.dtype, split=cfg.scan_layers)

    def project(name, inputs, kernel_init: Any = _kernel_init):
      features = (cfg.num_heads, cfg.head_dim)
      layer = dense(features, kernel_init=kernel_init, kernel_axes=("embed", *heads), name=name)
      return spmd.with_logical_constraint(layer(inputs), ("batch", "length", "heads", "kv"))

    # 1 / sqrt(d) is part of the query's initial value, so the logits are not divided later.
    def query_init(key, shape, dtype):
      # T5X rounds the divisor to the compute dtype; equal keys shall give equal parameters.
      divisor = jnp.sqrt(jnp.float32(cfg.head_dim)).astype(cfg.dtype)
      return _kernel_init(key, shape, dtype) / divisor.astype(dtype)

    query = project("query", inputs_q, query_init)
    key_and_value = lambda: tuple(project(x, inputs_kv) for x in ("key", "value"))
    if once:
      last = lambda: tuple(map(_length_last, key_and_value()))
      key, value = self.variable(PREPARED, "keys_and_values", last).value
    else:
      key, value = key_and_value()
    if decode:
      key, value, bias, mask = self._cached(key, value, bias)
    if cfg.float32_attention_logits:
      query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    # Kept keys and values have their length last. XLA multiplies them as they lie; turned in a
    # loop, it would copy them at each token.
    layout = "...hdk" if once or decode else "...khd"
    logits = jnp.einsum(f"...qhd,{layout}->...hqk", query, key)
    seen = jnp.where(mask, 0.0, _MASKED).astype(cfg.dtype)  # type: ignore
    bias = seen if bias is None else seen + bias
    logits = logits + bias.astype(logits.dtype)
    weights = jax.nn.softmax(logits, axis=-1).astype(cfg.dtype)
    if cfg.dropout_rate > 0.0 and not deterministic:
      # One draw for all queries, as in T5X: random bits are slow on a TPU.
      kept = 1.0 - cfg.dropout_rate
      shape = (*weights.shape[:-2], 1, weights.shape[-1])
      keep = jax.random.bernoulli(self.make_rng("dropout"), kept, shape)
      weights = weights * (keep.astype(cfg.dtype) / jnp.asarray(kept, cfg.dtype))
    x = jnp.einsum(f"...hqk,{layout}->...qhd", weights, value)
    out = dense(
      inputs_q.shape[-1],
      (-2, -1),
      kernel_init=_kernel_init,
      kernel_axes=(*heads, "embed"),
      name="out",
    )
    return out(x)

  def _cached(self, key, value, bias):
    """Adds a key and a value; returns all [b, h, d, k], this token's biases, and who is seen."""
    made = self.has_variable("cache", "cache_index")
    index = self.variable("cache", "cache_index", lambda: jnp.int32(0))
    now = index.value
    index.value = now + int(made)  # the call that makes the cache writes nothing
    found = []
    for name, new in (("cached_key", _length_last(key)), ("cached_value", _length_last(value))):
      kept = self.variable("cache", name, jnp.zeros, new.shape, new.dtype)
      if made:
        kept.value = lax.dynamic_update_slice_in_dim(kept.value, new, now, axis=3)
      found.append(kept.value)
    length = found[0].shape[-1]
    # A bias depends on key - query alone; what stands for keys in the future is masked.
    bias = lax.dynamic_slice_in_dim(bias, length - 1 - now, length, axis=-1)
    # Places that are not written yet are zeros, and must not be seen.
    past = lax.broadcasted_iota(jnp.int32, (1, 1, 1, length), 3) <= now
    return *found, bias, past


def _length_last(x: jax.Array) -> jax.Array:
  # [b, k, h, d] -> [b, h, d, k]: the lanes of a TPU want a long last axis, and d is 64.
  return jnp.moveaxis(x, -3, -1)
