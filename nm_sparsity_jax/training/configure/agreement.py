"""Whether settings say the same as the rules of a checkpoint.

rules of a checkpoint, settings -> [agree] -> the first setting that says something else
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.recipes import Dense, Recipe
from nm_sparsity_jax.training.rules import Rules

# Arguments of `rules` that each sparse recipe has: macro, value in the recipe.
_HAS: Mapping[str, tuple[str, Callable[[Recipe], Any]]] = {
  "sparse_steps": ("SPARSE_STEPS", lambda r: r.phases.total if r.phases else None),
  "dense_steps": ("DENSE_STEPS", lambda r: r.phases.dense if r.phases else None),
  "finetune_steps": ("FINETUNE_STEPS", lambda r: r.phases.finetune if r.phases else None),
  "beta": ("BETA", lambda r: getattr(r, "beta", None)),
  "gradient": ("GRADIENT", lambda r: r.gradient_mode),
}


def agree(stored: Rules, source: str, **given: Any) -> None:
  """Refuses a setting that says something else than the rules of a checkpoint.

  >>> from nm_sparsity_jax.training.configure import rules
  >>> stored = rules({"ff": None}, "sr_ste", "1:4", sparse_steps=100)
  >>> agree(stored, "checkpoint_100", recipe="sr_ste", sparse_steps=100)
  >>> agree(stored, "checkpoint_100", pattern="1:8")  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  ValueError: PATTERN='1:8', but checkpoint_100 was trained with '1:4': leave PATTERN out. ...

  Args:
    stored: the rules of the checkpoint.
    source: what the checkpoint is called.
    **given: arguments of `rules`; None where a setting is not given.

  Raises:
    ValueError: names the first setting that does not agree.
  """
  for macro, value, has in _compared(stored, given):
    if value != has:
      raise ValueError(
        f"{macro}={value!r}, but {source} was trained with {has!r}: leave {macro} out. "
        "Where a file sets it, None counts as left out."
      )


def _compared(stored: Rules, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (macro, its value, what the stored rules have) for each setting that is given."""
  places = given.get("places")
  table = places if isinstance(places, Mapping) else dict.fromkeys(stored.places)
  if places is not None:
    yield "SPARSITY_RULES", *_compared_places(stored, places)
  own = [place for place, value in table.items() if isinstance(value, Recipe)]
  common = {place: recipe for place, recipe in stored.places.items() if place not in own}
  for recipe in common.values():
    yield from _compared_recipe(recipe, given)
  pattern = given.get("pattern")
  had = [str(r.pattern) for place, r in common.items() if r.pattern and table.get(place) is None]
  if pattern is not None and had and _text(pattern) not in had:
    yield "PATTERN", str(pattern), ", ".join(had)
  if given.get("indivisible") is not None:
    yield "INDIVISIBLE", given["indivisible"], stored.indivisible


def _compared_recipe(recipe: Recipe, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (macro, its value, what a recipe has) for each setting that all places share."""
  if given.get("recipe") is not None:
    yield "RECIPE", given["recipe"], recipe.name
  if isinstance(recipe, Dense):  # which has no others
    return
  for name, (macro, value_in) in _HAS.items():
    if given.get(name) is not None:
      yield macro, given[name], value_in(recipe)
  for field, value in (given.get("fields") or {}).items():
    yield f"RECIPE_FIELDS[{field!r}]", _held(recipe, field, value), getattr(recipe, field, None)


def _held(recipe: Any, field: str, value: Any) -> Any:
  """Returns the value of a field as a recipe holds it, such as a pattern for its text."""
  try:
    return getattr(dataclasses.replace(recipe, **{field: value}), field)
  except (TypeError, ValueError):  # the recipe refuses it, so it has another
    return value


def _text(pattern: Any) -> str:
  """Returns the text of a pattern in its one form: '1:8' for '01:8'."""
  try:
    return str(NM.parse(pattern))
  except ValueError:
    return str(pattern)


def _compared_places(stored: Rules, table: Any) -> tuple[Any, Any]:
  """Returns SPARSITY_RULES as given and as stored; what is left to PATTERN is as stored."""
  has: dict[str, Any] = {place: str(recipe.pattern) for place, recipe in stored.places.items()}
  if not isinstance(table, Mapping):
    return table, has
  told = {}
  for place, value in table.items():
    if isinstance(value, Recipe) and place in has:
      told[place], has[place] = value, stored.places[place]
    else:
      told[place] = has.get(place) if value is None else _text(value)
  return told, has
