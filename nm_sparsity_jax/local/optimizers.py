"""The learning rate of a run: a product of named factors, T5X's words for it."""

from __future__ import annotations

import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

FACTORS: dict[str, Callable] = {
  "constant": lambda step, rate, warmup: rate,
  "linear_warmup": lambda step, rate, warmup: jnp.minimum(1.0, step / max(warmup, 1)),
  "rsqrt_decay": lambda step, rate, warmup: jnp.maximum(step, warmup) ** -0.5,
  "rsqrt_normalized_decay": lambda step, rate, warmup: (jnp.maximum(step / warmup, 1.0)) ** -0.5,
}


def learning_rate(
  rate: float, factors: str = "constant", warmup_steps: int = 1000
) -> Callable[[jax.Array | int], jax.Array]:
  """Returns step of this run -> learning rate, as T5X's `create_learning_rate_scheduler` does.

  It is at least 1e-8. The factors are

      constant                rate
      linear_warmup           min(1, step / warmup)
      rsqrt_decay             max(step, warmup) ** -1/2
      rsqrt_normalized_decay  max(step / warmup, 1) ** -1/2

  >>> float(learning_rate(0.5, "constant * linear_warmup", warmup_steps=10)(5))
  0.25

  Args:
    rate: the factor 'constant' [LEARNING_RATE].
    factors: names joined by `*` [LEARNING_RATE_FACTORS].
    warmup_steps: see above [WARMUP_STEPS].
  """
  is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
  if not is_number or not rate > 0:
    raise ValueError(f"LEARNING_RATE={rate!r}: give a number above 0, such as 0.001.")
  if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
    raise ValueError(f"WARMUP_STEPS={warmup_steps!r}: give a whole number of steps, 0 or more.")
  names = [name.strip() for name in factors.split("*")]
  if unknown := [name for name in names if name not in FACTORS]:
    raise ValueError(
      f"LEARNING_RATE_FACTORS={factors!r}: {unknown[0]!r} is not one of {', '.join(FACTORS)}."
    )
  if warmup_steps < 1 and any("rsqrt" in name for name in names):
    raise ValueError(f"WARMUP_STEPS={warmup_steps}: with {factors!r} it must be at least 1.")

  def at(step):
    step = jnp.asarray(step, jnp.float32)
    value = jnp.float32(1)
    for name in names:
      value = value * jnp.asarray(FACTORS[name](step, rate, warmup_steps), jnp.float32)
    return jnp.maximum(value, 1e-8)

  return at
