"""What a trainer needs of a model family: `Workload`, and T5's, `t5.T5`.

`base` says what a family brings; `of` finds the workload of a network. seqio and TensorFlow are
imported inside functions.
"""

from nm_sparsity_jax.trainer.workloads.base import Batch, Sums, Workload
from nm_sparsity_jax.trainer.workloads.find import describe, of, refuse_without_predict

__all__ = ["Batch", "Sums", "Workload", "describe", "of", "refuse_without_predict"]
