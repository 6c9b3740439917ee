"""Stored masks: made for what, renewed when, refused why.

    params, rules -> [init_state] -> state -> [update_state, after each update] -> state
    place, step, state -> [current] -> the mask to act by, or an error that says what is wrong

A recipe that keeps a mask says how often it was to be renewed by a step. A state notes for each
mask how often it was renewed, and for which recipe and axis it was made. Both meet here and
nowhere else, so a mask that is missing, foreign or out of date cannot act unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.rules import Rules, require
from nm_sparsity_jax.training.sites import Place

State = dict[str, Any]


class Stamps(NamedTuple):
  """What tells whether a stored mask is the right one; int32 scalars.

  Attributes:
    last: the last step that `update_state` saw.
    made: the `fingerprint` of the place that it was made for.
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
      mask     bool masks (True = kept), nested as `params`, stateful places only
      made     int32 scalars, likewise: what recipe and axis the mask is for
      renewed  int32 scalars, likewise: how many times it was renewed
      score    sums of |g * W|, float32, where there are snip places
      seen     how many gradients are in them, int32 scalars, likewise

    Masks are all True until their step comes; one_shot with `dense = 0` takes it here, from
    `params`.
  """
  require(rules, "nms.init_state(params, rules)")
  return first_masks(rules.assign(params).places, dict(flatten(params)))


def first_masks(places: Mapping[str, Place], arrays: Mapping[str, jax.Array]) -> State:
  """Returns what `init_state` does, from path -> place and path -> weight."""
  state: State = {}
  for path, place in places.items():
    if place.recipe.stateful:
      state.setdefault("step", jnp.int32(0))
      kept = place.recipe.first_state(place.groups, arrays[path])
      _put(state, path, kept | _stamp(place, kept, 0))
  return state


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
  places = rules.assign(params).places
  arrays = dict(flatten(params))
  gradients = dict(flatten(grads)) if grads is not None else {}
  taken_at = dict(flatten(grads_at)) if grads_at is not None else arrays
  return renewed_masks(places, state, arrays, step, gradients, taken_at)


def renewed_masks(
  places: Mapping[str, Place],
  state: State,
  arrays: Mapping[str, jax.Array],
  step: jax.Array | int,
  grads: Mapping[str, jax.Array],
  grads_at: Mapping[str, jax.Array],
) -> State:
  """Returns what `update_state` does, from path -> place and path -> array."""
  places = {p: x for p, x in places.items() if x.recipe.stateful}
  if sorted(places) != (kept := sorted(stored_masks(state))):
    raise ValueError(
      f"the state keeps masks for {kept}, but the rules want them for {sorted(places)}: it was "
      "made by other rules or for other parameters. Make it by nms.init_state(params, rules)."
    )
  if not state:
    return state
  step, last = as_step(step), state["step"]
  new: State = {"step": jnp.maximum(last, step)}
  for path, place in places.items():
    old, w = _kept(place, state), arrays[path]
    grad = _gradient(place, grads.get(path))
    kept = place.recipe.next_state(place.groups, old, w, step, last, grad, grads_at.get(path, w))
    _put(new, path, kept | _stamp(place, kept, new["step"]) | {"made": old["made"]})
  return new


def current(
  place: Place, step: jax.Array | int, state: State | None
) -> tuple[jax.Array | int, jax.Array | None]:
  """Returns the step to act at, and the stored mask of a place; None where its recipe keeps none.

  Raises where a mask is missing, or is known to be of other rules or of another time. Where that is
  traced, it returns step -1, which makes D and so the weights NaN.

  Args:
    place: the place.
    step: updates applied so far.
    state: what `init_state` or `update_state` returned.
  """
  if not place.recipe.stateful:
    return step, _take(state or {}, place.path).get("mask")
  found = _kept(place, state)
  stamps = Stamps(state["step"], found["made"], found["renewed"])  # type: ignore[index]
  return in_time(place, step, stamps), found["mask"]


def final(place: Place, state: State | None) -> dict[str, jax.Array]:
  """Returns all that a state keeps of a place at the end of a run; empty where it keeps nothing.

  Raises where a mask is missing, is of other rules, or was never taken.

  Args:
    place: the place.
    state: what `init_state` or `update_state` returned.
  """
  if not place.recipe.stateful:
    return _take(state or {}, place.path)
  found = _kept(place, state)
  _refuse_untaken(place, Stamps(state["step"], found["made"], found["renewed"]))  # type: ignore[index]
  return found


def stored_masks(state: State | None) -> dict[str, jax.Array]:
  """Returns path -> stored mask of a state; empty where there is none."""
  return dict(flatten(state["mask"])) if state else {}


def in_time(place: Place, step: jax.Array | int, stamps: Stamps) -> jax.Array:
  """Returns `step`, or -1 where the stored mask is wrong for it: of other rules, old, or new.

  At step -1 D is NaN: a traced value cannot raise, but NaN is seen. A known value raises.

  Args:
    place: the place that the mask is for.
    step: updates applied so far.
    stamps: what is known of the mask.
  """
  step, recipe = as_step(step), place.recipe
  foreign = jnp.asarray(stamps.made) != place.fingerprint
  due = recipe.renewals(step)
  wrong = foreign | (jnp.asarray(stamps.renewed) != due) | (step < stamps.last)
  if not isinstance(wrong, jax.core.Tracer) and bool(wrong):
    start = f"{place.path!r}: at step {int(step)} the stored mask of {recipe.name} "
    if bool(foreign):
      raise ValueError(
        f"{start}was made for another recipe, pattern or axis than these rules have: "
        f"{recipe!r}. Make the state of a new run by nms.init_state(params, rules). A "
        "state from a checkpoint belongs to a run with other rules."
      )
    raise ValueError(
      f"{start}is out of date: it is of step {int(stamps.last)} and was renewed "
      f"{int(stamps.renewed)} times instead of {int(due)}. {recipe.renewed_by}"
    )
  return jnp.where(wrong, jnp.int32(-1), step)


def _kept(place: Place, state: State | None) -> dict[str, jax.Array]:
  """Returns what a state keeps of a stateful place; refuses a state without mask or stamps."""
  found = _take(state or {}, place.path)
  missing = [key for key in ("mask", "made", "renewed") if key not in found]
  if missing or not state:
    what = "None" if state is None else "the one given"
    lost = "none" if "mask" in missing else "no " + " and no ".join(map(repr, missing))
    raise ValueError(
      f"{place.recipe.name} at {place.path!r} keeps its mask as state, and state={what} has {lost} "
      "for it: carry state = nms.init_state(params, rules) whole, refresh it by nms.update_state, "
      "and pass it, as in nms.sparsify(params, rules, step, state)."
    )
  return found


def _refuse_untaken(place: Place, stamps: Stamps) -> None:
  """Raises where a mask is known to be of other rules, or never to have been taken."""
  recipe = place.recipe
  assert recipe.phases is not None
  foreign = jnp.asarray(stamps.made) != place.fingerprint
  if not isinstance(foreign, jax.core.Tracer) and foreign:
    in_time(place, stamps.last, stamps)
  fine = (jnp.asarray(stamps.renewed) > 0) | (recipe.renewals(recipe.phases.total) == 0)
  if not isinstance(fine, jax.core.Tracer) and not fine:
    raise ValueError(
      f"{place.path!r}: the mask of {recipe.name} was never taken: the state is of step "
      f"{int(stamps.last)}. {recipe.renewed_by}"
    )


def _gradient(place: Place, grad: jax.Array | None) -> jax.Array | None:
  """Returns the gradient of a place; refuses one that is missing or of another shape."""
  if not place.recipe.needs_gradients:
    return grad
  if grad is None:
    raise ValueError(
      f"{place.recipe.name} needs the gradient of {place.path!r}: pass update_state(..., "
      "grads=grads), the gradients of the step just taken."
    )
  if grad.shape != place.shape:
    raise ValueError(
      f"{place.recipe.name}: the gradient of {place.path!r} has shape {grad.shape}, the weight "
      f"{place.shape}. Pass the gradients of these parameters."
    )
  return grad


def _stamp(place: Place, kept: State, step: jax.Array | int) -> dict[str, jax.Array]:
  """Returns what `in_time` compares."""
  renewed = jnp.asarray(place.recipe.renewed(kept, step), jnp.int32)
  return {"made": jnp.int32(place.fingerprint), "renewed": renewed}


def _put(state: State, path: str, values: Mapping[str, jax.Array]) -> None:
  """Sets state[key][<path>] for every key of `values`; the path is nested, as in params."""
  for key, value in values.items():
    tree = state.setdefault(key, {})
    *parents, leaf = path.split("/")
    for word in parents:
      tree = tree.setdefault(word, {})
      if not isinstance(tree, dict):
        raise ValueError(
          f"{path!r} and a part of it, up to {word!r}, are both names of parameters with stored "
          "masks, which are kept by paths: rename one of them, without a '/'."
        )
    tree[leaf] = value


def _take(state: State, path: str) -> dict[str, jax.Array]:
  """Returns what `_put` set for one path."""
  found = {}
  for key, tree in state.items():
    for word in path.split("/"):
      tree = tree.get(word) if isinstance(tree, Mapping) else None
    if tree is not None and not isinstance(tree, Mapping):
      found[key] = tree
  return found
