"""Kauldron with sparse weights: a train step, what an evaluator is given, and a launcher.

    params, opt_state -> [nms.sparsify] -> W~ of that step -> Kauldron's loss -> gradients
    gradients -> [nms.sparse around the optimizer] -> params, opt_state: count, masks, fingerprint
    state -> [Effective] -> state with W~ -> Kauldron's evaluator

Kauldron saves, restores and shards `opt_state` and `collections`, so a checkpoint knows itself:

    opt_state/count, fingerprint, masks    the state of `nms.sparse`
    collections/nm_sparsity/rules          uint8[4096], the text of the rules, deflated and padded

A konfig file says two things more than one of Kauldron's does:

    rules = nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=phases)})
    cfg.trainstep = kauldron_adapter.SparseTrainStep(rules=rules)
    cfg.evals = {"eval": kd.evals.Evaluator(
      init_transform=kauldron_adapter.Effective(rules=rules), ...)}

Only this package imports Kauldron, when a name of it is first used. It needs no change there.
"""

from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.kauldron_adapter import release

if TYPE_CHECKING:
  from nm_sparsity_jax.kauldron_adapter.evaluation import Effective, effective
  from nm_sparsity_jax.kauldron_adapter.train_step import SparseTrainStep

__all__ = ["Effective", "SparseTrainStep", "effective"]


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  release.require()
  from nm_sparsity_jax.kauldron_adapter import evaluation, train_step

  return getattr(train_step if name == "SparseTrainStep" else evaluation, name)
