"""What of a training program has run in this process, to warn of a part that is missing.

    sparsify   -> [sparsified]      which rules mask weights, and how the step was told
    layers     -> [layer_applied]   the same
    nms.sparse -> [optimizes]       which rules have an optimizer
               -> [updated]         is there a loss that its rules mask?

Under jit these run while a program is traced, so nothing here costs a step anything. A program that
lacks one of them trains without an error, and trains something else than the rules say.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from nm_sparsity_jax.errors import warn
from nm_sparsity_jax.places import Assignment, Place
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.trees import flatten

STATE, NUMBER = "state", "number"  # a step is told by an optimizer state, or by itself


class _Seen:
  """What has run in this process; rules by their fingerprints."""

  def __init__(self):
    self.applied: dict[int, set[str]] = {}  # rules that masked weights -> how the step was told
    self.optimized: set[int] = set()  # rules whose term of SR-STE an optimizer adds
    self.wrapped: set[int] = set()  # of these, the rules of nms.sparse
    self.count_read = False
    self.layers_told = STATE
    self.layers_step: int | None = None  # that layers.with_step made a constant
    self.layered: set[int] = set()  # rules by which layers masked weights
    self.given: dict[int, list[weakref.ref]] = {}  # rules -> a weight of each call of sparsify
    self.effective: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # it made, by id


_seen = _Seen()


def forget() -> None:
  """Forgets everything, as a new process would."""
  _seen.__init__()


# --- noted ----------------------------------------------------------------------------------------


def optimizes(rules: Rules, wraps: bool = False) -> None:
  """Notes that an optimizer adds SR-STE's term of `rules`; `wraps`: it is `nms.sparse`."""
  _seen.optimized.add(rules.fingerprint)
  if wraps:
    _seen.wrapped.add(rules.fingerprint)


def count_read() -> None:
  """Notes that the count of an optimizer state was read, to be used as a step."""
  _seen.count_read = True


def layers_told(told: str, step: Any) -> None:
  """Notes how `layers.with_step` got the step, and a step that a program keeps as a constant."""
  _seen.layers_told = told
  _seen.layers_step = _constant(step)


def masked(rules: Rules, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
  """Notes the sparse weights that `sparsify` got, and what it made of them, while these live."""
  calls = _seen.given.setdefault(rules.fingerprint, [])
  if before and len(calls) < _MOST_CALLS:
    calls.append(weakref.ref(next(iter(before.values()))))
  _seen.effective.update((id(w), w) for w in after.values())


# --- looked at ------------------------------------------------------------------------------------


def sparsified(rules: Rules, assignment: Assignment, params: Any, told: str, step: Any) -> None:
  """Notes that `sparsify` masks a tree, and warns of likely mistakes.

  Args:
    rules: the rules.
    assignment: what they mean for `params`.
    params: the parameters.
    told: `STATE` or `NUMBER`.
    step: updates applied so far, as it was given.
  """
  _seen.applied.setdefault(rules.fingerprint, set()).add(told)
  constant = _constant(step)
  is_trained = told == NUMBER and _is_trained(params)
  arrays = dict(flatten(params)) if _seen.effective else {}
  for path, place in assignment.places.items():
    _check_constant(place, constant)
    if is_trained:
      _check_term(rules, place)
    if _is_effective(arrays.get(path)):
      warn(
        f"nms.sparsify got weights at {path!r} that nms.sparsify made, so D acts on them twice: "
        "give it the stored parameters, once."
      )
  is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(step))
  is_foreign = bool(_seen.wrapped) and rules.fingerprint not in _seen.wrapped
  if told == STATE and is_traced and is_foreign:  # what is not traced is refused
    warn(
      "nms.sparsify got an optimizer state and rules that no nms.sparse in this process has, so "
      "the weights will be NaN: give both the same Rules."
    )


def layer_applied(rules: Rules, place: Place, w: Any) -> None:
  """Notes that a layer masks its kernel `w`, and warns of likely mistakes."""
  _seen.applied.setdefault(rules.fingerprint, set()).add(_seen.layers_told)
  _seen.layered.add(rules.fingerprint)
  _check_constant(place, _seen.layers_step)
  if _seen.layers_told == NUMBER and _is_trained(w):
    _check_term(rules, place)
  if _is_effective(w):
    warn(
      f"the layer at {place.path!r} masks weights that nms.sparsify made, so D acts on them twice: "
      "give the layers the stored parameters, or nms.sparsify a model of plain layers."
    )


