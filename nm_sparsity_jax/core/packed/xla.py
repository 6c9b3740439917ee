"""Products of a packed weight in plain XLA, on every platform.

    x (batch, depth), NMPacked -> [scan] or [unpacked] -> (batch, features), float32

`scan` walks over the kept rows: it is the one formulation that beats a dense product on a CPU.
`unpacked` makes the dense weight first: it saves memory between products, never time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nm_sparsity_jax.core.packed.array import NMPacked, spread

_LANES = 128  # rows of x that one scan takes


def prepare(packed: NMPacked) -> NMPacked:
  """Returns the packed weight with an index in each byte, which the scan need not spread."""
  places = spread(np.asarray(packed.indices), packed.rows, packed.bits)
  return dataclasses.replace(packed, indices=places, bits=8)


def dense(packed: NMPacked) -> jax.Array:
  """Returns the weight (depth, features) with its zeros, as `unpack` does, inside jit too.

  int8 values come back as floats, without their scale.
  """
  values = packed.values
  if packed.scale is not None:
    values = values.astype(jnp.float32)
  cut = (packed.groups, packed.n, 1, packed.features)
  places = spread(packed.indices, packed.rows, packed.bits).reshape(cut)
  values = values.reshape(cut)
  here = lax.broadcasted_iota(jnp.uint8, (1, packed.m, 1), 1)
  w = jnp.zeros((packed.groups, packed.m, packed.features), values.dtype)
  for i in range(packed.n):
    w = jnp.where(places[:, i] == here, values[:, i], w)
  return w.reshape(packed.groups * packed.m, packed.features)[: packed.depth]


def unpacked(x: jax.Array, packed: NMPacked) -> jax.Array:
  """Returns x . W by making W: float32 [batch, features]."""
  return scaled(product(x, dense(packed)), packed)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns the float32 sums x . w; where the dtypes differ, both are float32 before."""
  kind = x.dtype if x.dtype == w.dtype else np.dtype(np.float32)
  return jnp.dot(x.astype(kind), w.astype(kind), preferred_element_type=jnp.float32)


def scaled(y: jax.Array, packed: NMPacked) -> jax.Array:
  """Returns y times the scale of its column, in float32; without a scale as it is."""
  return y if packed.scale is None else y.astype(jnp.float32) * packed.scale[None]


def scan(x: jax.Array, packed: NMPacked) -> jax.Array:
  """Returns x . W by adding up kept rows: float32 [batch, features]."""
  batch = x.shape[0]
  if batch <= _LANES:
    return scaled(_scan(x, packed), packed)
  full = jnp.pad(x, ((0, -batch % _LANES), (0, 0)))
  y = lax.map(lambda part: _scan(part, packed), full.reshape(-1, _LANES, packed.depth))
  return scaled(y.reshape(-1, packed.features)[:batch], packed)


def _scan(x: jax.Array, packed: NMPacked) -> jax.Array:
  batch = x.shape[0]
  padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, packed.groups * packed.m - packed.depth)))
  columns = padded[0] if batch == 1 else padded.T
  first = np.arange(packed.rows, dtype=np.int32) // packed.n * packed.m

  def add(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
    values, at, start = row
    picked = columns.at[at.astype(jnp.int32) + start].get(mode="promise_in_bounds")
    values = values.astype(jnp.float32)
    return total + (values if batch == 1 else values[:, None]) * picked, None

  start = jnp.zeros((packed.features,) if batch == 1 else (packed.features, batch), jnp.float32)
  rows = (packed.values, spread(packed.indices, packed.rows, packed.bits), jnp.asarray(first))
  # XLA fuses the rows of one turn of the loop, which pays for more than a few columns of x.
  unroll = 1 if batch < 16 else min(8, packed.rows)
  total, _ = lax.scan(add, start, rows, unroll=unroll)
  return total[None] if batch == 1 else total.T
