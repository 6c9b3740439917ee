"""Training FLOPs of a run: of matrix products, on a machine that skips every pruned weight."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.run_folder import Run
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.runs import trained
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import flops


def training_flops(run: Run, until: int) -> tuple[float, float]:
  """Returns FLOPs of the first steps, and what a dense run would have spent on them.

  Args:
    run: the run.
    until: how many steps of the sparse run; those that it inherited do not count.

  Raises:
    ValueError: the rules, the network or the batch size are not known.
  """
  if run.rules is None:
    raise ValueError(run.no_rules)
  batch, steps = run.settings.get("BATCH_SIZE"), run.settings.get("SPARSE_STEPS")
  if not isinstance(batch, int) or not isinstance(steps, int):
    raise ValueError("BATCH_SIZE and SPARSE_STEPS are not numbers in config.gin")
  cost = _cost(run)
  spent = lambda rules: flops.training(cost, rules, batch, steps=steps, until=until).flops
  return spent(run.rules), spent({})


@functools.cache  # each step of a run asks for it
def _cost(run: Run) -> flops.Cost:
  """Returns what the local runner noted of its network, or the cost of the T5 in config.gin."""
  noted = (trained.started(run.path).get("workload") or {}).get("ops")
  if noted is not None:
    return flops.Cost(tuple(flops.Op(**op) for op in noted))
  preset = trained.bound(run.gin, "T5Config.preset")
  bound = preset or trained.bound(run.gin, "T5Config")
  lengths = run.settings.get("TASK_FEATURE_LENGTHS")
  if not bound or not isinstance(lengths, Mapping):
    raise ValueError("config.gin binds no T5Config, or no TASK_FEATURE_LENGTHS")
  values: dict[str, Any] = {
    name: run.settings.get(text[1:]) if text[0] == "%" else trained.plain(text)
    for name, text in bound.items()
  }
  if preset:
    make = T5Config.preset
  else:  # T5X's own class has the names of ours, and more that no FLOPs depend on
    make, ours = T5Config, T5Config.__annotations__
    values = {name: value for name, value in values.items() if name in ours}
  if any(isinstance(value, trained.Reference) for value in values.values()):
    raise ValueError("config.gin binds T5Config to values that are not plain")
  network: Any = Transformer(make(**values))
  return T5(network, lengths=lengths).cost()
