"""Rules as a text, and back: what a checkpoint holds to know its own rules.

Rules -> [describe] -> text -> [pack] -> bytes in a checkpoint
bytes in a checkpoint -> [unpack] -> text -> [parse] -> Rules
"""

from __future__ import annotations

import ast
import re
import zlib
from typing import Any

import numpy as np

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes import RECIPES, Recipe, recipe
from nm_sparsity_jax.training.rules import Rules

_PAGE = 4096  # bytes; most rules take one page, so other rules do not change the shape of a state
_MOST_TEXT = 1 << 20
_PLACE = re.compile(r"(.+): ([^\W\d]\w*)(?: (\d+:\d+))?((?:, \w+=.*)?)")


def describe(rules: Rules) -> str:
  """Returns `Rules.text`, once it is sure that `parse` can read it.

  >>> from nm_sparsity_jax import recipe
  >>> r = recipe("mdgf_linear", pattern="1:8", phases=Phases(total=9), beta=0.5)
  >>> print(describe(Rules({"ff": r})))
  ff: mdgf_linear 1:8, total=9, beta=0.5

  Raises:
    ValueError: nothing could read the text of a checkpoint back: a place has several lines, or a
      field holds another value than numbers, texts, patterns, and tuples of these.
  """
  if all(type(r) is RECIPES.get(r.name) for r in rules.places.values()):
    parse(rules.text)
  return rules.text


def parse(text: str) -> Rules:
  """Reads the rules of a text of `describe`: a checkpoint holds it, so it needs no settings.

  A recipe that is not of this package must be registered first: import the module that does it.

  >>> parse("ff: mdgf_linear 1:8, total=9, beta=0.5").places["ff"].beta
  0.5

  Raises:
    ValueError: this version cannot read the text, or would write another one for what it reads; or
      a place has a recipe that nobody registered.
  """
  places: dict[str, Recipe] = {}
  axes: dict[str, masks.Axis] = {}
  optional: list[str] = []
  indivisible = "error"
  try:
    for line in text.splitlines():
      kind, _, rest = line.partition(" ")
      if kind == "indivisible:":
        indivisible = rest
      elif kind == "axis":
        regex, _, axis = rest.rpartition(": ")
        axes[regex] = ast.literal_eval(axis)
      elif kind == "optional":
        optional.append(rest)
      elif found := _PLACE.fullmatch(line):
        places[found[1]] = _parse_recipe(*found.groups()[1:])
    rules = Rules(places, axes, indivisible, optional)
    # Another version may know other defaults: it must not go on with other rules in silence.
    if rules.text != text:
      raise ValueError(f"it reads {rules.text!r}")
  # What a text that `describe` did not write ends in: deep nesting, a call with wrong arguments.
  except (ValueError, TypeError, SyntaxError, AttributeError, RecursionError) as e:
    raise ValueError(
      f"this version cannot read these rules ({e}). If a recipe is not registered, import the "
      f"module that registers it (commands: --import MODULE).\n{text[:4000]}"
    ) from e
  return rules


def _parse_recipe(name: str, pattern: str | None, fields: str) -> Recipe:
  # A pattern in a field is written as its repr; recipes take its text.
  fields = re.sub(r"NM\(n=(\d+), m=(\d+)\)", r"'\1:\2'", fields)
  call: Any = ast.parse(f"dict({fields.removeprefix(', ')})", mode="eval").body
  given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
  steps = {key: given.pop(key) for key in ("total", "dense", "finetune") if key in given}
  return recipe(name, pattern=pattern, phases=Phases(**steps) if steps else None, **given)


def pack(text: str) -> np.ndarray:
  """Returns the text of rules as a checkpoint keeps it: uint8[4096 * k], deflated and padded."""
  data = np.frombuffer(zlib.compress(text.encode(), 9), np.uint8)
  return np.pad(data, (0, -data.size % _PAGE))


def unpack(data: np.ndarray) -> str:
  """Returns the text that `pack` was given."""
  inflating = zlib.decompressobj()
  text = inflating.decompress(np.asarray(data).tobytes(), _MOST_TEXT)
  if inflating.unconsumed_tail:  # a checkpoint is anybody's file
    raise ValueError(f"the text of its rules has more than {_MOST_TEXT:,} bytes")
  return text.decode()
