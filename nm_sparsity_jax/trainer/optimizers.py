"""The learning rate of a run, a product of named factors in T5X's words, and AdamW for images."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.core.trees import map_with_names

FACTORS: dict[str, Callable] = {
  "constant": lambda step, rate, warmup: rate,
  "linear_warmup": lambda step, rate, warmup: jnp.minimum(1.0, step / max(warmup, 1)),
  "rsqrt_decay": lambda step, rate, warmup: jnp.maximum(step, warmup) ** -0.5,
  "rsqrt_normalized_decay": lambda step, rate, warmup: (jnp.maximum(step / warmup, 1.0)) ** -0.5,
}
_COSINE = "cosine_decay"  # the one factor that depends on the length of the run


def learning_rate(
  rate: float, factors: str = "constant", warmup_steps: int = 1000, steps: int | None = None
) -> Callable[[jax.Array | int], jax.Array]:
  """Returns step of this run -> learning rate, as T5X's `create_learning_rate_scheduler` does.

  It is at least 1e-8. The factors are

      constant                rate
      linear_warmup           min(1, step / warmup)
      rsqrt_decay             max(step, warmup) ** -1/2
      rsqrt_normalized_decay  max(step / warmup, 1) ** -1/2
      cosine_decay            (1 + cos(pi * t)) / 2; t goes from 0 at warmup to 1 at the last step

  >>> float(learning_rate(0.5, "constant * linear_warmup", warmup_steps=10)(5))
  0.25

  Args:
    rate: the factor 'constant' [LEARNING_RATE].
    factors: names joined by `*` [LEARNING_RATE_FACTORS].
    warmup_steps: see above [WARMUP_STEPS].
    steps: of the run; only 'cosine_decay' needs them [SPARSE_STEPS].
  """
  is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
  if not is_number or not rate > 0:
    raise ValueError(f"LEARNING_RATE={rate!r}: give a number above 0, such as 0.001.")
  if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
    raise ValueError(f"WARMUP_STEPS={warmup_steps!r}: give a whole number of steps, 0 or more.")
  names = [name.strip() for name in factors.split("*")]
  known = (*FACTORS, _COSINE)
  if unknown := [name for name in names if name not in known]:
    raise ValueError(
      f"LEARNING_RATE_FACTORS={factors!r}: {unknown[0]!r} is not one of {', '.join(known)}."
    )
  if warmup_steps < 1 and any("rsqrt" in name for name in names):
    raise ValueError(f"WARMUP_STEPS={warmup_steps}: with {factors!r} it must be at least 1.")

  decays = FACTORS | ({_COSINE: _cosine(warmup_steps, steps)} if _COSINE in names else {})

  def at(step):
    step = jnp.asarray(step, jnp.float32)
    value = jnp.float32(1)
    for name in names:
      value = value * jnp.asarray(decays[name](step, rate, warmup_steps), jnp.float32)
    return jnp.maximum(value, 1e-8)

  return at


def _cosine(warmup_steps: int, steps: int | None) -> Callable:
  """Returns the factor 'cosine_decay' of a run with so many steps."""
  if isinstance(steps, bool) or not isinstance(steps, int) or steps <= warmup_steps:
    raise ValueError(
      f"LEARNING_RATE_FACTORS has {_COSINE!r}, which falls from WARMUP_STEPS={warmup_steps} to "
      f"SPARSE_STEPS={steps!r}: give more SPARSE_STEPS or a smaller WARMUP_STEPS (in gin: "
      "learning_rate.steps = %SPARSE_STEPS)."
    )
  length = float(steps - warmup_steps)

  def factor(step, rate, warmup):
    del rate
    return (1 + jnp.cos(math.pi * jnp.clip((step - warmup) / length, 0.0, 1.0))) / 2

  return factor


def adamw(
  learning_rate: Any,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0001,
  clip_norm: float | None = None,
) -> optax.GradientTransformation:
  """Returns AdamW that decays kernels alone, and clips the gradient.

      adamw(1e-3, weight_decay=0.05, clip_norm=1.0)

  Biases, norms, tokens and embeddings of positions are not decayed. SR-STE's term is part of the
  gradient that is clipped.

  Args:
    learning_rate: a number, or step -> number, such as `learning_rate` makes.
    b1: of the first moment [ADAM_B1].
    b2: of the second moment [ADAM_B2].
    eps: beside the root of the second moment [ADAM_EPS].
    weight_decay: times the learning rate [WEIGHT_DECAY].
    clip_norm: the largest norm of the gradient; None = any [CLIP_NORM].
  """
  _refuse("WEIGHT_DECAY", weight_decay, lambda x: x >= 0, "a number from 0 on")
  _refuse("CLIP_NORM", clip_norm, lambda x: x > 0, "a number above 0, or None")
  links = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
  links.append(optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=_kernels))
  return optax.chain(*links)


def _kernels(params: Any) -> Any:
  """Returns which parameters are kernels, a tree of bool."""
  return map_with_names(lambda path, _: path.endswith("kernel"), params)


def _refuse(macro: str, value: Any, fits: Callable[[Any], bool], words: str) -> None:
  """Refuses a number that does not fit; None is looked at nowhere."""
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if value is not None and not (is_number and fits(value)):
    raise ValueError(f"{macro}={value!r}: give {words}.")
