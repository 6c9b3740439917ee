"""How much masks change: of one mask, or of a tree of masks that counts as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.metrics import sums


class FlipRate(NamedTuple):
  """How much two masks differ, float32 scalars.

  Attributes:
    all: changed positions / positions.
    kept: positions that were kept and no longer are / positions that were kept.
  """

  all: jax.Array
  kept: jax.Array


def flip_rate(mask_before: Any, mask_after: Any) -> FlipRate:
  """Returns how much of a mask, or of a tree of masks, changed from one time to another.

      all  = sum(before xor after) / size
      kept = sum(before and not after) / sum(before)

  With equal n:m both times, `all` = 2 * density * `kept`. A tree counts as one long mask.

  Args:
    mask_before: bool array or tree of them, such as what `masks_of` returns.
    mask_after: the same shapes under the same paths.

  >>> f = flip_rate(jnp.array([True, False, True, False]), jnp.array([False, True, True, False]))
  >>> float(f.all), float(f.kept)
  (0.5, 0.5)
  """
  return rate_of(list(count_flips(mask_before, mask_after).values()))


class Flips(NamedTuple):
  """Counts of one pair of masks, float32.

  Attributes:
    changed: positions that differ.
    lost: positions that were kept and no longer are.
    kept: positions that were kept.
    size: all positions.
  """

  changed: jax.Array
  lost: jax.Array
  kept: jax.Array
  size: int


def count_flips(before: Any, after: Any) -> dict[str, Flips]:
  """Returns path -> counts; refuses trees that do not pair up, and masks that are not bool."""
  a, b = dict(flatten(before)), dict(flatten(after))
  if odd := sorted(set(a) ^ set(b)):
    has = "before" if odd[0] in a else "after"
    raise ValueError(
      f"the masks do not pair up: only the one {has} has {odd[0]!r} ({len(odd)} such). Compare "
      "what metrics.masks_of returned for the same parameters and rules at two steps."
    )
  for path in a:
    kinds = [(jnp.shape(x), getattr(x, "dtype", type(x).__name__)) for x in (a[path], b[path])]
    if kinds[0][0] != kinds[1][0] or any(dtype != jnp.bool_ for _, dtype in kinds):
      raise ValueError(
        f"the masks {path!r} are {kinds[0][1]} {kinds[0][0]} before and {kinds[1][1]} "
        f"{kinds[1][0]} after, but must be bool (True = kept) of one shape. For a float mask "
        "pass mask != 0."
      )
  return {
    path: Flips(
      sums.count(a[path] ^ b[path]), sums.count(a[path] & ~b[path]), sums.count(a[path]), m.size
    )
    for path, m in b.items()
  }


def rate_of(counts: Sequence[Flips]) -> FlipRate:
  """Returns the rates of pairs of masks that count as one."""
  return FlipRate(
    sums.ratio(sums.add_up([c.changed for c in counts]), sum(c.size for c in counts)),
    sums.ratio(sums.add_up([c.lost for c in counts]), sums.add_up([c.kept for c in counts])),
  )
