"""Stored masks: made for what, renewed when, refused why.

    params, rules -> [init_state] -> state -> [update_state, after each update] -> state
    site, step, state -> [current] -> the mask to act by, or an error that says what is wrong

A recipe that keeps a mask says how often it was to be renewed by a step. A state notes for each
mask how often it was renewed, and for which recipe and axis it was made. Both meet here and
nowhere else, so a mask that is missing, of other rules or out of date cannot act unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site

State = dict[str, Any]


class Stamps(NamedTuple):
  """What tells whether a stored mask is the right one; int32 scalars.

  Attributes:
    last: the last step that `update_state` saw.
    made: the `fingerprint` of the site that it was made for.
    renewed: how many times it was renewed.
  """

  last: jax.Array
  made: jax.Array
  renewed: jax.Array


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

    Masks are all True until their step comes; one_shot with `dense = 0` takes it here, from
    `params`.
  """
  return first_masks(rules.assign(params).places, dict(flatten(params)))


def first_masks(sites: Mapping[str, Site], arrays: Mapping[str, jax.Array]) -> State:
  """Returns what `init_state` does, from path -> site and path -> weight."""
  kept = {}
  for path, site in sites.items():
    if site.recipe.stateful:
      kept[path] = site.recipe.first_state(site.groups, arrays[path])
      kept[path]["made"] = jnp.int32(site.fingerprint)
      kept[path]["renewed"] = jnp.asarray(site.recipe.renewed(kept[path], 0), jnp.int32)
  return _by_key(kept, jnp.int32(0))


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
  gradients = dict(flatten(grads)) if grads is not None else {}
  at = dict(flatten(grads_at)) if grads_at is not None else arrays
  return renewed_masks(rules.assign(params).places, state, arrays, step, gradients, at)


def renewed_masks(
  sites: Mapping[str, Site],
  state: State,
  arrays: Mapping[str, jax.Array],
  step: jax.Array | int,
  grads: Mapping[str, jax.Array],
  grads_at: Mapping[str, jax.Array],
) -> State:
  """Returns what `update_state` does, from path -> site and path -> array."""
  sites = {path: site for path, site in sites.items() if site.recipe.stateful}
  if sites.keys() != (kept := stored_masks(state)).keys():
    raise ValueError(
      f"the state keeps masks for {sorted(kept)}, but the rules want them for {sorted(sites)}: it "
      "was made by other rules or for other parameters. Make it by nms.init_state(params, rules)."
    )
  if not state:
    return state
  # A step that was seen before renews nothing, so a repeated call is harmless.
  step, last = as_step(step), state["step"]
  latest, new = jnp.maximum(last, step), {}
  for path, site in sites.items():
    recipe, old = site.recipe, _kept(site, state)
    if recipe.needs_gradients and path not in grads:
      raise ValueError(
        f"{recipe.name} needs the gradient of {path!r}: pass update_state(..., grads=grads), the "
        "gradients of the step just taken."
      )
    grad, at = grads.get(path), grads_at.get(path, arrays[path])
    new[path] = recipe.next_state(site.groups, old, arrays[path], step, last, grad, at)
    # Not the fingerprint of these rules: a mask of others must stay recognizable as theirs.
    new[path]["made"] = old["made"]
    new[path]["renewed"] = jnp.asarray(recipe.renewed(new[path], latest), jnp.int32)
  return _by_key(new, latest)


def current(
  site: Site, step: jax.Array | int, state: State | None
) -> tuple[jax.Array | int, jax.Array | None]:
  """Returns the step to act at, and the stored mask of a site; None where its recipe keeps none.

  Raises where a mask is missing, or is known to be of other rules or of another time. Where that is
  traced, it returns step -1, which makes D and so the weights NaN.

  Args:
    site: the site.
    step: updates applied so far.
    state: what `init_state` or `update_state` returned.
  """
  if not site.recipe.stateful:
    return step, None
  found = _kept(site, state)
  stamps = Stamps(state["step"], found["made"], found["renewed"])  # type: ignore[index]
  return check_step(site, step, stamps), found["mask"]


