"""How D(j) falls within the sparsify phase: a value with its course, its end and its corners.

    kind, beta, phases -> [Curve] -> D(j), j = step - dense

The fine-tune phase, in which D = 0 in any case, is not its business.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.schedules import Phases


@dataclasses.dataclass(frozen=True)
class Curve:
  """The course of D.

  Attributes:
    value: (j, xp) -> D(j), float32, for an array j of the library `xp`, jax.numpy or numpy.
    end: the first j from which on D(j) is 0.
    knots: the j at which D(j) has a corner, for the timeline.
  """

  value: Callable[[Any, Any], Any]
  end: int
  knots: tuple[int, ...] = ()


def hard() -> Curve:
  """Returns D = 0: a pruned weight is 0 at once."""
  return Curve(lambda j, xp: xp.zeros(xp.shape(j), xp.float32), 0)


def linear(horizon: float) -> Curve:
  """Returns D = max(1 - j / horizon, 0)."""
  value = lambda j, xp: schedules.linear_decay(j, horizon, xp)
  return Curve(value, schedules.linear_end(horizon))


def exponential(beta: float) -> Curve:
  """Returns D = exp(-beta * j)."""
  value = lambda j, xp: schedules.exponential_decay(j, beta, xp)
  return Curve(value, schedules.exponential_end(beta))


def piecewise(knots: Sequence[tuple[int, float]], dense: int) -> Curve:
  """Returns D that runs linearly between knots (step, D); the step of j = 0 is `dense`."""
  zero_from = knots[-1][0]
  for step, d in reversed(knots):
    if d:
      break
    zero_from = step
  # Where D rises from 0, it is 0 for one step: a segment of its own.
  rises = [a + 1 for (a, d), (_, e) in zip(knots, knots[1:], strict=False) if not d and e]
  corners = (*(step for step, _ in knots), *rises)
  value = lambda j, xp: schedules.piecewise_linear(j + xp.int32(dense), knots, xp)
  return Curve(value, zero_from - dense, tuple(step - dense for step in corners))


# --- the decays of the paper, by kind and beta ---------------------------------------------------

KINDS = ("linear", "exponential")


def decay(kind: str | None, beta: float | None, phases: Phases) -> Curve:
  """Returns the curve of a kind of decay, hard for None.

  Args:
    kind: one of `KINDS`, or None.
    beta: how fast D falls; None = so that it is over at `schedules.default_horizon`.
    phases: the steps of the sparse run.
  """
  if kind == "linear":
    return linear(schedules.default_horizon(phases) if beta is None else 1 / beta)
  return exponential(rate(kind, beta, phases)) if kind else hard()


def rate(kind: str | None, beta: float | None, phases: Phases) -> float:
  """Returns beta, or what None stands for: linear 1 / j*, exponential ln(1000) / j*."""
  if beta is not None:
    return beta
  top = 1 if kind == "linear" else math.log(1000)
  return top / schedules.default_horizon(phases)


def check_decay(name: str, kind: str | None, beta: float | None, phases: Phases) -> None:
  """Refuses a beta that no decay uses, one that is not positive, and phases too short for None."""
  if kind is None and beta is not None:
    raise ValueError(f"{name}(beta={beta!r}) needs decay_kind='linear' or 'exponential'.")
  if beta is not None and not (is_number(beta) and 0 < beta < math.inf):
    raise ValueError(
      f"{name}(beta={beta!r}): give a positive plain number, or D would not fall. None chooses it "
      "from the phases."
    )
  if kind is not None and beta is None:
    schedules.default_horizon(phases)


def is_number(x: Any) -> bool:
  """Returns whether x is a plain number; an array is refused because a recipe is hashed."""
  return isinstance(x, (int, float)) and not isinstance(x, bool)