def updated(rules: Rules, what: str, params: Any) -> None:
  """Warns where an optimizer updates weights that no forward pass has masked by its rules.

  Args:
    rules: the rules of the optimizer.
    what: 'nms.sparse' or 'nms.sr_ste'.
    params: what it updates.
  """
  _check_updated(rules, what, params)
  told = _seen.applied.get(rules.fingerprint)
  if rules.is_dense:
    return
  if told is None and _seen.applied:
    warn(
      f"{what} updates weights by rules that no loss applies: other Rules masked weights in this "
      "process. Give nms.sparsify, or the layers, the Rules of the optimizer."
    )
  elif told is None:
    warn(
      f"{what} updates weights that no loss has masked, so this run trains dense weights: take the "
      "gradient of lambda p: model_loss(nms.sparsify(p, rules, opt_state)), or use layers with "
      "rules= and nms.layers.with_step."
    )
  elif told == {NUMBER} and not _seen.count_read:
    warn(
      f"{what} counts the steps, but the loss got its step from elsewhere. An epoch or a global "
      "step would be wrong: pass the optimizer state, or nms.step_count(opt_state)."
    )


def _check_updated(rules: Rules, what: str, params: Any) -> None:
  """Warns where effective weights are updated, or where no gradient went through `sparsify`."""
  arrays = {path: w for path, w in flatten(params) if rules.find(path) is not None}
  if path := next((path for path, w in arrays.items() if _is_effective(w)), None):
    warn(
      f"{what} updates the weights at {path!r} that nms.sparsify made, so the pruned weights are "
      "lost at every step: pass the stored parameters to tx.update and optax.apply_updates."
    )
  if not any(isinstance(w, jax.core.Tracer) for w in arrays.values()):
    return  # an eager call of sparsify may be an evaluation, and the gradient be of another source
  calls = [ref() for ref in _seen.given.get(rules.fingerprint, ())]
  if len(calls) < _MOST_CALLS and rules.fingerprint not in _seen.layered:
    # An eager call is not part of this program's loss. One that is gone may be.
    calls = [w for w in calls if not isinstance(w, jax.Array) or isinstance(w, jax.core.Tracer)]
    known = set(map(id, arrays.values()))
    if calls and all(w is not None and id(w) in known for w in calls):
      warn(
        "no gradient went through nms.sparsify: it was called beside the loss, on the weights that "
        f"{what} updates, so the gradient mode of the recipe is lost. Call it in the loss, "
        "jax.grad(lambda p: model_loss(nms.sparsify(p, rules, opt_state)))(params)."
      )


def _is_effective(w: Any) -> bool:
  """Returns whether `sparsify` made this very array."""
  return _seen.effective.get(id(w)) is w and w is not None


def _check_constant(place: Place, step: int | None) -> None:
  """Warns of a step that is a constant of a program, while the schedule of a place goes on."""
  phases = place.recipe.phases
  if step is not None and phases is not None and step < phases.finetune_start:
    warn(
      f"step={step} is a constant of the compiled program, so the program stays at this step while "
      f"the schedule of {place.key!r} ends at step {phases.finetune_start}: pass the optimizer "
      "state, or the step, as an argument of the jitted function."
    )


def _is_trained(tree: Any) -> bool:
  """Returns whether a gradient is taken with respect to a leaf."""
  return any(type(leaf).__name__ in _DIFFERENTIATED for leaf in jax.tree.leaves(tree))


def _check_term(rules: Rules, place: Place) -> None:
  """Warns where nothing adds SR-STE's term that a place in training asks for."""
  if place.recipe.lam and rules.fingerprint not in _seen.optimized:
    warn(
      f"{place.recipe.name} at {place.key!r} adds lam={place.recipe.lam:g} times the pruned "
      "weights to the gradient, but no optimizer of this process does: use nms.sparse(tx, rules), "
      "or put nms.sr_ste(rules) first in the chain; lam=0 leaves the term out."
    )


_MOST_CALLS = 100  # of sparsify that are kept in mind
_DIFFERENTIATED = ("JVPTracer", "LinearizeTracer")  # what jax.grad hands to a loss


def _constant(step: Any) -> int | None:
  """Returns a step whose value is known while a program is traced around it, else None."""
  leaves = jax.tree.leaves(step)
  if len(leaves) != 1 or isinstance(leaves[0], jax.core.Tracer) or np.size(leaves[0]) != 1:
    return None
  is_staged = isinstance(jax.lax.add(np.int32(0), np.int32(0)), jax.core.Tracer)
  return int(np.asarray(leaves[0]).item()) if is_staged else None
