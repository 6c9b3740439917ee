"""Recipes by name: those of the package, and those that users register.

class -> [register] -> RECIPES -> recipe(name), settings, the text of rules in a checkpoint
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes.base import Recipe

#: name -> class of every recipe; `register` adds to it.
RECIPES: dict[str, type[Recipe]] = {}

C = TypeVar("C", bound=type[Recipe])


def register(cls: C) -> C:
  """Makes a recipe class known by its name, wherever a recipe of the package is.

      @nms.recipes.register
      @dataclasses.dataclass(frozen=True, kw_only=True)
      class Mine(nms.Recipe):
        name = "mine"

  Then `nms.recipe("mine", ...)`, RECIPE = "mine" and the rules in a checkpoint mean this class. A
  program that reads such a checkpoint imports the module that registers it first. A class that a
  notebook or a reload defines again replaces itself.

  Args:
    cls: a frozen dataclass below `Recipe`. Values of its fields are numbers, texts,
      patterns, or tuples of these.

  Returns:
    `cls`, so that it can be used as a decorator.
  """
  name: Any = getattr(cls, "name", None)
  is_named = Recipe in cls.__mro__ and isinstance(name, str) and name.isidentifier()
  # A notebook or importlib.reload defines a class again: the same place means the same recipe.
  known = RECIPES.get(name, cls)
  is_taken = (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__)
  if not is_named or is_taken:
    raise ValueError(
      f"register({cls!r}): give a dataclass below nms.Recipe, and a name of one word that is not "
      f"taken ({', '.join(RECIPES)})."
    )
  RECIPES[name] = cls
  return cls


def recipe(
  name: str,
  *,
  pattern: NM | str | None = None,
  phases: Phases | None = None,
  **fields: Any,
) -> Recipe:
  """Makes a recipe by name. Fields that are None take the recipe's own default.

  So one set of settings (`beta=None, gradient=None`) fits every recipe. A field that the recipe
  lacks and that is not None is an error.

  >>> recipe("mdgf_linear", pattern="1:8", phases=Phases(total=100), beta=None).pattern
  NM(n=1, m=8)

  Args:
    name: one of `RECIPES`.
    pattern: the target.
    phases: the steps of the sparse run.
    **fields: the other fields of its class, such as `lam` of `nms.recipes.SrSte`.
  """
  # None is how a gin file says that a macro is not set, so one file serves all recipes.
  given = {k: v for k, v in fields.items() if v is not None}
  cls = choose(RECIPES, "recipe", name)
  try:
    call = inspect.signature(cls).bind(pattern=pattern, phases=phases, **given)
  except TypeError as e:
    names = ", ".join(inspect.signature(cls).parameters)
    raise ValueError(f"the recipe {name!r} {e}: its fields are {names}.") from None
  return cls(**call.kwargs)
