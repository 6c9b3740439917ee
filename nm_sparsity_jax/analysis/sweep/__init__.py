"""A grid of recipes, patterns and seeds from one file: checked, trained, compared.

    from nm_sparsity_jax import sweep
    grid = sweep.read("sweep.toml")             # a Sweep: its cells, seed by seed
    checked = sweep.check(grid)                 # raises for a wrong setting; starts nothing
    sweep.train(grid, checked)                  # each run is a process of its own
    found = sweep.table(grid, checked)          # plain values: means, spreads, differences
    print(sweep.text(found))
    sweep.page(grid, checked, found)            # out/report.html

docs/sweep.md describes the file. The names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
  "Cell": "grid",
  "Sweep": "grid",
  "read": "grid",
  "Checked": "checks",
  "check": "checks",
  "check_tasks": "checks",
  "Run": "states",
  "Outcome": "training",
  "train": "training",
  "table": "tables",
  "text": "texts",
  "page": "pages",
}

if TYPE_CHECKING:
  from nm_sparsity_jax.analysis.sweep.checks import Checked, check, check_tasks
  from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep, read
  from nm_sparsity_jax.analysis.sweep.pages import page
  from nm_sparsity_jax.analysis.sweep.states import Run
  from nm_sparsity_jax.analysis.sweep.tables import table
  from nm_sparsity_jax.analysis.sweep.texts import text
  from nm_sparsity_jax.analysis.sweep.training import Outcome, train

__all__ = [
    "Cell", "Checked", "Outcome", "Run", "Sweep", "check", "check_tasks", "page", "read", "table",
    "text", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name in _HOME:
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
