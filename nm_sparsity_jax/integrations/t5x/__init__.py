"""T5X with sparse weights: models, a trainer, metrics, and what restores a checkpoint.

    params + flax_mutables/nm_sparsity -> [model: W~ of that step] -> loss, decode, score
    gradients -> [trainer: + SR-STE's term, once] -> T5X's update -> [step + 1, masks] -> checkpoint
    sampled steps: state, batch -> [measure] -> masks -> (the step) -> [measure] -> nm/...

T5X saves, restores, shards and hands out `flax_mutables` in train, eval and infer alike, so a
checkpoint knows itself:

    nm_sparsity/step               int32 scalar, updates that the sparse run has applied
    nm_sparsity/start              int32 scalar, the global step before the first of them
    nm_sparsity/rules              uint8[4096 * k], the text of the rules, deflated and padded
    nm_sparsity/mask, scale, ...   what `stored.init_state` keeps, sharded as the parameters

Only this package imports T5X, and it needs no change there. A gin file imports the package and
binds its names, wherever they are defined inside:

    from nm_sparsity_jax.integrations import t5x as t5x_adapter
    t5x_adapter.SparseTrainer.metrics_every = 100
"""

from nm_sparsity_jax.integrations.t5x.models import COLLECTION, SparseModel, sparse
from nm_sparsity_jax.integrations.t5x.restore import (
  SparseTrainStateInitializer,
  absolute,
  get_dataset,
  owes_evaluation,
  require_sparse,
  resume_sparse,
)
from nm_sparsity_jax.integrations.t5x.trainer import SparseTrainer, sparse_train_step

__all__ = [
  "COLLECTION",
  "SparseModel",
  "SparseTrainStateInitializer",
  "SparseTrainer",
  "absolute",
  "get_dataset",
  "owes_evaluation",
  "require_sparse",
  "resume_sparse",
  "sparse",
  "sparse_train_step",
]
