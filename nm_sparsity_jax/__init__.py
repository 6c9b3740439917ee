"""N:M sparsity training in JAX: keep n of every m consecutive weights.

The public names; everything is imported when it is first used.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax._version import __version__

# name -> where it lies; `__getattr__` imports it.
_HOME = {
  "NM": "core.patterns.NM",
  "magnitude_mask": "core.masks.magnitude_mask",
  "nm_mask": "core.masks.nm_mask",
  "Phases": "core.schedules.Phases",
  "Recipe": "recipes.Recipe",
  "recipe": "recipes.recipe",
  "Rules": "training.rules.Rules",
  "init_state": "training.stored.init_state",
  "update_state": "training.stored.update_state",
  "sparsify": "training.apply.sparsify",
  "finalize": "training.apply.finalize",
  "verify": "training.apply.verify",
  "sparse": "training.transform.sparse",
  "dense_params": "training.transform.dense_params",
  "sr_ste": "training.transform.sr_ste",
  "count_steps": "training.transform.count_steps",
  "step_count": "training.transform.step_count",
  "bench": "analysis.bench",
  "configure": "training.configure",
  "flops": "training.flops",
  "inference_tree": "deploy.inference_tree",
  "layers": "training.layers",
  "masks": "core.masks",
  "metrics": "training.metrics",
  "packed": "core.packed",
  "plan": "analysis.plan",
  "recipes": "recipes",
  "report": "analysis.report",
  "roles": "training.roles",
  "runs": "runs",
  "scores": "analysis.scores",
  "sweep": "analysis.sweep",
}

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it equal to the table
  from nm_sparsity_jax import recipes, runs
  from nm_sparsity_jax.analysis import bench, plan, report, scores, sweep
  from nm_sparsity_jax.core import masks, packed
  from nm_sparsity_jax.core.masks import magnitude_mask, nm_mask
  from nm_sparsity_jax.core.patterns import NM
  from nm_sparsity_jax.core.schedules import Phases
  from nm_sparsity_jax.deploy import inference_tree
  from nm_sparsity_jax.recipes import Recipe, recipe
  from nm_sparsity_jax.training import configure, flops, layers, metrics, roles
  from nm_sparsity_jax.training.apply import finalize, sparsify, verify
  from nm_sparsity_jax.training.rules import Rules
  from nm_sparsity_jax.training.stored import init_state, update_state
  from nm_sparsity_jax.training.transform import (
    count_steps,
    dense_params,
    sparse,
    sr_ste,
    step_count,
  )

__all__ = [
    "__version__", "NM", "Phases", "Recipe", "Rules", "bench", "configure", "count_steps",
    "dense_params", "finalize", "flops", "inference_tree", "init_state", "layers",
    "magnitude_mask", "masks", "metrics", "nm_mask", "packed", "plan", "recipe", "recipes",
    "report", "roles", "runs", "scores", "sparse", "sparsify", "sr_ste", "step_count", "sweep",
    "update_state", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  value = pkgutil.resolve_name(f"{__name__}.{_HOME[name]}")
  globals()[name] = value
  return value


def __dir__():
  return sorted(__all__)
