"""Fields of frozen values, such as recipes and phases: their types, and their text.

fields as given, np.int64(3) or 1 -> [settle] -> 3 or 1.0 -> [spelled] -> the text of a fingerprint
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np


def spelled(value: Any) -> str:
  """Returns class and fields as a text for fingerprints, whatever `repr` the class has.

  Checkpoints hold fingerprints, so it must not change. It is what a dataclass' own `repr` says.

  >>> from nm_sparsity_jax.core.schedules import Phases
  >>> spelled(Phases(total=9))
  'Phases(total=9, dense=0, finetune=0)'

  Args:
    value: an instance of a dataclass.
  """
  words = []
  for field in dataclasses.fields(value):
    held = getattr(value, field.name)
    words.append(f"{field.name}={spelled(held) if _is_plain(held) else repr(held)}")
  return f"{type(value).__qualname__}({', '.join(words)})"


def _is_plain(value: Any) -> bool:
  """Returns whether a value is an instance of a dataclass that has the `repr` of one."""
  known = getattr(type(value), "__dataclass_params__", None)
  return known is not None and known.repr


def settle(value: Any) -> None:
  """Casts numbers and texts in the fields of a frozen dataclass to the types that they name.

  numpy's scalars become Python's, and a whole number in a field of floats becomes a float, so that
  equal values have one text. What is no such number is left to the checks of the class.

  Args:
    value: an instance of a dataclass; call it first in its `__post_init__`.
  """
  for field in dataclasses.fields(value):
    held = getattr(value, field.name)
    kinds = _kinds(field.type)
    if (made := _cast(held, kinds)) is not held:
      object.__setattr__(value, field.name, made)


def _kinds(annotation: Any) -> set[str]:
  """Returns the plain types that an annotation allows: 'float | None' -> {'float', 'None'}."""
  text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
  if not isinstance(annotation, str | type):
    text = str(annotation)
  inner = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]", text)
  return {word.strip() for word in (inner[1] if inner else text).split("|")}


def _cast(held: Any, kinds: set[str]) -> Any:
  """Returns a number or a text as one of Python's, of the one kind that a field names."""
  if isinstance(held, bool | np.bool_):
    return bool(held) if "bool" in kinds else held
  if isinstance(held, np.integer) and kinds & {"int", "float"}:
    held = int(held)
  if isinstance(held, np.floating) and "float" in kinds:
    return float(held)
  if isinstance(held, int) and "float" in kinds and "int" not in kinds:
    return float(held) if abs(held) < 1 << 53 else held  # a larger one is not always a float
  return str(held) if type(held) is np.str_ and "str" in kinds else held
