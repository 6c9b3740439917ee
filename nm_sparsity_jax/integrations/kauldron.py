"""Kauldron: a metric that watches the masks. Training needs the optimizer alone.

    cfg.optimizer = nms.sparse(optax.adamw(1e-3), rules)
    cfg.train_metrics["sparsity"] = nms_kauldron.Sparsity(rules=rules)

docs/kauldron.md has the commands, for one host and for several.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from kauldron import kd

from nm_sparsity_jax.core.schedules import NO_STEP
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics, rules_text, transform
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass(kw_only=True, frozen=True, eq=True)
class Sparsity(kd.metrics.Metric):
  """Density, D and pattern of a step, and the share of weights that its update flips.

  The names are those of `nms.metrics.summary`, without the first 'nm/'. Where the optimizer's state
  was made by other rules, as after a resume with another recipe, it ends the run by an error:
  without it all weights become NaN.

  Attributes:
    rules: those of the optimizer.
    params: Kauldron's key of the parameters.
    opt_state: that of the optimizer's state.
    updates: that of its updates; an evaluation has none, and no flips.
  """

  rules: Rules
  params: kd.kontext.Key = "params"
  opt_state: kd.kontext.Key = "opt_state"
  updates: kd.kontext.Key | None = "updates"

  @struct.dataclass
  class State(kd.metrics.State):
    """Name -> value; `D` is NaN where the rules are others."""

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def empty(cls) -> Any:
      """Returns a state without values."""
      return cls()

    def merge(self, other: Any) -> Any:
      """Returns a state with values: all batches of an evaluation see the same weights."""
      return self if self.values else other

    def compute(self) -> dict[str, Any]:
      """Returns name -> value."""
      if np.isnan(self.values["D"]):
        raise ValueError(
          "the optimizer's state was made by nms.sparse with other rules than those of this "
          "Sparsity metric: go on with the rules of the checkpoint, or take another workdir."
        )
      return dict(self.values)

  def get_state(self, params: Any, opt_state: Any, updates: Any = None) -> State:
    """Returns what the state of the optimizer tells of a step."""
    (state,) = transform.states(opt_state, transform.SparseState)
    same = jnp.array_equal(state.rules, rules_text.pack(self.rules.text))
    step = jnp.where(same, state.count, NO_STEP)
    dense = transform.dense_params(params, state)
    values = metrics.summary(dense, self.rules, step, state.masks)
    if updates is not None:
      # W~ in place of W, which comes later: a pruned weight of it is never the larger one.
      after = dict(flatten(optax.apply_updates(params, updates)))
      new = {
        path: after[path] != 0 if site.recipe.stateful else site.mask(after[path], step + 1)
        for path, site in self.rules.assign(params).sites.items()
      }
      rate = metrics.flip_rate(metrics.masks_of(dense, self.rules, step, state.masks), new)
      values |= {"nm/flip_rate/all": rate.all, "nm/flip_rate/kept": rate.kept}
    return self.State({name.removeprefix("nm/"): x for name, x in values.items()})
