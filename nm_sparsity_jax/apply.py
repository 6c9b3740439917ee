"""A whole parameter tree: stored masks, effective parameters, exact zeros, proof.

params, rules, step, state -> [sparsify] -> dense model;  at the end [finalize] -> [verify]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax import masks, opt_states
from nm_sparsity_jax.rules import Assignment, Place, Rules, Stored
from nm_sparsity_jax.schedules import as_step
from nm_sparsity_jax.text import table
from nm_sparsity_jax.trees import flatten, map_with_names

State = dict[str, Any]


def init_state(params: Any, rules: Rules) -> State:
  """The stored masks that the rules need; empty when no recipe keeps one.

  Returns:
    `{}`, or a dict to carry and checkpoint with the optimizer state:

      step     int32 scalar, the last step that `update_state` saw
      mask     bool masks (True = kept), nested as `params`, stateful places only
      made     int32 scalars, likewise: what recipe and axis the mask is for
      renewed  int32 scalars, likewise: how many times it was renewed
      score    sums of |g * W|, float32, where there are snip places
      seen     how many gradients are in them, int32 scalars, likewise

    Masks are all True until their step comes; one_shot with `dense = 0` takes it here, from the
    initial (or restored) weights.
  """
  arrays = dict(flatten(params))
  state: State = {}
  for path, place in rules.assign(params, partial=opt_states.is_part(params)).places.items():
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
  """Refreshes the stored masks. Pure; call it after each optimizer update.

  Calls with a step that was seen before change nothing. What happens when `step` comes:

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
  assignment = rules.assign(params, partial=opt_states.is_part(params))
  places = {p: x for p, x in assignment.places.items() if x.recipe.stateful}
  if sorted(places) != (kept := sorted(stored_masks(state))):
    raise ValueError(
      f"the state keeps masks for {kept}, but the rules want them for {sorted(places)}: it was "
      "made by other rules or for other parameters. Make it by nms.init_state(params, rules)."
    )
  if not state:
    return state
  step, last = as_step(step), state["step"]
  arrays = dict(flatten(params))
  gradients = dict(flatten(grads)) if grads is not None else {}
  taken_at = dict(flatten(grads_at)) if grads_at is not None else arrays
  new: State = {"step": jnp.maximum(last, step)}
  for path, place in places.items():
    old, w, at = _take(state, path), arrays[path], taken_at.get(path, arrays[path])
    _refuse_unkept(place, old, state)
    grad = _gradient(place, gradients.get(path))
    kept = place.recipe.next_state(place.groups, old, w, step, last, grad, at)
    _put(new, path, kept | _stamp(place, kept, new["step"]) | {"made": old["made"]})
  return new


def current(
  place: Place, step: jax.Array | int, state: State | None
) -> tuple[jax.Array | int, jax.Array | None]:
  """The step to act at and the stored mask of a place, None where there is none.

  Raises where a mask is missing, or known to be of other rules or of another time; where that is
  traced the step is -1, which makes D and so the weights NaN.
  """
  found = _take(state or {}, place.path)
  if not place.recipe.stateful:
    return step, found.get("mask")
  _refuse_unkept(place, found, state)
  stored = Stored(state["step"], found["made"], found["renewed"])  # type: ignore[index]
  return place.in_time(step, stored), found["mask"]


def _refuse_unkept(place: Place, found: State, state: State | None):
  """Raises unless a state holds the mask of a stateful recipe's place, and its stamps."""
  missing = [key for key in ("mask", "made", "renewed") if key not in found]
  if missing or not state:
    what = "None" if state is None else "the one given"
    lost = "none" if "mask" in missing else "no " + " and no ".join(map(repr, missing))
    raise ValueError(
      f"{place.recipe.name} at {place.path!r} keeps its mask as state, and state={what} has {lost} "
      "for it: carry state = nms.init_state(params, rules) whole, refresh it by nms.update_state, "
      "and pass it (nms.finalize(params, rules, state), or tx.update(..., nm_state=state))."
    )


def stored_masks(state: State | None) -> dict[str, jax.Array]:
  """path -> stored mask of a state; empty where there is none."""
  return dict(flatten(state["mask"])) if state else {}


