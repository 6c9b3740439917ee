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
  last = levels[-1][1]
  w = lax.stop_gradient(w)
  final = lambda: masks.magnitude_mask(w, last, axis, parent=parent)
  if len(levels) == 1:
    return final()
  # The last level holds longest and is often far cheaper than the ladder: 1:m is one maximum.
  if isinstance(step, jax.core.Tracer):
    all_in_one = _ladder(levels, w, step, axis, parent, settles=True)
    if all_in_one is not None:  # one operation, which XLA merges with its like
      return all_in_one()
  climb = _ladder(levels[:-1], w, step, axis, parent)
  if climb is None:
    return _choice(levels, w, step, axis, parent)
  return when(step >= levels[-1][0], final, climb)


def _ladder(
  levels: Levels, w, step, axis, parent, settles: bool = False
) -> Callable[[], jax.Array] | None:
  # One program with a traced n serves levels of one m, and with a traced d levels that double.
  patterns = [p for _, p in levels]
  base = patterns[-1]
  if len({p.m for p in patterns}) == 1:
    n = value_at(levels, step, [p.n for p in patterns])
    return lambda: masks.magnitude_mask(w, base, axis, n=n, parent=parent, settles=settles)
  most = len(patterns) - 1
  doubling = [NM(base.n << d, base.m << d) for d in range(most, -1, -1)]
  if patterns == doubling and parent is None:
    d = value_at(levels, step, range(most, -1, -1))
    return lambda: masks.ladder_mask(w, base, axis, doublings=d, most=most, settles=settles)
  return None


def _choice(levels: Levels, w, step, axis, parent) -> jax.Array:
  # Levels without a program in common are branches, each with a program of its own.
  take = lambda w, p: masks.magnitude_mask(w, p, axis, parent=parent)
  branches = [functools.partial(take, p=p) for _, p in levels]
  now = value_at(levels, step, range(len(levels)))
  if isinstance(now, jax.core.Tracer):
    return lax.switch(now, branches, w)
  return branches[int(now)](w)
