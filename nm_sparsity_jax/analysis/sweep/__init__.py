"""A grid of recipes, patterns and seeds from one file: checked, trained, compared.

    from nm_sparsity_jax import sweep
    grid = sweep.read("sweep.toml")             # a Sweep: its cells, seed by seed
    runs = sweep.check(grid)                    # raises for a wrong setting; starts nothing
    sweep.train(grid, runs)                     # each run is a process of its own
    found = sweep.table(grid, runs)             # plain values: means, spreads, differences
    print(sweep.text(found))
    sweep.page(grid, runs, found)               # out/report.html

docs/sweep.md describes the file.
"""

from nm_sparsity_jax.analysis.sweep.grid import Cell, Sweep, read
from nm_sparsity_jax.analysis.sweep.pages import page
from nm_sparsity_jax.analysis.sweep.results import table, text
from nm_sparsity_jax.analysis.sweep.training import Run, check, train

__all__ = ["Cell", "Run", "Sweep", "check", "page", "read", "table", "text", "train"]
