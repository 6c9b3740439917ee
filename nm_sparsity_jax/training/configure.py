"""From settings, such as gin macros, to rules, and whether both say the same.

    SPARSITY_RULES, RECIPE, PATTERN, SPARSE_STEPS, ... -> [rules] -> Rules -> model, plan, verify
    rules of a checkpoint, the same settings           -> [agree] -> the setting that differs

Plain functions: a configuration library binds their arguments, and nothing here knows of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes import RECIPES, Dense, Recipe
from nm_sparsity_jax.recipes import recipe as make_recipe
from nm_sparsity_jax.training import roles as roles_of
from nm_sparsity_jax.training.rules import Rules

# The text of rules lives in `rules_text`. Users also know it as `configure.describe`.
from nm_sparsity_jax.training.rules_text import TEXT_BYTES, describe, pack, parse, unpack  # noqa: F401


def rules(
  places: Mapping[str, str | NM | Recipe | None],
  recipe: str | None = None,
  pattern: str | NM | None = None,
  sparse_steps: int | None = None,
  dense_steps: int | None = 0,
  finetune_steps: int | None = 0,
  beta: float | None = None,
  gradient: str | None = None,
  fields: Mapping[str, Any] | None = None,
  axes: Mapping[str, masks.Axis] | None = None,
  indivisible: str = "error",
  roles: Mapping[str, str] | None = None,
) -> Rules:
  """Makes `Rules` from settings that fit on a command line. Macro names in brackets.

  >>> r = rules({"ff": "1:8", "qkv": None}, recipe="sr_ste", pattern="1:4", sparse_steps=100)
  >>> {place: str(recipe.pattern) for place, recipe in r.places.items()}
  {'ff': '1:8', 'qkv': '1:4'}

  Args:
    places: place -> pattern, None for the common `pattern`, or a recipe [SPARSITY_RULES].
    recipe: name of the recipe of all places that give a pattern or None [RECIPE].
    pattern: the common pattern [PATTERN].
    sparse_steps: steps of the sparse run, `Phases.total` [SPARSE_STEPS].
    dense_steps: `Phases.dense`; None = a tenth of all steps [DENSE_STEPS].
    finetune_steps: `Phases.finetune`; None = a fifth of all steps [FINETUNE_STEPS].
    beta: see the recipe; None = its own default [BETA].
    gradient: 'masked', 'straight_through' or None = the recipe's own default [GRADIENT].
    fields: more fields of the recipe, name -> value [RECIPE_FIELDS].
    axes: see `Rules`.
    indivisible: see `Rules` [INDIVISIBLE].
    roles: see `Rules`.

  Raises:
    ValueError: the first thing that is wrong, by its macro.
  """
  if not isinstance(places, Mapping) or not places:
    raise ValueError(
      f"SPARSITY_RULES={places!r}: give a dict from place to pattern, such as {{'ff': '1:8'}}. "
      f"Places are roles ({', '.join(roles_of.regexes())}) or regexes. For a dense run set RECIPE "
      "to 'dense'."
    )
  phases = None
  if sparse_steps is not None:
    dense, finetune = phase_steps(sparse_steps, dense_steps, finetune_steps)
    with _macro("SPARSE_STEPS, DENSE_STEPS, FINETUNE_STEPS"):
      phases = Phases(total=sparse_steps, dense=dense, finetune=finetune)
  settings = {"phases": phases, "beta": beta, "gradient": gradient, **(fields or {})}
  made: dict[str, Recipe] = {}
  for place, value in places.items():
    if isinstance(value, Recipe):
      made[place] = value
    elif value is None:
      made[place] = _recipe(recipe, pattern, settings, "PATTERN")
    else:
      made[place] = _recipe(recipe, value, settings, f"SPARSITY_RULES, {place!r}")
  with _macro("SPARSITY_RULES"):
    return Rules(made, axes or {}, indivisible, roles or {})


def _recipe(name: str | None, pattern: Any, settings: Mapping[str, Any], macro: str) -> Recipe:
  """Returns the recipe of one place; `macro` is where its pattern comes from."""
  if name is None:
    raise ValueError(f"RECIPE is not set: choose one of {', '.join(RECIPES)}.")
  needed = RECIPES[name].required() if name in RECIPES else ()
  if pattern is None and "pattern" in needed:
    raise ValueError("PATTERN is not set: give a pattern, for example '1:8'.")
  if settings["phases"] is None and "phases" in needed:
    raise ValueError(f"SPARSE_STEPS is not set: {name} needs the steps of the sparse run.")
  with _macro(macro):
    pattern = None if pattern is None else NM.parse(pattern)
  with _macro("RECIPE, BETA, GRADIENT, RECIPE_FIELDS"):
    return make_recipe(name, pattern=pattern, **settings)


@contextlib.contextmanager
def _macro(names: str) -> Iterator[None]:
  """Says in an error which macros the value came from."""
  try:
    yield
  except (ValueError, TypeError) as e:
    raise ValueError(f"{names}: {e}") from e


def phase_steps(sparse_steps: int, dense_steps: Any, finetune_steps: Any) -> tuple[Any, Any]:
  """Returns the steps of the dense and of the fine-tune phase: those given, else a share of all.

  >>> phase_steps(1000, None, None), phase_steps(1000, 0, None)
  ((100, 200), (0, 200))

  Args:
    sparse_steps: steps of the whole run.
    dense_steps: None = a tenth.
    finetune_steps: None = a fifth.
  """
  dense = sparse_steps // 10 if dense_steps is None else dense_steps
  return dense, sparse_steps // 5 if finetune_steps is None else finetune_steps


def train_steps(pretrained_steps: int, sparse_steps: int | None) -> int:
  """Returns the global step at which a sparse run ends that starts from a checkpoint."""
  for name, steps in (("PRETRAINED_STEPS", pretrained_steps), ("SPARSE_STEPS", sparse_steps)):
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
      raise ValueError(f"{name}={steps!r}: give a whole number of steps, such as 100_000.")
  return pretrained_steps + (sparse_steps or 0)


def agree(stored: Rules, source: str, **given: Any) -> None:
  """Refuses a setting that says something else than the rules of a checkpoint.

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
  given = {name: value for name, value in given.items() if value is not None}
  for macro, value, has in _compared(stored, given):
    if value != has:
      raise ValueError(
        f"{macro}={value!r}, but {source} was trained with {has!r}: leave {macro} out. "
        "Where a file sets it, None counts as left out."
      )


