"""A whole parameter tree: effective parameters, exact zeros, proof.

params, rules, step, state -> [sparsify] -> dense model;  at the end [finalize] -> [verify]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax import dtypes, masks, opt_states, witness
from nm_sparsity_jax.errors import warn
from nm_sparsity_jax.places import Assignment, Place
from nm_sparsity_jax.rules import Rules, require
from nm_sparsity_jax.schedules import as_step

# `init_state` and `update_state` live in `stored`. Users also know them as `apply.init_state`.
from nm_sparsity_jax.stored import State, current, final, init_state, update_state  # noqa: F401
from nm_sparsity_jax.text import printable, table
from nm_sparsity_jax.trees import alike, flatten, map_with_names


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
  require(rules, "nms.sparsify(params, rules, opt)")
  places = (assignment := rules.assign(params)).places
  if opt_states.is_step(step):
    witness.sparsified(rules, assignment, params, witness.NUMBER, step)
  else:
    told = opt_states.count_in(step)
    witness.sparsified(rules, assignment, params, witness.STATE, told)
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
    if place is None:
      return w
    _refuse_dtype(path, w)
    return place.effective(w, *current(place, step, state))

  made = map_with_names(apply, params)
  arrays, of_places = dict(flatten(params)), dict(flatten(made))
  witness.masked(rules, {p: arrays[p] for p in places}, {p: of_places[p] for p in places})
  return made


def finalize(params: Any, rules: Rules, state: Any = None, early: bool = False) -> Any:
  """Returns the trained parameters with exact zeros: the target pattern of every place, D = 0.

      params = nms.finalize(params, rules, opt)   # opt: the state of nms.sparse

  Survivors keep their bits. Stateful recipes keep their stored mask, so they need `state`.

  Args:
    params: the trained parameters.
    rules: the rules.
    state: how far the run is, so that its end is not missed: the state of an optimizer made by
      `nms.sparse(tx, rules)`; or the stored masks of `init_state` and `update_state`, which hold
      the step; or, where no recipe keeps a mask, the number of updates applied.
    early: finalize though the schedule of a place is not over, or though nothing tells the step,
      which is a warning otherwise.
  """
  require(rules, "nms.finalize(params, rules, opt)")
  assignment, places = (found := rules.assign(params)), found.places
  step: Any = None
  wrong: Any = False
  whose = "nms.finalize got"
  if state is None or _is_masks(state):
    if state:
      step, whose = state.get("step"), "the last nms.update_state was at"
  elif opt_states.is_step(state):
    step, state = as_step(state), None
  else:
    step, state = opt_states.read(state, rules.fingerprint)
    wrong = step < 0
    if not early:
      _refuse_early(assignment, step, "the optimizer state is at")

  def apply(path, w):
    place = places.get(path)
    if place is None:
      return w
    _refuse_dtype(path, w)
    _warn_of_nan(path, w)
    return place.recipe.final(w, place.groups, final(place, state))

  done = _spoiled(map_with_names(apply, params), wrong)
  if not early and step is not None:
    _refuse_early(assignment, step, whose)
  elif not early and any(place.recipe.phases for place in places.values()):
    warn(
      "nms.finalize(params, rules) does not know the step, so it may remove weights that still "
      "matter: call nms.finalize(params, rules, opt_state), or the step in its place, or with "
      "early=True if the schedule may be cut short."
    )
  return done


def _refuse_dtype(path: str, w: Any) -> None:
  """Raises where a rule names a parameter that has no magnitudes to rank, such as int8 weights."""
  if not jnp.issubdtype(w.dtype, jnp.floating):
    raise ValueError(
      f"{path!r} has dtype {w.dtype}, and masks need real floating-point weights: leave it out of "
      "the rules, or convert it, such as w.astype(jnp.float32)."
    )


def _refuse_early(assignment: Assignment, step: Any, whose: str) -> None:
  """Raises where `step` is known and a schedule is not over; `whose` says where it is from."""
  if not isinstance(step, jax.core.Tracer) and (ahead := unfinished(assignment, int(step))):
    raise ValueError(
      f"{whose} step {ahead}. Train on, or call nms.finalize(params, rules, opt_state, early=True)."
    )


_LOST = (
  "under jit a step or a stored mask that does not match makes the weights NaN, such as a step "
  "that is off by one, a forgotten nms.update_state, or other Rules. Pass the state of nms.sparse "
  "to nms.sparsify, and go back to a checkpoint with finite weights"
)


def _warn_of_nan(path: str, w: Any) -> None:
  """Warns where a sparse parameter is known to be NaN throughout."""
  wide = jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize > 1
  if wide and w.size and not isinstance(w, jax.core.Tracer) and bool(jnp.all(jnp.isnan(w))):
    warn(f"every weight of {path!r} is NaN: {_LOST}.")


def unfinished(assignment: Assignment, step: int) -> str | None:
  """Returns where a place stands at `step`, in words; None if its schedule is over.

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

  @property
  def warnings(self) -> tuple[str, ...]:
    """Returns in words what is wrong although it may be n:m; empty where nothing is."""
    found = []
    if not self.groups:
      found.append(f"it has no weights, shape {self.shape}")
    elif not self.density:
      found.append("every weight is zero: its data may be lost")
    if self.not_finite:
      found.append(f"{self.not_finite} inf or NaN")
    if self.not_finite == math.prod(self.shape) > 0:
      found.append(f"no weight is left: {_LOST}")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Report:
  """What `verify` found; `str` is a table that ends in the verdict, `ok`.

  It is ok when there are places, all of them are n:m, and no weight of them is inf or NaN.

  Attributes:
    places: the parameters that must be n:m.
    skipped: path -> why a rule left it dense ('skip' policy); not part of the verdict.
  """

  places: tuple[Verified, ...]
  skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def ok(self) -> bool:
    return self.verdict == "ok"

  @property
  def verdict(self) -> str:
    """Returns `ok`, or what is wrong."""
    if not self.places:
      why = "every rule was skipped" if self.skipped else "no rule makes anything sparse"
      return f"NOTHING TO PROVE: {why}"
    if any(p.bad_groups for p in self.places):
      return "NOT n:m"
    if lost := sum(p.not_finite for p in self.places):
      return f"NOT FINITE: {lost} weights are inf or NaN"
    return "ok"

  def __str__(self) -> str:
    head = "parameter", "pattern", "axis", "groups", "bad", "density", "first bad group at"
    by_path = {p.path: p for p in self.places}
    facts = {  # bad kernels stand apart
      p.path: (p.pattern, p.axis, p.shape, bool(p.bad_groups), bool(p.warnings))
      for p in self.places
    }
    rows = [_row(name, [by_path[path] for path in paths]) for name, paths, _ in alike(facts)]
    lines = table(head, rows) if rows else []
    lines += [f"skipped  {name}: {why}" for name, _, why in alike(self.skipped)]
    lines += [f"warning  {p.path}: {what}" for p in self.places for what in p.warnings]
    return "\n".join([*map(printable, lines), self.verdict])


