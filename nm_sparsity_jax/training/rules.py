"""Which parameter gets which recipe, and along which axis its groups lie.

    params[path] -> [rules: recipe, axis, what to do when the axis does not divide] -> Site

One table, read by the layers, by `sparsify`, by the optimizer, by verification and by the plan, so
that they agree. (`axes=` is for the stored tree; a layer groups along what it contracts.)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from nm_sparsity_jax.core import masks, trace
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.trees import alike, flatten
from nm_sparsity_jax.recipes import Dense, Recipe
from nm_sparsity_jax.training import roles
from nm_sparsity_jax.training.sites import Assignment, Site

_POLICIES = ("error", "skip", "pad")
_log = logging.getLogger(__name__)
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # (path, shape) of each parameter

# A module that flax named `Conv_0` is a convolution, whose kernel is (..., in, out). Names that a
# user chose tell nothing: it may be a transposed convolution.
_CONV = re.compile(r"(.*/)?Conv_\d+/kernel")
# flax's and Keras' own names; such a kernel may be (out, in).
_EINSUM = re.compile(r"(.*/)?(Einsum_\d+|einsum_dense(_\d+)?)/kernel")


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
  """Places to recipes: what is sparse, how, and along which axis.

  A place is a role (`ff`, `q`, `k`, `v`, `o`, `qk`, `qkv`; narrowed as in `encoder/ff` or
  `decoder/cross/qkv`) or a regex that must match a whole '/'-joined parameter path. The first place
  that names a parameter owns it, and one that no place names stays dense. So all kernels but the
  head are {"head/kernel": nms.recipe("dense"), ".*/kernel": r}. A place that owns no parameter is
  an error.

  >>> from nm_sparsity_jax import Phases, recipe
  >>> r = recipe("mdgf_linear", pattern="1:8", phases=Phases(total=100))
  >>> Rules({"ff": r, ".*/out/kernel": r}).match("encoder/layers_0/mlp/wi_0/kernel")
  'ff'

  Hashable by value, so it can be a field of a flax module. Do not change its tables.

  Attributes:
    places: place -> recipe.
    axes: regex -> axis (or ascending axes), for stored parameters whose contraction axis does
      not follow from path and rank; the first regex that matches wins; see `with_logical_axes`.
      Layers of this package know their own axis and do not ask.
    indivisible: what to do when m does not divide the axis: 'error', 'skip' (leave that
      parameter dense) or 'pad' (the last group is short and keeps at most n of what it has).
    optional: places, and regexes of `axes`, that may match nothing: one table for models of which
      some lack a part.
    shardings: path -> how devices share the parameter; see `with_shardings`.
  """

  places: Mapping[str, Recipe]
  axes: Mapping[str, masks.Axis] = dataclasses.field(default_factory=dict)
  indivisible: str = "error"
  optional: Sequence[str] = ()
  shardings: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict, repr=False)

  def __post_init__(self):
    recipes = self.places.values() if isinstance(self.places, Mapping) else ()
    are_recipes = bool(recipes) and all(isinstance(recipe, Recipe) for recipe in recipes)
    if not are_recipes or self.indivisible not in _POLICIES:
      raise ValueError(
        f"Rules({self.places!r}, indivisible={self.indivisible!r}): give a dict from place to "
        "recipe, such as {'ff': nms.recipe('sr_ste', pattern='1:8', phases=nms.Phases(total=...))}"
        f" (for a dense run 'dense'), and one of {', '.join(_POLICIES)}."
      )
    axes = {regex: _one_or_several(axis) for regex, axis in self.axes.items()}
    object.__setattr__(self, "places", dict(self.places))
    object.__setattr__(self, "axes", axes)
    object.__setattr__(self, "optional", tuple(sorted(self.optional)))
    _ = self._matchers, self._axes  # what is no regular expression raises here

  @functools.cached_property
  def _matchers(self) -> list[tuple[str, re.Pattern[str]]]:
    return [(place, roles.matcher(place)) for place in self.places]

  @functools.cached_property
  def _axes(self) -> list[tuple[re.Pattern[str], masks.Axis]]:
    return [(roles.compiled(regex, "axes"), axis) for regex, axis in self.axes.items()]

  # Caches: filled by `match` and `assign`.

  @functools.cached_property
  def _matched(self) -> dict[str, str | None]:
    return {}  # path -> place

  @functools.cached_property
  def _assigned(self) -> dict[_Shapes, Assignment]:
    return {}  # shapes of a tree -> its assignment

  @functools.cached_property
  def _said(self) -> set[str]:
    return set()  # what `warn` has logged

  # Shardings hold devices and compiled regexes are caches: neither goes into another process.
  def __reduce__(self):
    return Rules, (self.places, self.axes, self.indivisible, self.optional)

  def __eq__(self, other):
    return isinstance(other, Rules) and self.text == other.text

  def __hash__(self):
    return hash(self.text)

  @functools.cached_property
  def text(self) -> str:
    """Returns one line a place: what a checkpoint holds, and `rules_text.parse` reads.

    Equal rules have one text. The first place that matches wins, so their order counts. Fields at
    their defaults are left out, so that a field that a later version adds changes no text.
    """
    lines = [f"{place}: {_recipe_text(recipe)}" for place, recipe in self.places.items()]
    lines += [f"axis {regex}: {axis}" for regex, axis in self.axes.items()]
    lines += [f"optional {place}" for place in self.optional]
    if self.indivisible != "error":
      lines.append(f"indivisible: {self.indivisible}")
    return "\n".join(lines)

  @property
  def is_dense(self) -> bool:
    """Returns whether every place stays dense."""
    return all(isinstance(recipe, Dense) for recipe in self.places.values())

  def with_axes(self, axes: Mapping[str, masks.Axis]) -> Rules:
    """Returns the same rules with more `axes`, which come first."""
    # A key stays where it stood first, and has its last value.
    return dataclasses.replace(self, axes={**axes, **self.axes, **axes})

  def with_logical_axes(self, logical_axes: Any) -> Rules:
    """Returns the same rules, with axes of stacked kernels read from logical axis names.

        rules = rules.with_logical_axes(variables["params_axes"])

    Args:
      logical_axes: a tree that mirrors the parameters; leaves are tuples of axis names, flax's
        `AxisMetadata` or `PartitionSpec`. Paths may end in `_axes`, as in flax's `params_axes`.
        An axis called 'layers' or 'stack' comes from a scan over layers and is left out. A kernel
        is contracted along the first axis that remains. An attention kernel may have an axis of
        heads; then the kernel of role `o` is contracted along all axes but the last.

    Returns:
      New rules. Axes given by hand come first.
    """
    found: dict[str, masks.Axis] = dict(self.axes)
    is_names = lambda x: hasattr(x, "names") or isinstance(x, tuple)
    for path, names in flatten(logical_axes, is_names):
      path = path.removesuffix("_axes")
      names = tuple(getattr(names, "names", names))
      own = [i for i, name in enumerate(names) if name not in ("layers", "stack")]
      if not path.endswith("kernel") or len(own) == len(names) or self.match(path) is None:
        continue
      role = roles.role_of(path)
      if len(own) == 2 or (len(own) == 3 and role in ("q", "k", "v", "o")):
        how_many = len(own) - 1 if role == "o" else 1
        found.setdefault(re.escape(path), _one_or_several(own[:how_many]))
    return dataclasses.replace(self, axes=found)

  def with_shardings(self, shardings: Any) -> Rules:
    """Returns equal rules that know how devices share each parameter.

        rules = rules.with_shardings(jax.tree.map(lambda x: x.sharding, params))

    Masks keep their bits. On several TPUs each device then makes the masks of its own shard, by a
    kernel that reads the weights once; XLA cannot cut such a kernel by itself. A sharding that cuts
    a group is passed over, and so is one without devices (`AbstractMesh`). The local runner and
    T5X call this.

    Args:
      shardings: a tree like the parameters; leaves are `NamedSharding`. Others are passed over.
    """
    known = {path: s for path, s in flatten(shardings) if isinstance(s, NamedSharding)}
    new = dataclasses.replace(self, shardings=known)
    new._said.update(self._said)
    return new

  def for_model(self, function: Callable[..., Any], params: Any, *inputs: Any) -> Rules:
    """Returns the same rules, with the axes that a program contracts its parameters along.

        rules = rules.for_model(lambda p, x: model.apply({"params": p}, x), params, x)

    The program is traced and not computed, so arrays and `jax.ShapeDtypeStruct` both serve. It
    looks at every product of each parameter that a rule names. A parameter is refused where two
    products contract it along different axes, as of a tied embedding, and where no product
    contracts it. The error says why. An axis in `axes` lifts the refusal.

    Args:
      function: the forward pass, called as function(params, *inputs).
      params: the parameters, by whose paths the rules name them.
      *inputs: the data. Pass all of it here: what the function closes over counts as a constant,
        and a product of a weight with a constant tells no axis.
    """
    shapes = dict(_shapes(params))
    traced = trace.trace(function, params, *inputs)
    found: dict[str, masks.Axis] = {}
    refused = []
    for path, shape in shapes.items():
      if self.sparse_recipe(path) is None:
        continue
      by_hand, known = self._axis_of(path), traced.axes.get(path)
      if known is None:
        if by_hand is None:
          refused.append(f"{path!r}: {traced.refused[path]}")
        continue
      said = _default_axis(path, shapes) if by_hand is None else by_hand
      # Ascending, non-negative ints. With gaps, since groups may lie along axes that are not
      # adjacent.
      if said is not None and masks.check_axis(shape, said, gaps=True) == known:
        continue  # checkpoints hold the text of rules, so no axis is added where one is right
      if by_hand is None:
        found[re.escape(path)] = _one_or_several(known)
      else:
        refused.append(f"{path!r}: axes= says {by_hand}, the program contracts {known}")
    if refused:
      raise ValueError(
        "for_model cannot say along which one axis the program contracts these parameters, so "
        f"leave them out of the rules, or correct axes=: {'; '.join(refused)}."
      )
    return self.with_axes(found)

  def match(self, path: str) -> str | None:
    """Returns the first place that names a path; None where none does."""
    # Thousands of rules on thousands of kernels are millions of matches, and layers ask again.
    if path not in self._matched:
      hits = (place for place, regex in self._matchers if regex.fullmatch(path))
      self._matched[path] = next(hits, None)
    return self._matched[path]

  def sparse_recipe(self, path: str) -> Recipe | None:
    """Returns the recipe that makes a parameter sparse, None where it stays dense."""
    place = self.match(path)
    recipe = None if place is None else self.places[place]
    return None if isinstance(recipe, Dense) else recipe

  def site(self, path: str, shape: Sequence[int], axis: masks.Axis) -> Site | str | None:
    """Returns the `Site` of one parameter, why it is skipped, or None where it is dense.

    Args:
      path: '/'-joined path.
      shape: shape of the parameter.
      axis: its contraction axis.
    """
    recipe = self.sparse_recipe(path)
    if recipe is None:
      return None
    groups = Groups(tuple(shape), axis)
    # Whole groups of the target pattern, and of each level that fits.
    m = math.lcm(recipe.pattern.m, *(level.m for _, level in recipe.levels(groups.size)))
    if groups.size % m:
      problem = f"axis {axis} has length {groups.size} (shape {groups.shape}), no multiple of {m}"
      if self.indivisible == "skip":
        return problem
      if self.indivisible == "error":
        raise ValueError(
          f"{path!r}: {problem}, so {recipe.name} {recipe.pattern} does not fit. Choose another "
          "pattern, or indivisible='skip' to leave it dense, or 'pad' (gin: INDIVISIBLE)."
        )
      groups = Groups(groups.shape, axis, -groups.size % m)
      recipe.levels(groups.size)  # raises where a schedule does not fit the padded axis
    groups = groups.sharded(self.shardings.get(path), m)
    return Site(path, recipe, groups, self.match(path) or "")

  def _axis_of(self, path: str) -> masks.Axis | None:
    """Returns what `axes` says of a path; the first regex that matches counts."""
    return next((axis for regex, axis in self._axes if regex.fullmatch(path)), None)

  def assign(self, params: Any) -> Assignment:
    """Applies the table to a whole tree and checks it.

        print(rules.assign(params))   # what becomes sparse, and how

    Args:
      params: arrays or shapes, in any nesting that jax knows (dicts, nnx.State, boxes).

    Returns:
      An `Assignment`; its `str` is a table.
    """
    shapes = _shapes(params)
    # One update asks a dozen times, so the answer is kept by the shapes of the tree.
    if shapes in self._assigned:
      return self._assigned[shapes]
    known, sites, skipped, dense = dict(shapes), {}, {}, []
    ambiguous: list[str] = []
    remarks: dict[str, str] = {}
    for path, shape in shapes:
      if self.sparse_recipe(path) is None:
        dense.append(path)
        continue
      axis = self._axis_of(path)
      axis = _default_axis(path, known) if axis is None else axis
      # '.*' also matches biases and scales. To make one sparse, write its whole path.
      is_vector = len(shape) == 1 and path not in {*self.places, *self.axes}
      site = None if axis is None or is_vector else self.site(path, shape, axis)
      if site is None:
        hint = ", a bias or a scale unless its whole path is named" if is_vector else ""
        ambiguous.append(f"{path!r} of shape {shape}{hint}")
      elif isinstance(site, str):
        skipped[path] = site
        remarks[path] = f"stays dense: {site}"
      else:
        # Whoever names one parameter, as `for_model` does, knows its axis.
        if isinstance(axis, int) and re.escape(path) not in self.axes:
          site = dataclasses.replace(site, is_output=roles.is_output(path, known, axis))
        sites[path] = site
        if site.remarks:
          remarks[path] = "; ".join(site.remarks)
    if ambiguous:
      raise ValueError(
        f"which axis the product sums over is not known for {', '.join(ambiguous)}: let the "
        "forward pass tell, rules = rules.for_model(forward, params, *inputs), or name it, such as "
        "axes={'.*/kernel': 0} (gin: SPARSITY_AXES)."
      )
    self._check_all_used(known)
    for name, _, remark in alike(remarks):
      self.warn(f"{name}: {remark}")
    self._assigned[shapes] = assignment = Assignment(sites, skipped, tuple(dense))
    return assignment

  def warn(self, text: str) -> None:
    """Logs a warning, once however often a trainer makes its state or its mesh."""
    if text not in self._said and _log.isEnabledFor(logging.WARNING):
      self._said.add(text)
      _log.warning("%s", text)

  def _check_all_used(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses places and axes that name no parameter: a wrong word would change nothing."""
    found = {*map(self.match, shapes), *self.optional}
    idle = [repr(place) for place in self.places if place not in found]
    for place, regex in self._matchers:
      # 'wi|wo/kernel' means 'wi' or 'wo/kernel'. A flag or a backreference is of the whole.
      is_plain = regex.pattern == place and not re.search(r"\(\?|\\\d", place)
      parts = _alternatives(place) if is_plain else []
      if place in found and place not in self.optional and len(parts) > 1:
        matched = lambda part: any(map(roles.compiled(part, "a place").fullmatch, shapes))
        idle += [f"{part!r} of {place!r}" for part in parts if not matched(part)]
    for regex, axis in self._axes:
      if regex.pattern not in self.optional and not any(map(regex.fullmatch, shapes)):
        idle.append(f"axes={{{regex.pattern!r}: {axis}}}")
    if idle:
      have = ", ".join(dict.fromkeys(filter(None, map(roles.role_of, shapes)))) or "no roles"
      if shapes and all("lora" in path for path in shapes):
        have += ": they are LoRA's, and this optimizer has no base weights"
      raise ValueError(
        f"rules that match no parameter, or none that is left: {', '.join(idle)}. The "
        f"{len(shapes)} parameters begin {', '.join([*shapes][:4])} and have {have}. A place (gin: "
        f"in SPARSITY_RULES) is a role ({', '.join(roles.regexes())}; narrowed as in encoder/ff, "
        "decoder/cross/qkv) or a regex for the whole path, such as '.*/kernel'; nms.roles.register "
        "(gin: SPARSITY_ROLES) adds roles, and optional= lists places that may match nothing."
      )


