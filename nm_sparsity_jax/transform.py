"""One optax transformation that owns what sparse training needs beside the parameters.

    gradients -> [nms.sparse: + SR-STE's term -> wrapped optimizer] -> updates
                      |-> count + 1 where the update is applied
                      |-> stored masks, refreshed from the parameters after the update

`nms.sparsify` and `nms.finalize` read the step and the masks from its state.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from nm_sparsity_jax import opt_states, witness
from nm_sparsity_jax.apply import verify
from nm_sparsity_jax.errors import warn
from nm_sparsity_jax.opt_states import SparseState
from nm_sparsity_jax.optim import add_sr_ste
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.stored import init_state, update_state
from nm_sparsity_jax.trees import flatten


def sparse(
  tx: optax.GradientTransformation | optax.MultiSteps, rules: Rules
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it trains N:M sparse weights.

      tx = nms.sparse(optax.adamw(1e-2), rules)
      opt = tx.init(params)

      loss = lambda p: model_loss(nms.sparsify(p, rules, opt))
      updates, opt = tx.update(jax.grad(loss)(params), opt, params)
      params = optax.apply_updates(params, updates)

      params = nms.finalize(params, rules, opt)

  In each update it adds SR-STE's term to the gradient, for the recipes that have one, and hands
  the sum to `tx`. It counts the updates that `tx` applies, and refreshes the stored masks from
  the parameters after the update. snip's scores take the gradient without the term.

  It works inside and around `optax.MultiSteps`, `apply_if_finite`, `masked`, `multi_transform`,
  `inject_hyperparams` and `chain`. Use one for all parameters. In a chain it is the last link,
  since it takes its masks from the parameters that its own updates lead to. Mini-steps of
  `optax.MultiSteps`, and updates that `apply_if_finite` rejects, count nothing and change no mask.
  So a guard inside it must decide alone: one with links after it, or of a part of the parameters,
  is refused.

  Args:
    tx: any optax optimizer, without `nms.sr_ste` and without another `nms.sparse`.
    rules: what becomes sparse, and how. `nms.sparsify` and `nms.finalize` need the same rules.

  Returns:
    A transformation whose state is a `SparseState`, with arrays as leaves. Its `update` needs the
    parameters.
  """
  _check(tx, rules)
  witness.optimizes(rules, wraps=True)
  inner = (
    optax.GradientTransformationExtraArgs(tx.init, tx.update)  # type: ignore[arg-type]
    if isinstance(tx, optax.MultiSteps)
    else optax.with_extra_args_support(tx)
  )

  def init(params):
    _refuse_left_out(params, rules)
    masks = init_state(params, rules)
    _warn_of_new_schedule(params, rules)
    with _relaxed():
      inner_state = inner.init(params)
    _check_inner(inner_state, rules)
    return SparseState(jnp.int32(0), jnp.int32(rules.fingerprint), masks, inner_state)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("nms.sparse needs the parameters: tx.update(grads, opt_state, params).")
    if not isinstance(state, SparseState):
      raise ValueError(
        f"nms.sparse got a {type(state).__name__}, which it did not make. A new run "
        "starts from opt_state = tx.init(params). A run that goes on restores its checkpoint into "
        "that structure, such as jax.eval_shape(tx.init, params)."
      )
    witness.updated(rules, "nms.sparse", params)
    now = opt_states.matched(state, rules.fingerprint)
    full = add_sr_ste(updates, params, rules, now, state.masks)
    with _relaxed():
      new, inner_state = inner.update(full, state.inner_state, params, **extra)
      applied = _applied(state.inner_state, inner_state, new)
      count = jnp.where(now < 0, now, now + applied)
      masks = state.masks
      if masks:
        after, grads = optax.apply_updates(params, new), _whole(updates, state)
        masks = update_state(masks, after, rules, count, grads=grads, grads_at=params)
    return new, SparseState(count, state.fingerprint, masks, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _warn_of_new_schedule(params: Any, rules: Rules) -> None:
  """Warns where weights are n:m already, since a fresh state begins the schedule once more."""
  arrays = dict(flatten(params))
  if opt_states.is_part(params):
    return
  places = rules.assign(params).places
  if not any(place.recipe.target_from(place.axis_size) for place in places.values()):
    return  # the schedule begins with the target pattern
  known = {p: arrays[p] for p in places if _is_readable(arrays[p])}
  with jax.ensure_compile_time_eval():  # known arrays, also where a program is being traced
    used = {path: int(jnp.count_nonzero(w)) / max(w.size, 1) for path, w in known.items()}
  is_sparse = lambda path: used[path] <= places[path].pattern.density
  if len(known) < len(places) or not all(map(is_sparse, used)) or not any(used.values()):
    return
  if verify(params, rules).ok:
    path, place = next((path, place) for path, place in places.items() if used[path])
    warn(
      f"the weights of {path!r} are {place.pattern} already, and a fresh optimizer state begins "
      "the schedule at step 0: a run that goes on restores its optimizer state with its "
      "parameters, and a new run starts from dense weights."
    )


def _is_readable(w: Any) -> bool:
  """Returns whether a parameter is a known array of a float that jax can count."""
  if isinstance(w, jax.core.Tracer) or not isinstance(w, np.ndarray | jax.Array):
    return False
  is_here = isinstance(w, np.ndarray) or w.is_fully_addressable
  return is_here and jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize > 1


def _check(tx: Any, rules: Any) -> None:
  """Raises where the arguments of `sparse` have wrong types, or cannot work together."""
  if not isinstance(rules, Rules) or not hasattr(tx, "update"):
    raise ValueError(
      f"nms.sparse({type(tx).__name__}, {type(rules).__name__}): give an optax optimizer and "
      "nms.Rules, such as nms.sparse(optax.adamw(1e-3), rules)."
    )
  owner = tx if isinstance(tx, optax.MultiSteps) else getattr(tx.update, "__self__", None)
  if isinstance(owner, optax.MultiSteps) and not hasattr(owner, "_use_grad_mean"):
    raise ValueError(
      f"nms.sparse cannot tell whether the MultiSteps of optax {optax.__version__} takes a mean or "
      "a sum: write optax.MultiSteps(nms.sparse(tx, rules), k)."
    )
  if not getattr(owner, "_use_grad_mean", True):
    raise ValueError(
      "nms.sparse around optax.MultiSteps(use_grad_mean=False) would add SR-STE's term once for "
      "every mini-step: write optax.MultiSteps(nms.sparse(tx, rules), k, use_grad_mean=False)."
    )


def _refuse_left_out(params: Any, rules: Rules) -> None:
  """Raises where `optax.masked` or `multi_transform` hides a place that `sparse` must act on."""
  if not opt_states.is_part(params):
    return
  hidden = lambda x: isinstance(x, optax.MaskedNode)
  left_out = {path: rules.find(path) for path, x in flatten(params, hidden) if hidden(x)}
  # A mask may leave out a whole subtree. Then no path tells what was in it.
  left_out |= {key: rules.places[key] for key in rules.examine(params).idle}
  for place, recipe in left_out.items():
    if recipe is not None and (recipe.lam or recipe.stateful):
      what = "keeps a stored mask" if recipe.stateful else "needs SR-STE's term"
      raise ValueError(
        f"{place!r} is left out of nms.sparse by optax.masked or multi_transform, but "
        f"{recipe.name} {what}: put nms.sparse around the whole optimizer, "
        "nms.sparse(optax.masked(tx, mask), rules)."
      )


def _check_inner(inner_state: Any, rules: Rules) -> None:
  """Raises where the wrapped optimizer holds what would act twice or out of step."""
  nodes = list(opt_states.walk(inner_state))
  opt_states.refuse(
    inner_state,
    sparse="nms.sparse is wrapped around an optimizer that holds nms.sparse already, so SR-STE's "
    "term would be added twice: use one, around the whole optimizer.",
    sr_ste=opt_states.TWICE,
  )
  multi = [s for s in nodes if isinstance(s, optax.MultiStepsState)]
  if len(multi) > 1:
    raise ValueError(
      f"nms.sparse is wrapped around {len(multi)} optax.MultiSteps, whose steps may differ: write "
      "one around it, optax.MultiSteps(nms.sparse(tx, rules), k)."
    )
  behind = [
    link for n in nodes for link in opt_states.links(n)[1:]
    if any(isinstance(s, optax.MultiStepsState) for s in opt_states.walk(link))
  ]  # fmt: skip
  if _hides_a_guard(inner_state):
    raise ValueError(
      "nms.sparse is wrapped around an optax.apply_if_finite that does not decide alone: behind "
      "it, or beside it, other links move the parameters although it rejects an update, so the "
      "steps would be miscounted. Put it around all of them, "
      "nms.sparse(optax.apply_if_finite(optax.chain(...), n), rules)."
    )
  for recipe in rules.places.values() if multi else ():
    if recipe.needs_gradients and (behind or recipe.lam):
      what = "links of a chain stand" if behind else "SR-STE's term stands"
      raise ValueError(
        f"{recipe.name} needs the mean gradient of a step, but {what} before optax.MultiSteps "
        f"inside nms.sparse and change{'' if behind else 's'} it: write "
        "optax.MultiSteps(nms.sparse(tx, rules), k)."
      )


def _guards(state: Any) -> list[optax.ApplyIfFiniteState]:
  """Returns the states of the `optax.apply_if_finite` in a state."""
  return [s for s in opt_states.walk(state) if isinstance(s, optax.ApplyIfFiniteState)]


# What hands on the zeros of a rejected update as they are, and where its inner state lies.
_HAND_ON = {
  "ApplyIfFiniteState": "inner_state",
  "MultiStepsState": "inner_opt_state",
  "InjectHyperparamsState": "inner_state",
  "InjectStatefulHyperparamsState": "inner_state",
}


def _hides_a_guard(state: Any) -> bool:
  """Returns whether something may move a parameter though an `apply_if_finite` here rejects."""
  if not _guards(state):
    return False
  if chain := opt_states.links(state):
    return any(map(_guards, chain[:-1])) or _hides_a_guard(chain[-1])
  inner = _HAND_ON.get(type(state).__name__)
  return inner is None or _hides_a_guard(getattr(state, inner))


def _multi(inner_state: Any) -> optax.MultiStepsState | None:
  """Returns the state of the `optax.MultiSteps` in a state."""
  found = (s for s in opt_states.walk(inner_state) if isinstance(s, optax.MultiStepsState))
  return next(found, None)


def _applied(before: Any, after: Any, updates: Any) -> jax.Array:
  """Returns 1 where the wrapped optimizer applies this update, else 0: int32.

  `optax.MultiSteps` applies one at the end of a step. `optax.apply_if_finite` rejects an update by
  zeros, which nothing changes (`_hides_a_guard`); one that is not finite and not zero was accepted,
  after too many errors.
  """
  applied = jnp.bool_(True)
  old, new = _multi(before), _multi(after)
  if old is not None and new is not None:
    applied = jnp.asarray(new.gradient_step) != jnp.asarray(old.gradient_step)
  if guards := _guards(after):
    moved = [jnp.any(u != 0) for u in jax.tree.leaves(updates)]
    finite = [jnp.asarray(s.last_finite) for s in guards]
    applied &= jnp.all(jnp.stack(finite)) | jnp.any(jnp.stack(moved))
  return applied.astype(jnp.int32)


def _whole(updates: Any, state: SparseState) -> dict[str, jax.Array]:
  """Returns the gradients of the whole step, path -> array, for the weights with stored masks.

  Inside `optax.MultiSteps` they are the mean over the mini-steps up to this one, by its formula.
  """
  multi = _multi(state.inner_state)
  kept = dict(flatten(state.masks["mask"]))
  grads = {path: g for path, g in flatten(updates) if path in kept}
  if multi is None:
    return grads
  sums = dict(flatten(multi.acc_grads))
  mean = lambda g, acc: (acc + (g - acc) / (multi.mini_step + 1)).astype(g.dtype)
  return {path: mean(g, sums[path]) if path in sums else g for path, g in grads.items()}


@contextlib.contextmanager
def _relaxed():
  """Allows standard promotion, for code that is not ours."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
