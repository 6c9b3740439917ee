"""What holds at a step: masks, D, patterns, and the share of weights that is in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.metrics import sums
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site
from nm_sparsity_jax.training.stored import State, current


class PatternNow(NamedTuple):
  """The pattern n:m that holds at a step, int32 scalars."""

  n: jax.Array
  m: jax.Array


class Density(NamedTuple):
  """Shares of sparse-place weights, float32 scalars.

  Attributes:
    overall: the share that is in use now, over all places, each weighted by its size.
    target: the share that the target patterns keep, weighted in the same way.
    places: path -> the share in use now.
    targets: path -> n / m of the target pattern.
  """

  overall: jax.Array
  target: jax.Array
  places: dict[str, jax.Array]
  targets: dict[str, jax.Array]


def masks_of(
  params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> dict[str, jax.Array]:
  """Returns path -> the bool mask that the effective weight of this step uses, True = kept.

  Only sparse places have one, not those with the dense recipe. It is all True in the dense phase,
  and for one_shot and snip until their mask is taken. While D > 0 a pruned weight is faded, not yet
  zero, but its mask is False already.
  """
  step = as_step(step)
  arrays = dict(flatten(params))
  return {
    path: place.mask(arrays[path], *current(place, step, state))
    for path, place in rules.assign(params).places.items()
  }


def decay(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, jax.Array]:
  """Returns path -> D at `step`, float32: 1 in the dense phase, 0 in the fine-tune phase."""
  places = rules.assign(params).places
  return {path: place.recipe.decay(step) for path, place in places.items()}


def pattern_now(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, PatternNow]:
  """Returns path -> the pattern that holds at `step`, levels of a schedule included.

  It is 1:1 (keep all) while a place is dense, and 0:0 at a traced negative step, which means that
  no step was given.
  """
  step = as_step(step)
  found = {}
  for path, place in rules.assign(params).places.items():
    n = m = jnp.where(step < 0, jnp.int32(0), jnp.int32(1))
    for start, pattern in place.recipe.levels(place.axis_size):
      n = jnp.where(step >= start, jnp.int32(pattern.n), n)
      m = jnp.where(step >= start, jnp.int32(pattern.m), m)
    found[path] = PatternNow(n, m)
  return found


def rule_patterns(
  params: Any, rules: Rules, step: jax.Array | int
) -> dict[str, tuple[PatternNow, jax.Array]]:
  """Returns rule -> the pattern of its places at `step`, and whether they share one; 0:0 if not."""
  patterns, found = pattern_now(params, rules, step), {}
  places = rules.assign(params).places
  for rule in dict.fromkeys(place.key for place in places.values()):
    n, m = jnp.array([patterns[path] for path, place in places.items() if place.key == rule]).T
    shared = jnp.all((n == n[0]) & (m == m[0]))
    found[rule] = PatternNow(*(jnp.where(shared, x[0], 0) for x in (n, m))), shared
  return found


def density(
  params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Density:
  """Returns the share of sparse-place weights in use: those whose factor in W~ is not zero.

  With the mask Phi and W~ = W * (Phi + D * (1 - Phi)), of a place with |W| weights

      density = 1              while D > 0
      density = sum(Phi) / |W| where D = 0
      target  = n / m

  so a stored weight that happens to be 0 counts as used if it is kept. In a padded place the
  short last group keeps up to n of what it has, which can be more than n / m of it. NaN at a
  traced negative step.
  """
  return density_of(rules.assign(params).places, masks_of(params, rules, step, state), step)


def density_of(places: Mapping[str, Site], masks: dict[str, jax.Array], step) -> Density:
  """Returns what `density` does, from masks that exist already."""
  shares, targets = {}, {}
  for path, place in places.items():
    d, pattern = place.recipe.decay(step), place.recipe.pattern
    kept = sums.ratio(sums.count(masks[path]), masks[path].size)
    # D itself where it is NaN: no step was given.
    shares[path] = jnp.where(d == 0, kept, jnp.where(d > 0, jnp.float32(1), d))
    targets[path] = jnp.float32(1 if pattern is None else pattern.density)
  return Density(
    sums.mean_by_size(places, shares), sums.mean_by_size(places, targets), shares, targets
  )
