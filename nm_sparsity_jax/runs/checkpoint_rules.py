"""The rules by which a checkpoint is looked at: its own, or those that somebody gives.

checkpoint, rules or none -> [rules_for] -> Rules -> [assign] -> Assignment of its parameters
checkpoint to start from  -> [check_start] -> a warning, or ''
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.recipes import Recipe, SrSte
from nm_sparsity_jax.runs.stored import Stored
from nm_sparsity_jax.training import roles, rules_text
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Assignment, Site

Given = Rules | Mapping[str, Any] | None


def rules_for(stored: Stored, given: Given, axes: Mapping[str, Any] | None = None) -> Rules:
  """Returns the checkpoint's own rules, or those given; where there are both, they must agree.

  Rules that were given to `finalize` bind nobody but for their axes: those given now stand in their
  place.

  Args:
    stored: the checkpoint.
    given: as in `runs.verify`.
    axes: as in `runs.verify`.
  """
  if given is not None and not isinstance(given, Rules):
    given = Rules({place: _by_magnitude(place, x) for place, x in given.items()})
  own = stored.known_rules if given is None else stored.rules
  if own is None:
    if given is None:
      raise ValueError(
        f"{stored.path} holds no rules: say what should be n:m, such as rules={{'ff': '1:8'}}"
      )
    if stored.known_rules is None:
      return given.with_axes(axes or {})
    noted = rules_text.parse(stored.known_rules)
    rules = given.with_axes(noted.axes).with_axes(axes or {})
    _check_axes(stored, rules, noted)
    return rules
  if axes:
    raise ValueError(f"axes: {stored.path} knows the axes of its groups: leave them out")
  rules = rules_text.parse(own)
  patterns = lambda rules: {place: str(r.pattern) for place, r in rules.places.items() if r.pattern}
  if given is not None and patterns(rules) != patterns(given):
    raise ValueError(
      f"{stored.path} was trained with the rules {patterns(rules)}, not with rules="
      f"{patterns(given)}: leave rules out"
    )
  return rules


def _check_axes(stored: Stored, rules: Rules, noted: Rules) -> None:
  """Refuses rules that group a parameter along another axis than the checkpoint has noted."""
  known = assign(stored, noted).places
  for path, site in assign(stored, rules).places.items():
    if path in known and known[path].axes != site.axes:
      raise ValueError(
        f"axes: {stored.path} groups {path!r} along {known[path].axis}, not along {site.axis}: "
        "leave axes out"
      )


def _by_magnitude(place: str, given: Any) -> Recipe:
  """Returns the recipe of a pattern alone, by magnitude: without a run there is no more."""
  if isinstance(given, Recipe):
    return given
  try:
    return SrSte(pattern=NM.parse(given), phases=Phases(total=1))
  except ValueError as e:
    raise ValueError(f"rules, {place!r}: {e}") from e


def is_of(stored: Stored, rules: Rules) -> bool:
  """Returns whether a checkpoint was trained with these rules, which its network has resolved.

  A packed file holds no stack of layers, so it knows no axes of one.
  """
  if stored.packed is None or stored.rules is None:
    return stored.rules == rules_text.describe(rules)
  return dict(rules_text.parse(stored.rules).places) == dict(rules.places)


def to_note(stored: Stored, rules: Rules) -> str | None:
  """Returns the text of rules that a finalized checkpoint notes; None where it holds them already.

  Args:
    stored: the checkpoint that is finalized.
    rules: by which it is.
  """
  if stored.rules is not None:
    return None
  with contextlib.suppress(ValueError):  # a recipe of somebody else that no text can name
    text = rules_text.describe(rules)
    rules_text.parse(text)
    return text
  return None


def assign(stored: Stored, rules: Rules) -> Assignment:
  """Assigns the rules to the parameters of a checkpoint, by shapes alone.

  Args:
    stored: the checkpoint.
    rules: what `rules_for` returned.
  """
  shapes = {
    key.removeprefix("target/"): jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
    for key, leaf in stored.leaves.items()
    if key.startswith("target/")
  }
  if not shapes:
    raise ValueError(f"{stored.path} has no parameters: no arrays under 'target'")
  try:
    assignment = rules.assign(nested(shapes))
  except ValueError as e:
    if stored.rules is not None and (lost := _unknown_role(rules, shapes)):
      raise ValueError(
        f"the rules of this checkpoint name the role {lost!r}, which is not registered: import "
        "the module that registers it (commands: --import MODULE)."
      ) from e
    raise
  if not assignment.places:
    raise ValueError(f"the rules leave all of {stored.path} dense: there is nothing to prove")
  return assignment


def _unknown_role(rules: Rules, paths: Iterable[str]) -> str | None:
  """Returns a word of the rules that is neither a role nor a parameter; None without one."""
  known = {*roles.regexes(rules.roles), *paths}
  words = (place for place in rules.places if re.fullmatch(r"\w+", place))
  return next((word for word in words if word not in known), None)


def rules_of_places(places: Mapping[str, Site], indivisible: str) -> Rules:
  """Returns rules that give these parameters, by their paths, the recipes and axes they have."""
  regexes = {f"(?:{re.escape(path)})": place for path, place in places.items()}
  return Rules(
    {regex: place.recipe for regex, place in regexes.items()},
    {regex: place.axis for regex, place in regexes.items()},
    indivisible,
  )


def check_steps(
  rules: Rules | None,
  start: int,
  pretrained_steps: int | None,
  train_steps: int | None = None,
  train_steps_relative: int | None = None,
) -> None:
  """Refuses steps with which a sparse run would end at another step than its schedule.

  Args:
    rules: of the run, whose recipes know how many steps it has.
    start: the global step of the checkpoint that it starts from.
    pretrained_steps: the same, as the settings say it; None = any.
    train_steps: the global step at which T5X ends the run, as the settings say it; None = any.
    train_steps_relative: T5X adds it to the restored step, so each restart adds a whole run.
  """
  recipes = rules.places.values() if rules else ()
  ends = {start + recipe.phases.total for recipe in recipes if recipe.phases}
  is_other_end = bool(ends) and train_steps not in (None, *ends)
  if pretrained_steps not in (None, start) or is_other_end or train_steps_relative:
    macros = {
      "PRETRAINED_STEPS": pretrained_steps,
      "TRAIN_STEPS": train_steps,
      "TRAIN_STEPS_RELATIVE": train_steps_relative,
    }
    known = {name: value for name, value in macros.items() if value is not None}
    raise ValueError(
      f"{', '.join(f'{name}={value}' for name, value in known.items())}: the sparse run starts at "
      f"global step {start}, and its schedule ends at {max(ends, default=None)}. Leave "
      f"{', '.join(known)} out."
    )


def check_start(stored: Stored) -> str:
  """Says that a run starts from a sparse run that is not finalized; '' where it does not.

      if warning := check_start(stored):
        warnings.warn(f"INITIAL_CHECKPOINT_PATH: {warning}")

  T5X stores dense weights, and so does a moving average; masks act on them on the fly. A run that
  starts from them without `finalize` trains another network than the one that was scored. This
  reads the smallest sparse kernel, and what reads the whole checkpoint says whether it is damaged.

  Args:
    stored: the checkpoint.
  """
  if not stored.rules or stored.in_place and not stored.average:
    return ""
  try:
    places = assign(stored, rules_for(stored, None)).places
    path, place = min(places.items(), key=lambda item: math.prod(item[1].shape))
    array = stored.array(stored.deployed(f"target/{path}"))
  except (ValueError, OSError):  # rules of another model, an unknown recipe, a damaged array
    return ""
  if np.count_nonzero(array) <= (1 + place.pattern.density) / 2 * array.size:
    return ""
  return (
    f"{stored.path} is of a sparse run and not finalized, so it holds dense weights that its "
    f"network never saw ({path!r} is not {place.pattern}): start from what `nm-sparsity finalize` "
    "writes, or go on in its own MODEL_DIR."
  )
