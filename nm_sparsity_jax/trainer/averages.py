"""The moving average of what a run trains: the parameters, and the workload's state beside them.

    variables after a step -> [moved] -> decay * average + (1 - decay) * variables

It is a part of the train state, so it is saved, resumed and laid over devices as that is. State
such as batch statistics is averaged with the parameters, as in timm: averaged weights with the
statistics of the newest ones would be a network that never was.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def check(decay: Any) -> None:
  """Refuses what is no decay; None is one: there is no average."""
  is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
  if decay is not None and not (is_number and 0 < decay < 1):
    raise ValueError(f"EMA_DECAY={decay!r}: give a number between 0 and 1, or None.")


def begin(variables: Any) -> Any:
  """Returns the average at the start of a run: a copy of what the run starts from, as timm's is.

  Args:
    variables: {'params': ..., collection: ...}.
  """
  return jax.tree.map(jnp.copy, variables)


def moved(average: Any, variables: Any, decay: float) -> Any:
  """Returns decay * average + (1 - decay) * variables; of what is no float, the newest.

      moved(average, {"params": params, **collections}, 0.9999)

  Args:
    average: what `begin` or `moved` returned.
    variables: after an update, in the same structure.
    decay: above 0 and below 1.
  """

  def move(a, x):
    return a + (1 - decay) * (x - a) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(move, average, variables)
