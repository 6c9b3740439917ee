"""What the names of two trees have in common, and where they differ, in few words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.trees import group

_SHOWN = 3  # groups of names in an error


def difference(
  wanted: Mapping[str, tuple[int, ...]],
  found: Mapping[str, Any],
  where: tuple[str, str] = ("there", "here"),
) -> str:
  """Says in one clause all that is missing, unknown and of another shape; '' where nothing is.

  >>> difference({"a.0.w": (2,), "a.1.w": (2,), "b": (3,)}, {"b": (4,)})
  '2 of 3 are missing (a.{0,1}.w), 1 has another shape (b is (4,) there and (3,) here)'

  Args:
    wanted: name -> shape, of all that must be there.
    found: name -> shape, of all that is.
    where: says where what is found lies, and where what is wanted.
  """
  said = []
  if missing := [name for name in wanted if name not in found]:
    are = "is" if len(missing) == 1 else "are"
    said.append(f"{len(missing)} of {len(wanted)} {are} missing ({_grouped(missing)})")
  if unknown := [name for name in found if name not in wanted]:
    are = "is" if len(unknown) == 1 else "are"
    said.append(f"{len(unknown)} {are} unknown ({_grouped(unknown)})")
  if other := [n for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]:
    have, name = "has another shape" if len(other) == 1 else "have other shapes", other[0]
    there, here = where
    example = f"{name} is {tuple(found[name])} {there} and {tuple(wanted[name])} {here}"
    said.append(f"{len(other)} {have} ({example})")
  return ", ".join(said)


def _grouped(names: Sequence[str]) -> str:
  # `group` counts numbers between slashes; other libraries put them between dots.
  parts = [re.sub(r"/\.(\d+)\b", r"/._\1", name.replace(".", "/.")) for name in names]
  rows = group(parts)
  shown = [name.replace("/._", ".").replace("/.", ".") for name, _ in rows[:_SHOWN]]
  left = sum(len(members) for _, members in rows[_SHOWN:])
  return ", ".join(shown) + (f" and {left} more" if left else "")
