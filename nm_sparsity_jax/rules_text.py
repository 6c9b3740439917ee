"""Rules as a text, and back: what a checkpoint holds to know its own rules.

Rules -> [describe] -> text -> [pack] -> bytes in a checkpoint
bytes in a checkpoint -> [unpack] -> text -> [parse] -> Rules
"""

from __future__ import annotations

import ast
import dataclasses
import re
import zlib

import numpy as np

from nm_sparsity_jax import masks
from nm_sparsity_jax import roles as vocabulary
from nm_sparsity_jax.errors import UnknownRecipe
from nm_sparsity_jax.recipes import RECIPES, Recipe, recipe
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.schedules import Phases

TEXT_BYTES = 4096
_MOST_TEXT = 1 << 16  # characters that may be inflated from them


def describe(rules: Rules) -> str:
  """Returns the rules as a text, one line a place, equal for equal rules.

  Fields at their defaults are left out, so that a field that a later version adds changes no text.

  >>> from nm_sparsity_jax import recipe
  >>> r = recipe("mdgf_linear", pattern="1:8", phases=Phases(total=9), beta=0.5)
  >>> print(describe(Rules({"ff": r})))
  ff: mdgf_linear 1:8, total=9, beta=0.5
  """
  lines = [f"{place}: {_describe_recipe(recipe)}" for place, recipe in rules.places.items()]
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
  places: dict[str, Recipe] = {}
  axes: dict[str, masks.Axis] = {}
  roles: dict[str, str] = {}
  indivisible = "error"
  try:
    for line in text.splitlines():
      if found := _place(line):
        places[found["place"]] = _parse_recipe(found["name"], found["pattern"], found["fields"])
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
  except UnknownRecipe:
    raise
  except _NOT_READ as e:
    raise ValueError(f"this version cannot read these rules ({e}):\n{_short(text)}") from e
  if describe(rules) != text:
    now = _short(repr(describe(rules)))
    raise ValueError(f"this version reads these rules as other rules, {now}:\n{_short(text)}")
  vocabulary.distrust(*places, *axes, *roles.values())
  return rules


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


def _describe_recipe(recipe: Recipe) -> str:
  words = [recipe.name if recipe.pattern is None else f"{recipe.name} {recipe.pattern}"]
  for owner in (recipe.phases, recipe):
    for field in dataclasses.fields(owner) if owner else ():  # type: ignore[arg-type]
      value = getattr(owner, field.name)
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


def _parse_recipe(name: str, pattern: str | None, fields: str) -> Recipe:
  fields = re.sub(r"NM\(n=(\d+), m=(\d+)\)", r"'\1:\2'", fields)
  call = ast.parse(f"dict({fields.removeprefix(', ')})", mode="eval").body
  assert isinstance(call, ast.Call)
  given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
  steps = {key: given.pop(key) for key in ("total", "dense", "finetune") if key in given}
  phases = Phases(**steps) if steps else None
  return recipe(name, pattern=pattern, phases=phases, **given)