def sparsify(params: Any, rules: Rules, step: Any, state: State | None = None) -> Any:
  """Returns effective parameters for a dense model: to predict, score, export, or train.

      loss = lambda p: model_loss(nms.sparsify(p, rules, opt))   # opt: the state of nms.sparse

  Differentiable, in the gradient mode of each recipe. Same structure, shapes and dtypes; what no
  rule names is passed through.

  Args:
    params: the stored parameters.
    rules: the rules.
    step: the optimizer state of an optimizer made by `nms.sparse(tx, rules)`, which also holds the
      stored masks; or the number of updates applied, `nms.step_count(opt_state)`.
    state: with a number, what `init_state` made and `update_state` refreshed, for the recipes that
      keep a mask.

  A stored mask that should have been renewed by `step` and was not (a forgotten `update_state`), or
  an optimizer state made with other rules, is an error; where the step is traced it makes the
  weights NaN, so that it cannot pass unseen.
  """
  places = rules.assign(params).places
  if not opt_states.is_step(step):
    if state is not None:
      raise ValueError(
        "nms.sparsify got an optimizer state and state=: pass the optimizer state alone, it holds "
        "the stored masks."
      )
    step, state = opt_states.read(step, rules.fingerprint)
    if not places:  # no weight would show the wrong rules
      return _spoiled(params, step < 0)

  def apply(path, w):
    place = places.get(path)
    return w if place is None else place.effective(w, *current(place, step, state))

  return map_with_names(apply, params)


def finalize(params: Any, rules: Rules, state: Any = None, early: bool = False) -> Any:
  """Returns the trained parameters with exact zeros: the target pattern of every place, D = 0.

      params = nms.finalize(params, rules, opt)   # opt: the state of nms.sparse

  Survivors keep their bits. Stateful recipes keep their stored mask, so they need `state`.

  Args:
    params: the trained parameters.
    rules: the rules.
    state: the optimizer state of an optimizer made by `nms.sparse(tx, rules)`; or the stored masks
      of `init_state` and `update_state`; or None where no recipe keeps a mask.
    early: with an optimizer state, finalize though the schedule of a place is not over. Without
      one, `finalize` does not know the step and refuses nothing.
  """
  assignment, places = (found := rules.assign(params)), found.places
  wrong: Any = False
  if not (state is None or _is_masks(state)):
    step, state = opt_states.read(state, rules.fingerprint)
    if isinstance(step, jax.core.Tracer):
      wrong = step < 0
    elif not early and (ahead := unfinished(assignment, int(step))):
      raise ValueError(
        f"the optimizer state is at step {ahead}. Train on, or call nms.finalize(params, rules, "
        "opt_state, early=True)."
      )

  def apply(path, w):
    place = places.get(path)
    if place is None:
      return w
    kept = _take(state or {}, path)
    if place.recipe.stateful:
      _refuse_unkept(place, kept, state)
      _refuse_untaken(place, state["step"], kept)  # type: ignore[index]
    mask = place.groups.magnitude_mask(w, place.pattern, parent=kept.get("mask"))
    return jnp.where(mask, w, jnp.zeros_like(w))

  return _spoiled(map_with_names(apply, params), wrong)


def unfinished(assignment: Assignment, step: int) -> str | None:
  """Returns where a place stands whose fine-tune phase is ahead at `step`, in words; None if over.

  >>> unfinished(rules.assign(params), 40)  # doctest: +SKIP
  "40, with pattern 1:8 and D = 0.5 at 'ff', where the schedule is over at 60"
  """
  for place in assignment.places.values():
    phases = place.recipe.phases
    if phases is not None and step < phases.finetune_start:
      now = next(s for s in place.recipe.timeline(place.axis_size) if s.start <= step < s.stop)
      d = float(place.recipe.decay(step))
      return (
        f"{step:,}, with pattern {now.pattern or 'dense'} and D = {d:.3g} at {place.key!r}, where "
        f"the schedule is over at {phases.finetune_start:,}"
      )
  return None


def _is_masks(state: Any) -> bool:
  """Returns whether `state` is what `init_state` makes, and no optimizer state."""
  if not isinstance(state, Mapping) or opt_states.holds_sparse(state):
    return False
  return not state or "mask" in state or "step" in state


def _spoiled(params: Any, wrong: Any) -> Any:
  """Returns `params`, with NaN in place of every float where a traced `wrong` holds."""
  if not isinstance(wrong, jax.core.Tracer):
    return params
  spoil = lambda w: jnp.where(wrong, jnp.full_like(w, jnp.nan), w)
  inexact = lambda w: jnp.issubdtype(w.dtype, jnp.inexact)
  return jax.tree.map(lambda w: spoil(w) if inexact(w) else w, params)


