"""Variances over sparse kernels, of all weights and of the kept ones: figure 3 of the paper.

values, masks -> [moments of each place] -> [pool] -> Variances
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.metrics import sums
from nm_sparsity_jax.training.metrics.moments import second_moments
from nm_sparsity_jax.training.metrics.now import masks_of
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State


class Variance(NamedTuple):
  """The variance of one quantity, float32 scalars.

  Attributes:
    all: over all weights.
    kept: over those that the mask of this step keeps.
  """

  all: jax.Array
  kept: jax.Array


class Variances(NamedTuple):
  """The variance over all places together, and path -> the variance of one place."""

  overall: Variance
  places: dict[str, Variance]


def grad_abs_variance(
  grads: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Returns Var(|g|) over the sparse kernels, over all weights and over the kept ones.

      Var(x) = mean((x - mean(x))^2)

  Figure 3b of arXiv:2402.04744 shows `all`. In masked mode a pruned weight's gradient carries
  the factor D, so `all` falls with D whatever the noise; `kept` is free of that.

  Args:
    grads: gradients with respect to the dense parameters, nested as `params`.
    params: the parameters that they were taken at.
    rules: the rules.
    step: the step that they were taken at.
    state: the state of stateful recipes at that step.
  """
  return of_gradient(grads, masks_of(params, rules, step, state))


def second_moment_variance(
  opt_state: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Returns Var(v) of Adam's second moment over the sparse kernels, all weights and kept ones.

  Figure 3a of arXiv:2402.04744 shows `all`, which is confounded as in `grad_abs_variance`. A
  variance below 1e-38 reads 0. Arguments as there; `opt_state` is read by `second_moments`.
  """
  moments = second_moments(opt_state, params)
  return of_second_moment(moments, masks_of(params, rules, step, state))


def of_gradient(grads: Any, masks: dict[str, jax.Array]) -> Variances:
  """Returns what `grad_abs_variance` does, from masks that exist already."""
  return _variances(dict(flatten(grads)), masks, "gradient (grads)", jnp.abs)


def of_second_moment(moments: Any, masks: dict[str, jax.Array]) -> Variances:
  """Returns what `second_moment_variance` does, of moments by path and masks."""
  return _variances(moments, masks, "second moment (opt_state)", lambda v: v)


def _variances(
  values: Mapping[str, jax.Array], masks: Mapping[str, jax.Array], what: str, of: Callable
) -> Variances:
  """Returns the variances of of(values) at the places of `masks`."""
  moments = {}
  for path, mask in masks.items():
    if path not in values:
      some = ", ".join(list(values)[:4])
      raise ValueError(
        f"the sparse kernel {path!r} has no {what}; these have one: {some or 'none'}. The tree "
        "must be nested as `params` and cover every place of the rules."
      )
    x = values[path]
    if x.shape != mask.shape:
      raise ValueError(
        f"the {what} of {path!r} has shape {x.shape}, but the parameter has {mask.shape}. It "
        "must be kept per weight and belong to these parameters."
      )
    x = of(x.astype(jnp.float32))
    moments[path] = _moments(x), _moments(x, mask)

  def pool(pairs):
    return Variance(_pool([a for a, _ in pairs]), _pool([k for _, k in pairs]))

  return Variances(pool(list(moments.values())), {p: pool([pair]) for p, pair in moments.items()})


class _Moments(NamedTuple):
  """How many, their mean, and the sum of their squared deviations from it."""

  count: jax.Array
  mean: jax.Array
  squares: jax.Array


def _moments(x: jax.Array, mask: jax.Array | None = None) -> _Moments:
  """Takes two passes over x[mask]; the second corrects what rounding left in the mean.

  Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 1.7.
  """
  chosen = (lambda y: y) if mask is None else (lambda y: jnp.where(mask, y, jnp.zeros_like(y)))
  count = jnp.float32(x.size) if mask is None else sums.count(mask)
  mean = sums.ratio(jnp.sum(chosen(x)), count)
  off = chosen(x - mean)
  left = jnp.sum(off)
  squares = jnp.sum(off * off) - left * sums.ratio(left, count)
  return _Moments(count, mean, jnp.maximum(squares, jnp.float32(0)))


def _pool(parts: Sequence[_Moments]) -> jax.Array:
  """Returns the variance of several samples together (Chan, Golub and LeVeque 1983, 2.1)."""
  if not parts:
    return jnp.float32(0)
  if len(parts) == 1:
    return sums.ratio(parts[0].squares, parts[0].count)
  total = sums.add_up([p.count for p in parts])
  first = parts[0].mean  # the mean by differences: exact where all agree
  mean = first + sums.add_up([(p.mean - first) * sums.ratio(p.count, total) for p in parts])
  between = [p.count * (p.mean - mean) * (p.mean - mean) for p in parts]
  return sums.ratio(
    sums.add_up([p.squares + b for p, b in zip(parts, between, strict=True)]), total
  )
