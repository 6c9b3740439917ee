"""From settings, such as gin macros, to rules; from rules to a text that names them, and back.

    SPARSITY_RULES, RECIPE, PATTERN, SPARSE_STEPS, ... -> [rules] -> Rules -> model, plan, verify
                                                                  or every mistake at once

Plain functions: a configuration library binds their arguments, and nothing here knows of it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax import masks
from nm_sparsity_jax import roles as roles_of
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.recipes import RECIPES, Dense, Recipe
from nm_sparsity_jax.recipes import recipe as make_recipe
from nm_sparsity_jax.rules import Rules
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

  Raises:
    SettingsError: all that is wrong, each thing by its macro.
  """
  wrong = SettingsError()
  table = places if isinstance(places, Mapping) else {}
  named = {place: v for place, v in table.items() if isinstance(v, str | NM | None)}
  if places is None:
    wrong.missing["SPARSITY_RULES"] = (
      "SPARSITY_RULES is not set: give a dict, such as {'ff': None}."
    )
  elif not isinstance(places, Mapping):
    wrong.errors.append(
      f"SPARSITY_RULES={places!r} says no pattern: give a dict from place to pattern, such as "
      f"{{'ff': '1:8'}}. Places are roles ({', '.join(roles_of.regexes())}) or regexes."
    )
  elif not places:
    wrong.errors.append(
      "SPARSITY_RULES={} would leave everything dense. Name a place, such as {'ff': None}; for a "
      "dense run set RECIPE to 'dense'."
    )
  if named and recipe is None:
    wrong.missing["RECIPE"] = (
      f"{', '.join(map(repr, named))} in SPARSITY_RULES need a recipe, but RECIPE names no recipe. "
      f"Choose one of: {', '.join(RECIPES)}."
    )
  if pattern is None and None in named.values() and recipe != "dense":
    wrong.missing["PATTERN"] = (
      "SPARSITY_RULES leaves a pattern to PATTERN, which is not set. Set it, for example to '1:8'."
    )
  if named and sparse_steps is None and recipe != "dense":
    wrong.missing["SPARSE_STEPS"] = (
      f"{recipe or 'it'} needs SPARSE_STEPS, the steps of the sparse run."
    )

  phases = _phases(sparse_steps, dense_steps, finetune_steps, wrong)
  settings = {"beta": beta, "gradient": gradient, **(fields or {})}
  settings = {name: value for name, value in settings.items() if value is not None}
  right = _right_fields(recipe, settings, wrong) if named and recipe is not None else None
  made: dict[str, Recipe] = {}
  for place, given in table.items():
    if wrong.tried(Rules, {place: Dense()}) is None:
      continue
    made[place] = Dense()  # unless all goes well
    if place not in named and not isinstance(given, Recipe):
      wrong.errors.append(
        f"SPARSITY_RULES: {place!r} has {given!r}. Give a pattern such as '1:8', None for PATTERN, "
        "or a recipe (a gin reference to one ends in parentheses)."
      )
    elif isinstance(given, Recipe):
      made[place] = given
    elif recipe == "dense":
      made[place] = make_recipe("dense", pattern=given or pattern, phases=phases)
    elif given is not None or pattern is not None:
      where = "PATTERN" if given is None else f"SPARSITY_RULES, {place!r}"
      parsed = wrong.tried(_parse, where, pattern if given is None else given)
      if right is not None and parsed and phases:
        found = wrong.tried(make_recipe, recipe, pattern=parsed, phases=phases, **right)
        made[place] = found if found and right == settings else Dense()
  if wrong.tried(Rules, {"ff": Dense()}, axes) is None:
    axes = None
  if wrong.tried(Rules, {"ff": Dense()}, indivisible=indivisible) is None:
    indivisible = "error"
  if made:
    wrong.rules = Rules(made, axes, indivisible)
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
    """function(...), None where it fails; its error is then noted, once, in terms of macros."""
    try:
      return function(*args, **kwargs)
    except (ValueError, TypeError) as e:
      text = _in_macros(str(e))
      if text not in self.errors:
        self.errors.append(text)
      return None


def _phases(sparse_steps, dense_steps, finetune_steps, wrong: SettingsError) -> Phases | None:
  given = {"DENSE_STEPS": dense_steps, "FINETUNE_STEPS": finetune_steps}
  if sparse_steps is not None:
    given = {"SPARSE_STEPS": sparse_steps, **given}
  whole = [wrong.tried(_whole, name, steps) is not None for name, steps in given.items()]
  if not all(whole) or sparse_steps is None:
    return None
  return wrong.tried(Phases, total=sparse_steps, dense=dense_steps, finetune=finetune_steps)


