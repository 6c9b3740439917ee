"""Rules as a text, and back: what a checkpoint holds to know its own rules.

Rules -> [describe] -> text -> [pack] -> bytes in a checkpoint
bytes in a checkpoint -> [unpack] -> text -> [parse] -> Rules
"""

from __future__ import annotations

import ast
import dataclasses
import re
import types
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.errors import UnknownRecipe
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes import RECIPES, Recipe, recipe
from nm_sparsity_jax.training.rules import Rules

TEXT_BYTES = 4096
_MOST_TEXT = 1 << 16  # characters that may be inflated from them


def describe(rules: Rules) -> str:
  """Returns the rules as a text, one line a place, equal for equal rules.

  Fields at their defaults are left out, so that a field that a later version adds changes no text.
  Rules whose text `parse` could not read are refused, so that no checkpoint is of unknown rules.

  >>> from nm_sparsity_jax import recipe
  >>> r = recipe("mdgf_linear", pattern="1:8", phases=Phases(total=9), beta=0.5)
  >>> print(describe(Rules({"ff": r})))
  ff: mdgf_linear 1:8, total=9, beta=0.5
  """
  for place, owner in rules.places.items():
    if type(owner) is RECIPES.get(owner.name):
      _refuse_unreadable(place, owner)
  return _written(rules)


def _written(rules: Rules, given: Mapping[str, Mapping[str, Any]] | None = None) -> str:
  """Returns the text of rules; `given`: place -> fields, which are written as they were given."""
  lines = [
    f"{place}: {_describe_recipe(recipe, (given or {}).get(place, {}))}"
    for place, recipe in rules.places.items()
  ]
  lines += [f"role {name}: {regex}" for name, regex in rules.roles.items()]
  lines.sort()
  # The first regex that matches wins, so the order counts.
  lines += [f"axis {regex}: {axis}" for regex, axis in rules.axes.items()]
  if rules.indivisible != "error":
    lines.append(f"indivisible: {rules.indivisible}")
  return "\n".join(lines)


def parse(text: str) -> Rules:
  """Reads the rules of a text of `describe`: a checkpoint holds it, so it needs no settings.

  A recipe that is not of this package must be registered first: import the module that does it.

  >>> parse("ff: mdgf_linear 1:8, total=9, beta=0.5").places["ff"].beta
  0.5

  Raises:
    UnknownRecipe: a place has a recipe that nobody registered.
    ValueError: this version cannot read the text, or would write another one for what it reads.
  """
  try:
    rules, now = _read(text)
  except UnknownRecipe:
    raise
  except _NOT_READ as e:
    raise ValueError(f"this version cannot read these rules ({e}):\n{_short(text)}") from e
  if now != text:
    raise ValueError(
      f"this version reads these rules as other rules, {_short(repr(now))}:\n{_short(text)}"
    )
  return rules


def _read(text: str) -> tuple[Rules, str]:
  """Returns the rules that a text says, and the text of these rules.

  A whole number in a field of floats is written as it stands in `text`: 0 for 0.0, as before.
  """
  places: dict[str, Recipe] = {}
  given: dict[str, Mapping[str, Any]] = {}
  axes: dict[str, masks.Axis] = {}
  roles: dict[str, str] = {}
  indivisible = "error"
  for line in text.splitlines():
    if found := _place(line):
      place = found["place"]
      places[place], given[place] = _parse_recipe(found["name"], found["pattern"], found["fields"])
    elif line.startswith("axis "):
      regex, _, axis = line.removeprefix("axis ").rpartition(": ")
      axes[regex] = ast.literal_eval(axis)
    elif line.startswith("role "):
      name, _, roles_regex = line.removeprefix("role ").partition(": ")
      roles[name] = roles_regex
    else:
      _refuse_unknown(line)
      indivisible = line.removeprefix("indivisible: ")
  rules = Rules(places, axes, indivisible, roles)
  return rules, _written(rules, given)


