"""From settings, such as gin macros, to rules.

    SPARSITY_RULES, RECIPE, PATTERN, SPARSE_STEPS, ... -> [rules] -> Rules -> model, plan, verify
                                                                  or every mistake at once
    rules of a checkpoint, the same settings -> [agreement.agree] -> the setting that says another

Plain functions: a configuration library binds their arguments, and nothing here knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes import RECIPES, Dense, Recipe
from nm_sparsity_jax.recipes import recipe as make_recipe
from nm_sparsity_jax.training import roles as roles_of
from nm_sparsity_jax.training.configure.agreement import agree  # noqa: F401
from nm_sparsity_jax.training.rules import Rules

# The text of rules lives in `rules_text`. Users also know it as `configure.describe`.
from nm_sparsity_jax.training.rules_text import TEXT_BYTES, describe, pack, parse, unpack  # noqa: F401

# An argument that an error names, as in "beta=-1" -> the macro that a user set.
MACROS: Mapping[str, str] = {
  "beta=": "BETA",
  "gradient=": "GRADIENT",
  "total=": "SPARSE_STEPS",
  "dense=": "DENSE_STEPS",
  "finetune=": "FINETUNE_STEPS",
  "indivisible=": "INDIVISIBLE",
  "a place has": "SPARSITY_RULES",
}


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
    SettingsError: all that is wrong, each thing by its macro.
  """
  wrong = SettingsError()
  table = _table(places, wrong)
  named = {place: v for place, v in table.items() if isinstance(v, str | NM | None)}
  _note_missing(named, recipe, pattern, sparse_steps, wrong)
  phases = _phases(sparse_steps, dense_steps, finetune_steps, wrong)
  settings = {"beta": beta, "gradient": gradient, **(fields or {})}
  settings = {name: value for name, value in settings.items() if value is not None}
  right = _right_fields(recipe, settings, wrong) if named and recipe is not None else None
  common = _Common(recipe, pattern, phases, settings, right)
  made: dict[str, Recipe] = {}
  for place, given in table.items():
    if wrong.tried(Rules, {place: Dense()}) is not None:
      make = common.recipe_of if place in named else _own
      made[place] = make(place, given, wrong) or Dense()
  rest = {"axes": axes, "indivisible": indivisible, "roles": roles}
  fits = lambda name: wrong.tried(Rules, {"ff": Dense()}, **{name: rest[name]}) is not None
  rest = {name: rest[name] for name in rest if fits(name)}
  if made:
    wrong.rules = Rules(made, **rest)
  if wrong.errors or wrong.missing:
    raise wrong
  assert wrong.rules is not None
  return wrong.rules


class SettingsError(ValueError):
  """All that is wrong with settings, one sentence or two each.

  Attributes:
    missing: macro that is needed and not set -> what to say of it.
    errors: everything else.
    rules: those of the places whose settings are right, the others dense; None where none could be.
  """

  def __init__(self):
    super().__init__()
    self.missing: dict[str, str] = {}
    self.errors: list[str] = []
    self.rules: Rules | None = None

  def __str__(self) -> str:
    texts = [*self.missing.values(), *self.errors]
    return texts[0] if len(texts) == 1 else "\n".join(f"- {text}" for text in texts)

  def tried(self, function, *args, **kwargs) -> Any:
    """Returns function(...), or None where it fails; then notes its error, by macros, once."""
    try:
      return function(*args, **kwargs)
    except (ValueError, TypeError) as e:
      macros = [macro for argument, macro in MACROS.items() if argument in str(e)]
      self.note(f"{', '.join(macros)}: {e}" if macros else str(e))
      return None

  def note(self, text: str) -> None:
    """Adds an error, once."""
    if text not in self.errors:
      self.errors.append(text)


def _table(places: Any, wrong: SettingsError) -> Mapping[str, Any]:
  """Returns SPARSITY_RULES as a table; an empty one where it is not a table."""
  if places is None:
    wrong.missing["SPARSITY_RULES"] = (
      "SPARSITY_RULES is not set: give a dict, such as {'ff': None}."
    )
  elif not isinstance(places, Mapping):
    wrong.note(
      f"SPARSITY_RULES={places!r} says no pattern: give a dict from place to pattern, such as "
      f"{{'ff': '1:8'}}. Places are roles ({', '.join(roles_of.regexes())}) or regexes."
    )
  elif not places:
    wrong.note(
      "SPARSITY_RULES={} would leave everything dense. Name a place, such as {'ff': None}; for a "
      "dense run set RECIPE to 'dense'."
    )
  return places if isinstance(places, Mapping) else {}


