"""Who may see whom in attention, as masks and biases.

A mask is not 0 where attention is allowed; a bias is added to the logits. Names and numbers are
those of T5X's `examples/t5/layers.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jax import lax


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
  present = _of_equal_rank(masks)
  if not present:
    return None
  return functools.reduce(jnp.logical_and, [m.astype(bool) for m in present]).astype(dtype)


def combine_biases(*masks: jax.Array | None) -> jax.Array | None:
  """Returns the sum of the biases. They have one rank; None is left out."""
  present = _of_equal_rank(masks)
  return functools.reduce(operator.add, present) if present else None


def _of_equal_rank(arrays: Sequence[Any]) -> list[Any]:
  present = [x for x in arrays if x is not None]
  if len({x.ndim for x in present}) > 1:
    raise ValueError(
      f"cannot combine masks or biases of shapes {[tuple(x.shape) for x in present]}: their ranks "
      "differ. Make each [b, h, q, k], with 1 where it holds for all."
    )
  return present


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
