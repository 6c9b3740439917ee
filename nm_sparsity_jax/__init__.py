"""N:M sparsity training in JAX: keep n of every m consecutive weights.

The public names; everything is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax._version import __version__

_HOME = {
  "NM": "patterns",
  "nm_mask": "masks",
  "Phases": "schedules",
  "Recipe": "recipes",
  "recipe": "recipes",
  "Rules": "rules",
  "init_state": "stored",
  "update_state": "stored",
  "sparsify": "apply",
  "finalize": "apply",
  "verify": "apply",
  "sparse": "transform",
  "dense_params": "transform",
  "sr_ste": "optim",
  "count_steps": "optim",
  "step_count": "optim",
}
_MODULES = (
    "apply", "benches", "configure", "deployed", "environment", "flops", "gradients", "groups",
    "layers", "masks", "metrics", "optim", "packed", "patterns", "plan", "recipes", "report",
    "roles", "rules", "runs", "schedules", "scores", "stored", "sweep", "workloads",
)  # fmt: skip

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it equal to the table
  from nm_sparsity_jax import (
    apply,
    benches,
    configure,
    deployed,
    environment,
    flops,
    gradients,
    groups,
    layers,
    masks,
    metrics,
    optim,
    packed,
    patterns,
    plan,
    recipes,
    report,
    roles,
    rules,
    runs,
    schedules,
    scores,
    stored,
    sweep,
    workloads,
  )
  from nm_sparsity_jax.apply import finalize, sparsify, verify
  from nm_sparsity_jax.masks import nm_mask
  from nm_sparsity_jax.optim import count_steps, sr_ste, step_count
  from nm_sparsity_jax.patterns import NM
  from nm_sparsity_jax.recipes import Recipe, recipe
  from nm_sparsity_jax.rules import Rules
  from nm_sparsity_jax.schedules import Phases
  from nm_sparsity_jax.stored import init_state, update_state
  from nm_sparsity_jax.transform import dense_params, sparse

__all__ = [
    "__version__", "NM", "Phases", "Recipe", "Rules", "apply", "benches", "configure",
    "count_steps", "dense_params", "deployed", "environment", "finalize", "flops", "gradients",
    "groups", "init_state", "layers", "masks", "metrics", "nm_mask", "optim", "packed",
    "patterns", "plan", "recipe", "recipes", "report", "roles", "rules", "runs", "schedules",
    "scores", "sparse", "sparsify", "sr_ste", "step_count", "stored", "sweep", "update_state",
    "verify", "workloads",
]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return importlib.import_module(f"{__name__}.{name}")
  if name in _HOME:
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
  return sorted(__all__)
