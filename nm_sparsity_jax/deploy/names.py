"""Where the names and shapes of two trees differ, in few words."""

from __future__ import annotations

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
  '2 of 3 missing (a.{0,1}.w), 1 of another shape (b is (4,) there and (3,) here)'

  Args:
    wanted: name -> shape, of all that must be there.
    found: name -> shape, of all that is.
    where: says where what is found lies, and where what is wanted.
  """
  said = []
  if missing := [name for name in wanted if name not in found]:
    said.append(f"{len(missing)} of {len(wanted)} missing ({_grouped(missing)})")
  if unknown := [name for name in found if name not in wanted]:
    said.append(f"{len(unknown)} unknown ({_grouped(unknown)})")
  if other := [n for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]:
    there, here = where
    name = other[0]
    example = f"{name} is {tuple(found[name])} {there} and {tuple(wanted[name])} {here}"
    said.append(f"{len(other)} of another shape ({example})")
  return ", ".join(said)


def _grouped(names: Sequence[str]) -> str:
  rows = group(names)
  left = sum(len(members) for _, members in rows[_SHOWN:])
  return ", ".join(name for name, _ in rows[:_SHOWN]) + (f" and {left} more" if left else "")