def _compared(stored: Rules, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (macro, its value, what the stored rules have) for each setting that is given."""
  places = given.get("places")
  if places is not None:
    yield "SPARSITY_RULES", *_compared_places(stored, places)
  table = places or {}
  common = {p: r for p, r in stored.places.items() if not isinstance(table.get(p), Recipe)}
  had = [str(r.pattern) for p, r in common.items() if r.pattern and table.get(p) is None]
  if "pattern" in given and had and (pattern := _text(given["pattern"])) not in had:
    yield "PATTERN", pattern, ", ".join(had)
  for recipe in common.values():
    yield from _compared_recipe(recipe, given)
  if "indivisible" in given:
    yield "INDIVISIBLE", given["indivisible"], stored.indivisible


def _compared_recipe(recipe: Recipe, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (macro, its value, what a recipe has) for each setting that all places share."""
  if "recipe" in given:
    yield "RECIPE", given["recipe"], recipe.name
  if isinstance(recipe, Dense):  # which has no others
    return
  for phase, macro in (("total", "sparse"), ("dense", "dense"), ("finetune", "finetune")):
    if (name := f"{macro}_steps") in given:
      yield name.upper(), given[name], getattr(recipe.phases, phase)
  if "beta" in given:
    yield "BETA", given["beta"], getattr(recipe, "beta", None)
  if "gradient" in given:
    yield "GRADIENT", given["gradient"], recipe.gradient_mode
  for field, value in given.get("fields", {}).items():
    yield f"RECIPE_FIELDS[{field!r}]", _held(recipe, field, value), getattr(recipe, field, None)


def _compared_places(stored: Rules, table: Any) -> tuple[Any, Any]:
  """Returns SPARSITY_RULES as given and as stored; what is left to PATTERN is as stored."""
  has: dict[str, Any] = {place: str(recipe.pattern) for place, recipe in stored.places.items()}
  if not isinstance(table, Mapping):
    return table, has
  said = {}
  for place, value in table.items():
    if isinstance(value, Recipe) and place in has:
      said[place], has[place] = value, stored.places[place]
    else:
      said[place] = has.get(place) if value is None else _text(value)
  return said, has


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
