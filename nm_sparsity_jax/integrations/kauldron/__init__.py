"""Kauldron with sparse weights: a train step, and a launcher.

    params = W~ -> Kauldron's loss -> gradients -> [nms.sparse around the optimizer] -> params

Kauldron saves, restores and shards `opt_state` and `collections`, so a checkpoint knows itself:

    opt_state/count, fingerprint, dense, masks   the state of `nms.sparse`
    collections/nm_sparsity/rules                uint8[4096], the rules' text, deflated and padded

A konfig file says one thing more than one of Kauldron's does:

    cfg.trainstep = kauldron_adapter.SparseTrainStep(rules=rules)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from nm_sparsity_jax.integrations.kauldron.train_step import SparseTrainStep

__all__ = ["SparseTrainStep"]


def __getattr__(name: str) -> Any:
  # The launcher lies in this package too, and prints its --help without Kauldron's imports.
  if name != "SparseTrainStep":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from nm_sparsity_jax.integrations.kauldron import train_step

  return train_step.SparseTrainStep
