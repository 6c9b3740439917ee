"""One parameter that a recipe owns, and what rules mean for a whole tree.

Rules, shapes -> [Site, Assignment] -> what is done to which parameter, as a table
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping

import jax

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.core.trees import alike, group
from nm_sparsity_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Site:
  """One parameter that a recipe owns.

  Attributes:
    path: '/'-joined path in the parameter tree.
    recipe: what is applied to it.
    groups: where its groups lie.
    place: the place of the rules that named it.
    is_output: whether a bias says that the axis is one of outputs, which no product sums over.
  """

  path: str
  recipe: Recipe
  groups: Groups
  place: str
  is_output: bool = False

  @property
  def pattern(self) -> NM:
    """Returns the target pattern."""
    return self.recipe.pattern

  @property
  def shape(self) -> tuple[int, ...]:
    """Returns the shape of the parameter."""
    return self.groups.shape

  @property
  def axis(self) -> masks.Axis:
    """Returns the axis of the groups; see `Groups`."""
    return self.groups.axis

  @property
  def axis_size(self) -> int:
    """Returns the length of the grouped axis, padding included."""
    return self.groups.size

  @property
  def remarks(self) -> tuple[str, ...]:
    """Returns what is unusual about this site, in words; empty where nothing is."""
    remarks = []
    if self.is_output:
      remarks.append(f"is axis {self.axis} summed over? The bias says that it is one of outputs")
    if self.groups.pad:
      remarks.append(f"axis padded by {self.groups.pad}")
    fits = {pattern for _, pattern in self.recipe.levels(self.axis_size)}
    if dropped := [str(p) for _, p in self.recipe.levels() if p not in fits]:
      remarks.append(f"levels {', '.join(dropped)} do not divide {self.axis_size}: dropped")
    return tuple(remarks)

  @functools.cached_property
  def fingerprint(self) -> int:
    """Returns a hash of recipe, axis length and padding in 31 bits: it differs where masks differ.

    The axis is left out: a layer in a scan and the stacked parameter have different ones.
    """
    text = f"({self.recipe!r}, {self.axis_size!r}, {self.groups.pad!r})"
    return zlib.crc32(text.encode()) >> 1

  def final_from(self, early: bool = False) -> int:
    """Returns the first step at which the weight can be deployed; `early`: has its mask."""
    if not early:
      return self.recipe.phases.finetune_start
    # Sums of gradients have no substitute: until they are complete there is no mask.
    return self.recipe.sparse_from if self.recipe.needs_gradients else 0

  def effective(self, w: jax.Array, step, mask: jax.Array | None = None) -> jax.Array:
    """Returns `Recipe.effective` at this site."""
    return self._apply(self.recipe.effective, w, step, mask)

  def mask(self, w: jax.Array, step, mask: jax.Array | None = None) -> jax.Array:
    """Returns `Recipe.mask` at this site."""
    return self._apply(self.recipe.mask, w, step, mask)

  def _apply(self, function, w, step, mask):
    arrays = (w,) if mask is None else (w, mask)
    call = lambda step, w, *m, axis: function(w, step, axis, *m)
    return self.groups.apply(call, *arrays, scalar=step)


@dataclasses.dataclass(frozen=True)
class Assignment:
  """What rules mean for one parameter tree. `print` it before a run.

  Attributes:
    sites: path -> Site, the sparse parameters.
    skipped: path -> why a rule did not apply ('skip' policy).
    dense: paths that no rule makes sparse.
  """

  sites: Mapping[str, Site]
  skipped: Mapping[str, str]
  dense: tuple[str, ...]

  def __str__(self) -> str:
    head = "parameter", "shape", "axis", "pattern", "groups", "recipe", "remarks"
    facts = {}
    for path, site in self.sites.items():
      groups, remarks = site.groups.count(site.pattern), "; ".join(site.remarks)
      facts[path] = site.shape, site.axis, site.pattern, groups, site.recipe.name, remarks
    # Like layers are one row. Its groups are those of all of them.
    rows = [
      (name, *fact[:3], fact[3] * len(paths), *fact[4:]) for name, paths, fact in alike(facts)
    ]
    lines = columns([head, *rows])
    lines += [f"skipped  {name}: {why}" for name, _, why in alike(self.skipped)]
    if self.dense:
      lines.append(f"dense    {', '.join(name for name, _ in group(self.dense))}")
    return "\n".join(lines)

  def unfinished(self, step: int, early: bool = False) -> str | None:
    """Returns which schedule is not over at `step`, in words; None if every one is.

    Args:
      step: updates applied so far.
      early: ask which mask is not there yet instead, see `Site.final_from`.

    >>> rules.assign(params).unfinished(40)  # doctest: +SKIP
    "40, and the schedule of 'ff' is over at 60"
    """
    for site in self.sites.values():
      if step < (end := site.final_from(early)):
        waits = f"mask of {site.place!r} comes" if early else f"schedule of {site.place!r} is over"
        return f"{step:,}, and the {waits} at {end:,}"
    return None
