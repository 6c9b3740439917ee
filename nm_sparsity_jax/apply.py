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
from jax import lax

from nm_sparsity_jax import masks
from nm_sparsity_jax.recipes import Idp, OneShot, Snip
from nm_sparsity_jax.rules import Place, Rules, flatten, map_with_names
from nm_sparsity_jax.schedules import as_step

State = dict[str, Any]


def init_state(params: Any, rules: Rules) -> State:
  """The stored masks that the rules need; empty when no recipe keeps one.

  Returns:
    `{}`, or a dict to carry and checkpoint with the optimizer state:

      step   int32 scalar, the last step that `update_state` saw
      mask   bool masks (True = kept), nested as `params`, stateful places only
      score  sums of |g * W|, float32, snip places only
      seen   how many gradients are in them, int32 scalars

    Masks are all True until their step comes; one_shot with `dense = 0` takes it here, from the
    initial (or restored) weights.
  """
  places = rules.assign(params).places
  arrays = dict(flatten(params))
  state: State = {"step": jnp.int32(0), "mask": {}, "score": {}, "seen": {}}
  for path, place in places.items():
    if not place.recipe.stateful:
      continue
    w = arrays[path]
    mask = jnp.ones_like(w, bool)
    if isinstance(place.recipe, OneShot) and place.recipe.phases.dense == 0:
      mask = place.magnitude_mask(w)
    _put(state["mask"], path, mask)
    if isinstance(place.recipe, Snip):
      _put(state["score"], path, jnp.zeros_like(w, jnp.float32))
      _put(state["seen"], path, jnp.int32(0))
  return state if state["mask"] else {}


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
    grads: gradients of the step just taken (of its whole batch); only snip needs them.
    grads_at: the parameters that `grads` were taken at, for snip's exact |g * W|; None = `params`.

  Returns:
    The new state, same structure.
  """
  places = rules.assign(params).places
  needed = sorted(path for path, place in places.items() if place.recipe.stateful)
  if needed != (kept := sorted(stored_masks(state))):
    raise ValueError(
      f"the state keeps masks for {kept}, but the rules want them for {needed}: it was made by "
      "other rules or for other parameters. Make it by nms.init_state(params, rules)."
    )
  if not state:
    return state
  step = as_step(step)
  last = state["step"]
  arrays = dict(flatten(params))
  gradients = dict(flatten(grads)) if grads is not None else {}
  taken_at = dict(flatten(grads_at)) if grads_at is not None else arrays
  new: State = {"step": jnp.maximum(last, step), "mask": {}, "score": {}, "seen": {}}
  for path, mask in flatten(state["mask"]):
    place = places[path]
    recipe, w = place.recipe, arrays[path]
    if isinstance(recipe, OneShot):
      due = (last < recipe.phases.dense) & (step >= recipe.phases.dense)
      take = lambda place=place, w=w: place.magnitude_mask(w)
    elif isinstance(recipe, Snip):
      if path not in gradients:
        raise ValueError(
          f"snip needs the gradient of {path!r}: pass update_state(..., grads=grads), the "
          "gradients of the step just taken."
        )
      add = (step > last) & (step > recipe.phases.dense)
      seen = _get(state["seen"], path)
      add &= seen < recipe.batches
      sensitivity = jnp.abs(
        gradients[path].astype(jnp.float32) * taken_at[path].astype(jnp.float32)
      )
      score = _get(state["score"], path)
      score = jnp.where(add, score + sensitivity, score)
      seen = seen + add.astype(jnp.int32)
      _put(new["score"], path, score)
      _put(new["seen"], path, seen)
      due = add & (seen == recipe.batches)
      take = lambda place=place, score=score: _top(place, score)
    elif isinstance(recipe, Idp):
      level = recipe.level(step)
      due = (step > last) & (level > recipe.level(last))
      # One choice replays all levels crossed: the best of the best is the best.
      before = recipe.level_before(step)
      take = lambda place=place, w=w, n=before, m=mask: place.magnitude_mask(w, n, m)
    else:
      raise TypeError(f"{type(recipe).__name__} is stateful, but update_state does not know it.")
    _put(new["mask"], path, lax.cond(due, take, lambda mask=mask: mask))
  return new


def stored_masks(state: State | None) -> dict[str, jax.Array]:
  """path -> stored mask of a state; empty where there is none."""
  return dict(flatten(state["mask"])) if state else {}


def sparsify(params: Any, rules: Rules, step: jax.Array | int, state: State | None = None) -> Any:
  """Effective parameters for a dense model: to predict, score, export, or train foreign models.

  Differentiable, in the gradient mode of each recipe. Same structure, shapes and dtypes; what no
  rule names is passed through.
  """
  places = rules.assign(params).places
  stored = stored_masks(state)

  def apply(path, w):
    place = places.get(path)
    return w if place is None else place.effective(w, step, stored.get(path))

  return map_with_names(apply, params)


def finalize(params: Any, rules: Rules, state: State | None = None) -> Any:
  """The trained parameters with exact zeros: the target pattern of every place, D = 0.

  Survivors keep their bits. Stateful recipes keep their stored mask, so they need `state`.
  """
  places = rules.assign(params).places
  stored = stored_masks(state)

  def apply(path, w):
    place = places.get(path)
    if place is None:
      return w
    mask = stored.get(path)
    if place.recipe.stateful and mask is None:
      raise ValueError(
        f"{place.recipe.name} at {path!r} keeps its mask as state: "
        "nms.finalize(params, rules, state)."
      )
    if place.recipe.stateful and not isinstance(place.recipe, Idp):
      _refuse_untaken(place, mask)
    return jnp.where(place.magnitude_mask(w, None, mask), w, jnp.zeros_like(w))

  return map_with_names(apply, params)


@dataclasses.dataclass(frozen=True)
class Verified:
  """One parameter's proof. `first` is the index of the first weight of the first bad group."""

  path: str
  shape: tuple[int, ...]
  axis: masks.Axis
  pattern: str
  groups: int
  bad_groups: int
  most: int
  density: float
  first: tuple[int, ...] | None


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
    rows: list[tuple[str, ...]] = [
      ("parameter", "pattern", "axis", "groups", "bad", "density", "first bad group at")
    ]
    for p in self.places:
      cells = p.path, p.pattern, p.axis, p.groups, p.bad_groups, f"{p.density:.4f}", p.first or ""
      rows.append(tuple(map(str, cells)))
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines += [f"skipped  {path}: {why}" for path, why in self.skipped.items()]
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
  axes = masks.check_axis(w.shape, place.axis)
  length = place.axis_size - place.pad
  # On the host and by the bits, so that no backend can flush a subnormal to zero.
  bits = w.view(f"u{w.dtype.itemsize}")
  used = (bits << np.asarray(1, bits.dtype)) != 0
  used = used.reshape(*w.shape[: axes[0]], length, *w.shape[axes[-1] + 1 :])
  widths = [(0, place.pad if a == axes[0] else 0) for a in range(used.ndim)]
  used = np.pad(used, widths)
  shape = used.shape
  grouped = used.reshape(*shape[: axes[0]], -1, pattern.m, *shape[axes[0] + 1 :])
  counts = grouped.sum(axes[0] + 1)
  bad = counts > pattern.n
  first = None
  if bad.any():
    index = [int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape)]
    at = np.unravel_index(index[axes[0]] * pattern.m, [w.shape[a] for a in axes])
    first = (*index[: axes[0]], *(int(i) for i in at), *index[axes[0] + 1 :])
  return Verified(
      place.path, tuple(w.shape), place.axis, str(pattern), counts.size, int(bad.sum()),
      int(counts.max(initial=0)), float(used.sum() / max(w.size, 1)), first,
  )  # fmt: skip


def _top(place: Place, score):
  return place.on_whole_groups(lambda s, axis: masks.nm_mask(s, place.pattern, axis), score)


def _refuse_untaken(place: Place, mask):
  if isinstance(mask, jax.core.Tracer) or place.pattern.n == place.pattern.m:
    return
  if bool(jnp.all(mask)):
    raise ValueError(
      f"{place.path!r}: the stored mask of {place.recipe.name} keeps everything, so it was never "
      f"taken (its time is step {place.recipe.sparse_from}). Call nms.update_state after each "
      "update and carry its result, or train on."
    )


def _put(tree: dict, path: str, value) -> None:
  *parents, leaf = path.split("/")
  for word in parents:
    tree = tree.setdefault(word, {})
  tree[leaf] = value


def _get(tree: Any, path: str) -> Any:
  for word in path.split("/"):
    tree = tree[word]
  return tree
