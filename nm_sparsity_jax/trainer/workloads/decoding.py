"""Greedy and beam search with the network's KV cache, as jitted loops.

    effective params, inputs -> [start], once -> [step], one token a turn -> ids, scores

Token 0 is both the start and padding. Beam search is T5X's: same scores, same stop, so the same
weights give the same decodes (a search with one beam is not greedy: it may pass by an early end).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from nm_sparsity_jax.models.t5.attention import PREPARED
from nm_sparsity_jax.models.t5.network import Transformer

_NEVER = -1e7  # a score that no hypothesis has


def greedy(
  network: Transformer, params: Any, inputs: jax.Array, length: int, eos_id: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Takes the likeliest next token until every row has ended.

  Args:
    network: the dense network.
    params: its parameters, effective ones for a sparse run.
    inputs: [b, k] encoder ids.
    length: tokens to decode at most.
    eos_id: the token that ends a row.

  Returns:
    ids [b, length], padding after the end, and the sum of log probabilities [b].
  """
  step, cache = _decoder(network, params, inputs, length, beams=1)

  def turn(carry):
    i, cache, ids, score, ended = carry
    logits, cache = step(cache, ids[:, i - 1])  # at first the last one: padding, so a start
    log_probs = jax.nn.log_softmax(logits)
    # An ended row goes on with padding, since all rows share the loop.
    tokens = jnp.where(ended, 0, jnp.argmax(log_probs, -1).astype(jnp.int32))
    gained = jnp.take_along_axis(log_probs, tokens[:, None], 1)[:, 0]
    score = score + jnp.where(ended, jnp.float32(0), gained)
    return i + 1, cache, ids.at[:, i].set(tokens), score, ended | (tokens == eos_id)

  rows = inputs.shape[0]
  first = (
    jnp.int32(0), cache, jnp.zeros((rows, length), jnp.int32), jnp.zeros(rows, jnp.float32),
    jnp.zeros(rows, bool),
  )  # fmt: skip
  going_on = lambda carry: (carry[0] < length) & ~jnp.all(carry[-1])
  _, _, ids, score, _ = lax.while_loop(going_on, turn, first)
  return ids, score


class _Beams(NamedTuple):
  """k live and k ended hypotheses for each row, best first; ids [b, k, length]."""

  i: jax.Array
  cache: Any
  live_ids: jax.Array
  live_scores: jax.Array  # sums of log probabilities
  ended_ids: jax.Array
  ended_scores: jax.Array  # the same, over the length penalty


def beam_search(
  network: Transformer,
  params: Any,
  inputs: jax.Array,
  length: int,
  beams: int,
  eos_id: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Returns the best of `beams` hypotheses by log probability over ((5 + length) / 6) ** 0.6.

  It ends when no live hypothesis can still beat the worst ended one. Arguments and result are those
  of `greedy`. Scores are divided by the penalty, unless the row has no end.
  """
  step, cache = _decoder(network, params, inputs, length, beams)
  rows, k = inputs.shape[0], beams
  penalty = lambda n: ((5.0 + jnp.float32(n)) / 6.0) ** 0.6

  def take(tree, index):  # [b, n, ...] at [b, k] -> [b, k, ...]
    return jax.tree.map(
      lambda x: jnp.take_along_axis(x, index.reshape(rows, k, *[1] * (x.ndim - 2)), 1), tree
    )

  def turn(s: _Beams) -> _Beams:
    # Before the first one, index -1 is padding, and so a start.
    logits, cache = step(s.cache, s.live_ids[:, :, s.i - 1].reshape(-1))
    log_probs = jax.nn.log_softmax(logits).reshape(rows, k, -1) + s.live_scores[..., None]
    size = log_probs.shape[-1]
    # Of 2 k candidates at least k go on, for each beam ends in one way only.
    scores, index = lax.top_k(log_probs.reshape(rows, -1), 2 * k)
    parent, token = index // size, (index % size).astype(jnp.int32)
    ids = jnp.take_along_axis(s.live_ids, parent[..., None], 1).at[:, :, s.i].set(token)
    ends = token == eos_id
    live_scores, live = lax.top_k(jnp.where(ends, _NEVER + scores, scores), k)
    ended = jnp.where(ends, scores / penalty(s.i + 1), _NEVER + scores)
    ended_scores, best = lax.top_k(jnp.concatenate([s.ended_scores, ended], 1), k)
    ended_ids = take(jnp.concatenate([s.ended_ids, ids], 1), best)
    # The cache moves last, once: keys and values are the largest arrays of the loop.
    live_ids, parent = take((ids, parent), live)
    cache = jax.tree.map(lambda x: _of_parents(x, parent), cache)
    return _Beams(s.i + 1, cache, live_ids, live_scores, ended_ids, ended_scores)

  def going_on(s: _Beams):
    # A score can only fall, and the longest length divides it most: no live row ends above this.
    reachable = s.live_scores[:, 0] / penalty(length + 1)
    full = s.ended_scores[:, -1] > _NEVER / 2
    decided = full & (s.ended_scores[:, -1] > reachable)
    return (s.i < length) & ~jnp.all(decided)

  nothing = jnp.zeros((rows, k, length), jnp.int32)
  never = jnp.full((rows, k), _NEVER, jnp.float32)
  # One live hypothesis, else all k would be the same.
  first = _Beams(jnp.int32(0), cache, nothing, never.at[:, 0].set(0.0), nothing, never)
  end = lax.while_loop(going_on, turn, first)
  has_ended = end.ended_scores[:, 0] > _NEVER / 2
  ids = jnp.where(has_ended[:, None], end.ended_ids[:, 0], end.live_ids[:, 0])
  return ids, jnp.where(has_ended, end.ended_scores[:, 0], end.live_scores[:, 0])


def _decoder(network: Any, params: Any, inputs: jax.Array, length: int, beams: int):
  """Returns a step, (cache, tokens [b * beams]) -> (logits, cache), and the first cache."""
  made = network.apply(
    {"params": params}, inputs, length, beams, mutable=[PREPARED, "cache"], method="start"
  )[1]

  def step(cache, tokens):
    known = {"params": params, PREPARED: made[PREPARED], "cache": cache}
    logits, new = network.apply(known, tokens, length, mutable=["cache"], method="step")
    return logits, new["cache"]

  return step, made["cache"]


def _of_parents(x: jax.Array, parent: jax.Array) -> jax.Array:
  """Returns keys or values of each hypothesis's parent; `parent` [b, k] counts within its k rows.

  Positions and the like, of lower rank, are the same for all rows.
  """
  if x.ndim < 4:
    return x
  rows, k = parent.shape
  axis = x.ndim - 4  # a scan stacks layers before it
  return jnp.take(x, (jnp.arange(rows)[:, None] * k + parent).reshape(-1), axis)