def _right_fields(name: str, fields: Mapping[str, Any], wrong: SettingsError):
  """The fields that are right in themselves; None where nothing can be made of them."""
  if name not in RECIPES:
    return wrong.tried(make_recipe, name)
  if name == "custom" and not fields.get("path"):
    wrong.errors.append(
      "custom needs a path: RECIPE_FIELDS = {'path': ((0, '4:8', 1.0), (5000, '1:8', 0.5))}, "
      "entries (step, pattern, D)."
    )
    return None
  # Beside a pattern and phases that suit every field, and what others need beside them.
  common = {"pattern": NM(1, 2), "phases": Phases(total=2**31 - 1)}
  common |= {field: fields[field] for field in ("path", "decay_kind") if field in fields}
  tried = lambda field: wrong.tried(make_recipe, name, **common | {field: fields.get(field)})
  right = {field: fields[field] for field in fields if tried(field)}
  # Without the beta that is wrong it would take one of its own, and say what is wrong with that.
  return None if "beta" in fields and "beta" not in right else right


# What recipes and phases call what macros set.
_WORDS = (
  (r"Phases\(total=(.*?), dense=(.*?), finetune=(.*?)\)",
   r"SPARSE_STEPS=\1, DENSE_STEPS=\2, FINETUNE_STEPS=\3"),
  (r"\btotal \(SPARSE_STEPS\)", "SPARSE_STEPS"),
  (r"\btotal\b", "SPARSE_STEPS"),
  (r"(?<!the )(?<!recipe ')(?<!of: )\bdense\b", "DENSE_STEPS"),
  (r"\bfinetune\b", "FINETUNE_STEPS"),
  (r"\bbeta\b", "BETA"),
  (r"\bgradient=", "GRADIENT="),
  (r"\bindivisible=", "INDIVISIBLE="),
  (r"\bRules: a place has\b", "SPARSITY_RULES: a place is"),
)  # fmt: skip


def _in_macros(text: str) -> str:
  for regex, macro in _WORDS:
    text = re.sub(regex, macro, text)
  return text


def _parse(where: str, pattern: str | NM) -> NM:
  try:
    return NM.parse(pattern)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from None


def _whole(name: str, steps: Any) -> int:
  if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
    raise ValueError(f"{name}={steps!r}: give a whole number of steps, such as 100_000.")
  return steps


def train_steps(pretrained_steps: int, sparse_steps: int) -> int:
  """The global step at which a sparse run ends that starts from a checkpoint."""
  return _whole("PRETRAINED_STEPS", pretrained_steps) + _whole("SPARSE_STEPS", sparse_steps)


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


def parse(text: str) -> Rules:
  """The rules of a text of `describe`: a checkpoint holds it, so it needs no settings beside it.

  >>> parse("ff: mdgf_linear 1:8, total=9, beta=0.5").places["ff"].beta
  0.5
  """
  places: dict[str, Recipe] = {}
  axes: dict[str, masks.Axis] = {}
  roles: dict[str, str] = {}
  indivisible = "error"
  try:
    for line in text.splitlines():
      if found := _PLACE.fullmatch(line):
        places[found["place"]] = _parse_recipe(found["name"], found["pattern"], found["fields"])
      elif line.startswith("axis "):
        regex, _, axis = line.removeprefix("axis ").rpartition(": ")
        axes[regex] = ast.literal_eval(axis)
      elif line.startswith("role "):
        name, _, roles_regex = line.removeprefix("role ").partition(": ")
        roles[name] = roles_regex
      else:
        indivisible = line.removeprefix("indivisible: ")
    rules = Rules(places, axes, indivisible, roles)
  except (ValueError, TypeError, SyntaxError) as e:
    raise ValueError(f"these rules cannot be read by this version ({e}):\n{text}") from e
  if describe(rules) != text:
    raise ValueError(f"these rules read as others by this version, {describe(rules)!r}:\n{text}")
  return rules


_PLACE = re.compile(
  rf"(?P<place>.+): (?P<name>{'|'.join(RECIPES)})(?: (?P<pattern>\d+:\d+))?"
  r"(?P<fields>(?:, \w+=.*)?)"
)


def _parse_recipe(name: str, pattern: str | None, fields: str) -> Recipe:
  fields = re.sub(r"NM\(n=(\d+), m=(\d+)\)", r"'\1:\2'", fields)
  call = ast.parse(f"dict({fields.removeprefix(', ')})", mode="eval").body
  assert isinstance(call, ast.Call)
  given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
  steps = {key: given.pop(key) for key in ("total", "dense", "finetune") if key in given}
  phases = Phases(**steps) if steps else None
  return make_recipe(name, pattern=pattern, phases=phases, **given)
