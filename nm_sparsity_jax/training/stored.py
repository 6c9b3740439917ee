"""Stored masks: made for what, renewed when, refused why.

    params, rules -> [init_state] -> state -> [update_state, after each update] -> state
    site, step, state -> [current] -> the mask to act by, or an error that says what is wrong

A recipe gives the number of renewals of its mask that are due at each step. The state records how
many happened, and for which recipe and axis the mask was made. Both meet here alone, so a mask that
is missing, of other rules or out of date cannot act unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from nm_sparsity_jax.core.schedules import NO_STEP, as_step
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site

_log = logging.getLogger(__name__)
State = dict[str, Any]


def init_state(params: Any, rules: Rules) -> State:
  """Returns the stored masks that the rules need; empty when no recipe keeps one.

      state = nms.init_state(params, rules)

  Args:
    params: the initial (or restored) parameters.
    rules: the rules.

  Returns:
    `{}`, or a dict to carry and checkpoint with the optimizer state:

      step     int32 scalar, the last step that `update_state` saw
      mask     bool masks (True = kept), nested as `params`, of stateful recipes only
      made     int32 scalars, likewise: what recipe and axis the mask is for
      renewed  int32 scalars, likewise: how many times it was renewed
      score    sums of |g * W|, float32, where a recipe is snip
      seen     how many gradients are in them, int32 scalars, likewise
      over     how many non-zeros too many the first weights had, where a recipe is hold
      scale    float32 scalars, in place of masks where a recipe is s_ste

    Masks are all True until their step comes. hold, and one_shot with `dense = 0`, take it here,
    from `params`. s_ste takes its scale here, and anew when the step is `dense`.
  """
  arrays, new = dict(flatten(params)), {}
  for path, site in rules.assign(params).sites.items():
    if site.recipe.stateful:
      new[path] = site.recipe.first_state(site.groups, arrays[path])
      for remark in site.recipe.remarks(site.groups, new[path]):
        _log.warning("%s %s at %r: %s", site.recipe.name, site.pattern, path, remark)
      # In the state, and not in the rules: a checkpoint may be read by other rules.
      new[path]["made"] = jnp.int32(site.fingerprint)
      new[path]["renewed"] = jnp.asarray(site.recipe.renewals_done(new[path], 0), jnp.int32)
  return _by_key(new, jnp.int32(0))


def update_state(
  state: State,
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  grads: Any = None,
  grads_at: Any = None,
) -> State:
  """Refreshes the stored masks. It is pure; call it after each optimizer update.

      state = nms.update_state(state, params, rules, step, grads=grads, grads_at=params_before)

  A call with a step that was seen before changes nothing. What happens when `step` comes:

      one_shot  at dense: the magnitude mask of `params`, kept for good
      snip      at dense + 1, ...: adds |g * W| of the step just taken; with `batches` of them
                in, the mask, kept for good
      s_ste     at dense: the scale of least squares of `params`, kept for good
      idp       at the start of a level: the mask of the level before, of `params`, becomes the
                parent that later masks choose from

  Args:
    state: what `init_state` or the last call returned.
    params: the parameters after the update.
    rules: the rules.
    step: the number of updates applied, after this one: `nms.step_count(opt_state)`.
    grads: gradients of the step just taken, of its whole batch (under `optax.MultiSteps` the mean
      over the mini-steps); only snip needs them.
    grads_at: the parameters that `grads` were taken at, for snip's exact |g * W|; None = `params`.

  Returns:
    The new state, same structure.
  """
  arrays = dict(flatten(params))
  gradients = dict(flatten(grads))
  at = dict(flatten(grads_at)) if grads_at is not None else arrays
  sites = {p: site for p, site in rules.assign(params).sites.items() if site.recipe.stateful}
  olds = {path: kept(site, state) for path, site in sites.items()}
  if not sites:
    return state
  # A step that was seen before renews nothing, so a repeated call is harmless.
  step, last = as_step(step), state["step"]
  latest, new = jnp.maximum(last, step), {}
  for path, site in sites.items():
    recipe, old = site.recipe, olds[path]
    if recipe.needs_gradients and path not in gradients:
      raise ValueError(
        f"{recipe.name} needs the gradient of {path!r}: pass update_state(..., grads=grads), the "
        "gradients of the step just taken."
      )
    grad, grad_at = gradients.get(path), at[path]
    new[path] = recipe.next_state(site.groups, old, arrays[path], step, last, grad, grad_at)
    # Not the fingerprint of these rules: a mask of others must stay recognizable as theirs.
    new[path]["made"] = old["made"]
    new[path]["renewed"] = jnp.asarray(recipe.renewals_done(new[path], latest), jnp.int32)
  return _by_key(new, latest)


def current(
  site: Site, step: jax.Array | int, state: State | None
) -> tuple[jax.Array | int, jax.Array | None]:
  """Returns the step to act at, and what the recipe of a site acts by; None where it keeps nothing.

  See `check_step` for what is refused.

  Args:
    site: the site.
    step: updates applied so far.
    state: what `init_state` or `update_state` returned.
  """
  if not site.recipe.stateful:
    return step, None
  found = kept(site, state)
  if problem := site.recipe.problem(found):
    raise ValueError(f"{site.recipe.name} {site.pattern} at {site.path!r}: {problem}.")
  last = state["step"]  # type: ignore[index]  # else `kept` has raised
  at = check_step(site, step, last, found["made"], found["renewed"])
  return at, found[site.recipe.keeps]


def kept(site: Site, state: State | None) -> dict[str, jax.Array]:
  """Returns key -> what a state keeps of a site; empty where its recipe keeps nothing."""
  if not site.recipe.stateful:
    return {}
  found = {}
  for key, tree in (state or {}).items():
    for word in site.path.split("/"):
      tree = tree.get(word) if isinstance(tree, Mapping) else None
    if tree is not None:
      found[key] = tree
  if not {site.recipe.keeps, "made", "renewed"} <= found.keys():
    raise ValueError(
      f"{site.recipe.name} at {site.path!r} keeps its {site.recipe.keeps} as state, and the state "
      "has none for it: carry state = nms.init_state(params, rules), refresh it by "
      "nms.update_state, and pass it, as in nms.sparsify(params, rules, step, state)."
    )
  return found


def check_step(site: Site, step: jax.Array | int, last: Any, made: Any, renewed: Any) -> jax.Array:
  """Returns `step`, or NO_STEP where the stored mask is wrong for it: of other rules, old, or new.

  A known value raises.

  Args:
    site: the site that the mask is for.
    step: updates applied so far.
    last: the last step that `update_state` saw.
    made: the `fingerprint` of the site that the mask was made for.
    renewed: how many times it was renewed.
  """
  step, due = as_step(step), site.recipe.renewals_due(step)
  other_rules = jnp.asarray(made) != site.fingerprint
  # A state of a later step than this one has forgotten the masks of the earlier step.
  untimely = (jnp.asarray(renewed) != due) | (step < last)
  wrong = other_rules | untimely
  if not isinstance(wrong, jax.core.Tracer) and wrong.any():
    why = f"out of date: it is of step {last}, renewed {renewed} times instead of {due}"
    raise ValueError(
      f"{site.path!r}: at step {step} the stored {site.recipe.keeps} of {site.recipe.name} is "
      f"{'of other rules, or none was given' if other_rules.any() else why}. Make it by "
      "nms.init_state(params, rules), and call nms.update_state(state, params, rules, step, "
      "grads=grads) after each update, from the first one on; snip needs each gradient."
    )
  return jnp.where(wrong, NO_STEP, step)


def _by_key(kept: Mapping[str, Mapping[str, jax.Array]], step: jax.Array) -> State:
  """Returns the state of path -> key -> value: key -> values, nested as the parameters."""
  leaves = {f"{key}/{path}": x for path, values in kept.items() for key, x in values.items()}
  return {"step": step, **nested(leaves)} if kept else {}