def _default_axis(path: str, shapes: Mapping[str, tuple[int, ...]]) -> masks.Axis | None:
  """Returns the axis that a stored kernel is contracted along, None where that is in doubt.

  A family of `roles` may be sure of it. A `kernel` of rank 2 is contracted along its first axis.
  That of a convolution is (..., in, out), and is contracted along the last but one. A bias beside
  it has the length of the outputs: if that is not the last axis, the layout is in doubt. It alone
  tells what a `weight` or a `w` is.
  """
  shape, bias, name = shapes[path], roles.bias_of(path, shapes), path.rpartition("/")[2]
  if axes := roles.axis_of(path, shapes):
    return _one_or_several(axes)
  if name in ("weight", "w") and len(shape) == 2 and shape[0] != shape[1]:
    return 1 if bias == shape[:1] else 0 if bias == shape[1:] else None
  if name != "kernel" or bias not in (None, shape[-1:]):
    return None
  if len(shape) == 2:
    return None if _EINSUM.fullmatch(path) else 0
  is_conv = _CONV.fullmatch(path) or roles.role_of(path) in ("stem", "conv", "shortcut")
  # The window has 1, 2 or 3 dimensions; in and out are two more.
  return -2 if 3 <= len(shape) <= 5 and is_conv else None


def _alternatives(regex: str) -> list[str]:
  """Returns what a regex joins by '|', outside of brackets."""
  parts, part = [], ""
  for piece in regex.split("|"):
    part += piece
    try:
      re.compile(part)
    except re.error:  # '(a' of '(a|b)'
      part += "|"
    else:
      parts.append(part)
      part = ""
  return parts


def _recipe_text(recipe: Recipe) -> str:
  """Returns 'name n:m, field=value, ...' without defaults; `rules_text` has its inverse."""
  words = [recipe.name if recipe.pattern is None else f"{recipe.name} {recipe.pattern}"]
  for owner in (recipe.phases, recipe):
    for field in dataclasses.fields(owner) if owner else ():  # type: ignore[arg-type]
      value = getattr(owner, field.name)
      if field.name in ("pattern", "phases"):
        continue
      # The default of SR-STE's lambda depends on another field.
      depends = field.name == "lam" and field.default is None
      is_default = depends and dataclasses.replace(owner, lam=None) == owner
      if value != field.default and not is_default:
        words.append(f"{field.name}={value!r}")
  return ", ".join(words)


def _shapes(params: Any) -> _Shapes:
  return tuple((path, tuple(x.shape)) for path, x in flatten(params) if hasattr(x, "shape"))


def _one_or_several(axis: masks.Axis) -> masks.Axis:
  """Returns (0,) as 0, and numpy's ints and arrays as Python's, so that equal rules are equal."""
  axes = tuple(int(a) for a in np.atleast_1d(np.asarray(axis)))
  return axes[0] if len(axes) == 1 else axes
