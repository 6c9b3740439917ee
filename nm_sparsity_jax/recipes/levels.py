"""The mask of the level that holds at a step: one program for all levels of a schedule.

    ((first step, pattern), ...), step, w -> [leveled_mask] -> mask

Which levels a pattern has is in `schedules`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.patterns import NM

Levels = Sequence[tuple[int, NM]]


def when(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
  """Calls `yes` or `no`: by lax.cond where traced, else in Python, which needs no compilation."""
  if isinstance(condition, jax.core.Tracer):
    return lax.cond(condition, yes, no)
  return yes() if condition else no()


def value_at(levels: Levels, step: jax.Array, values: Iterable[int]) -> jax.Array:
  """Returns the value of the level that holds at `step`, by comparisons: nothing to gather.

  Args:
    levels: (first step, pattern) of each.
    step: int32 scalar.
    values: one int for each level.
  """
  first, *others = values
  now = jnp.int32(first)
  for (start, _), value in zip(levels[1:], others, strict=True):
    now = jnp.where(step >= start, jnp.int32(value), now)
  return now


def leveled_mask(
  levels: Levels,
  w: jax.Array,
  step: jax.Array,
  axis: masks.Axis,
  parent: jax.Array | None = None,
) -> jax.Array:
  """Returns the magnitude mask of the level that holds at `step`; the first counts before it, too.

  Args:
    levels: (first step, pattern) of each.
    w: float array.
    step: int32 scalar; one compilation serves all steps.
    axis: as in `masks.nm_mask`.
    parent: as in `masks.magnitude_mask`.
  """
  w, patterns = lax.stop_gradient(w), [p for _, p in levels]
  take = lambda w, pattern: masks.magnitude_mask(w, pattern, axis, parent=parent)
  if len(levels) == 1:
    return take(w, patterns[0])
  now = value_at(levels, step, range(len(levels)))
  if not isinstance(now, jax.core.Tracer):
    return take(w, patterns[int(now)])
  # The last level holds longest and is often far cheaper than the others, as 1:m is one maximum:
  # `settles` says so.
  if len({p.m for p in patterns}) == 1:
    n = value_at(levels, step, [p.n for p in patterns])
    return masks.magnitude_mask(w, patterns[-1], axis, n=n, parent=parent, settles=True)
  return lax.switch(now, [functools.partial(take, pattern=p) for p in patterns], w)
