"""The learning rate of a run: how it begins and ends, and whether its warm-up does."""

from __future__ import annotations

from typing import Any

from nm_sparsity_jax.analysis.plan.findings import Findings

# The function that gin binds, by program: T5X's, the local runner's.
_SCHEDULERS = ("create_learning_rate_scheduler", "learning_rate")
_POINTS = 256


def rate(found: Findings) -> dict[str, Any] | None:
  """Returns the part `learning_rate`; None where it is unknown.

  'first', 'last', 'highest': values of the run; 'highest_at': its step; 'factors', 'warmup_steps':
  what makes them, None where a function of your own does.

  Args:
    found: of the run; gets a warning where the run ends in its warm-up, and where the optimizer has
      a rate of its own.
  """
  steps = found.config.get("SPARSE_STEPS")
  if found.config.program != "train" or not isinstance(steps, int) or steps < 1:
    return None
  function, offset = _function(found)
  if function is None:
    return None
  values = _values(function, steps, offset)
  highest = max(values, key=lambda step: values[step])
  factors, warmup = (_bound(found, name) for name in ("factors", "warmup_steps"))
  part = {
    "first": values[0],
    "last": values[steps - 1],
    "highest": values[highest],
    "highest_at": highest,
    "factors": factors if callable(function) else "constant",
    "warmup_steps": warmup if callable(function) and "warmup" in str(factors) else None,
  }
  _warn(found, part, steps)
  if not callable(function) and not found.config.local:
    found.warnings.append(
      f"OPTIMIZER has a learning rate of its own, {part['first']:g}: LEARNING_RATE, WARMUP_STEPS "
      "and LEARNING_RATE_FACTORS do nothing, and T5X's metric learning_rate shows another rate"
    )
  return part


def _function(found: Findings) -> tuple[Any, int]:
  """Returns step -> rate, or a number, and the step at which the run begins."""
  own = found.optimizer_rate()
  if isinstance(own, int | float):
    return float(own), 0
  if found.config.local:
    return own if callable(own) else found.argument("learning_rate", "Run"), 0
  if callable(own):  # optax counts from the run's own step
    return own, 0
  return found.argument("learning_rate_fn", "SparseTrainer"), found.offset or 0


def _values(function: Any, steps: int, offset: int) -> dict[int, float]:
  """Returns step -> rate, at steps that are spread over the run."""
  last = steps - 1
  at = sorted({round(last * i / (_POINTS - 1)) for i in range(_POINTS)} | {0, min(1, last), last})
  if not callable(function):
    return dict.fromkeys(at, float(function))
  import jax
  import numpy as np

  with jax.numpy_dtype_promotion("standard"):  # T5X's and users' own
    found: Any = jax.vmap(function)(np.asarray(at, np.int32) + np.int32(offset))
  values = np.broadcast_to(np.asarray(found, np.float64), len(at))
  return {step: float(value) for step, value in zip(at, values, strict=True)}


def _bound(found: Findings, name: str) -> Any:
  for of in _SCHEDULERS:
    if (value := found.argument(name, of)) is not None:
      return value
  return None


def _warn(found: Findings, part: dict[str, Any], steps: int) -> None:
  """Warns of a run that ends during its warm-up, so that it never reaches its learning rate."""
  warmup, given = part["warmup_steps"], _bound(found, "base_learning_rate") or _bound(found, "rate")
  if not isinstance(warmup, int) or warmup < steps:
    return
  of = f" of LEARNING_RATE={given:g}" if isinstance(given, int | float) else ""
  found.warnings.append(
    f"the run has SPARSE_STEPS={steps:,}, and the learning rate warms up for WARMUP_STEPS="
    f"{warmup:,}: it ends at {part['last']:.3g}{of}. Lower WARMUP_STEPS"
  )
