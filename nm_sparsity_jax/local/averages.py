"""A moving average of the parameters, kept by a link at the end of an optimizer's chain.

    params, updates -> [moving_average] -> the same updates
    state: decay * average + (1 - decay) * new parameters

The average is part of the optimizer's state, so it is saved, resumed and laid over devices as that
is. An update is made of all microbatches, so it moves once a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.opt_states import named


class AverageState(NamedTuple):
  """The state of `moving_average`.

  Attributes:
    average: of the parameters, a tree like theirs.
  """

  average: Any


def moving_average(decay: float) -> optax.GradientTransformation:
  """Keeps decay * average + (1 - decay) * parameters after each update, and changes no update.

  It begins with the parameters, as timm's does. It must be the last link of a chain:

      optax.chain(optax.adamw(1e-3), moving_average(0.9999))

  Args:
    decay: above 0 and below 1.
  """

  def init(params):
    return AverageState(jax.tree.map(jnp.copy, params))

  def update(updates, state, params=None):
    if params is None:
      raise ValueError("moving_average needs the parameters: tx.update(grads, opt_state, params).")
    new = optax.apply_updates(params, updates)
    average = jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), state.average, new)
    return updates, AverageState(average)

  return optax.GradientTransformation(init, update)


def average_of(opt_state: Any) -> Any:
  """Returns the average that a state of an optimizer holds; None without one.

      average_of(tx.init(params))

  Args:
    opt_state: of optax, in `nms.sparse` or not.
  """
  found = (s.average for s in named(opt_state) if isinstance(s, AverageState))
  return next(found, None)
