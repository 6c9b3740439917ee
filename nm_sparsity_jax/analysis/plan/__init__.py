"""Says what a run would do, and what stands in its way, before it starts.

    gin files, overrides
      -> gin_files.Config   errors: files, bindings, macros that are not set or that nothing reads
      -> build              the run as its program makes it, under `jax.eval_shape`
      -> contents           schedule, lambda, learning rate, cost
      -> checks             what the program refuses before its first step; what it restores
      -> chips              --topology: the train step, compiled for TPUs
      -> plain values       -> render

Nothing of the model's size is allocated.

    from nm_sparsity_jax import plan
    from nm_sparsity_jax.integrations import gin_files

    report = plan.plan(
      ["gin_configs/models/t5.gin", "gin_configs/sparsity.gin"],
      ["T5_SIZE = 'base'", "RECIPE = 'sr_ste'", "PATTERN = '1:8'", "SPARSE_STEPS = 100_000"],
      search_paths=[gin_files.folder()],
    )
    report["ok"], report["cost"]["inference"]
    print(plan.render(report))
"""

from nm_sparsity_jax.analysis.plan.report import plan, render

__all__ = ["plan", "render"]
