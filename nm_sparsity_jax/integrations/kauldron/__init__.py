"""Kauldron with sparse weights: a train step, and a launcher.

    params = W~ -> Kauldron's loss -> gradients -> [nms.sparse around the optimizer] -> params

Kauldron saves, restores and shards `opt_state` and `collections`, so a checkpoint knows itself:

    opt_state/count, fingerprint, dense, masks   the state of `nms.sparse`
    collections/nm_sparsity/rules                uint8[4096], the rules' text, deflated and padded

A konfig file says one thing more than one of Kauldron's does:

    cfg.trainstep = kauldron_adapter.SparseTrainStep(rules=rules)

Only this package imports Kauldron, when a name of it is first used. It needs no change there.
"""

from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.integrations.kauldron import release

if TYPE_CHECKING:
  from nm_sparsity_jax.integrations.kauldron.train_step import SparseTrainStep

__all__ = ["SparseTrainStep"]


def __getattr__(name: str) -> Any:
  if name != "SparseTrainStep":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  release.require()
  from nm_sparsity_jax.integrations.kauldron import train_step

  return train_step.SparseTrainStep
