"""gin files and overrides, read as T5X's programs read them, with every mistake collected.

config = gin_files.Config([gin_files.folder()], ["gin_configs/sparsity.gin"], ["RECIPE = 'idp'"])
config.errors           # ['PATTERN is not set: ...', 'SPARSE_STEPS is not set: ...']
config.value("RECIPE")  # 'idp'
"""

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.integrations.gin_files.bound import LOCAL, PROGRAMS, Unbound, Unset
from nm_sparsity_jax.integrations.gin_files.config import (
  Config,
  ask_for,
  message,
  read,
  unread_flags,
)
from nm_sparsity_jax.integrations.gin_files.folders import (
  find,
  folder,
  refuse_missing_module,
  see_modules_here,
)

__all__ = [
    "LOCAL", "PROGRAMS", "Config", "Unbound", "Unset", "ask_for", "find", "folder", "message",
    "quiet", "read", "refuse_missing_module", "see_modules_here", "unread_flags",
]  # fmt: skip
