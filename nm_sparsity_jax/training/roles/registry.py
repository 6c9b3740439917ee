"""Families of models, and the words that they add up to.

Family -> [register] -> word -> regex of whole paths -> role of a path
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.training.roles.matching import PathTest, compiled, matches


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
  """How a family of models names its kernels.

  A regex must match a whole '/'-joined path. Families add up: 'ff' names what any of them calls so.

  >>> own = Family(name="own", roles={"ff": r"(.*/)?(fc1|fc2)/kernel"})
  >>> own.role("blocks_0/fc1/kernel")
  'ff'

  Attributes:
    name: of the family, such as 't5'.
    roles: role -> regex of the kernels that have it.
    narrow: word -> regex of the paths that it narrows a role to, as 'decoder' in 'decoder/ff'.
    fused: regex of the kernels that hold q, k and v side by side; 'qkv' names them, and no part of
      it can.
  """

  name: str
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  narrow: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fused: str = ""

  def role(self, path: str) -> str | None:
    """Returns the role of a kernel, None where the family gives it none."""
    found = next((r for r, regex in self.roles.items() if re.fullmatch(regex, path)), None)
    if found is None and self.fused and re.fullmatch(self.fused, path):
      return FUSED
    return found


FUSED = "qkv"  # what a kernel is that holds them all
# What several roles are called together.
COMPOSITES: Mapping[str, tuple[str, ...]] = {"qk": ("q", "k"), "qkv": ("q", "k", "v")}

# Roles that families may have had as narrowing words before vision models had them. The last word
# of a place is the role, those before it narrow it, so both may be.
_SINCE_VISION = {"stem", "conv", "shortcut", "merge", "head"}

_families: dict[str, Family] = {}
_registered_by: dict[str, str] = {}  # name of a family -> the module that did it


def register(family: Family) -> Family:
  """Adds a family to the vocabulary, for all rules made from then on.

  Call it where your module defines its models, so that a run that names the module knows them.
  Families add up: where two give one role, it names the kernels of both. A module that registers a
  family again, as a notebook or a reload does, replaces its own.

  Args:
    family: its name must be new, its roles must not be words for something else.

  Returns:
    The family.
  """
  _refuse_kinds(family)
  by = sys._getframe(1).f_globals.get("__name__", "")
  if family.name in _families and _registered_by[family.name] != by:
    raise ValueError(
      f"roles: the family {family.name!r} is registered already; give yours another name."
    )
  others = [f for f in _families.values() if f.name != family.name]
  words, known = _joined([f.narrow for f in others]), {role for f in others for role in f.roles}
  for role in family.roles:
    if role in COMPOSITES or role in words or role in family.narrow:
      raise ValueError(
        f"roles: the family {family.name!r} defines {role!r} twice: it is a word for "
        f"{'several roles' if role in COMPOSITES else 'paths'} already. Choose another word."
      )
  if taken := sorted(set(family.narrow) & {*known, *COMPOSITES} - _SINCE_VISION):
    raise ValueError(
      f"roles: the family {family.name!r} defines {taken[0]!r} twice: it is a role already. "
      "Choose another word."
    )
  for regex in (*family.roles.values(), *family.narrow.values(), family.fused):
    compiled(regex, f"the family {family.name!r}")
  _families[family.name], _registered_by[family.name] = family, by
  return family


def _refuse_kinds(family: Family) -> None:
  """Raises where roles or words of a family are no texts, or no words."""
  for name in ("roles", "narrow"):
    table = getattr(family, name)
    if not isinstance(table, Mapping):
      raise ValueError(
        f"roles: the family {family.name!r} has {name}={table!r}: give a dict from word to regex, "
        r"such as {'ff': r'.*/fc\d/kernel'}."
      )
    for word, regex in table.items():
      check_word(word, f"the words of the family {family.name!r}")
      if not isinstance(regex, str):
        raise ValueError(
          f"roles: the family {family.name!r} has {regex!r} for {word!r}: give a regex as a text."
        )


def check_word(word: Any, whose: str) -> None:
  """Raises where a role is no word: a place splits at '/', and the text of rules at ': '.

  >>> check_word("ff", "these rules")

  Args:
    word: of a role, or one that narrows roles.
    whose: names the table in the error.
  """
  if not isinstance(word, str) or not re.fullmatch(r"[\w.-]+", word):
    raise ValueError(
      f"roles: {whose} hold {word!r}, which is no word: take letters, digits, '_', '-' and '.', "
      "as in 'ff'. What stands before a '/' in a place narrows it."
    )


def families() -> Mapping[str, Family]:
  """Returns name -> family, in the order of registration."""
  return dict(_families)


def regexes(more: Mapping[str, str] | None = None) -> dict[str, str]:
  """Returns role -> regex of all families, the words for several roles last.

  >>> list(regexes())[:5]
  ['ff', 'q', 'k', 'v', 'o']

  Args:
    more: roles of one set of rules, which stand before those of families.
  """
  joined = _joined([f.roles for f in _families.values()])
  single = {**joined, **(more or {})}
  for name, parts in COMPOSITES.items():
    known = [single[part] for part in parts if part in single]
    known += _fused() if name == FUSED else ()
    if known:
      joined[name] = _either(known)
  return {**joined, **(more or {})}


def narrowing() -> dict[str, str]:
  """Returns word -> regex of the paths that it narrows a role to."""
  return _joined([f.narrow for f in _families.values()])


def narrowing_text() -> str:
  """Returns the words that narrow a role, as a sentence lists them.

  >>> narrowing_text()
  'encoder/, decoder/, self/, cross/'
  """
  return ", ".join(f"{word}/" for word in narrowing())


def _joined(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
  found: dict[str, list[str]] = {}
  for table in tables:
    for word, regex in table.items():
      known = found.setdefault(word, [])
      known += [regex] if regex not in known else ()
  return {word: _either(those) for word, those in found.items()}


def _either(those: Sequence[str]) -> str:
  return those[0] if len(those) == 1 else "|".join(f"(?:{regex})" for regex in those)


def path_test(key: str, more: Mapping[str, str] | None = None) -> PathTest:
  """Returns a test of whole paths for a place: a role, narrowed by words, or a regex.

  >>> test = path_test("encoder/ff")
  >>> test("encoder/layers_0/mlp/wi/kernel"), test("decoder/layers_0/mlp/wi/kernel")
  (True, False)

  Args:
    key: the place.
    more: roles of one set of rules, beside those of families.
  """
  known, words = regexes(more), narrowing()
  *narrow, role = key.split("/")
  if role in known and all(word in words for word in narrow):
    narrowed = tuple(words[word] for word in narrow)
    fused = _parts(role, more or {})
    return PathTest((known[role], *narrowed), key, (*fused, *narrowed) if fused else ())
  return PathTest((compiled(key, "a place").pattern,))


def _parts(role: str, more: Mapping[str, str]) -> tuple[str, ...]:
  """Returns regexes of the kernels that hold what a role names, and more; () for other roles."""
  parts = {*COMPOSITES, *(part for of in COMPOSITES.values() for part in of)} - {FUSED, *more}
  return (_either(_fused()),) if role in parts else ()


def _fused() -> list[str]:
  return list(dict.fromkeys(f.fused for f in _families.values() if f.fused))


def roles_of(paths: Sequence[str], more: Mapping[str, str] | None = None) -> list[str]:
  """Returns the roles that some of these paths have, in the order of `regexes`.

  >>> roles_of(["blocks_0/mlp/fc1/kernel", "head/kernel", "norm/scale"])
  ['ff', 'head']

  Args:
    paths: of parameters.
    more: roles of one set of rules, beside those of families.
  """
  single = {role: regex for role, regex in regexes(more).items() if role not in COMPOSITES}
  return [role for role, regex in single.items() if any(matches(regex, path) for path in paths)]


def role_of(path: str) -> str | None:
  """Returns the role of a kernel in whatever family names it, None where none does."""
  return next((r for f in _families.values() if (r := f.role(path))), None)