def final(site: Site, state: State | None) -> tuple[dict[str, jax.Array], jax.Array | bool]:
  """Returns all that a state keeps of a site at the end of a run, and whether it is wrong.

  Raises where a mask is missing, or is known to be of other rules or never taken.

  Args:
    site: the site.
    state: what `init_state` or `update_state` returned.
  """
  recipe = site.recipe
  if not recipe.stateful:
    return {}, False
  found = _kept(site, state)
  others = jnp.asarray(found["made"]) != site.fingerprint
  untaken = (jnp.asarray(found["renewed"]) == 0) & (recipe.renewals(recipe.phases.total) > 0)
  if _is_known(others):
    raise ValueError(f"{site.path!r}: {_OTHER_RULES}")
  if _is_known(untaken):
    raise ValueError(
      f"{site.path!r}: the mask of {recipe.name} was never taken. {recipe.renewed_by}"
    )
  return found, others | untaken


def stored_masks(state: State | None) -> dict[str, jax.Array]:
  """Returns path -> stored mask of a state; empty where there is none."""
  return dict(flatten(state["mask"])) if state else {}


def check_step(site: Site, step: jax.Array | int, stamps: Stamps) -> jax.Array:
  """Returns `step`, or -1 where the stored mask is wrong for it: of other rules, old, or new.

  At step -1 D is NaN: a traced value cannot raise, but NaN is seen. A known value raises.

  Args:
    site: the site that the mask is for.
    step: updates applied so far.
    stamps: what is known of the mask.
  """
  step, recipe = as_step(step), site.recipe
  due, renewed = recipe.renewals(step), jnp.asarray(stamps.renewed)
  others = jnp.asarray(stamps.made) != site.fingerprint
  if _is_known(others):
    raise ValueError(f"{site.path!r}: {_OTHER_RULES}")
  # A state of a later step than this one has forgotten the masks of the earlier step.
  untimely = (renewed != due) | (step < stamps.last)
  if _is_known(untimely):
    raise ValueError(
      f"{site.path!r}: at step {int(step)} the stored mask of {recipe.name} is out of date: it is "
      f"of step {int(stamps.last)} and was renewed {int(renewed)} times instead of {int(due)}. "
      f"{recipe.renewed_by}"
    )
  return jnp.where(others | untimely, jnp.int32(-1), step)


_OTHER_RULES = (
  "the state holds no mask for this recipe, pattern and axis: it is of other rules, or none was "
  "given. Make it by nms.init_state(params, rules), and pass it."
)


def _is_known(wrong: jax.Array) -> bool:
  """Returns whether something is wrong, where that is no tracer."""
  return not isinstance(wrong, jax.core.Tracer) and bool(wrong)


def _kept(site: Site, state: State | None) -> dict[str, jax.Array]:
  """Returns what a state keeps of the site of a stateful recipe."""
  found = {}
  for key, tree in (state or {}).items():
    for word in site.path.split("/"):
      tree = tree.get(word) if isinstance(tree, Mapping) else None
    if tree is not None:
      found[key] = tree
  if not {"mask", "made", "renewed"} <= found.keys():
    raise ValueError(
      f"{site.recipe.name} at {site.path!r} keeps its mask as state, and the state has none for "
      "it: carry state = nms.init_state(params, rules), refresh it by nms.update_state, and pass "
      "it, as in nms.sparsify(params, rules, step, state)."
    )
  return found


def _by_key(kept: Mapping[str, Mapping[str, jax.Array]], step: jax.Array) -> State:
  """Returns the state of path -> key -> value: key -> values, nested as the parameters."""
  keys = dict.fromkeys(key for values in kept.values() for key in values)
  of_key = lambda key: {path: values[key] for path, values in kept.items() if key in values}
  return {"step": step, **{key: nested(of_key(key)) for key in keys}} if kept else {}
