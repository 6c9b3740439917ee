"""Which parameter gets which recipe, and along which axis its groups lie.

    params[path] -> [rules: recipe, axis, what to do when the axis does not divide] -> recipe

One table, read by the layers, by `sparsify`, by the optimizer term, by verification and by the
plan, so that they agree. (`axes=` is for the stored tree; a layer groups along what it contracts.)
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from nm_sparsity_jax.core import masks, trace
from nm_sparsity_jax.core.errors import SettingError
from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.trees import flatten, path_name
from nm_sparsity_jax.recipes import Dense, Recipe
from nm_sparsity_jax.training import roles as vocabulary
from nm_sparsity_jax.training.sites import Assignment, Examined, Place

_POLICIES = ("error", "skip", "pad")
_log = logging.getLogger(__name__)
_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
_ROLE = r"{'hidden': r'.*/hidden_\d/kernel'}"


class Rules:
  """Places to recipes: what is sparse, how, and along which axis.

  A place is a role (`ff`, `q`, `k`, `v`, `o`, `qk`, `qkv`; narrowed as in `encoder/ff` or
  `decoder/cross/qkv`) or a regex that must match a whole '/'-joined parameter path. Parameters
  that no place names stay dense. Two places on one parameter, and a place that names none, are
  errors.

  >>> from nm_sparsity_jax import Phases, recipe
  >>> r = recipe("mdgf_linear", pattern="1:8", phases=Phases(total=100))
  >>> Rules({"ff": r}).find("encoder/layers_0/mlp/wi_0/kernel") is r
  True

  Immutable and hashable by value, so it can be a field of a flax module.

  Args:
    places: place -> recipe.
    axes: regex -> axis (or ascending axes), for stored parameters whose contraction axis does
      not follow from path and rank; the first regex that matches wins; see `with_logical_axes`.
      Layers of this package know their own axis and do not ask.
    indivisible: what to do when m does not divide the axis: 'error', 'skip' (leave that
      parameter dense) or 'pad' (the last group is short and keeps at most n of what it has).
    roles: more roles, name -> regex, beside those of `nms.roles`. A role that families know
      means your regex alone, in these rules: `roles={"head": "lm/kernel"}`.
  """

  def __init__(
    self,
    places: Mapping[str, Recipe],
    axes: Mapping[str, masks.Axis] | None = None,
    indivisible: str = "error",
    roles: Mapping[str, str] | None = None,
  ):
    if not isinstance(places, Mapping):
      raise ValueError(
        f"Rules({places!r}): give a dict from place to recipe, such as Rules({{'ff': recipe}})."
      )
    if not places:
      raise ValueError(
        "Rules({}) would leave everything dense. Name a place, for example "
        "Rules({'ff': recipe}); for a dense run use the recipe 'dense'."
      )
    for key, value in places.items():
      if not isinstance(value, Recipe):
        raise ValueError(
          f"Rules: {key!r} has {value!r}, which is not a recipe. Make one by nms.recipe(name, "
          "pattern='1:8', phases=nms.Phases(total=...))."
        )
    for name, table, example in (("axes", axes, "{'w1': 1}"), ("roles", roles, _ROLE)):
      if table is not None and not isinstance(table, Mapping):
        raise ValueError(f"Rules(..., {name}={table!r}): give a dict, such as {name}={example}.")
    if indivisible not in _POLICIES:
      raise SettingError(
        "indivisible",
        "{indivisible=}{given!r}: choose one of {policies}.",
        given=indivisible,
        policies=", ".join(_POLICIES),
      )
    self._places = tuple(places.items())
    self._axes = tuple((k, _one_or_several(v)) for k, v in (axes or {}).items())
    self._roles = tuple((roles or {}).items())
    self._indivisible = indivisible
    self._shardings: Mapping[str, NamedSharding] = {}
    for regex, _ in self._axes:
      vocabulary.compiled(regex, "axes")
    tests = [vocabulary.path_test(key, dict(self._roles)) for key, _ in self._places]
    self._by_place = vocabulary.Table(zip(tests, self._places, strict=True))
    self._by_axis = vocabulary.Table((regex, (regex, axis)) for regex, axis in self._axes)
    self._assigned: dict[_Shapes, Assignment] = {}  # what `assign` returned
    _check_roles(self._roles)

  @property
  def places(self) -> dict[str, Recipe]:
    """Returns the table as given."""
    return dict(self._places)

  @property
  def axes(self) -> dict[str, masks.Axis]:
    """Returns regex -> axis as given; the first regex that matches a path counts."""
    return dict(self._axes)

  @property
  def roles(self) -> dict[str, str]:
    """Returns the roles beside those of the package, name -> regex."""
    return dict(self._roles)

  @property
  def is_dense(self) -> bool:
    """Returns whether every place stays dense."""
    return all(isinstance(recipe, Dense) for _, recipe in self._places)

  @property
  def indivisible(self) -> str:
    """Returns what to do when m does not divide the axis."""
    return self._indivisible

  def __reduce__(self):
    return Rules, (self.places, dict(self._axes), self.indivisible, dict(self._roles))

  def _key(self):
    # In `axes` the first regex wins, so there the order counts.
    return frozenset(self._places), self._axes, frozenset(self._roles), self.indivisible

  @functools.cached_property
  def fingerprint(self) -> int:
    """Returns a hash in 31 bits that is equal for equal rules, in every process."""
    places = sorted(f"({place!r}, {recipe.spelled})" for place, recipe in self._places)
    text = repr((places, self._axes, sorted(self._roles), self.indivisible))
    return zlib.crc32(text.encode()) >> 1

  def __eq__(self, other):
    return isinstance(other, Rules) and self._key() == other._key()

  def __hash__(self):
    return self.fingerprint

  def __repr__(self):
    given = f"axes={dict(self._axes)!r}, indivisible={self.indivisible!r}"
    return f"Rules({dict(self._places)!r}, {given}, roles={dict(self._roles)!r})"

  def with_axes(self, axes: Mapping[str, masks.Axis]) -> Rules:
    """Returns the same rules with more `axes`, which come first."""
    rest = {regex: axis for regex, axis in self._axes if regex not in axes}
    return Rules(self.places, {**axes, **rest}, self.indivisible, dict(self._roles))

  def with_logical_axes(
    self, logical_axes: Any, stacked: Sequence[str] = ("layers", "stack")
  ) -> Rules:
    """Returns the same rules, with axes of stacked kernels read from logical axis names.

        rules = rules.with_logical_axes(variables["params_axes"])

    Args:
      logical_axes: a tree that mirrors the parameters; leaves are tuples of axis names, flax's
        `AxisMetadata` or `PartitionSpec`. Paths may end in `_axes`, as in flax's `params_axes`.
      stacked: names of axes that a scan over layers adds. Of the others, the contraction axis of
        a kernel is the first; of an attention kernel with heads as an axis of their own, all but
        the last for `out`.

    Returns:
      New rules. Axes given by hand come first.
    """
    found: dict[str, masks.Axis] = dict(self._axes)
    is_names = lambda x: (
      hasattr(x, "names")
      or (isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x))
    )
    leaves, _ = jax.tree_util.tree_flatten_with_path(logical_axes, is_leaf=is_names)
    for keys, names in leaves:
      path = re.sub(r"_axes$", "", path_name(keys))
      names = tuple(getattr(names, "names", names))
      own = [i for i, name in enumerate(names) if name not in stacked]
      if not path.endswith("kernel") or len(own) == len(names) or self.find(path) is None:
        continue
      if len(own) == 2 or (len(own) == 3 and vocabulary.role_of(path) in ("q", "k", "v")):
        found.setdefault(re.escape(path), own[0])
      elif len(own) == 3 and vocabulary.role_of(path) == "o":
        found.setdefault(re.escape(path), (own[0], own[1]))
    return Rules(self.places, found, self.indivisible, dict(self._roles))

  def with_shardings(self, shardings: Any) -> Rules:
    """Returns equal rules that know how devices share each parameter.

        rules = rules.with_shardings(jax.tree.map(lambda x: x.sharding, params))

    Masks keep their bits. On several TPUs each device then makes the masks of its own shard, by a
    kernel that reads the weights once; XLA cannot cut such a kernel by itself. A sharding that cuts
    a group is passed over, and so is one without devices (`AbstractMesh`). The local runner, T5X
    and Kauldron call this. Call it last: other `with_` methods return rules without shardings.

    Args:
      shardings: a tree like the parameters; leaves are `NamedSharding`. Others are passed over.
    """
    rules = Rules(self.places, self.axes, self.indivisible, self.roles)
    found = flatten(shardings)
    rules._shardings = {path: s for path, s in found if isinstance(s, NamedSharding)}
    return rules

  def for_model(self, function: Callable[..., Any], params: Any, *inputs: Any) -> Rules:
    """Returns the same rules, with the axes that a program contracts its parameters along.

        rules = rules.for_model(lambda p, x: model.apply({"params": p}, x), params, x)

    The program is traced and not computed, so arrays and `jax.ShapeDtypeStruct` both serve. Every
    product of every parameter that a rule names is looked at. One that is contracted along two
    axes, such as a tied embedding, or in no product, is refused with that reason, unless `axes`
    names its axis.

    Args:
      function: the forward pass, called as function(params, *inputs).
      params: the parameters, by whose paths the rules name them.
      *inputs: what it computes on. What the function closes over is a constant of the program, as
        a weight is, so a product with it says nothing.
    """
    if not inputs:
      raise ValueError(
        "for_model(function, params) has no inputs: pass what the function computes on as well, "
        "as in for_model(lambda p, x: model.apply({'params': p}, x), params, x)."
      )
    shapes = dict(_shapes(params))
    named = [path for path in shapes if not isinstance(self.find(path), Dense | None)]
    known, unknown = trace.axes(function, params, *inputs)
    open_paths = [path for path in named if path not in known and not self._by_axis.find(path)]
    if refused := [f"{path!r}: {unknown[path]}" for path in open_paths]:
      raise ValueError(
        "for_model finds no axis that the program contracts these parameters along, so leave them "
        f"out of the rules, or name the axis by axes=: {'; '.join(refused)}."
      )
    found: dict[str, masks.Axis] = {}
    for path in (path for path in named if path in known):
      here = self._axis(path, shapes)
      if here is not None and masks.check_axis(shapes[path], here, gaps=True) == known[path]:
        continue
      if given := self._by_axis.find(path):
        raise ValueError(
          f"axes={{{given[0][0]!r}: {given[0][1]}}}, but the program contracts {path!r} along "
          f"{known[path]}: leave axes= out."
        )
      found[re.escape(path)] = _one_or_several(known[path])
    return self.with_axes(found)

  def find(self, path: str) -> Recipe | None:
    """Returns the recipe of a path, None where no place names it."""
    found = self.match(path)
    return found[1] if found else None

  def match(self, path: str) -> tuple[str, Recipe] | None:
    """Returns the place that names a path, and its recipe; None where none does."""
    hits = self._by_place.find(path)
    if len(hits) > 1:
      raise SettingError(
        "places",
        "two rules claim {path}: {keys}. Narrow one of them, so that every parameter has one "
        "recipe.",
        path=repr(path),
        keys=" and ".join(repr(k) for k, _ in hits),
      )
    return hits[0] if hits else None

  def place(self, path: str, shape: Sequence[int], axis: masks.Axis) -> Place | str | None:
    """Returns the `Place` of one parameter, why it is skipped, or None where no rule names it.

    Args:
      path: '/'-joined path.
      shape: shape of the parameter.
      axis: its contraction axis.
    """
    found = self.match(path)
    if not found or isinstance(found[1], Dense):
      return None
    return self._place(path, tuple(shape), axis, *found)

  def _place(
    self, path: str, shape: tuple[int, ...], axis: masks.Axis, key: str, recipe: Recipe
  ) -> Place | str:
    place = Place(path, recipe, Groups(shape, axis), key)
    m = place.whole
    if place.axis_size % m:
      problem = f"axis {axis} has length {place.axis_size} (shape {shape}), no multiple of {m}"
      names = ", ".join(map(str, dict.fromkeys(place.patterns)))
      if self.indivisible == "error":
        raise SettingError(
          "indivisible",
          "{path}: {problem}, so {names} cannot be applied. Choose another pattern for it, or "
          "Rules(..., indivisible='skip') (gin: INDIVISIBLE) to leave it dense, or 'pad'.",
          path=repr(path),
          problem=problem,
          names=names,
        )
      if self.indivisible == "skip":
        return problem
      place = dataclasses.replace(place, groups=Groups(shape, axis, -place.axis_size % m))
    recipe.levels(place.axis_size)  # raises where a schedule does not fit
    sharding = self._shardings.get(path)
    return dataclasses.replace(place, groups=place.groups.sharded(sharding, m))

  def _axis(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> masks.Axis | None:
    """Returns the contraction axis of a stored parameter, None where nothing tells it."""
    if given := self._by_axis.find(path):
      masks.check_axis(shapes[path], given[0][1], gaps=True)
      return given[0][1]
    return _default_axis(path, shapes)

  def assign(self, params: Any) -> Assignment:
    """Applies the table to a whole tree and checks it.

        print(rules.assign(params))   # what becomes sparse, and how

    Args:
      params: arrays or shapes, in any nesting that jax knows (dicts, nnx.State, boxes).

    Returns:
      An `Assignment`; its `str` is a table.
    """
    shapes = _shapes(params)
    found = self._assigned.get(shapes)
    if found is None:
      found = self._assigned[shapes] = self._checked(shapes)
    return found

  def examine(self, params: Any) -> Examined:
    """Applies the table to a whole tree and returns all mistakes instead of raising the first.

    It logs nothing. `nm-sparsity plan` shows every mistake at once this way.

    >>> import jax
    >>> from nm_sparsity_jax import Phases, recipe
    >>> rules = Rules({"ff": recipe("sr_ste", pattern="1:4", phases=Phases(total=9))})
    >>> wi = {"encoder": {"mlp": {"wi": {"kernel": jax.ShapeDtypeStruct((6, 8), "float32")}}}}
    >>> list(rules.examine(wi).failed)
    ['encoder/mlp/wi/kernel']

    Args:
      params: arrays or shapes, as for `assign`.
    """
    return self._examined(_shapes(params))

  def _examined(self, shapes: _Shapes) -> Examined:
    known = dict(shapes)
    places: dict[str, Place] = {}
    skipped: dict[str, str] = {}
    dense: list[str] = []
    failed: dict[str, ValueError] = {}
    used: set[str] = set()
    for path, shape in shapes:
      place = None
      try:
        if found := self.match(path):
          used.add(found[0])
          if not isinstance(found[1], Dense):
            axis = self._axis(path, known)
            if axis is None:
              raise AmbiguousAxis(path, shape)
            place = self._place(path, shape, axis, *found)
      except ValueError as e:
        failed[path] = e
      if isinstance(place, Place):
        places[path] = place
      elif place is None:
        dense.append(path)
      else:
        skipped[path] = place
    idle = tuple(key for key, _ in self._places if key not in used)
    return Examined(Assignment(places, skipped, tuple(dense)), failed, idle)

  def _checked(self, shapes: _Shapes) -> Assignment:
    """Returns the assignment of a tree; raises its first mistake, or all axes that are missing."""
    assignment, failed, idle = self._examined(shapes)
    if not shapes:
      raise ValueError(
        "there are no parameters, so the rules match none: give a tree of arrays, such as "
        "model.init(...)['params'] or nnx.state(model, nnx.Param)."
      )
    asked = [e for e in failed.values() if isinstance(e, AmbiguousAxis)]
    if len(asked) > 1:
      raise AmbiguousAxis.of_all(asked)
    for error in failed.values():
      raise error
    paths = [path for path, _ in shapes]
    for path, why in assignment.skipped.items():
      _log.warning("%s stays dense: %s", path, why)
    for path, place in assignment.places.items():
      if place.remarks:
        _log.warning("%s: %s", path, "; ".join(place.remarks))
    times = collections.Counter(paths)
    if twice := next((path for path in assignment.places if times[path] > 1), None):
      raise ValueError(
        f"{times[twice]} parameters have the path {twice!r}, by which masks are kept: rename one, "
        "without a '/' in its name."
      )
    used = {regex for path in paths for regex, _ in self._by_axis.find(path)}
    wrong = [repr(key) for key in idle]
    wrong += [f"axes={{{regex!r}: {axis!r}}}" for regex, axis in self._axes if regex not in used]
    if wrong:
      raise ValueError(self._idle(wrong, shapes))
    return assignment

  def _idle(self, wrong: Sequence[str], shapes: _Shapes) -> str:
    """Returns the error of places that name no parameter: what there is, and how to name it."""
    paths = [path for path, _ in shapes]
    here = vocabulary.roles_of(paths, self.roles)
    have = f" The network has the roles {', '.join(here)}." if here else ""
    return (
      f"rules that match no parameter and so would change nothing: {', '.join(wrong)}. "
      f"The {len(paths)} parameters begin: {', '.join(paths[:4])}.{have} A place (gin: in "
      f"SPARSITY_RULES) is a role ({', '.join(vocabulary.regexes(self.roles))}; narrowed as in "
      "encoder/ff, decoder/cross/qkv) or a regex for the whole path, such as "
      f"{_example(shapes)!r}; Rules(..., roles={{name: regex}}) adds roles."
    )


class AmbiguousAxis(ValueError):
  """Shapes and names of these parameters leave open which of their axes a product sums over."""

  def __init__(self, path: str, shape: tuple[int, ...]):
    self.found = [(path, shape)]
    super().__init__(self._text())

  @classmethod
  def of_all(cls, errors: Sequence[AmbiguousAxis]) -> AmbiguousAxis:
    """Returns one error for the parameters of several."""
    joined = cls(*errors[0].found[0])
    joined.found = [found for error in errors for found in error.found]
    joined.args = (joined._text(),)
    return joined

  def _text(self) -> str:
    one = f"{{{re.escape(self.found[0][0])!r}: 0}}"
    return (
      "which axis the product sums over is not known for "
      + ", ".join(f"{path!r} of shape {shape}" for path, shape in self.found)
      + ": let the program tell, rules.for_model(lambda p, x: model.apply({'params': p}, x), "
      f"params, x), or name it, Rules(..., axes={one})."
    )


# flax's own names, and the roles of families: such a module is a convolution, whose kernel is
# (..., in, out). A name that a user chose may be that of a transposed one.
_CONV = re.compile(r"(.*/)?Conv_\d+/kernel")
_CONV_ROLES = ("stem", "conv", "shortcut")
_EINSUM = re.compile(r"(.*/)?Einsum_\d+/kernel")  # its kernel may be (out, in)


def _default_axis(path: str, shapes: Mapping[str, tuple[int, ...]]) -> masks.Axis | None:
  """Returns the axis that a stored kernel is contracted along, None where that is in doubt.

  Of a `kernel` of rank 2 it is the first axis, and of a convolution's, (..., in, out), the last but
  one. A bias beside it has the length of the outputs; one of another length is a doubt.
  """
  folder, _, name = path.rpartition("/")
  shape, bias = shapes[path], shapes.get(f"{folder}/bias" if folder else "bias")
  if name != "kernel" or bias not in (None, shape[-1:]):
    return None
  if len(shape) == 2:
    return None if _EINSUM.fullmatch(path) else 0
  is_conv = _CONV.fullmatch(path) or vocabulary.role_of(path) in _CONV_ROLES
  return -2 if 3 <= len(shape) <= 5 and is_conv else None


def _check_roles(roles: Sequence[tuple[str, str]]) -> None:
  """Refuses a role that is no word, or one that narrows roles, and what is no regex."""
  words = vocabulary.narrowing().keys() - vocabulary.regexes().keys()
  for role, regex in roles:
    vocabulary.check_word(role, "the roles of these rules")
    if role in words:
      raise ValueError(
        f"Rules(..., roles={{{role!r}: ...}}): {role!r} narrows a role, as in '{role}/ff', so it "
        "cannot be one. Choose another word."
      )
    vocabulary.compiled(regex, "roles")


def _shapes(params: Any) -> _Shapes:
  return tuple((path, tuple(x.shape)) for path, x in flatten(params) if hasattr(x, "shape"))


def _example(shapes: _Shapes) -> str:
  """Returns a regex that matches a whole path among these: of a matrix, where there is one."""
  paths = [path for path, shape in shapes if len(shape) > 1] or [path for path, _ in shapes]
  usual = any(path.endswith("/kernel") for path in paths)
  return ".*/kernel" if usual else re.escape(paths[0])


def require(rules: Any, call: str) -> Rules:
  """Returns rules; raises where something else was given in their place, such as the parameters.

  Args:
    rules: what should be `Rules`.
    call: the call in full, as the error shows it.
  """
  if isinstance(rules, Rules):
    return rules
  raise ValueError(
    f"{call} got a {type(rules).__name__} as its rules: give nms.Rules, such as "
    "nms.Rules({'.*/kernel': recipe}), in that order of arguments."
  )


def _one_or_several(axis: masks.Axis) -> masks.Axis:
  """Returns (0,) as 0, and numpy's ints as Python's, so that equal rules are equal."""
  plain = lambda a: int(a) if isinstance(a, np.integer) else a
  if not isinstance(axis, Sequence):
    return plain(axis)
  return plain(axis[0]) if len(axis) == 1 else tuple(map(plain, axis))
