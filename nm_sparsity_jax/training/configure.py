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
  # What is wrong with a place itself, such as a regex, is said by the rules.
  with _macro("SPARSITY_RULES"):
    return Rules(made, axes or {}, indivisible, roles or {})


def _recipe(name: str | None, pattern: Any, settings: Mapping[str, Any], macro: str) -> Recipe:
  """Returns the recipe of one place; `macro` is where its pattern comes from."""
  values: dict[str, Any] = {"RECIPE": name}
  if name != Dense.name:
    values |= {"PATTERN": pattern, "SPARSE_STEPS": settings["phases"]}
  for lost in (macro for macro, value in values.items() if value is None):
    raise ValueError(
      f"{lost} is not set: RECIPE is one of {', '.join(RECIPES)}, PATTERN such as '1:8', and "
      "SPARSE_STEPS the steps of the sparse run."
    )
  with _macro(macro):
    pattern = None if pattern is None else NM.parse(pattern)
  with _macro("RECIPE, BETA, GRADIENT, RECIPE_FIELDS"):
    return make_recipe(str(name), pattern=pattern, **settings)


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
  # None is how a gin file says that a macro is not set.
  given = {name: value for name, value in given.items() if value is not None}
  for macro, value, has in _compared(stored, given):
    if value != has:
      raise ValueError(
        f"{macro}={value!r}, but {source} was trained with {has!r}: leave {macro} out. "
        "Where a file sets it, None counts as left out."
      )


def _compared(stored: Rules, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
  """Yields (macro, its value, what the stored rules have) for each setting that is given."""
  table = given.get("places", dict.fromkeys(stored.places))
  if not isinstance(table, Mapping) or table.keys() != stored.places.keys():
    yield "SPARSITY_RULES", table, dict(stored.places)
  # The text of rules does not say which places shared PATTERN, so it may be that of any.
  shared = {str(stored.places[place].pattern): 0 for place, said in table.items() if said is None}
  if "pattern" in given and shared and (said := str(NM.parse(given["pattern"]))) not in shared:
    yield "PATTERN", said, ", ".join(shared)
  for place, has in stored.places.items():
    said, macro = table[place], f"SPARSITY_RULES, {place!r}"
    if isinstance(said, Recipe):
      yield macro, said, has
      continue
    if said is not None:
      yield macro, str(NM.parse(said)), str(has.pattern)
    if "recipe" in given:
      yield "RECIPE", given["recipe"], has.name
    if isinstance(has, Dense):  # it has no other settings
      continue
    settings = {
      "sparse_steps": has.phases.total,
      "dense_steps": has.phases.dense,
      "finetune_steps": has.phases.finetune,
      "beta": getattr(has, "beta", None),
      "gradient": has.gradient_mode,
    }
    yield from ((name.upper(), given[name], settings[name]) for name in settings if name in given)
    for field, value in given.get("fields", {}).items():
      with contextlib.suppress(TypeError, ValueError):  # else it is no field of this recipe
        # As the recipe holds it, such as a pattern for its text.
        value = getattr(dataclasses.replace(has, **{field: value}), field)  # type: ignore
      yield f"RECIPE_FIELDS[{field!r}]", value, getattr(has, field, None)
  if "indivisible" in given:
    yield "INDIVISIBLE", given["indivisible"], stored.indivisible
