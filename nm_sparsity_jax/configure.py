"""From settings, such as gin macros, to rules; from rules to a text that names them.

    SPARSITY_RULES, RECIPE, PATTERN, SPARSE_STEPS, ... -> [rules] -> Rules -> model, plan, export

Plain functions: a configuration library binds their arguments, and nothing here knows of it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import masks
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.recipes import RECIPES, Recipe
from nm_sparsity_jax.recipes import recipe as make_recipe
from nm_sparsity_jax.rules import ROLES, Rules
from nm_sparsity_jax.schedules import Phases


def rules(
  places: Mapping[str, str | NM | Recipe | None],
  recipe: str | None = None,
  pattern: str | NM | None = None,
  sparse_steps: int | None = None,
  dense_steps: int = 0,
  finetune_steps: int = 0,
  beta: float | None = None,
  gradient: str | None = None,
  fields: Mapping[str, Any] | None = None,
  axes: Mapping[str, masks.Axis] | None = None,
  indivisible: str = "error",
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
    dense_steps: `Phases.dense` [DENSE_STEPS].
    finetune_steps: `Phases.finetune` [FINETUNE_STEPS].
    beta: see the recipe; None = its own default [BETA].
    gradient: 'masked', 'straight_through' or None = the recipe's own default [GRADIENT].
    fields: more fields of the recipe, name -> value [RECIPE_FIELDS].
    axes: see `Rules`.
    indivisible: see `Rules` [INDIVISIBLE].
  """
  if not isinstance(places, Mapping):
    raise ValueError(
      f"SPARSITY_RULES={places!r} says no pattern: give a dict from place to pattern, such as "
      f"{{'ff': '1:8'}}. Places are roles ({', '.join(ROLES)}) or regexes."
    )

  def make(place: str, given) -> Recipe:
    if isinstance(given, Recipe):
      return given
    if given is None:
      given = pattern
    if not isinstance(given, str | NM | None):
      raise ValueError(
        f"SPARSITY_RULES: {place!r} has {given!r}. Give a pattern such as '1:8', None for PATTERN, "
        "or a recipe (a gin reference to one ends in parentheses)."
      )
    if recipe is None:
      raise ValueError(
        f"SPARSITY_RULES: {place!r} needs a recipe, but RECIPE names no recipe. Choose one of: "
        f"{', '.join(RECIPES)}."
      )
    if given is None and recipe != "dense":
      raise ValueError(
        f"SPARSITY_RULES: {place!r} leaves the pattern to PATTERN, which is not set. Set PATTERN, "
        "for example to '1:8'."
      )
    if sparse_steps is None and recipe != "dense":
      raise ValueError(f"{recipe} needs SPARSE_STEPS, the steps of the sparse run.")
    phases = None
    if sparse_steps is not None:
      phases = Phases(total=sparse_steps, dense=dense_steps, finetune=finetune_steps)
    if recipe == "custom" and not (fields or {}).get("path"):
      raise ValueError(
        "custom needs a path: RECIPE_FIELDS = {'path': ((0, '4:8', 1.0), (5000, '1:8', 0.5))}, "
        "entries (step, pattern, D)."
      )
    settings = {"beta": beta, "gradient": gradient, **(fields or {})}
    return make_recipe(recipe, pattern=given, phases=phases, **settings)

  return Rules({place: make(place, given) for place, given in places.items()}, axes, indivisible)


def train_steps(pretrained_steps: int, sparse_steps: int) -> int:
  """The global step at which a sparse run ends that starts from a checkpoint."""
  for name, value in (("PRETRAINED_STEPS", pretrained_steps), ("SPARSE_STEPS", sparse_steps)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
      raise ValueError(f"{name}={value!r}: give a whole number of steps, such as 1_000_000.")
  return pretrained_steps + sparse_steps


def vocabulary(file: str) -> Any:
  """A vocabulary of seqio, which is imported only here.

  Args:
    file: a SentencePiece model, 'bytes', or 'mini' for mini-GLUE's words [VOCABULARY_FILE].
  """
  import seqio  # type: ignore[import-not-found]

  if file == "mini":
    from t5x_tasks.vocabulary import mini_words

    return mini_words()
  return seqio.ByteVocabulary() if file == "bytes" else seqio.SentencePieceVocabulary(file)


def describe(rules: Rules) -> str:
  """The rules as a text, one line a place, equal for equal rules.

  Fields at their defaults are left out, so that a field that a later version adds changes no text.

  >>> print(describe(rules({"ff": "1:8"}, recipe="mdgf_linear", sparse_steps=9, beta=0.5)))
  ff: mdgf_linear 1:8, total=9, beta=0.5
  """
  places, axes, roles, indivisible = rules._key()
  lines = [f"{place}: {_describe_recipe(recipe)}" for place, recipe in places]
  lines += [f"role {name}: {regex}" for name, regex in roles]
  lines.sort()
  lines += [f"axis {regex}: {axis}" for regex, axis in axes]  # the first that matches wins
  if indivisible != "error":
    lines.append(f"indivisible: {indivisible}")
  return "\n".join(lines)


TEXT_BYTES = 4096


def pack(text: str) -> np.ndarray:
  """The text of rules as a checkpoint keeps it: uint8[4096], deflated and padded."""
  data = np.frombuffer(zlib.compress(text.encode(), 9), np.uint8)
  if data.size > TEXT_BYTES:
    raise ValueError(
      f"the text of these rules takes {data.size} bytes, and a checkpoint keeps {TEXT_BYTES}: "
      "join places by regexes."
    )
  return np.pad(data, (0, TEXT_BYTES - data.size))


def unpack(data: np.ndarray) -> str:
  """The text that `pack` was given."""
  return zlib.decompressobj().decompress(np.asarray(data).tobytes()).decode()


def _describe_recipe(recipe: Recipe) -> str:
  words = [recipe.name if recipe.pattern is None else f"{recipe.name} {recipe.pattern}"]
  for owner in (recipe.phases, recipe):
    for field in dataclasses.fields(owner) if owner else ():  # type: ignore[arg-type]
      value = getattr(owner, field.name)
      if field.name not in ("pattern", "phases") and value != field.default:
        words.append(f"{field.name}={value!r}")
  return ", ".join(words)
