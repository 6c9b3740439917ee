"""Says what a run would do, and what stands in its way, before it starts.

    from nm_sparsity_jax import gin_files, plan

    report = plan.plan(
      ["gin_configs/models/t5.gin", "gin_configs/sparsity.gin"],
      ["T5_SIZE = 'base'", "RECIPE = 'sr_ste'", "PATTERN = '1:8'", "SPARSE_STEPS = 100_000"],
      search_paths=[gin_files.folder()],
    )
    report["ok"], report["cost"]["inference"]
    print(plan.render(report))
    plan.plot(report, "schedule.png")

A report is plain values, as `nm-sparsity plan --json` prints them.
"""

from nm_sparsity_jax.analysis.plan.drawing import plot
from nm_sparsity_jax.analysis.plan.model import network_of, shapes
from nm_sparsity_jax.analysis.plan.report import examine, plan
from nm_sparsity_jax.analysis.plan.text import render

__all__ = ["examine", "network_of", "plan", "plot", "render", "shapes"]
