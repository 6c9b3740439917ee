"""What a program does with each parameter, read off its jaxpr: axes, products, multiply-adds.

    function, params, inputs -> [jax.make_jaxpr] -> equations -> [Walk] -> path -> axes, or why not
                                                                        -> multiply-adds

Values that depend on parameters alone are followed through transposes, reshapes, casts, slices and
loops, up to the product with data. What cannot be followed into a product is refused by name, so no
answer is a guess. Nothing is computed. A parameter is refused as well where

- data meets it outside of a product, as in `x @ (w * keep)` or `w[ids]`,
- two products sum over different axes of it, or a loop changes it from turn to turn,
- data sums over one axis of it, and then other data over another: a mixture of kernels,
  `x @ einsum("e,eio->io", gates, w)`, where either axis may be the one that is meant.

A product with a one-hot, which T5 looks words up by, is a look-up and no arithmetic. A `while` loop
whose turns data decide counts as one turn, and a `cond` as all of its branches. Under `shard_map`
the products of all devices count, also where they compute the same. What a kernel of Pallas
multiplies is not seen.
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

# One axis of a value, as the pieces it is made of, in order: (axes of the parameter, length).
_Dim = tuple[tuple[frozenset[int], int], ...]


@dataclasses.dataclass(frozen=True)
class Traced:
  """What a program does with its parameters.

  Attributes:
    products: path -> the axes, ascending, that each of its products sums over.
    lost: path -> why the axes of its products do not tell all.
    shapes: path -> shape of the parameter.
    macs: path -> multiply-adds of its products, with those of all turns of a loop. Parameters that
      meet in one product, such as joined kernels, share them by size.
    others: the products of no parameter that could be followed, such as attention scores: the names
      of the scopes around the equation, as jax has them, and its multiply-adds.
  """

  products: Mapping[str, tuple[tuple[int, ...], ...]]
  lost: Mapping[str, str]
  shapes: Mapping[str, tuple[int, ...]]
  macs: Mapping[str, int]
  others: tuple[tuple[str, int], ...]

  def axes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns path -> the axes that a parameter is contracted along, and path -> why none."""
    known: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for path, shape in self.shapes.items():
      found = list(dict.fromkeys(self.products.get(path, ())))
      along = f"summed over along {' and along '.join(map(str, found))}"
      if path in self.lost:
        refused[path] = self.lost[path] + (f", and it is {along}" if found else "")
      elif not found:
        refused[path] = f"its shape is {shape}, and no product sums over it"
      elif len(found) > 1:
        refused[path] = f"it is {along}"
      elif not found[0]:
        refused[path] = "its product sums over no axis of it"
      else:
        known[path] = found[0]
    return known, refused


class _Track(NamedTuple):
  """Where the axes of one parameter lie in a value; dims is None with the reason if it is lost."""

  path: str
  dims: tuple[_Dim, ...] | None
  lost: str = ""


class _Value(NamedTuple):
  """What is known of a value.

  Attributes:
    is_data: whether it depends on inputs.
    tracks: of the parameters it depends on; in data, of those whose product with data it is.
  """

  is_data: bool
  tracks: tuple[_Track, ...] = ()


_CONSTANT, _DATA = _Value(False), _Value(True)
_WITH_CONSTANT = "a product with a constant"


