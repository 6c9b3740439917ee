"""Variances over sparse kernels, of all weights and of the kept ones: figure 3 of the paper.

    optax state -> [second_moments] -> path -> v
    values, masks -> [moments of each kernel] -> [pool] -> Variances

Counts are taken in integers and rounded once to float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.trees import flatten


class Variance(NamedTuple):
  """The variance of one quantity, float32 scalars.

  Attributes:
    all: over all weights.
    kept: over those that the mask of this step keeps.
  """

  all: jax.Array
  kept: jax.Array


class Variances(NamedTuple):
  """The variance over all sparse kernels together, and path -> the variance of one."""

  overall: Variance
  places: dict[str, Variance]


def variances(
  values: Mapping[str, jax.Array], masks: Mapping[str, jax.Array], what: str
) -> Variances:
  """Returns the variances of the values of each kernel that has a mask.

  Args:
    values: path -> array.
    masks: path -> bool, True = kept.
    what: names the values in an error.
  """
  moments = {}
  for path, mask in masks.items():
    if path not in values:
      raise ValueError(
        f"the sparse kernel {path!r} has no {what}. The tree must be nested as `params` and cover "
        "every kernel of the rules."
      )
    x = values[path].astype(jnp.float32)
    moments[path] = _moments(x), _moments(x, mask)
  pool = lambda pairs: Variance(_pool([a for a, _ in pairs]), _pool([k for _, k in pairs]))
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
  chosen = lambda y: y if mask is None else jnp.where(mask, y, jnp.zeros_like(y))
  size = jnp.float32(x.size) if mask is None else count(mask)
  mean = ratio(jnp.sum(chosen(x)), size)
  off = chosen(x - mean)
  left = jnp.sum(off)
  squares = jnp.sum(off * off) - left * ratio(left, size)
  return _Moments(size, mean, jnp.maximum(squares, jnp.float32(0)))


def _pool(parts: Sequence[_Moments]) -> jax.Array:
  """Returns the variance of several samples together (Chan, Golub and LeVeque 1983, 2.1)."""
  if not parts:
    return jnp.float32(0)
  total = add_up([p.count for p in parts])
  first = parts[0].mean  # the mean by differences: exact where all agree
  mean = first + add_up([(p.mean - first) * ratio(p.count, total) for p in parts])
  between = [p.count * (p.mean - mean) * (p.mean - mean) for p in parts]
  return ratio(add_up([p.squares + b for p, b in zip(parts, between, strict=True)]), total)


def count(mask: jax.Array) -> jax.Array:
  """Returns the number of True entries, float32: counted exactly, rounded once."""
  return jnp.sum(mask, dtype=jnp.uint32).astype(jnp.float32)


def ratio(part: jax.Array, whole: jax.Array | int) -> jax.Array:
  """Returns part / whole: exactly 1 where they are equal, and 0 where the whole is 0."""
  whole = jnp.asarray(whole, jnp.float32)
  share = part / jnp.maximum(whole, jnp.float32(1))
  # XLA may multiply by 1 / whole, which is not 1 for part = whole.
  return jnp.where((part == whole) & (whole > 0), jnp.float32(1), share)


def add_up(values: Sequence[jax.Array]) -> jax.Array:
  """Returns the sum of scalars; 0 where there are none."""
  return jnp.sum(jnp.stack(values)) if values else jnp.float32(0)


# --- second moments -------------------------------------------------------------------------------


class SecondMoments(NamedTuple):
  """Second moments by path, for `summary` and `after` in place of an optax state.

  Attributes:
    nu: path -> second moment, of the parameter's shape.
    is_factored: whether they are estimates, rebuilt from factors as Adafactor does.
  """

  nu: Mapping[str, jax.Array]
  is_factored: bool = False


def second_moments(opt_state: Any, params: Any) -> dict[str, jax.Array]:
  """Returns path -> second moment of an optax state: Adam's v as stored, or Adafactor's estimate.

      v[i, j] = rows[i] * columns[j] / mean(rows)

  Found are the `nu` trees of all states inside, such as that of `optax.scale_by_adam` (no bias
  correction), and the factors of `optax.scale_by_factored_rms`, of small weights the v that it
  keeps whole, under chain, MultiSteps, inject_hyperparams, masked or multi_transform. Weights that
  a transformation is masked from have none.

  Args:
    opt_state: the state.
    params: the parameters, whose shapes tell the axes that Adafactor factors.
  """
  shapes = {path: jnp.shape(leaf) for path, leaf in flatten(params)}
  found: dict[str, jax.Array] = {}
  states = _holders(opt_state)
  if not states:
    raise ValueError(
      f"the optimizer state ({type(opt_state).__name__}) holds no second moment: no state in it "
      "has a field `nu`, as that of optax.adam does, or `v_row`, as optax.adafactor's. SGD and "
      "Lion keep none; leave opt_state out for them."
    )
  for state in states:
    moments = _rebuilt(state, shapes) if _is_factored(state) else dict(flatten(state.nu))
    if both := sorted(found.keys() & moments.keys()):
      raise ValueError(
        f"the optimizer state holds two second moments (`nu`) of {both[0]!r}. Pass the part that "
        "is meant, such as opt_state[1]."
      )
    found |= moments
  return found


def any_factored(opt_state: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
  """Returns whether the second moment of any of these parameters is rebuilt from factors."""
  if isinstance(opt_state, SecondMoments):
    return opt_state.is_factored
  states = [state for state in _holders(opt_state) if _is_factored(state)]
  whole = {path: v.shape for state in states for path, v in flatten(state.v)}
  return any(whole.get(path, shape) != shape for path, shape in shapes.items())


def adafactor_estimate(rows: jax.Array, columns: jax.Array, row_axes, column_axes) -> jax.Array:
  """Returns Adafactor's v (arXiv:1804.04235, algorithm 4; sums there, means here).

  Args:
    rows: the means over the column axes.
    columns: the means over the row axes.
    row_axes: of the whole array.
    column_axes: of the whole array.
  """
  rows, columns = jnp.expand_dims(rows, column_axes), jnp.expand_dims(columns, row_axes)
  mean = jnp.mean(rows, row_axes, keepdims=True)
  return rows / jnp.where(mean == 0, 1, mean) * columns  # 0 before the first gradient


def _holders(opt_state: Any) -> list[Any]:
  """Returns the states that hold a second moment, Adam's or Adafactor's, in order."""
  holds = lambda x: getattr(x, "nu", None) is not None or _is_factored(x)
  return [x for x in jax.tree.leaves(opt_state, is_leaf=holds) if holds(x)]


def _is_factored(state: Any) -> bool:
  return hasattr(state, "v_row") and hasattr(state, "v_col")


def _rebuilt(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
  """Returns the estimates of one state of `optax.scale_by_factored_rms`."""
  rows, columns = dict(flatten(state.v_row)), dict(flatten(state.v_col))
  found = {}
  for path, v in flatten(state.v):
    if v.shape == shapes[path]:
      found[path] = v
    else:  # by its two largest axes
      row, column = (int(axis) for axis in np.argsort(shapes[path])[-2:])
      found[path] = adafactor_estimate(rows[path], columns[path], (row,), (column,))
  return found
