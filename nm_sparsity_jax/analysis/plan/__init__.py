"""Says what a run would do, and what stands in its way, before it starts.

    gin files, overrides
      -> gin_files.Config   errors: files, bindings, macros that are not set or that nothing reads
      -> build              the run as its program makes it, so that its own checks speak:
           local runner       Run or Model -> workload, rules, shapes of the parameters
           T5X                MODEL, Ahead -> network, rules, T5X's whole train state as shapes
           no run file        NETWORK or WORKLOAD, RULES
      -> contents           rules.assign -> kernels; recipes -> schedule, lambda, learning rate;
                            flops -> cost
      -> checks             what a program refuses between its making and its first step
      -> restore            keys of a checkpoint, as the program would take them
      -> chips              --topology: the train step, compiled for TPUs
      -> plain values       -> render, plot

Each part notes its first error, and the others go on. Nothing of the model's size is allocated.

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

from nm_sparsity_jax.analysis.plan.build import network_of, shapes
from nm_sparsity_jax.analysis.plan.drawing import plot
from nm_sparsity_jax.analysis.plan.report import plan
from nm_sparsity_jax.analysis.plan.text import render

__all__ = ["network_of", "plan", "plot", "render", "shapes"]