@dataclasses.dataclass(frozen=True)
class Verified:
  """One parameter's proof.

  `first` is the index of the first weight of the first bad group; `not_finite` counts inf and NaN,
  which are no zeros: they may be n:m, and still be of no use.
  """

  path: str
  shape: tuple[int, ...]
  axis: masks.Axis
  pattern: str
  groups: int
  bad_groups: int
  most: int
  density: float
  first: tuple[int, ...] | None
  not_finite: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
  """What `verify` found; `str` is a table, `ok` the verdict on `places`.

  Attributes:
    places: the parameters that must be n:m.
    skipped: path -> why a rule left it dense ('skip' policy); not part of the verdict.
  """

  places: tuple[Verified, ...]
  skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def ok(self) -> bool:
    return bool(self.places) and all(not p.bad_groups for p in self.places)

  def __str__(self) -> str:
    head = "parameter", "pattern", "axis", "groups", "bad", "density", "first bad group at"
    rows = [
      (p.path, p.pattern, p.axis, p.groups, p.bad_groups, f"{p.density:.4f}", p.first or "")
      for p in self.places
    ]
    lines = table(head, rows)
    lines += [f"skipped  {path}: {why}" for path, why in self.skipped.items()]
    lines += [f"warning  {p.path}: {p.not_finite} inf or NaN" for p in self.places if p.not_finite]
    return "\n".join([*lines, "ok" if self.ok else "NOT n:m"])


def verify(params: Any, rules: Rules) -> Report:
  """Counts, group by group, that at most n weights are not zero (-0.0 is zero, 1e-40 is not)."""
  arrays = dict(flatten(params))
  found = []
  assignment = rules.assign(params)
  for path, place in assignment.places.items():
    found.append(_verify(place, np.asarray(arrays[path])))
  return Report(tuple(found), assignment.skipped)


def _verify(place: Place, w: np.ndarray) -> Verified:
  pattern = place.pattern
  if jnp.issubdtype(w.dtype, jnp.floating):
    # On the host and by the bits, so that no backend can flush a subnormal to zero.
    bits = w.view(f"u{w.dtype.itemsize}")
    used = (bits << np.asarray(1, bits.dtype)) != 0
  elif jnp.issubdtype(w.dtype, jnp.integer):
    used = w != 0
  else:
    raise ValueError(f"{place.path!r} has dtype {w.dtype}: verify takes real floats and integers.")
  counts = place.groups.split(used, pattern).sum(-1)
  bad = counts > pattern.n
  first = place.groups.start(int(np.argmax(bad)), pattern) if bad.any() else None
  return Verified(
      place.path, place.shape, place.axis, str(pattern), counts.size, int(bad.sum()),
      int(counts.max(initial=0)), float(used.sum() / max(w.size, 1)), first,
      int((~np.isfinite(w.astype(np.float64))).sum()),
  )  # fmt: skip


def _gradient(place: Place, grad: jax.Array | None) -> jax.Array | None:
  """The gradient of a place, refused where its recipe cannot do with it."""
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
  """What `current` looks at."""
  renewed = jnp.asarray(place.recipe.renewed(kept, step), jnp.int32)
  return {"made": jnp.int32(place.fingerprint), "renewed": renewed}


def _refuse_untaken(place: Place, last: jax.Array, kept: State):
  recipe = place.recipe
  assert recipe.phases is not None
  foreign = jnp.asarray(kept["made"]) != place.fingerprint
  if not isinstance(foreign, jax.core.Tracer) and foreign:
    place.in_time(last, Stored(last, kept["made"], kept["renewed"]))
  fine = (jnp.asarray(kept["renewed"]) > 0) | (recipe.renewals(recipe.phases.total) == 0)
  if not isinstance(fine, jax.core.Tracer) and not fine:
    raise ValueError(
      f"{place.path!r}: the mask of {recipe.name} was never taken: the state is of step "
      f"{int(last)}. {recipe.renewed_by}"
    )


def _put(state: State, path: str, values: Mapping[str, jax.Array]) -> None:
  """Sets state[key][<path>] for every key of `values`; the path is nested, as in params."""
  for key, value in values.items():
    tree = state.setdefault(key, {})
    *parents, leaf = path.split("/")
    for word in parents:
      tree = tree.setdefault(word, {})
    tree[leaf] = value


def _take(state: State, path: str) -> dict[str, jax.Array]:
  """What `_put` set for one path."""
  found = {}
  for key, tree in state.items():
    for word in path.split("/"):
      tree = tree.get(word) if isinstance(tree, Mapping) else None
    if tree is not None and not isinstance(tree, Mapping):
      found[key] = tree
  return found
