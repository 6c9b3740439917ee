"""A grid of recipes, patterns and seeds from one file: checked, trained, compared.

    from nm_sparsity_jax import sweep
    grid = sweep.read("sweep.toml")             # a Sweep: its cells, seed by seed
    checked = sweep.check(grid)                 # raises for a wrong setting; starts nothing
    sweep.train(grid, checked)                  # each run is a process of its own
    found = sweep.table(grid, checked)          # plain values: means, spreads, differences
    print(sweep.text(found))
    sweep.page(grid, checked, found)            # out/report.html

docs/sweep.md describes the file.
"""

from nm_sparsity_jax.analysis.sweep.checks import Checked, Run, check, check_tasks
from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep, read
from nm_sparsity_jax.analysis.sweep.pages import page
from nm_sparsity_jax.analysis.sweep.results import table, text
from nm_sparsity_jax.analysis.sweep.training import Outcome, train

__all__ = [
    "Cell", "Checked", "Outcome", "Run", "Sweep", "check", "check_tasks", "page", "read", "table",
    "text", "train",
]  # fmt: skip
