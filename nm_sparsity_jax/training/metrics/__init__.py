"""What to watch during a run: density, D, pattern, flips, and the variances of figure 3.

    params, rules, step, state, gradients, optimizer state -> [metrics] -> scalars -> a writer

Pure functions for use inside jit: the step is traced and one compilation serves all steps. Give
them the parameters, the step and the state of one forward pass, and the gradients of that pass.
`summary` is all of them at once, under flat names. It takes the masks anew and reads each sparse
kernel a few times, so a trainer samples it. `before` and `after` are the two halves of such a
sample, one on each side of an optimizer update: compile them as programs of their own, and the
train step costs nothing more when it is not sampled.

Masks are True = kept. Everything is counted in integers and summed in float32, whatever the
dtype of the parameters; of nothing at all (no sparse place) the density is 1, D is 1, and rates
and variances are 0.
"""

from nm_sparsity_jax.training.metrics.flips import FlipRate, flip_rate
from nm_sparsity_jax.training.metrics.moments import (
  SecondMoments,
  adafactor_estimate,
  second_moments,
)
from nm_sparsity_jax.training.metrics.now import (
  Density,
  PatternNow,
  decay,
  density,
  masks_of,
  pattern_now,
  rule_patterns,
)
from nm_sparsity_jax.training.metrics.samples import Before, after, before, summary
from nm_sparsity_jax.training.metrics.variances import (
  Variance,
  Variances,
  grad_abs_variance,
  second_moment_variance,
)

__all__ = [
    "Before", "Density", "FlipRate", "PatternNow", "SecondMoments", "Variance", "Variances",
    "adafactor_estimate", "after", "before", "decay", "density", "flip_rate", "grad_abs_variance",
    "masks_of", "pattern_now", "rule_patterns", "second_moment_variance", "second_moments",
    "summary",
]  # fmt: skip
