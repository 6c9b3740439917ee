"""Families of models, and the words that they add up to.

Family -> [register] -> word -> regex of whole paths -> role of a path
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """How a family of models names its kernels.

  A regex must match a whole '/'-joined path. Families add up: 'ff' names what any of them calls so.

  >>> own = Family(name="own", roles={"ff": r"(.*/)?(fc1|fc2)/kernel"})
  >>> own.role("blocks_0/fc1/kernel")
  'ff'

  Attributes:
    name: of the family, such as 't5'.
    roles: role -> regex of the kernels that have it. A kernel that holds q, k and v side by side
      has the role 'qkv'.
    narrow: word -> regex of the paths that it narrows a role to, as 'decoder' in 'decoder/ff'.
  """

  name: str
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  narrow: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def role(self, path: str) -> str | None:
    """Returns the role of a kernel, None where the family gives it none."""
    return next((role for role, regex in self.roles.items() if re.fullmatch(regex, path)), None)


# What several roles are called together.
COMPOSITES: Mapping[str, tuple[str, ...]] = {"qk": ("q", "k"), "qkv": ("q", "k", "v")}

_families: dict[str, Family] = {}


def register(family: Family) -> Family:
  """Adds a family to the vocabulary, for all rules made from then on.

  Call it where your module defines its models, so that a run that names the module knows them. A
  family replaces one of the same name, so a cell of a notebook may run again.

  Args:
    family: its roles must not be words for something else.

  Returns:
    The family.
  """
  for word, regex in {**family.roles, **family.narrow}.items():
    compiled(regex, f"the family {family.name!r}, role {word!r}")
  _families[family.name] = family
  return family


# Python's own cache keeps 512 patterns, and a large network has more.
@functools.cache
def compiled(regex: str, owner: str) -> re.Pattern[str]:
  """Returns the compiled regex; `owner` says in an error where it stands."""
  try:
    return re.compile(regex)
  except re.error as e:
    raise ValueError(f"{owner}: {regex!r} is not a regular expression: {e}.") from e


def regexes(more: Mapping[str, str] | None = None) -> dict[str, str]:
  """Returns role -> regex of all families, the words for several roles last.

  >>> list(regexes())[:5]
  ['ff', 'q', 'k', 'v', 'o']

  Args:
    more: roles of one set of rules, which stand before those of families.
  """
  single = _joined(f.roles for f in _families.values()) | dict(more or {})
  several = {}
  for name, parts in COMPOSITES.items():
    fused = single.pop(name, None)  # a kernel that holds them side by side
    several[name] = _either([*(single[part] for part in parts), *([fused] if fused else [])])
  return single | several | dict(more or {})


def matcher(place: str, more: Mapping[str, str] | None = None) -> re.Pattern[str]:
  """Returns the regex of whole paths for a place: a role, narrowed by words, or a regex.

  >>> regex = matcher("encoder/ff")
  >>> paths = "encoder/layers_0/mlp/wi/kernel", "decoder/layers_0/mlp/wi/kernel"
  >>> [bool(regex.fullmatch(path)) for path in paths]
  [True, False]

  Args:
    place: what rules name.
    more: roles of one set of rules, beside those of families.
  """
  known, words = regexes(more), _joined(f.narrow for f in _families.values())
  *narrow, role = place.split("/")
  if role not in known or not words.keys() >= set(narrow):
    return compiled(place, f"the place {place!r}")
  # The path must match each narrowing word as well as the role.
  narrowed = "".join(rf"(?=(?:{words[word]})\Z)" for word in narrow)
  return compiled(f"{narrowed}(?:{known[role]})", f"the place {place!r}")


def roles_of(paths: Sequence[str], more: Mapping[str, str] | None = None) -> list[str]:
  """Returns the roles that some of these paths have, in the order of `regexes`.

  >>> roles_of(["blocks_0/mlp/fc1/kernel", "head/kernel", "norm/scale"])
  ['ff', 'head']

  Args:
    paths: of parameters.
    more: roles of one set of rules, beside those of families.
  """
  single = {role: regex for role, regex in regexes(more).items() if role not in COMPOSITES}
  return [role for role, regex in single.items() if any(re.fullmatch(regex, p) for p in paths)]


def role_of(path: str) -> str | None:
  """Returns the role of a kernel in whatever family names it, None where none does."""
  return next((role for f in _families.values() if (role := f.role(path))), None)


def _joined(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
  found: dict[str, list[str]] = {}
  for table in tables:
    for word, regex in table.items():
      found.setdefault(word, []).append(regex)
  return {word: _either(those) for word, those in found.items()}


def _either(those: Iterable[str]) -> str:
  return "|".join(f"(?:{regex})" for regex in dict.fromkeys(those))