def _refuse_unreadable(place: str, owner: Recipe) -> None:
  """Raises where `parse` would not read the line of a place as what it says."""
  said = _describe_recipe(owner)
  try:
    found = _place(f"{place}: {said}")
    assert found is not None and found["place"] == place
    again, _ = _parse_recipe(found["name"], found["pattern"], found["fields"])
    assert _describe_recipe(again) == said
  except _NOT_READ:
    raise ValueError(
      f"a checkpoint cannot keep the rule {f'{place}: {said}'!r}, as nothing could read it back: "
      "a place is one line, and values of fields are numbers, texts, patterns, or tuples of these."
    ) from None


# What a text that `describe` did not write ends in, beside ValueError: deep nesting, a wrong call.
_NOT_READ = (ValueError, TypeError, SyntaxError, AssertionError, RecursionError, MemoryError)


def _short(text: str) -> str:
  return text if len(text) <= 4000 else f"{text[:400]}... ({len(text):,} characters)"


def pack(text: str) -> np.ndarray:
  """Returns the text of rules as a checkpoint keeps it: uint8[4096], deflated and padded."""
  data = np.frombuffer(zlib.compress(text.encode(), 9), np.uint8)
  if data.size > TEXT_BYTES:
    raise ValueError(
      f"the text of these rules takes {data.size} bytes, and a checkpoint keeps {TEXT_BYTES}: "
      "join places by regexes."
    )
  return np.pad(data, (0, TEXT_BYTES - data.size))


def unpack(data: np.ndarray) -> str:
  """Returns the text that `pack` was given.

  Raises:
    ValueError: it is longer than any that `pack` makes.
  """
  inflating = zlib.decompressobj()
  text = inflating.decompress(np.asarray(data).tobytes(), _MOST_TEXT)
  if inflating.unconsumed_tail:
    raise ValueError(f"the text of its rules has more than {_MOST_TEXT:,} bytes")
  return text.decode()


def _describe_recipe(recipe: Recipe, given: Mapping[str, Any] = types.MappingProxyType({})) -> str:
  words = [recipe.name if recipe.pattern is None else f"{recipe.name} {recipe.pattern}"]
  for owner in (recipe.phases, recipe):
    for field in dataclasses.fields(owner) if owner else ():  # type: ignore[arg-type]
      value = getattr(owner, field.name)
      value = given[field.name] if given.get(field.name, ...) == value else value
      if field.name not in ("pattern", "phases") and value != field.default:
        words.append(f"{field.name}={value!r}")
  return ", ".join(words)


def _place(line: str) -> re.Match[str] | None:
  """Matches a line of `describe` about a place, by the recipes that are registered now."""
  names = "|".join(RECIPES)
  return re.fullmatch(
    rf"(?P<place>.+): (?P<name>{names})(?: (?P<pattern>\d+:\d+))?(?P<fields>(?:, \w+=.*)?)", line
  )


def _refuse_unknown(line: str) -> None:
  """Raises where a line says that a place has a recipe that nobody registered."""
  found = re.fullmatch(r".+?: ([^\W\d]\w*)(?: \d+:\d+)?(?:, \w+=.*)?", line)
  if found and not line.startswith("indivisible: "):
    raise UnknownRecipe(
      f"the rules of this checkpoint name the recipe {found[1]!r}, which is not registered: "
      "import the module that registers it (commands: --import MODULE)."
    )


def _parse_recipe(name: str, pattern: str | None, fields: str) -> tuple[Recipe, Mapping[str, Any]]:
  """Returns a recipe, and its fields as its text gives them."""
  fields = re.sub(r"NM\(n=(\d+), m=(\d+)\)", r"'\1:\2'", fields)
  call = ast.parse(f"dict({fields.removeprefix(', ')})", mode="eval").body
  assert isinstance(call, ast.Call)
  given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
  steps = {key: given.pop(key) for key in ("total", "dense", "finetune") if key in given}
  phases = Phases(**steps) if steps else None
  return recipe(name, pattern=pattern, phases=phases, **given), given
