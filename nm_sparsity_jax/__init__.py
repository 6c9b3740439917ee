"""N:M sparsity training in JAX: keep n of every m consecutive weights.

The public names; everything is imported when it is first used.
"""

import importlib
from typing import Any

from nm_sparsity_jax._version import __version__

_HOME = {
  "NM": "patterns",
  "nm_mask": "masks",
  "Phases": "schedules",
  "Recipe": "recipes",
  "recipe": "recipes",
  "Rules": "rules",
  "init_state": "apply",
  "update_state": "apply",
  "sparsify": "apply",
  "finalize": "apply",
  "verify": "apply",
  "sr_ste": "optim",
  "count_steps": "optim",
  "step_count": "optim",
}
_MODULES = (
    "apply", "configure", "flops", "gradients", "layers", "masks", "metrics", "optim", "patterns",
    "recipes", "rules", "schedules",
)  # fmt: skip

__all__ = ["__version__", *_HOME, *_MODULES]


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
