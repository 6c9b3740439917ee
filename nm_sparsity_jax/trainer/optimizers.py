"""The learning rate of a run, a product of named factors in T5X's words, and AdamW for images."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.core.trees import map_with_names


def learning_rate(
  rate: float, factors: str = "constant", warmup_steps: int = 1000, steps: int | None = None
) -> Callable[[jax.Array | int], jax.Array]:
  """Returns step of this run -> learning rate, as T5X's `create_learning_rate_scheduler` does.

  It is at least 1e-8. The factors are

      constant       rate
      linear_warmup  min(1, step / warmup)
      rsqrt_decay    max(step, warmup) ** -1/2
      cosine_decay   (1 + cos(pi * t)) / 2; t goes from 0 at warmup to 1 at the last step

  >>> float(learning_rate(0.5, "constant * linear_warmup", warmup_steps=10)(5))
  0.25

  Args:
    rate: the factor 'constant' [LEARNING_RATE].
    factors: names joined by `*` [LEARNING_RATE_FACTORS].
    warmup_steps: see above [WARMUP_STEPS].
    steps: of the run; only 'cosine_decay' needs them [SPARSE_STEPS].
  """
  share = lambda step: (step - warmup_steps) / ((steps or 0) - warmup_steps)
  # T5X's names, so that a setting moves between the two runners.
  known = {
    "constant": lambda step: rate,
    "linear_warmup": lambda step: jnp.minimum(1.0, step / max(warmup_steps, 1)),
    "rsqrt_decay": lambda step: jnp.maximum(step, max(warmup_steps, 1)) ** -0.5,
    "cosine_decay": lambda step: (1 + jnp.cos(math.pi * jnp.clip(share(step), 0.0, 1.0))) / 2,
  }
  names = [name.strip() for name in factors.split("*")]
  is_short = "cosine_decay" in names and (steps or 0) <= warmup_steps
  if not set(names) <= set(known) or not rate > 0 or is_short:
    raise ValueError(
      f"LEARNING_RATE={rate!r}, LEARNING_RATE_FACTORS={factors!r}, WARMUP_STEPS={warmup_steps}, "
      f"SPARSE_STEPS={steps!r}: give a rate above 0 and factors of {', '.join(known)}; "
      "'cosine_decay' needs a WARMUP_STEPS below SPARSE_STEPS (in gin: learning_rate.steps = "
      "%SPARSE_STEPS)."
    )

  def at(step):
    step = jnp.asarray(step, jnp.float32)
    value = math.prod(jnp.asarray(known[name](step), jnp.float32) for name in names)
    return jnp.maximum(value, 1e-8)  # T5X's floor

  return at


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
  gradient that is clipped, unless it is decoupled.

  Args:
    learning_rate: a number, or step -> number, such as `learning_rate` makes.
    b1: of the first moment [ADAM_B1].
    b2: of the second moment [ADAM_B2].
    eps: added to the root of the second moment [ADAM_EPS].
    weight_decay: times the learning rate [WEIGHT_DECAY].
    clip_norm: the largest norm of the gradient; None = any [CLIP_NORM].
  """
  # A decayed norm or bias would pull its layer to zero without making a weight smaller.
  kernels = functools.partial(map_with_names, lambda path, _: path.endswith("kernel"))
  tx = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=kernels)
  return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)
