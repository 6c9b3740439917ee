"""What a trainer needs of a model family: `Workload`; T5's is `t5.T5`, that of images `vision`."""

from nm_sparsity_jax.trainer.workloads.base import Batch, Workload, describe

__all__ = ["Batch", "Workload", "describe"]
