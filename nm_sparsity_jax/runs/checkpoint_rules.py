"""The rules by which a checkpoint is looked at: its own, or those that somebody gives.

checkpoint, rules or none -> [rules_for] -> Rules -> [assign] -> Assignment of its parameters
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.recipes import Recipe, SrSte
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training import roles, rules_text
from nm_sparsity_jax.training.rules import AmbiguousAxis, Rules
from nm_sparsity_jax.training.sites import Assignment

Given = Rules | Mapping[str, Any] | None


def rules_for(stored: Stored, given: Given, axes: Mapping[str, Any] | None = None) -> Rules:
  """Returns the checkpoint's own rules, or those given; where there are both, they must agree.

  Rules that were given to `finalize` bind nobody: those given now stand in their place.

  Args:
    stored: the checkpoint.
    given: as in `proof.verify`.
    axes: as in `proof.verify`.
  """
  if given is not None and not isinstance(given, Rules):
    given = _by_magnitude(given)
  if axes and (stored.rules if given is not None else stored.known_rules) is not None:
    raise ValueError(f"{stored.path} knows the axes of its groups from its rules: leave axes out")
  if given is not None:
    given = given.with_axes(axes or {})
  if stored.rules is None:
    if given is not None:
      return given
    if (told := stored.known_rules) is not None:
      return rules_text.parse(told)
    why = "" if stored.format == "timm" else ", since no sparse run wrote it"
    raise ValueError(
      f"{stored.path} holds no rules{why}: say what should be n:m, rules={{'ff': '1:8'}}"
    )
  own = rules_text.parse(stored.rules)
  pairs = lambda rules: {place: str(r.pattern) for place, r in rules.places.items() if r.pattern}
  if given is not None and pairs(own) != pairs(given):
    raise ValueError(
      f"{stored.path} was trained with the rules {pairs(own)}, but rules={pairs(given)}: leave "
      "rules out"
    )
  return own


def is_of(stored: Stored, rules: Rules) -> bool:
  """Returns whether a checkpoint was trained with these rules, which its network has resolved.

  A packed file holds no stack of layers, so it knows no axes of one.
  """
  if stored.packed is None or stored.rules is None:
    return stored.rules == rules_text.describe(rules)
  return dict(rules_text.parse(stored.rules).places) == dict(rules.places)


def _by_magnitude(places: Mapping[str, Any]) -> Rules:
  """Returns rules of patterns alone: without a run there is no more, and magnitude decides."""
  made: dict[str, Recipe] = {}
  for place, given in places.items():
    if isinstance(given, Recipe):
      made[place] = given
      continue
    try:
      made[place] = SrSte(pattern=NM.parse(given), phases=Phases(total=1))
    except ValueError as e:
      raise ValueError(f"rules, {place!r}: {e}") from e
  return Rules(made)


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
  shapes = {}
  for key, leaf in stored.leaves.items():
    if key.startswith("target/"):
      if leaf.shape is None:
        raise ValueError(f"{stored.path!r} is damaged: {key} has no shape")
      shapes[key.removeprefix("target/")] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
  if not shapes:
    raise ValueError(f"{stored.path} has no parameters: no arrays under 'target'")
  try:
    assignment = rules.assign(nested(shapes))
  except AmbiguousAxis as e:
    kernels = ", ".join(f"{path!r} of shape {shape}" for path, shape in e.found)
    raise ValueError(
      f"which axis the product sums over is not known for {kernels}: name it: "
      "axes={'.*/mlp/.*/kernel': 0}"
    ) from e
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


@contextlib.contextmanager
def named(stored: Stored) -> Iterator[None]:
  """Names a packed file in errors of its rules: they are a text that anybody can write.

  Args:
    stored: the checkpoint.
  """
  try:
    yield
  except ValueError as e:
    if stored.packed is None or stored.path in str(e):
      raise
    raise ValueError(f"{stored.path}: {e}") from e
