"""gin files and overrides, read as T5X's programs read them, with every mistake collected.

config = gin_files.Config([gin_files.folder()], ["gin_configs/sparsity.gin"], ["RECIPE = 'idp'"])
config.errors           # []
config.value("RECIPE")  # 'idp'
"""

from nm_sparsity_jax.integrations.gin_files.config import Config, Unset, message, read, unread_flags
from nm_sparsity_jax.integrations.gin_files.folders import (
  find,
  folder,
  refuse_missing_module,
  see_modules_here,
)

__all__ = [
    "Config", "Unset", "find", "folder", "message", "read", "refuse_missing_module",
    "see_modules_here", "unread_flags",
]  # fmt: skip
