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
from nm_sparsity_jax.recipes import Dense, Recipe
from nm_sparsity_jax.recipes import recipe as make_recipe
from nm_sparsity_jax.training.roles import matcher
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
    axes: see `Rules` [SPARSITY_AXES].
    indivisible: see `Rules` [INDIVISIBLE].
    roles: role -> regex of the kernels that `places` means by it [SPARSITY_ROLES]. The rules hold
      the regex, so a checkpoint needs no roles of its own.

  Raises:
    ValueError: the first thing that is wrong, by its macro.
  """
  phases = None
  if sparse_steps is not None:
    dense = sparse_steps // 10 if dense_steps is None else dense_steps
    finetune = sparse_steps // 5 if finetune_steps is None else finetune_steps
    with _macro("SPARSE_STEPS, DENSE_STEPS, FINETUNE_STEPS"):
      phases = Phases(total=sparse_steps, dense=dense, finetune=finetune)
  settings = {"phases": phases, "beta": beta, "gradient": gradient, **(fields or {})}
  made: dict[str, Recipe] = {}
  if not isinstance(places, Mapping):
    raise ValueError(f"SPARSITY_RULES={places!r}: give place -> pattern, such as {{'ff': '1:8'}}.")
  for place, value in _without_roles(places, roles).items():
    if isinstance(value, Recipe):
      made[place] = value
      continue
    macro = "PATTERN" if value is None else f"SPARSITY_RULES, {place!r}"
    own: Any = pattern if value is None else value
    if recipe != Dense.name:  # which needs none
      with _macro(macro):
        own = NM.parse(own)
    with _macro("RECIPE, SPARSE_STEPS, BETA, GRADIENT, RECIPE_FIELDS"):
      made[place] = make_recipe(recipe, pattern=own, **settings)  # type: ignore[arg-type]
  # What is wrong with a place itself, such as a regex, is said by the rules.
  with _macro("SPARSITY_RULES"):
    return Rules(made, axes or {}, indivisible)


def _without_roles(places: Mapping[str, Any], roles: Mapping[str, str] | None) -> dict[str, Any]:
  """Returns the places with a regex in place of each that names one of these roles."""
  named = lambda place: place.rpartition("/")[2] in (roles or {})
  with _macro("SPARSITY_ROLES"):
    return {matcher(p, roles).pattern if named(p) else p: value for p, value in places.items()}


@contextlib.contextmanager
def _macro(names: str) -> Iterator[None]:
  """Says in an error which macros the value came from."""
  try:
    yield
  except (ValueError, TypeError) as e:
    raise ValueError(f"{names}: {e}") from e


def train_steps(pretrained_steps: int, sparse_steps: int | None) -> int:
  """Returns the global step at which a sparse run ends that starts from a checkpoint."""
  return pretrained_steps + (sparse_steps or 0)


def agree(stored: Rules, source: str, **given: Any) -> None:
  """Refuses a setting that says something else than the rules of a checkpoint.

  A pattern must be that of some place, since the text of rules does not say which places share it.
  All else must be that of every place which SPARSITY_RULES gives no recipe of its own.

  >>> stored = rules({"ff": None}, "sr_ste", "1:4", sparse_steps=100)
  >>> agree(stored, "checkpoint_100", recipe="sr_ste", sparse_steps=100)
  >>> agree(stored, "checkpoint_100", pattern="1:8")  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  ValueError: PATTERN='1:8', but checkpoint_100 was trained with '1:4': leave PATTERN out. ...

  Args:
    stored: the rules of the checkpoint.
    source: what the checkpoint is called.
    **given: arguments of `rules`; None, which is how a gin file says that a macro is not set.

  Raises:
    ValueError: names the first setting that does not agree.
  """

  def check(macro, value, *has):
    if value not in has:
      raise ValueError(
        f"{macro}={value!r}, but {source} was trained with {', '.join(map(repr, has))}: leave "
        f"{macro} out. Where a file sets it, None counts as left out."
      )

  given = {name: value for name, value in given.items() if value is not None}
  places = given.get("places", dict.fromkeys(stored.places))
  places = _without_roles(places, given.get("roles"))
  for regex, axis in given.get("axes", {}).items():
    check(f"SPARSITY_AXES, {regex!r}", axis, stored.axes.get(regex))
  check("SPARSITY_RULES", {*places}, {*stored.places})
  shared = {str(stored.places[place].pattern): 0 for place, said in places.items() if said is None}
  if "pattern" in given and shared:
    check("PATTERN", str(NM.parse(given["pattern"])), *shared)
  for place, said in places.items():
    has = stored.places[place]
    if isinstance(said, Recipe):
      check(f"SPARSITY_RULES, {place!r}", said, has)
      continue
    if said is not None:
      check(f"SPARSITY_RULES, {place!r}", str(NM.parse(said)), str(has.pattern))
    trained: dict[str, Any] = {"recipe": has.name, "indivisible": stored.indivisible}
    if has.phases:  # a dense one may have a name alone
      steps = "sparse_steps", "dense_steps", "finetune_steps"
      trained |= zip(steps, dataclasses.astuple(has.phases), strict=True)
      trained |= {"beta": getattr(has, "beta", None), "gradient": has.gradient_mode}
    for name in filter(given.__contains__, trained):
      check(name.upper(), given[name], trained[name])
    with _macro("RECIPE_FIELDS"):
      made = dataclasses.replace(has, **given.get("fields", {}))
    check("RECIPE_FIELDS", made, has)
