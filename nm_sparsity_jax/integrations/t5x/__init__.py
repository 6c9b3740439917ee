"""T5X with sparse weights: models, a trainer, metrics, and what restores a checkpoint.

    params + flax_mutables/nm_sparsity -> [model: W~ of that step] -> loss, decode, score
    gradients -> [trainer: + SR-STE's term, once] -> T5X's update -> [step + 1, masks] -> checkpoint
    sampled steps only: state, batch -> [look] -> masks, variances -> (the step) -> [look] -> nm/...

T5X saves, restores, shards and hands out `flax_mutables` in train, eval and infer alike, so a
checkpoint knows itself:

    nm_sparsity/step               int32 scalar, updates that the sparse run has applied
    nm_sparsity/start              int32 scalar, the global step before the first of them
    nm_sparsity/rules              uint8[4096], the text of the rules, deflated and padded
    nm_sparsity/mask, score, seen  what `stored.init_state` keeps, sharded as the parameters

Only this package imports T5X, and it needs no change there. A gin file imports the package and
binds its names, wherever they are defined inside:

    from nm_sparsity_jax import t5x_adapter
    t5x_adapter.SparseTrainer.metrics_every = 100
"""

from nm_sparsity_jax.integrations.t5x.initializers import SparseTrainStateInitializer
from nm_sparsity_jax.integrations.t5x.measure import Sample, SampledStep
from nm_sparsity_jax.integrations.t5x.models import (
  COLLECTION,
  SparseDecoderOnlyModel,
  SparseEncoderDecoderModel,
  SparseModel,
  sparse,
)
from nm_sparsity_jax.integrations.t5x.restore import (
  absolute,
  first_step,
  get_dataset,
  owes_evaluation,
  refuse_relative,
  require_sparse,
  resume_sparse,
  saves,
  start,
  stored_rules,
)
from nm_sparsity_jax.integrations.t5x.trainer import (
  SparseTrainer,
  loss_scale,
  refuse_in_chain,
  sparse_train_step,
)

__all__ = [
  "COLLECTION",
  "Sample",
  "SampledStep",
  "SparseDecoderOnlyModel",
  "SparseEncoderDecoderModel",
  "SparseModel",
  "SparseTrainStateInitializer",
  "SparseTrainer",
  "absolute",
  "first_step",
  "get_dataset",
  "loss_scale",
  "owes_evaluation",
  "refuse_in_chain",
  "refuse_relative",
  "require_sparse",
  "resume_sparse",
  "saves",
  "sparse",
  "sparse_train_step",
  "start",
  "stored_rules",
]
