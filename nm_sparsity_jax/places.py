"""One parameter that a recipe owns, and what rules mean for a whole tree.

Rules, shapes -> [Place, Assignment] -> what is done to which parameter, as a table
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from nm_sparsity_jax import masks, roles
from nm_sparsity_jax.errors import warn
from nm_sparsity_jax.groups import Groups
from nm_sparsity_jax.packed import NMPacked
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.recipes import Recipe
from nm_sparsity_jax.schedules import Segment
from nm_sparsity_jax.text import table
from nm_sparsity_jax.trees import alike, flatten, group

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
  """One parameter that a recipe owns.

  Attributes:
    path: '/'-joined path in the parameter tree.
    recipe: what is applied to it.
    groups: where its groups lie.
    key: the rule that chose it.
    bias: the length of the bias beside it, where there is one and it is a matrix.
  """

  path: str
  recipe: Recipe
  groups: Groups
  key: str = ""
  bias: int | None = None

  @property
  def pattern(self) -> NM:
    """Returns the target pattern."""
    assert self.recipe.pattern is not None  # Dense makes no Place
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
  def pad(self) -> int:
    """Returns the number of entries that complete the last group ('pad' policy)."""
    return self.groups.pad

  @property
  def axis_size(self) -> int:
    """Returns the length of the grouped axis, padding included."""
    return self.groups.size

  @property
  def axes(self) -> tuple[int, ...]:
    """Returns `axis` as a tuple of ascending, non-negative ints."""
    return self.groups.axes

  @property
  def count(self) -> int:
    """Returns the number of groups of the target pattern."""
    return self.groups.count(self.pattern)

  @property
  def patterns(self) -> tuple[NM, ...]:
    """Returns the target pattern and those of the levels that fit this axis."""
    return (self.pattern, *(p for _, p in self.recipe.levels(self.axis_size)))

  @property
  def whole(self) -> int:
    """Returns the length that holds whole groups of each of `patterns`."""
    return math.lcm(*(p.m for p in self.patterns))

  @property
  def dropped(self) -> tuple[str, ...]:
    """Returns the levels of the recipe that do not fit this axis."""
    kept = {p for _, p in self.recipe.levels(self.axis_size)}
    return tuple(str(p) for _, p in self.recipe.levels() if p not in kept)

  @property
  def remarks(self) -> tuple[str, ...]:
    """Returns what is unusual about this place, in words; empty where nothing is."""
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
    return (*remarks, *(remark for remark, _ in self.doubts))

  @property
  def doubts(self) -> tuple[tuple[str, str], ...]:
    """Returns what is allowed but seldom meant: (a remark, a sentence with the remedy)."""
    found, (n, m) = [], (self.pattern.n, self.pattern.m)
    rule = f"rule {self.key!r} at {self.path!r}, shape {self.shape}"
    if 2 * n > m:
      found.append(
        (
          f"keeps {n} of {m}",
          f"{rule}: the pattern {n}:{m} keeps {n} of every {m} weights, as n is what is kept; "
          f"write {m - n or 1}:{m} to keep {m - n or 1}.",
        )
      )
    if self._groups_outputs():
      found.append(
        (
          "groups along the outputs?",
          f"{rule}: axis {self.axis} seems to be that of the outputs, but groups lie along the "
          f"axis that the matrix product sums over: Rules(..., axes={{{re.escape(self.path)!r}: "
          f"{self._inputs()}}}). A Flax kernel is (in, out) and needs no axes=; a torch or "
          "equinox weight is (out, in) and needs axis 1.",
        )
      )
    return tuple(found)

  def _groups_outputs(self) -> bool:
    """Returns whether the bias beside a matrix, or else its name, says that `axis` is an output."""
    other = {0: 1, 1: 0}.get(self.axes[0]) if len(self.shape) == 2 and len(self.axes) == 1 else None
    if other is not None and self.bias in self.shape and len(set(self.shape)) == 2:
      return self.shape[self.axes[0]] == self.bias
    name = self.path.rpartition("/")[-1]
    if name == "weight" and len(self.shape) > 1:
      return 0 in self.axes  # torch, equinox: (out, in, ...)
    known = roles.axis_of(self.path, len(self.shape))
    return known is not None and len(self.shape) - 1 in self.axes and "Transpose" not in self.path

  def _inputs(self) -> masks.Axis:
    """Returns the axis that `axis` should be, where it seems to be that of the outputs."""
    if len(self.shape) == 2:
      return 1 - self.axes[0]
    known = roles.axis_of(self.path, len(self.shape))
    return 1 if known is None else known

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
    facts = {
      p.path: (p.shape, p.axis, p.recipe.pattern, p.count, p.recipe.name, "; ".join(p.remarks))
      for p in self.places.values()
    }
    # Like layers are one row. Its groups are those of all of them.
    rows = [
      (name, *told[:3], told[3] * len(paths), *told[4:]) for name, paths, told in alike(facts)
    ]
    lines = table(head, rows)
    lines += [f"skipped  {name}: {why}" for name, _, why in alike(self.skipped)]
    if self.dense:
      lines.append(f"dense    {', '.join(name for name, _ in group(self.dense))}")
    return "\n".join(lines)

  @property
  def schedule(self) -> str:
    """Says when which pattern and D hold: a table for each recipe and length of an axis."""
    timelines: dict[tuple, list[Place]] = {}
    for place in self.places.values():
      key = place.recipe, place.recipe.timeline(place.axis_size)
      timelines.setdefault(key, []).append(place)
    blocks = []
    for (recipe, segments), of in timelines.items():
      keys = ", ".join(dict.fromkeys(place.key for place in of))
      rows = [
        (f"{s.start:,} .. {s.stop - 1:,}", s.pattern or "dense", _decay_text(s)) for s in segments
      ]
      lines = table(("sparse steps", "pattern", "D"), rows)
      head = f"schedule of {keys}: {recipe.name} {recipe.pattern}"
      blocks.append("\n".join([head, *(f"  {line}" for line in lines)]))
    return "\n".join(blocks)


def _decay_text(segment: Segment) -> str:
  a, b = float(segment.decay_start), float(segment.decay_stop)
  return f"{a:.3g}" if a == b else f"{a:.3g} -> {b:.3g}"


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


# --- a whole tree ---------------------------------------------------------------------------------


class Table(Protocol):
  """What is asked here of `Rules`, which say of one parameter what becomes of it."""

  @property
  def places(self) -> Mapping[str, Recipe]: ...
  @property
  def axes(self) -> Mapping[str, masks.Axis]: ...
  @property
  def roles(self) -> Mapping[str, str]: ...
  def match(self, path: str) -> tuple[str, Recipe] | None: ...
  def place(self, path: str, shape: Sequence[int]) -> Place | str | None: ...


def assign(rules: Table, params: Any, beside: Any, partial: bool) -> Assignment:
  """Does what `Rules.assign` says.

  Args:
    rules: the table, hashable by value.
    params: arrays or shapes.
    beside: what equal rules may differ in: their places are told apart by it too.
    partial: as in `Rules.assign`.
  """
  shapes = _shapes(params)
  assignment, idle = _assigned(rules, shapes, beside)
  if not shapes and not partial:
    raise ValueError(
      f"there are no parameters in this {type(params).__name__}, so the rules match none: give a "
      "tree of arrays, such as model.init(...)['params'] or nnx.state(model, nnx.Param)."
    )
  if idle and not partial:
    known = roles.regexes(rules.roles)
    some = ", ".join(name for name, _ in shapes[:4])
    here = roles.roles_of([name for name, _ in shapes], rules.roles)
    have = f" The network has the roles {', '.join(here)}." if here else ""
    raise ValueError(
      f"rules that match no parameter and so would change nothing: {', '.join(idle)}. "
      f"The {len(shapes)} parameters begin: {some}.{have} A place (gin: in SPARSITY_RULES) "
      f"is a role ({', '.join(known)}; narrowed as in encoder/ff, decoder/cross/qkv) or a regex "
      f"for the whole path, such as {_example(shapes)!r}; Rules(..., roles={{name: regex}}) adds "
      "roles."
    )
  for place in assignment.places.values():
    for _, doubt in place.doubts:
      warn(doubt, everywhere=False)
  return assignment


def examine(rules: Table, params: Any) -> Examined:
  """Does what `Rules.examine` says.

  Args:
    rules: the table.
    params: arrays or shapes.
  """
  return _examined(rules, _shapes(params))


def _shapes(params: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
  leaves = flatten(params, lambda x: isinstance(x, NMPacked))
  if name := next((name for name, x in leaves if isinstance(x, NMPacked)), None):
    raise ValueError(
      f"{name!r} is packed, and rules speak of weights with their zeros: give the tree that "
      "nms.deployed.unpack_tree(params) makes, or the one before nms.deployed.pack_tree."
    )
  return tuple((name, tuple(x.shape)) for name, x in leaves if hasattr(x, "shape"))


def _examined(rules: Table, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Examined:
  places: dict[str, Place] = {}
  skipped: dict[str, str] = {}
  dense: list[str] = []
  failed: dict[str, ValueError] = {}
  used: set[str] = set()
  known = dict(shapes)
  for path, shape in shapes:
    try:
      found = rules.match(path)
      used |= {found[0]} if found else set()
      place = rules.place(path, shape)
    except ValueError as e:
      failed[path], place = e, None
    if isinstance(place, Place):
      places[path] = dataclasses.replace(place, bias=_bias(known, place))
    elif place is None:
      dense.append(path)
    else:
      skipped[path] = place
  idle = tuple(key for key in rules.places if key not in used)
  return Examined(Assignment(places, skipped, tuple(dense)), failed, idle)


def _bias(shapes: Mapping[str, tuple[int, ...]], place: Place) -> int | None:
  """Returns the length of the bias beside a matrix, None without one."""
  folder = place.path.rpartition("/")[0]
  if len(place.shape) != 2:
    return None
  named = ("/".join(filter(None, (folder, name))) for name in ("bias", "b"))
  return next((shapes[n][0] for n in named if len(shapes.get(n, ())) == 1), None)


def _example(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str:
  """Returns a regex that matches a whole path among these: of a matrix, where there is one."""
  paths = [path for path, shape in shapes if len(shape) > 1] or [path for path, _ in shapes]
  usual = not paths or any(path.endswith("/kernel") for path in paths)
  return ".*/kernel" if usual else re.escape(paths[0])


@functools.lru_cache(maxsize=256)
def _assigned(rules: Table, shapes, beside) -> tuple[Assignment, list[str]]:
  del beside  # equal rules mean other places on other devices, or once a family has joined
  assignment, failed, unmatched = _examined(rules, shapes)
  for path, _ in shapes:
    if path in failed:
      raise failed[path]
    if path in assignment.skipped:
      _log.warning("%s stays dense: %s", path, assignment.skipped[path])
    elif path in assignment.places and (remarks := assignment.places[path].remarks):
      _log.warning("%s: %s", path, "; ".join(remarks))
  times = collections.Counter(path for path, _ in shapes)
  if twice := next((path for path in assignment.places if times[path] > 1), None):
    raise ValueError(
      f"{times[twice]} parameters have the path {twice!r}, by which masks are kept: rename one, "
      "without a '/' in its name."
    )
  idle = [repr(key) for key in unmatched]
  for regex, axis in rules.axes.items():
    if not any(roles.matches(regex, path) for path, _ in shapes):
      idle.append(f"axes={{{regex!r}: {axis!r}}}")
  return assignment, idle