def axes(
  function: Callable[..., Any], params: Any, *inputs: Any
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
  """Returns path -> the axes that a parameter is contracted along, and path -> why it has none.

  >>> import jax.numpy as jnp
  >>> params = {"w": jnp.ones((8, 4)), "v": jnp.ones((2, 8))}
  >>> axes(lambda p, x: x @ p["w"] @ p["v"].T[:4], params, jnp.ones((3, 8)))[0]
  {'w': (0,), 'v': (1,)}

  Args:
    function: the forward pass, called as function(params, *inputs).
    params: arrays or shapes, in any nesting that jax knows.
    *inputs: arrays, shapes, and values that are no arrays.
  """
  return trace(function, params, *inputs).axes()


def trace(function: Callable[..., Any], params: Any, *inputs: Any) -> Traced:
  """Returns what a program does with its parameters; see `axes` for the arguments."""
  is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
  leaves, tree = jax.tree.flatten((params, inputs))
  arrays = [x for x in leaves if is_array(x)]

  def flat(*arrays):
    # What is no array, such as a function in a tree of Equinox, is a constant of the program.
    given = iter(arrays)
    params, inputs = jax.tree.unflatten(tree, [next(given) if is_array(x) else x for x in leaves])
    return function(params, *inputs)

  jaxpr = jax.make_jaxpr(flat)(*arrays).jaxpr
  shapes = {path: tuple(x.shape) for path, x in flatten(params) if is_array(x)}
  whole = lambda shape: tuple(((frozenset([i]), n),) for i, n in enumerate(shape))
  values = [_Value(False, (_Track(path, whole(shape)),)) for path, shape in shapes.items()]
  values += [_DATA] * (len(jaxpr.invars) - len(values))
  walk = _Walk({path: math.prod(shape) for path, shape in shapes.items()})
  walk.run(jaxpr, values)
  for path, name in walk.statistics.items():
    if path not in walk.products:
      walk.lost.setdefault(path, f"no product sums over it, and {name} makes a statistic of it")
  products = {path: tuple(found) for path, found in walk.products.items()}
  return Traced(products, walk.lost, shapes, dict(walk.macs), tuple(walk.others))


class _Walk:
  """Goes through equations, and notes what happens to parameters."""

  def __init__(self, sizes: Mapping[str, int]):
    self.sizes = sizes
    self.products: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
    self.lost: dict[str, str] = {}
    self.statistics: dict[str, str] = {}  # path -> the primitive that makes one
    self.macs: dict[str, int] = collections.defaultdict(int)
    self.others: list[tuple[str, int]] = []

  def run(
    self, jaxpr: Any, values: Sequence[_Value], turns: int = 1, scope: str = ""
  ) -> list[_Value]:
    """Returns what is known of the outputs.

    Args:
      jaxpr: the equations.
      values: what is known of the inputs.
      turns: how often loops and devices around it run it.
      scope: names of the scopes around it.
    """
    env = dict(zip(jaxpr.invars, values, strict=True))
    get = lambda v: _CONSTANT if isinstance(v, core.Literal) else env.get(v, _CONSTANT)
    made = _made(jaxpr)
    for eqn in jaxpr.eqns:
      known = [get(v) for v in eqn.invars]
      around = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
      if eqn.primitive.name not in _PRODUCTS:
        outs = self._equation(eqn, known, turns, around)
      elif any(_is_one_hot(v, made) for v in eqn.invars):
        self._lose(_weights(known), "its rows are looked up by a one-hot")
        outs = [_DATA]  # rows of a table are data, whoever picks them
      else:
        outs = [self._product(eqn, known[:2], turns, around)]
      env.update(zip(eqn.outvars, outs, strict=True))
    return [get(v) for v in jaxpr.outvars]

  def _equation(self, eqn: Any, known: list[_Value], turns: int, scope: str) -> Sequence[_Value]:
    """Returns what is known of the outputs of one equation, which is no product."""
    name = eqn.primitive.name
    loop = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
    if loop is not None:
      return loop(eqn, known, turns, scope)
    if (inner := _inner(eqn)) is not None:
      if name == "shard_map":  # what it calls is the program of one device
        turns *= math.prod(eqn.params["mesh"].shape[a] for a in eqn.params["newly_manual_axes"])
      return self.run(inner, known, turns, scope)
    if name in _EACH_ALONE:
      return known
    if name == "dynamic_slice":
      known = known[:1]  # whichever rows data picks, its axes are the same
    if _is_statistic(eqn):
      self.statistics.update((track.path, name) for track in _weights(known))
      return [_Value(_any_data(known))] * len(eqn.outvars)
    if _any_data(known):
      known = self._met(known, name)
    return [_followed(eqn, known, i) for i in range(len(eqn.outvars))]

  def _lose(self, tracks: Iterable[_Track], why: str) -> None:
    for track in tracks:
      unknown = f"it could not be followed through {track.lost}"
      self.lost.setdefault(track.path, why if track.dims is not None else unknown)

  def _met(self, known: Sequence[_Value], name: str) -> list[_Value]:
    """Notes that weights meet data outside of a product, after which nobody can follow them."""
    # A product with a constant, such as the first state of a recurrent network, is as good as one
    # with data.
    weights = [track for track in _weights(known) if track.lost != _WITH_CONSTANT]
    self._lose(weights, f"it meets data outside of a product, in {name}")
    return [value if value.is_data else _CONSTANT for value in known]

  def _product(self, eqn: Any, known: list[_Value], turns: int, scope: str) -> _Value:
    """Notes a product; what it returns is no weight, or one that nobody can follow."""
    product = _PRODUCTS[eqn.primitive.name](eqn)
    of_data = all(value.is_data for value in known)
    for value, summed, kept in zip(known, product.summed, product.kept, strict=True):
      if of_data:
        mixtures = [track for track in value.tracks if _is_mixture(track, summed, kept)]
        self._lose(mixtures, "data sums over two of its axes in turn, as where gates mix kernels")
      elif not value.is_data:
        for track in value.tracks:
          self._note(track, summed, eqn.primitive.name)
    weights = _weights(known)
    factors = dict.fromkeys(track.path for track in weights if track.dims is not None)
    self._count(factors, product.macs * turns, scope)
    if _any_data(known):
      return _Value(True, () if of_data else _results(eqn, known, product))
    of_weights = all(value.tracks for value in known)
    return _lost(known, "a product of weights" if of_weights else _WITH_CONSTANT)

  def _count(self, paths: Collection[str], macs: int, scope: str) -> None:
    """Notes the multiply-adds of a product of these parameters, or of one without any."""
    if not paths and macs:
      self.others.append((scope, macs))
    whole = sum(self.sizes[path] for path in paths)
    for path in paths:
      self.macs[path] += macs * self.sizes[path] // max(whole, 1)

  def _note(self, track: _Track, contracted: Sequence[int], name: str) -> None:
    """Notes what a product that sums over some axes of a value does with its parameter."""
    if track.dims is None:
      self._lose([track], "")
      return
    summed = _all_of(*(track.dims[d] for d in contracted))
    left = [dim for d, dim in enumerate(track.dims) if d not in contracted]
    # Groups of a convolution lie along the input channels, at one offset of the window.
    is_conv = name == "conv_general_dilated"
    if not is_conv and any(summed & part for dim in left for part, n in dim if n > 1):
      self._lose([track], "a product sums over a part of an axis of it")
    else:
      self.products[track.path].append(tuple(sorted(summed)))

  def _scan(self, eqn: Any, known: list[_Value], turns: int, scope: str) -> list[_Value]:
    p = eqn.params
    body = p["jaxpr"].jaxpr
    # Constants and the carry keep their rank in a turn, and what is stacked has an axis less. JAX
    # 0.10 has these numbers as parameters of a scan, and JAX 0.12 has others.
    same_rank = lambda inside, outside: sum(
      a.aval.ndim == b.aval.ndim for a, b in zip(inside, outside, strict=True)
    )
    carries = same_rank(body.outvars, eqn.outvars)
    consts = same_rank(body.invars, eqn.invars) - carries
    layers = [_unstacked(value) for value in known[consts + carries :]]
    given = known[:consts], known[consts : consts + carries], layers
    carry = self._carry(body, *given, "scan")
    outs = self.run(body, [*known[:consts], *carry, *layers], turns * p["length"], scope)
    return [*carry, *(_lost([out], "scan") for out in outs[carries:])]

  def _while(self, eqn: Any, known: list[_Value], turns: int, scope: str) -> list[_Value]:
    p = eqn.params
    test, body = p["cond_jaxpr"].jaxpr, p["body_jaxpr"].jaxpr
    skip, first = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    carry = self._carry(body, known[skip:first], known[first:], (), "while")
    self.run(test, [*known[:skip], *carry], turns, scope)
    self.run(body, [*known[skip:first], *carry], turns, scope)
    return carry

  def _carry(
    self,
    body: Any,
    consts: Sequence[_Value],
    carry: Sequence[_Value],
    layers: Sequence[_Value],
    name: str,
  ) -> list[_Value]:
    """Returns a carry that is the same after a turn, and gives up the weights in it that change."""
    carry = [_DATA if value.is_data else value for value in carry]
    while True:
      outs = _Walk(self.sizes).run(body, [*consts, *carry, *layers])[: len(carry)]
      changed = [i for i, (k, out) in enumerate(zip(carry, outs, strict=True)) if k != out]
      weights = _weights([values[i] for values in (carry, outs) for i in changed])
      self._lose(weights, f"it changes from turn to turn of a {name}")
      if all(carry[i].is_data for i in changed):
        return carry
      carry = [_DATA if i in changed else value for i, value in enumerate(carry)]

  def _cond(self, eqn: Any, known: list[_Value], turns: int, scope: str) -> list[_Value]:
    branches = eqn.params["branches"]
    found = [self.run(branch.jaxpr, known[1:], turns, scope) for branch in branches]
    return [self._either(outs) for outs in zip(*found, strict=True)]

  def _either(self, outs: Sequence[_Value]) -> _Value:
    if is_data := _any_data(outs):
      outs = self._met(outs, "cond")
    return _Value(is_data, tuple(dict.fromkeys(t for value in outs for t in value.tracks)))


def _any_data(known: Iterable[_Value]) -> bool:
  return any(value.is_data for value in known)


def _weights(known: Iterable[_Value]) -> list[_Track]:
  return [track for value in known if not value.is_data for track in value.tracks]


def _is_statistic(eqn: Any) -> bool:
  """Returns whether an equation makes a statistic or a mask of a weight, which is no weight."""
  name = eqn.primitive.name
  if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
    return True
  return all(var.aval.dtype == bool for var in eqn.outvars)


def _followed(eqn: Any, known: Sequence[_Value], i: int) -> _Value:
  """Returns what output i of an equation depends on, and where the axes of parameters are in it."""
  name, shape, tracks = eqn.primitive.name, eqn.outvars[i].aval.shape, []
  is_data, follow = _any_data(known), _FOLLOW.get(name)
  for j, value in enumerate(known):
    for track in value.tracks:
      dims = None
      if track.dims is not None and follow is not None:
        dims = follow(eqn, j, i, track.dims)
      elif name in _SAME_SHAPE and eqn.invars[j].aval.shape == shape:
        dims = track.dims
      if dims is not None or not is_data:
        tracks.append(_Track(track.path, dims, "" if dims is not None else track.lost or name))
  return _Value(is_data, tuple(dict.fromkeys(tracks)))


def _inner(eqn: Any) -> Any:
  """Returns the jaxpr that an equation calls with its own arguments; None without one."""
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if (found := eqn.params.get(key)) is not None:
      inner = getattr(found, "jaxpr", found)
      return inner if len(inner.invars) == len(eqn.invars) else None
  return None


def _unstacked(value: _Value) -> _Value:
  """Returns a stacked value without its first axis, as a turn of a scan sees it."""
  tracks = (t if t.dims is None else t._replace(dims=t.dims[1:]) for t in value.tracks)
  return value._replace(tracks=tuple(tracks))


def _lost(known: Sequence[_Value], name: str) -> _Value:
  """Returns what depends on these values, without knowing where axes of weights are in it."""
  return _Value(_any_data(known), tuple(_Track(t.path, None, name) for t in _weights(known)))


# --- one-hots -------------------------------------------------------------------------------------

# What moves the entries of a one-hot, and leaves each as it is.
_MOVES = frozenset(
  "convert_element_type copy copy_p transpose reshape broadcast_in_dim squeeze".split()
)


def _made(jaxpr: Any) -> dict[Any, Any]:
  """Returns variable -> the equation that makes it."""
  return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def _source(var: Any, made: Mapping[Any, Any]) -> tuple[str, Sequence[Any], Mapping[Any, Any]]:
  """Returns the primitive that computes the entries of a value, its operands, what makes these."""
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    if (inner := _inner(eqn)) is not None:
      var, made = inner.outvars[eqn.outvars.index(var)], _made(inner)
    elif eqn.primitive.name in _MOVES:
      var = eqn.invars[0]
    else:
      return eqn.primitive.name, eqn.invars, made
  return "", (), made


def _is_one_hot(var: Any, made: Mapping[Any, Any]) -> bool:
  """Returns whether a value is a one-hot: where something equals a range, as numbers."""
  name, operands, made = _source(var, made)
  return name == "eq" and any(_source(operand, made)[0] == "iota" for operand in operands)


# --- products -------------------------------------------------------------------------------------


class _Product(NamedTuple):
  """A product of two operands.

  Attributes:
    summed: the axes of each that it sums over.
    kept: the axes of each that the other does not share, which follow one another in a result.
    macs: multiply-adds.
  """

  summed: tuple[Sequence[int], Sequence[int]]
  kept: tuple[Sequence[int], Sequence[int]]
  macs: int


def _dot(eqn: Any) -> _Product:
  p, (lhs, rhs) = eqn.params, (v.aval.shape for v in eqn.invars[:2])
  if ragged := p.get("ragged_dot_dimension_numbers"):
    # Data picks the group whose kernel a row meets, and it meets no other.
    numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
  else:
    numbers, groups = p["dimension_numbers"], ()
  summed, shared = numbers
  left = [a for a in range(len(lhs)) if a not in (*summed[0], *shared[0])]
  right = [a for a in range(len(rhs)) if a not in (*summed[1], *shared[1], *groups)]
  return _Product(summed, (left, right), math.prod(lhs) * math.prod(rhs[a] for a in right))


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
  """Returns where axes of weights are in their product with data, as far as mixtures need it."""
  if eqn.primitive.name == "conv_general_dilated":
    return ()
  shape, tracks = eqn.outvars[0].aval.shape, []
  end = len(shape) - len(product.kept[1])
  starts = (end - len(product.kept[0]), end)
  for value, kept, start in zip(known, product.kept, starts, strict=True):
    for track in _weights([value]):
      if track.dims is not None and len(_all_of(*(track.dims[a] for a in kept))) > 1:
        dims = _unknown(shape)
        dims[start : start + len(kept)] = [track.dims[a] for a in kept]
        tracks.append(_Track(track.path, tuple(dims)))
  return tuple(tracks)


def _is_mixture(track: _Track, summed: Sequence[int], kept: Sequence[int]) -> bool:
  """Returns whether data that a weight made is a kernel, in a product with other data.

  It is one where nothing but axes of the weight is left of it. In attention tokens are left of a
  query as well, also where all heads share their keys. A hypernetwork makes a kernel along one axis
  of its weight, and that weight is contracted along the other.
  """
  if track.dims is None or not kept:
    return False
  along = _all_of(*(track.dims[a] for a in summed))
  left = [_all_of(track.dims[a]) for a in kept]
  return bool(along) and all(left) and along.isdisjoint(frozenset().union(*left))


# --- how equations move the axes of a weight ------------------------------------------------------


def _transpose(eqn, j, i, dims):
  del j, i
  return tuple(dims[a] for a in eqn.params["permutation"])


def _reshape(eqn, j, i, dims):
  """Cuts the pieces of all axes anew; None where an axis would be cut across its rows."""
  del j, i
  order = eqn.params["dimensions"] or range(len(dims))  # vmap of a convolution has one
  pieces = [piece for a in order for piece in dims[a] if piece[1] != 1]
  out = []
  for size in eqn.outvars[0].aval.shape:
    dim, have = [], 1
    while have < size and pieces:
      part, n = pieces.pop(0)
      need = size // have
      if size % have or (n % need and need % n):
        return None
      if n > need:  # the slow part of it belongs here, the rest to the next axis
        pieces.insert(0, (part, n // need))
        n = need
      dim.append((part, n))
      have *= n
    if have != size:
      return None
    out.append(tuple(dim))
  return None if pieces else tuple(out)


def _broadcast(eqn, j, i, dims):
  del j, i
  shape, given = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
  out = _unknown(shape)
  for dim, n, to in zip(dims, given, eqn.params["broadcast_dimensions"], strict=True):
    if n == shape[to]:
      out[to] = dim
  return tuple(out)


def _squeeze(eqn, j, i, dims):
  del j, i
  return tuple(dim for a, dim in enumerate(dims) if a not in eqn.params["dimensions"])


def _resized(eqn, j, i, dims):
  """Slices, pads and joins: an axis of another length is still of the same axes."""
  if j and eqn.primitive.name != "concatenate":
    return None if eqn.invars[j].aval.shape else dims[:0]  # an index, or what fills
  given, out = eqn.invars[j].aval.shape, eqn.outvars[i].aval.shape
  pairs = zip(dims, given, out, strict=True)
  return tuple(dim if n == m else ((_all_of(dim), m),) for dim, n, m in pairs)


def _gathered(eqn, j, i, dims):
  """Shards that devices put together."""
  return _resized(eqn, j, i, dims) if eqn.params["tiled"] else None


def _unknown(shape: Sequence[int]) -> list[_Dim]:
  """Returns axes that are none of the parameter."""
  return [((frozenset(), n),) for n in shape]


def _all_of(*dims: _Dim) -> frozenset[int]:
  """Returns the axes of the parameter that are in some axes of a value."""
  return frozenset[int]().union(*(part for dim in dims for part, _ in dim))


_FOLLOW: Mapping[str, Callable[..., tuple[_Dim, ...] | None]] = {
  "transpose": _transpose,
  "reshape": _reshape,
  "broadcast_in_dim": _broadcast,
  "squeeze": _squeeze,
  "all_gather": _gathered,
  **dict.fromkeys(("slice", "dynamic_slice", "split", "pad", "concatenate"), _resized),
}
# Elementwise, of one shape: a product with a mask, a cast, a scale.
_SAME_SHAPE = frozenset(
  "convert_element_type copy copy_p mul add sub div neg sign abs exp log tanh logistic sqrt rsqrt "
  "integer_pow pow square max min clamp select_n stop_gradient reduce_precision rev round floor "
  "sharding_constraint layout_constraint mesh_cast "
  "reshard add_any nm_pinned erf cbrt expm1 log1p sin cos is_finite".split()
)
# Each output is one operand, or its sum over devices.
_EACH_ALONE = frozenset("optimization_barrier device_put pvary psum psum_invariant".split())
