"""What an evaluator is given: the effective weights of the step that a state is at.

state, rules -> [effective] -> the same state with W~ in place of W
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from kauldron import kd

from nm_sparsity_jax import apply, opt_states
from nm_sparsity_jax.rules import Rules


def effective(state: Any, rules: Rules) -> Any:
  """Returns a train state whose parameters are those that the network computes with.

      state = kauldron_adapter.effective(state, rules)

  It refuses a state that other rules made.

  Args:
    state: Kauldron's train state, with its optimizer state.
    rules: of the train step.
  """
  if state.opt_state is None:
    raise ValueError(
      "the train state has no optimizer state, which holds the step and the stored masks: restore "
      "it whole, without skip_optimizer or discard_opt."
    )
  # Kauldron's loop forbids transfers that nobody asked for. This one compares a number.
  with jax.transfer_guard("allow"):
    opt_states.read(state.opt_state, rules.fingerprint)
    placed = rules.with_shardings(jax.tree.map(lambda x: x.sharding, state.params))
    return state.replace(params=_sparsify(state.params, state.opt_state, rules=placed))


@functools.partial(jax.jit, static_argnames="rules")
def _sparsify(params, opt_state, rules):
  return apply.sparsify(params, rules, opt_state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effective(kd.ckpts.InitTransform):
  """Gives an evaluator the effective weights: what is scored is what the network computes with.

      kd.evals.Evaluator(init_transform=kauldron_adapter.Effective(rules=rules), ...)

  In a `kd.ckpts.MultiTransform` it stands last.

  Args:
    rules: of the train step.
  """

  rules: Rules

  def transform(self, state: Any) -> Any:
    """Returns the state with effective weights."""
    return effective(state, self.rules)
