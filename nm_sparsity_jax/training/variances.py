"""Variances over sparse kernels, of all weights and of the kept ones: figure 3 of the paper.

    optax state -> [second_moments] -> path -> v
    values, masks -> [variances] -> Variances

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
  if lost := [path for path in masks if path not in values]:
    raise ValueError(
      f"the sparse kernel {lost[0]!r} has no {what}. The tree must be nested as `params` and cover "
      "every kernel of the rules."
    )
  wide = {path: values[path].astype(jnp.float32) for path in masks}
  places = {path: _variance([x], [masks[path]]) for path, x in wide.items()}
  return Variances(_variance(list(wide.values()), list(masks.values())), places)


def _variance(xs: Sequence[jax.Array], masks: Sequence[jax.Array]) -> Variance:
  """Returns the variance of all entries of several arrays, and of those that masks keep."""
  whole = [jnp.ones_like(mask) for mask in masks]
  return Variance(_of_kept(xs, whole), _of_kept(xs, masks))


def _of_kept(xs: Sequence[jax.Array], masks: Sequence[jax.Array]) -> jax.Array:
  """Takes two passes; the second corrects what rounding left in the mean.

  Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 1.7.
  """
  total = add_up([count(mask) for mask in masks])
  chosen = lambda x, mask: jnp.where(mask, x, jnp.zeros_like(x))
  mean = ratio(add_up([jnp.sum(chosen(x, m)) for x, m in zip(xs, masks, strict=True)]), total)
  off = [chosen(x - mean, mask) for x, mask in zip(xs, masks, strict=True)]
  left = add_up([jnp.sum(x) for x in off])
  squares = add_up([jnp.sum(x * x) for x in off]) - left * ratio(left, total)
  return ratio(jnp.maximum(squares, jnp.float32(0)), total)


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
