"""Which axes of each parameter a program contracts, and its multiply-adds, read off its jaxpr.

    function, params, inputs -> [jax.make_jaxpr] -> equations -> [_Walk] -> Contractions

Values that depend on parameters alone are followed through transposes, reshapes, casts, slices and
loops, up to the product with data. A value in which the axes of a parameter cannot be told any more
has lost it. A parameter that is lost before its product is refused by name, so no answer is a
guess. Nothing is computed.

A mixture is `x @ (g(x) @ bank)`: data chooses a blend of the kernels in `bank`. It is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from nm_sparsity_jax.core.trees import flatten


@dataclasses.dataclass(frozen=True)
class Contractions:
  """What a program does with its parameters.

  Attributes:
    axes: path -> the axes, ascending, that every product of a parameter sums over.
    refused: path -> why no such axes are known. Each parameter is here or in `axes`.
    shapes: path -> shape of the parameter.
    macs: path -> multiply-adds of its products, with those of all trips of a loop. Parameters that
      meet in one product, such as joined kernels, share them by size.
    others: the products of no parameter that could be followed, such as attention scores: the names
      of the scopes around the equation, as jax has them, and its multiply-adds.
  """

  axes: Mapping[str, tuple[int, ...]]
  refused: Mapping[str, str]
  shapes: Mapping[str, tuple[int, ...]]
  macs: Mapping[str, int]
  others: Sequence[tuple[str, int]]


def trace(function: Callable[..., Any], params: Any, *inputs: Any) -> Contractions:
  """Returns what a program does with its parameters.

  A parameter is refused where data meets it outside of a product, as in `x @ (w * keep)`, where two
  products sum over different axes of it, where a loop changes it from trip to trip, and in a
  mixture. A product with a one-hot is a look-up: no axis is contracted, and no arithmetic counts.
  A `cond` counts as all of its branches, and `shard_map` as the sum of its devices. The inside of a
  Pallas kernel is not seen, nor that of a `while` loop, which has no gradient to train by.

  >>> import jax.numpy as jnp
  >>> params = {"w": jnp.ones((8, 4)), "v": jnp.ones((2, 8))}
  >>> trace(lambda p, x: x @ p["w"] @ p["v"].T[:4], params, jnp.ones((3, 8))).axes
  {'v': (1,), 'w': (0,)}

  Args:
    function: the forward pass, called as function(params, *inputs).
    params: arrays or shapes, in any nesting that jax knows.
    *inputs: arrays, shapes, and values that are no arrays.
  """
  is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
  leaves, tree = jax.tree.flatten((params, inputs))

  def of_arrays(*arrays):
    # What is no array, such as a function in a tree of Equinox, is a constant of the program.
    rest = iter(arrays)
    params, inputs = jax.tree.unflatten(tree, [next(rest) if is_array(x) else x for x in leaves])
    return function(params, *inputs)

  # Inputs of the jaxpr are in the order of the leaves: parameters first.
  jaxpr = jax.make_jaxpr(of_arrays)(*filter(is_array, leaves)).jaxpr
  shapes = {path: tuple(x.shape) for path, x in flatten(params) if is_array(x)}
  walk = _Walk({path: math.prod(shape) for path, shape in shapes.items()})
  # At the start axis i of a value is axis i of its parameter.
  own = lambda shape: tuple(((frozenset([i]), n),) for i, n in enumerate(shape))
  values = [_Value(False, (_Track(path, own(shape)),)) for path, shape in shapes.items()]
  data = [_DATA] * (len(jaxpr.invars) - len(values))
  walk.run(jaxpr, [*values, *data])
  axes, refused = {}, {}
  for path in shapes:
    found = list(walk.products[path])
    if path in walk.refused:
      refused[path] = walk.refused[path]
    elif all(axes_of_one == () for axes_of_one in found):
      refused[path] = "no product sums over an axis of it"
    elif len(found) > 1:
      refused[path] = f"products sum over axes {' and '.join(map(str, found))} of it"
    else:
      axes[path] = found[0]
  return Contractions(axes, refused, shapes, dict(walk.macs), walk.others)


# --- what is known of a value ---------------------------------------------------------------------

# One axis of a value, as the pieces it is made of, slowest first: (axes of the parameter, length).
# If w of shape (4, 6) becomes (24,), its one axis is ((frozenset({0}), 4), (frozenset({1}), 6)).
_Dim = tuple[tuple[frozenset[int], int], ...]


class _Track(NamedTuple):
  """Where the axes of one parameter lie in a value; without dims, `lost` says what lost them."""

  path: str
  dims: tuple[_Dim, ...] | None
  lost: str = ""


class _Value(NamedTuple):
  """What is known of a value.

  Attributes:
    is_data: whether it depends on inputs.
    tracks: of the parameters it depends on; in data, of those whose product with data it is.
    kind: 'range' of an iota, 'one-hot' where something equals one.
  """

  is_data: bool
  tracks: tuple[_Track, ...] = ()
  kind: str = ""


_CONSTANT, _DATA = _Value(False), _Value(True)
_WITH_CONSTANT = "a product with a constant"


def _any_data(known: Iterable[_Value]) -> bool:
  return any(value.is_data for value in known)


def _weights(known: Iterable[_Value]) -> list[_Track]:
  return [track for value in known if not value.is_data for track in value.tracks]


def _lost(known: Sequence[_Value], why: str) -> _Value:
  """Returns what depends on these values, in which their weights are lost."""
  return _Value(_any_data(known), tuple(_Track(t.path, None, why) for t in _weights(known)))


class _Walk:
  """An abstract interpreter, shaped like `jax.core.eval_jaxpr`: a `_Value` in place of each array.

  It notes what happens to parameters on the way.
  """

  def __init__(self, sizes: Mapping[str, int]):
    self.sizes = sizes
    # path -> the sets of axes that products sum over, in order of appearance
    self.products: dict[str, dict[tuple[int, ...], None]] = collections.defaultdict(dict)
    self.refused: dict[str, str] = {}
    self.macs: dict[str, int] = collections.defaultdict(int)
    self.others: list[tuple[str, int]] = []

  def run(
    self, jaxpr: Any, values: Sequence[_Value], trips: int = 1, scope: str = ""
  ) -> list[_Value]:
    """Returns what is known of the outputs.

    Args:
      jaxpr: the equations.
      values: what is known of the inputs.
      trips: how often loops and devices around it run it.
      scope: names of the scopes around it.
    """
    # Constants of the jaxpr are in no table: what a function closes over is no data.
    env = dict(zip(jaxpr.invars, values, strict=True))
    get = lambda v: _CONSTANT if isinstance(v, core.Literal) else env.get(v, _CONSTANT)
    for eqn in jaxpr.eqns:
      around = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
      outs = self._equation(eqn, [get(v) for v in eqn.invars], trips, around)
      env.update(zip(eqn.outvars, outs, strict=True))
    return [get(v) for v in jaxpr.outvars]

  def _equation(self, eqn: Any, known: list[_Value], trips: int, scope: str) -> Sequence[_Value]:
    """Returns what is known of the outputs of one equation."""
    name, params = eqn.primitive.name, eqn.params
    if name in _PRODUCTS:
      return [self._product(eqn, known[:2], trips, scope)]
    if name == "scan":
      return self._scan(eqn, known, trips, scope)
    if name == "cond":
      found = [self.run(branch.jaxpr, known[1:], trips, scope) for branch in params["branches"]]
      return [self._either(outs) for outs in zip(*found, strict=True)]
    if (inner := _inner(eqn)) is not None:
      if name == "shard_map":  # what it calls is the program of one device
        trips *= math.prod(params["mesh"].shape[a] for a in params["newly_manual_axes"])
      return self.run(inner, known, trips, scope)
    # What has a jaxpr of other arguments, such as a Pallas kernel, goes on as any other primitive.
    if name in _EACH_ALONE:
      return known
    kind = _kind(name, known)
    # A statistic or a mask of a weight is no weight.
    if name in _STATISTICS or all(var.aval.dtype == bool for var in eqn.outvars):
      return [_Value(_any_data(known), (), kind)] * len(eqn.outvars)
    if name == "dynamic_slice":
      known = known[:1]  # whichever rows data picks, its axes are the same
    if _any_data(known):
      known = self._lose_to_data(known, name)
    return [_outputs(eqn, known, i)._replace(kind=kind) for i in range(len(eqn.outvars))]

  def _refuse(self, tracks: Iterable[_Track], why: str = "") -> None:
    for track in tracks:
      lost = f"it could not be followed through {track.lost}"
      # The first reason counts: what follows it is its consequence.
      self.refused.setdefault(track.path, lost if track.dims is None else why)

  def _lose_to_data(self, known: Sequence[_Value], name: str) -> list[_Value]:
    """Refuses weights that meet data outside of a product; what comes of them is data."""
    # A product with a constant, such as the first state of a recurrent network, is as good as one
    # with data.
    weights = [track for track in _weights(known) if track.lost != _WITH_CONSTANT]
    self._refuse(weights, f"it meets data outside of a product, in {name}")
    return [value if value.is_data else _CONSTANT for value in known]

  def _either(self, outs: Sequence[_Value]) -> _Value:
    """Returns what is known of an output of one branch or another."""
    if is_data := _any_data(outs):
      outs = self._lose_to_data(outs, "cond")
    return _Value(is_data, tuple(dict.fromkeys(t for value in outs for t in value.tracks)))

  def _product(self, eqn: Any, known: list[_Value], trips: int, scope: str) -> _Value:
    """Notes a product; what it returns is data, or has lost its weights."""
    weights = _weights(known)
    if any(value.kind == "one-hot" for value in known):
      self._refuse(weights, "its rows are looked up by a one-hot")
      return _DATA  # rows of a table are data, whoever picks them
    product = _PRODUCTS[eqn.primitive.name](eqn)
    of_data = all(value.is_data for value in known)
    for value, contracting, free in zip(known, product.contracting, product.free, strict=True):
      if of_data:
        mixtures = [track for track in value.tracks if _is_mixture(track, contracting, free)]
        self._refuse(mixtures, "data sums over two of its axes in turn: a mixture of kernels")
      for track in _weights([value]):
        self._contract(track, contracting, eqn.primitive.name)
    paths = {track.path for track in weights if track.dims is not None}
    self._count(paths, product.macs * trips, scope)
    if _any_data(known):
      return _Value(True, () if of_data else _results(eqn, known, product))
    of_weights = all(value.tracks for value in known)
    return _lost(known, "a product of weights" if of_weights else _WITH_CONSTANT)

  def _count(self, paths: Collection[str], macs: int, scope: str) -> None:
    """Notes the multiply-adds of a product of these parameters, or of one without any."""
    size = sum(self.sizes[path] for path in paths)
    for path in paths:
      self.macs[path] += macs * self.sizes[path] // max(size, 1)
    if not paths and macs:
      self.others.append((scope, macs))

  def _contract(self, track: _Track, along: Sequence[int], name: str) -> None:
    """Notes the axes of a parameter that a product sums over."""
    if track.dims is None:
      self._refuse([track])
      return
    summed = _parts(track.dims[d] for d in along)
    left = [piece for d, dim in enumerate(track.dims) if d not in along for piece in dim]
    # Of a convolution groups lie along the input channels, at one offset of the window.
    is_conv = name == "conv_general_dilated"
    if not is_conv and any(summed & axes for axes, length in left if length > 1):
      self._refuse([track], "a product sums over a part of an axis of it")
    else:
      self.products[track.path][tuple(sorted(summed))] = None

  def _scan(self, eqn: Any, known: list[_Value], trips: int, scope: str) -> list[_Value]:
    body = eqn.params["jaxpr"].jaxpr
    # operands: consts | carry | stacked        results: carry | stacked
    # In a trip, what is stacked has an axis less, and the rest has the same rank. So ranks tell how
    # many there are of each: JAX 0.10 has these numbers as parameters of a scan, JAX 0.12 others.
    same_rank = lambda inside, outside: sum(
      a.aval.ndim == b.aval.ndim for a, b in zip(inside, outside, strict=True)
    )
    carries = same_rank(body.outvars, eqn.outvars)
    consts = same_rank(body.invars, eqn.invars) - carries
    layers = [
      value._replace(tracks=tuple(t._replace(dims=t.dims and t.dims[1:]) for t in value.tracks))
      for value in known[consts + carries :]
    ]
    # A weight that is carried may be another one in the next trip, so it is refused.
    self._refuse(_weights(known[consts : consts + carries]), "a loop carries it from trip to trip")
    # What is carried is data where data enters the loop at all.
    carry = [_Value(_any_data(known))] * carries
    outs = self.run(body, [*known[:consts], *carry, *layers], trips * eqn.params["length"], scope)
    # The axis along which results of trips are stacked is no axis of a parameter.
    return [*carry, *(_lost([out], "scan") for out in outs[carries:])]


def _inner(eqn: Any) -> Any:
  """Returns the jaxpr that an equation calls with its own arguments; None without one."""
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if (found := eqn.params.get(key)) is not None:
      inner = getattr(found, "jaxpr", found)
      return inner if len(inner.invars) == len(eqn.invars) else None
  return None


def _kind(name: str, known: Sequence[_Value]) -> str:
  """Returns the `kind` of the outputs of an equation."""
  if name == "eq" and any(value.kind == "range" for value in known):
    return "one-hot"
  return "range" if name == "iota" else known[0].kind if name in _KEEP_ENTRIES else ""


# --- products -------------------------------------------------------------------------------------


class _Product(NamedTuple):
  """A product of two operands.

  Attributes:
    contracting: the axes of each that it sums over.
    free: the axes of each that the other does not share, which follow one another in a result.
    macs: multiply-adds.
  """

  contracting: tuple[Sequence[int], Sequence[int]]
  free: tuple[Sequence[int], Sequence[int]]
  macs: int


def _dot(eqn: Any) -> _Product:
  p, (lhs, rhs) = eqn.params, (v.aval.shape for v in eqn.invars[:2])
  if ragged := p.get("ragged_dot_dimension_numbers"):
    # Data picks the group whose kernel a row meets, and it meets no other.
    numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
  else:
    numbers, groups = p["dimension_numbers"], ()
  contracting, batch = numbers
  left = [a for a in range(len(lhs)) if a not in (*contracting[0], *batch[0])]
  right = [a for a in range(len(rhs)) if a not in (*contracting[1], *batch[1], *groups)]
  return _Product(contracting, (left, right), math.prod(lhs) * math.prod(rhs[a] for a in right))


def _conv(eqn: Any) -> _Product:
  spec, rhs = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
  (batch, features, *window), (out, channels, *_) = spec.lhs_spec, spec.rhs_spec
  macs = math.prod(eqn.outvars[0].aval.shape) * math.prod(rhs) // rhs[out]
  return _Product(((features,), (channels,)), ((batch, *window), (out,)), macs)


_PRODUCTS: Mapping[str, Callable[[Any], _Product]] = {
  "dot_general": _dot,
  "ragged_dot_general": _dot,
  "conv_general_dilated": _conv,
}


def _results(eqn: Any, known: Sequence[_Value], product: _Product) -> tuple[_Track, ...]:
  """Returns where axes of weights are in their product with data, if it may become a mixture."""
  if eqn.primitive.name == "conv_general_dilated":
    return ()
  shape, tracks = eqn.outvars[0].aval.shape, []
  end = len(shape) - len(product.free[1])
  starts = (end - len(product.free[0]), end)
  for value, free, start in zip(known, product.free, starts, strict=True):
    for track in _weights([value]):
      # A mixture sums over one axis of the weight that is left, and keeps another one.
      if track.dims is not None and len(_parts(track.dims[a] for a in free)) > 1:
        dims = _foreign(shape)
        dims[start : start + len(free)] = [track.dims[a] for a in free]
        tracks.append(_Track(track.path, tuple(dims)))
  return tuple(tracks)


def _is_mixture(track: _Track, contracting: Sequence[int], free: Sequence[int]) -> bool:
  """Returns whether `g(x) @ bank` is a blend of kernels, in a product with other data.

  It is one where nothing but axes of the weight `bank` is left of it. In attention tokens are left
  of a query as well, also where all heads share their keys. A hypernetwork makes a kernel along one
  axis of its weight, and that weight is contracted along the other.
  """
  if track.dims is None or not free:
    return False
  along = _parts(track.dims[a] for a in contracting)
  left = [_parts([track.dims[a]]) for a in free]
  return bool(along) and all(left) and along.isdisjoint(frozenset().union(*left))


# --- how equations move the axes of a weight ------------------------------------------------------


def _outputs(eqn: Any, known: Sequence[_Value], i: int) -> _Value:
  """Returns what output i of an equation depends on, and where the axes of parameters are in it."""
  name, out, is_data = eqn.primitive.name, eqn.outvars[i].aval.shape, _any_data(known)
  move, tracks = _MOVE.get(name), []
  for var, value in zip(eqn.invars, known, strict=False):  # of a dynamic slice the first counts
    for track in value.tracks:
      dims = track.dims
      if dims is not None:
        dims = move(eqn.params, dims, var.aval.shape, out) if move else None
      if dims is not None:
        tracks.append(_Track(track.path, dims))
      elif not is_data:
        tracks.append(_Track(track.path, None, track.lost or name))
  return _Value(is_data, tuple(dict.fromkeys(tracks)))


def _reshape(params, dims, shape, out):
  """Cuts the pieces of all axes anew; None where an axis would be cut across its rows."""
  del shape
  order = params["dimensions"] or range(len(dims))  # vmap of a convolution has one
  pieces = [piece for a in order for piece in dims[a] if piece[1] != 1]
  cut = []
  for size in out:
    dim, have = [], 1
    while have < size and pieces:
      axes, n = pieces.pop(0)
      need = size // have
      if size % have or (n % need and need % n):
        return None
      if n > need:  # the slow part of it belongs here, the rest to the next axis
        pieces.insert(0, (axes, n // need))
        n = need
      dim.append((axes, n))
      have *= n
    if have != size:
      return None
    cut.append(tuple(dim))
  return None if pieces else tuple(cut)


def _broadcast(params, dims, shape, out):
  moved = _foreign(out)
  for dim, n, to in zip(dims, shape, params["broadcast_dimensions"], strict=True):
    # A repeated axis of length 1 is none of the parameter: a sum over it is no contraction.
    if n == out[to]:
      moved[to] = dim
  return tuple(moved)


def _resize(params, dims, shape, out):
  """Slices, pads and joins: an axis of another length is still of the same axes."""
  del params
  if len(shape) != len(out):  # what devices gather may be stacked
    return None
  # A part of joined axes may begin anywhere in them, so all of them stand for it.
  pairs = zip(dims, shape, out, strict=True)
  return tuple(dim if n == m else ((_parts([dim]), m),) for dim, n, m in pairs)


def _foreign(shape: Sequence[int]) -> list[_Dim]:
  """Returns axes that are none of the parameter."""
  return [((frozenset(), n),) for n in shape]


def _parts(dims: Iterable[_Dim]) -> frozenset[int]:
  """Returns the axes of the parameter that are in some axes of a value."""
  return frozenset[int]().union(*(axes for dim in dims for axes, _ in dim))


# Elementwise, of one shape: a product with a mask, a cast, a scale.
_SAME_SHAPE = (
  "convert_element_type copy copy_p mul add sub div neg sign abs exp log tanh logistic sqrt rsqrt "
  "integer_pow pow square max min clamp select_n stop_gradient reduce_precision rev round floor "
  "sharding_constraint layout_constraint mesh_cast "
  "reshard add_any nm_computed_once erf cbrt expm1 log1p sin cos is_finite".split()
)
# The last keeps a slice, on each device, of a sum over devices.
_RESIZE = "slice dynamic_slice split pad concatenate all_gather reduce_scatter".split()
# What moves the axes of a weight so that they can be followed.
_MOVE: Mapping[str, Callable[..., tuple[_Dim, ...] | None]] = {
  **dict.fromkeys(_SAME_SHAPE, lambda params, dims, shape, out: dims if shape == out else None),
  **dict.fromkeys(_RESIZE, _resize),
  "transpose": lambda params, dims, *_: tuple(dims[a] for a in params["permutation"]),
  "squeeze": lambda params, dims, *_: tuple(
    dim for a, dim in enumerate(dims) if a not in params["dimensions"]
  ),
  "reshape": _reshape,
  "broadcast_in_dim": _broadcast,
}
# What leaves the entries of a one-hot as they are.
_KEEP_ENTRIES = frozenset(
  "convert_element_type copy copy_p transpose reshape broadcast_in_dim squeeze".split()
)
# What makes a statistic.
_STATISTICS = frozenset(
  "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window "
  "reduce_window_max reduce_window_min reduce_window_sum reduce_xor".split()
)
# Each output is one operand, or its sum over devices.
_EACH_ALONE = frozenset("optimization_barrier device_put pvary psum psum_invariant".split())