def _row(name: str, like: Sequence[Verified]) -> tuple[Any, ...]:
  """Returns the row of kernels that are alike: groups and bad ones of all, the mean density."""
  one, density = like[0], sum(p.density for p in like) / len(like)
  groups, bad = sum(p.groups for p in like), sum(p.bad_groups for p in like)
  first = next((p for p in like if p.first is not None), None)
  where = "" if first is None else first.first if len(like) == 1 else f"{first.path} {first.first}"
  return name, one.pattern, one.axis, groups, bad, f"{density:.4f}", where


def verify(params: Any, rules: Rules) -> Report:
  """Counts the groups of each sparse parameter that have more than n weights that are not zero.

      print(nms.verify(params, rules))   # a table, and the verdict

  -0.0 is zero; 1e-40 is not.

  Args:
    params: the finalized parameters.
    rules: the rules.

  Returns:
    A `Report`; `report.ok` is the verdict as a bool.
  """
  require(rules, "nms.verify(params, rules)")
  arrays = dict(flatten(params))
  found = []
  assignment = rules.assign(params)
  for path, place in assignment.places.items():
    found.append(_verify(place, np.asarray(arrays[path])))
  return Report(tuple(found), assignment.skipped)


def joined(pieces: Sequence[Verified], shape: tuple[int, ...]) -> Verified:
  """Returns the proof of a parameter whose pieces, of equal size, were looked at one by one.

  >>> one = Verified("ff/kernel", (4, 1), 0, "1:4", 1, 0, 1, 0.25, None)
  >>> joined([one, one], (4, 2)).groups
  2

  Args:
    pieces: the proofs, each with `first` counted in the whole parameter.
    shape: of the parameter.
  """
  if len(pieces) == 1:
    return pieces[0]
  total = lambda name: sum(getattr(piece, name) for piece in pieces)
  weights = [math.prod(piece.shape) for piece in pieces]
  dense = sum(p.density * n for p, n in zip(pieces, weights, strict=True))
  return dataclasses.replace(
    pieces[0],
    shape=shape,
    groups=total("groups"),
    bad_groups=total("bad_groups"),
    most=max(piece.most for piece in pieces),
    density=dense / max(sum(weights), 1),
    first=next((piece.first for piece in pieces if piece.first is not None), None),
    not_finite=total("not_finite"),
  )


def _verify(place: Place, w: np.ndarray) -> Verified:
  pattern = place.pattern
  used = dtypes.used(w, place.path)
  counts = place.groups.split(used, pattern).sum(-1)
  bad = counts > pattern.n
  first = place.groups.start(int(np.argmax(bad)), pattern) if bad.any() else None
  return Verified(
      place.path, place.shape, place.axis, str(pattern), counts.size, int(bad.sum()),
      int(counts.max(initial=0)), float(used.sum() / max(w.size, 1)), first,
      int((~dtypes.finite(w)).sum()),
  )  # fmt: skip
