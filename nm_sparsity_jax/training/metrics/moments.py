"""Second moments by path, read from an optax state: Adam's as stored, Adafactor's as estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.sites import Site


class SecondMoments(NamedTuple):
  """Second moments by path, for `summary` and `after` in place of an optax state.

  Attributes:
    nu: path -> second moment, of the parameter's shape.
    is_factored: whether they are estimates, rebuilt from factors as Adafactor does.
  """

  nu: Mapping[str, jax.Array]
  is_factored: bool = False


def second_moments(opt_state: Any, params: Any = None) -> dict[str, jax.Array]:
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
  found: dict[str, jax.Array] = {}
  keeps_any = False
  for state in _holders(opt_state):
    if not _is_factored(state):
      moments = dict(flatten(state.nu))
    elif params is None:
      raise ValueError("Adafactor's second moment is factored: pass params, whose shapes it needs.")
    else:
      moments = _rebuilt(state, {path: jnp.shape(leaf) for path, leaf in flatten(params)})
    if both := sorted(found.keys() & moments.keys()):
      raise ValueError(
        f"the optimizer state holds two second moments (`nu`) of {both[0]!r}, the later one in "
        f"a {type(state).__name__}. Pass the part that is meant, such as opt_state[1]."
      )
    found |= moments
    keeps_any = True
  if not keeps_any:  # one of no weights keeps {}
    raise ValueError(
      f"the optimizer state ({type(opt_state).__name__}) holds no second moment: no state in it "
      "has a field `nu`, as that of optax.adam, adamw or scale_by_adam does, or `v_row`, as "
      "optax.adafactor's. SGD and Lion keep none; leave opt_state out for them."
    )
  return found


def any_factored(opt_state: Any, places: Mapping[str, Site]) -> bool:
  """Returns whether the second moment of any of these places is rebuilt from factors."""
  if isinstance(opt_state, SecondMoments):
    return opt_state.is_factored
  states = [state for state in _holders(opt_state) if _is_factored(state)]
  whole = {path: v.shape for state in states for path, v in flatten(state.v)}
  return any(whole.get(path, place.shape) != place.shape for path, place in places.items())


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
