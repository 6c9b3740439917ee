"""A grid of recipes, patterns and seeds from one file: checked, trained, compared.

    from nm_sparsity_jax import sweep
    grid = sweep.read("sweep.toml")      # its runs, seed by seed; raises for a wrong setting
    sweep.train(grid)                    # each run is a process of its own
    found = sweep.table(grid)            # plain values: means, spreads, differences
    print(sweep.text(found))
    sweep.page(found)                    # out/report.html

docs/sweep.md describes the file.
"""

from nm_sparsity_jax.analysis.sweep.grid import Run, Sweep, read
from nm_sparsity_jax.analysis.sweep.results import page, table, text
from nm_sparsity_jax.analysis.sweep.training import train

__all__ = ["Run", "Sweep", "page", "read", "table", "text", "train"]
