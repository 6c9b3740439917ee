"""Sums that are exact where they can be: counts, shares, means over places of many sizes.

Counts are taken in integers and rounded once to float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from nm_sparsity_jax.training.sites import Site

_MAX_COUNT = 2**32 - 1  # what one uint32 can count


def count(mask: jax.Array) -> jax.Array:
  """Returns the number of True entries, float32: counted exactly, rounded once."""
  if mask.size <= _MAX_COUNT:
    return jnp.sum(mask, dtype=jnp.uint32).astype(jnp.float32)
  rows = jnp.sum(mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.uint32)
  return jnp.sum(rows.astype(jnp.float32))


def ratio(part: jax.Array, whole: jax.Array | int) -> jax.Array:
  """Returns part / whole: exactly 1 where they are equal, and 0 where the whole is 0."""
  whole = jnp.asarray(whole, jnp.float32)
  share = part / jnp.maximum(whole, jnp.float32(1))
  return jnp.where((part == whole) & (whole > 0), jnp.float32(1), share)


def add_up(values: Sequence[jax.Array]) -> jax.Array:
  """Returns the sum of scalars; 0 where there are none."""
  return jnp.sum(jnp.stack(values)) if values else jnp.float32(0)


def mean_by_size(places: Mapping[str, Site], values: dict[str, jax.Array]) -> jax.Array:
  """Returns the mean over all weights, exact where all values agree; 1 without weights."""
  sizes = {path: math.prod(place.shape) for path, place in places.items()}
  total = sum(sizes.values())
  if not total:
    return jnp.float32(1)
  first = next(iter(values.values()))
  return first + add_up([(values[p] - first) * jnp.float32(n / total) for p, n in sizes.items()])