def _note_missing(named: Mapping[str, Any], recipe, pattern, sparse_steps, wrong: SettingsError):
  """Notes a recipe, a pattern or steps that places leave to macros which are not set."""
  if named and recipe is None:
    wrong.missing["RECIPE"] = (
      f"{', '.join(map(repr, named))} in SPARSITY_RULES need a recipe, but RECIPE names no recipe. "
      f"Choose one of: {', '.join(RECIPES)}."
    )
  if pattern is None and None in named.values() and _needs(recipe, "pattern"):
    wrong.missing["PATTERN"] = (
      "SPARSITY_RULES leaves a pattern to PATTERN, which is not set. Set it, for example to '1:8'."
    )
  if named and sparse_steps is None and _needs(recipe, "phases"):
    wrong.missing["SPARSE_STEPS"] = (
      f"{recipe or 'it'} needs SPARSE_STEPS, the steps of the sparse run."
    )


def _needs(recipe: str | None, field: str) -> bool:
  """Returns whether a recipe needs a field; an unknown recipe needs it."""
  return recipe is None or recipe not in RECIPES or field in RECIPES[recipe].required()


def _phases(sparse_steps, dense_steps, finetune_steps, wrong: SettingsError) -> Phases | None:
  """Returns the phases; None where they are not given, or wrong."""
  dense_steps, finetune_steps = phase_steps(sparse_steps, dense_steps, finetune_steps)
  given = {"DENSE_STEPS": dense_steps, "FINETUNE_STEPS": finetune_steps}
  if sparse_steps is not None:
    given = {"SPARSE_STEPS": sparse_steps, **given}
  whole = [wrong.tried(_whole, name, steps) is not None for name, steps in given.items()]
  if not all(whole) or sparse_steps is None:
    return None
  return wrong.tried(Phases, total=sparse_steps, dense=dense_steps, finetune=finetune_steps)


def _right_fields(name: str, fields: Mapping[str, Any], wrong: SettingsError):
  """Returns the fields that are right in themselves; None where none can be used."""
  if name not in RECIPES:
    return wrong.tried(make_recipe, name)
  common = {"pattern": NM(1, 2), "phases": Phases(total=2**31 - 1)}
  return fields if wrong.tried(make_recipe, name, **{**common, **fields}) else None


class _Common(NamedTuple):
  """What the macros give to places without values of their own.

  Attributes:
    recipe: RECIPE.
    pattern: PATTERN.
    phases: None where they are wrong or not given.
    settings: the fields of the recipe that are given.
    right: those that are right in themselves; None where nothing can be made of them.
  """

  recipe: str | None
  pattern: str | NM | None
  phases: Phases | None
  settings: Mapping[str, Any]
  right: Mapping[str, Any] | None

  def recipe_of(self, place: str, given: Any, wrong: SettingsError) -> Recipe | None:
    """Returns the recipe of a place that gives a pattern or None; None where it cannot be made."""
    fields = dict(self.right or {})
    if not _needs(self.recipe, "pattern"):
      fields |= {"pattern": given or self.pattern, "phases": self.phases}
      return make_recipe(str(self.recipe), **fields)
    if given is None and self.pattern is None:
      return None
    where = "PATTERN" if given is None else f"SPARSITY_RULES, {place!r}"
    pattern = wrong.tried(_parse, where, self.pattern if given is None else given)
    if self.right is None or not pattern or not self.phases:
      return None
    found = wrong.tried(make_recipe, self.recipe, pattern=pattern, phases=self.phases, **fields)
    return found if self.right == self.settings else None


def _own(place: str, given: Any, wrong: SettingsError) -> Recipe | None:
  """Returns the recipe that a place was given; None where it is not a recipe."""
  if isinstance(given, Recipe):
    return given
  wrong.note(
    f"SPARSITY_RULES: {place!r} has {given!r}. Give a pattern such as '1:8', None for PATTERN, "
    "or a recipe (a gin reference to one ends in parentheses)."
  )
  return None


def _parse(where: str, pattern: str | NM) -> NM:
  try:
    return NM.parse(pattern)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from None


def _whole(name: str, steps: Any) -> int:
  if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
    raise ValueError(f"{name}={steps!r}: give a whole number of steps, such as 100_000.")
  return steps


def phase_steps(sparse_steps: Any, dense_steps: Any, finetune_steps: Any) -> tuple[Any, Any]:
  """Returns the steps of the dense and of the fine-tune phase: those given, else a share of all.

  >>> phase_steps(1000, None, None), phase_steps(1000, 0, None)
  ((100, 200), (0, 200))

  Args:
    sparse_steps: steps of the whole run; a value of another kind gives phases of no steps.
    dense_steps: None = a tenth.
    finetune_steps: None = a fifth.
  """
  total = sparse_steps if isinstance(sparse_steps, int) and sparse_steps > 0 else 0
  dense = total // 10 if dense_steps is None else dense_steps
  return dense, total // 5 if finetune_steps is None else finetune_steps


def train_steps(pretrained_steps: int, sparse_steps: int) -> int:
  """Returns the global step at which a sparse run ends that starts from a checkpoint."""
  if sparse_steps is None:
    wrong = SettingsError()
    wrong.missing["SPARSE_STEPS"] = "SPARSE_STEPS is not set: the steps of the sparse run."
    raise wrong
  return _whole("PRETRAINED_STEPS", pretrained_steps) + _whole("SPARSE_STEPS", sparse_steps)
