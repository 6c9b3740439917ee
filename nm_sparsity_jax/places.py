"""One parameter that a recipe owns, and what rules mean for a whole tree.

Rules, shapes -> [Place, Assignment] -> what is done to which parameter, as a table
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from nm_sparsity_jax import masks
from nm_sparsity_jax.groups import Groups
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.recipes import Recipe
from nm_sparsity_jax.text import table


@dataclasses.dataclass(frozen=True)
class Place:
  """One parameter that a recipe owns.

  Attributes:
    path: '/'-joined path in the parameter tree.
    recipe: what is applied to it.
    groups: where its groups lie.
    key: the rule that chose it.
  """

  path: str
  recipe: Recipe
  groups: Groups
  key: str = ""

  @property
  def pattern(self) -> NM:
    """The target pattern."""
    assert self.recipe.pattern is not None  # Dense makes no Place
    return self.recipe.pattern

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the parameter."""
    return self.groups.shape

  @property
  def axis(self) -> masks.Axis:
    """The axis of the groups; see `Groups`."""
    return self.groups.axis

  @property
  def pad(self) -> int:
    """Entries that complete the last group ('pad' policy)."""
    return self.groups.pad

  @property
  def axis_size(self) -> int:
    """Length of the grouped axis, padding included."""
    return self.groups.size

  @property
  def axes(self) -> tuple[int, ...]:
    """`axis` as a tuple of ascending, non-negative ints."""
    return self.groups.axes

  @property
  def count(self) -> int:
    """The number of groups of the target pattern."""
    return self.groups.count(self.pattern)

  @property
  def dropped(self) -> tuple[str, ...]:
    """Levels of the recipe that do not fit this axis."""
    kept = {p for _, p in self.recipe.levels(self.axis_size)}
    return tuple(str(p) for _, p in self.recipe.levels() if p not in kept)

  @property
  def remarks(self) -> tuple[str, ...]:
    """What is unusual about this place, in words; empty where nothing is."""
    remarks = []
    if self.pad:
      remarks.append(f"axis padded by {self.pad}")
    if self.dropped:
      remarks.append(f"levels {', '.join(self.dropped)} do not divide {self.axis_size}: dropped")
    segments = self.recipe.timeline(self.axis_size)
    after = [*(later.decay_start for later in segments[1:]), 0.0]
    for a, d in zip(segments, after, strict=False):
      # The exponential decay of beta=None ends at 1/1000: that is how it is meant.
      if a.pattern is not None and a.decay_stop > 0.002 and d == 0:
        remarks.append(f"D jumps from {a.decay_stop:.3g} to 0 at step {a.stop}")
    return tuple(remarks)

  def effective(self, w: jax.Array, step, mask: jax.Array | None = None) -> jax.Array:
    """Returns `Recipe.effective` at this place."""
    stored = () if mask is None else (mask,)
    return self.groups.apply(
      lambda w, *m, axis: self.recipe.effective(w, step, axis, *m), w, *stored
    )

  def mask(self, w: jax.Array, step, mask: jax.Array | None = None) -> jax.Array:
    """Returns `Recipe.mask` at this place."""
    stored = () if mask is None else (mask,)
    return self.groups.apply(lambda w, *m, axis: self.recipe.mask(w, step, axis, *m), w, *stored)


@dataclasses.dataclass(frozen=True)
class Assignment:
  """What rules mean for one parameter tree. `print` it before a run.

  Attributes:
    places: path -> Place, the sparse parameters.
    skipped: path -> why a rule did not apply ('skip' policy).
    dense: paths that no rule names.
  """

  places: Mapping[str, Place]
  skipped: Mapping[str, str]
  dense: tuple[str, ...]

  def __str__(self) -> str:
    head = "parameter", "shape", "axis", "pattern", "groups", "recipe", "remarks"
    rows = [
      (p.path, p.shape, p.axis, p.recipe.pattern, p.count, p.recipe.name, "; ".join(p.remarks))
      for p in self.places.values()
    ]
    lines = table(head, rows)
    lines += [f"skipped  {path}: {why}" for path, why in self.skipped.items()]
    if self.dense:
      lines.append(f"dense    {', '.join(self.dense)}")
    return "\n".join(lines)


class Examined(NamedTuple):
  """What rules mean for one parameter tree, with all mistakes.

  Attributes:
    assignment: what the rules assign; a parameter with a mistake counts as dense.
    failed: path -> the error that `Rules.assign` would raise for it.
    idle: places that match no parameter.
  """

  assignment: Assignment
  failed: Mapping[str, ValueError]
  idle: tuple[str, ...]
