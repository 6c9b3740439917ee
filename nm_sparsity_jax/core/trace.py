"""What a program does with each parameter, read off its jaxpr: axes, products, multiply-adds.

    function, params, inputs -> [jax.make_jaxpr] -> equations -> [Walk] -> path -> products
                                                                        -> path -> axes, or why not
                                                                        -> multiply-adds

Values are followed from the parameters on, as long as they depend on parameters alone: through
transposes, reshapes, casts, slices and loops, up to the product with data. What cannot be followed
into a product is refused by name, so no answer is a guess. Nothing is computed.

A product with a one-hot, which T5 looks words up by, is a look-up and no arithmetic. A `while` loop
whose turns data decide counts as one turn, and a `cond` as all of its branches. What a kernel of
Pallas multiplies is not seen.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from nm_sparsity_jax.core.trees import flatten

# One axis of a value, as the pieces it is made of, in order: (axes of the parameter, length).
_Dim = tuple[tuple[frozenset[int], int], ...]


class Product(NamedTuple):
  """One product of a parameter.

  Attributes:
    axes: of the parameter, which the product sums over, ascending.
    kind: 'dot', 'conv', or 'lookup' for rows that are picked by data.
  """

  axes: tuple[int, ...]
  kind: str


@dataclasses.dataclass(frozen=True)
class Traced:
  """What a program does with its parameters.

  Attributes:
    products: path -> its products, in order.
    lost: path -> the primitive through which it could not be followed into a product.
    shapes: path -> shape of the parameter.
    macs: path -> multiply-adds of its products, with those of all turns of a loop. Parameters that
      meet in one product, such as joined kernels, share them by size.
    others: the products of no parameter that could be followed, such as attention scores: the names
      of the scopes around the equation, as jax has them, and its multiply-adds.
  """

  products: Mapping[str, tuple[Product, ...]]
  lost: Mapping[str, str]
  shapes: Mapping[str, tuple[int, ...]]
  macs: Mapping[str, int]
  others: tuple[tuple[str, int], ...]

  def axes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns path -> the axes that a parameter is contracted along, and path -> why none."""
    known: dict[str, tuple[int, ...]] = {}
    refused: dict[str, str] = {}
    for path, shape in self.shapes.items():
      found = list(dict.fromkeys(p.axes for p in self.products.get(path, ())))
      is_used = any(p.kind != "lookup" for p in self.products.get(path, ()))
      if path in self.lost:
        refused[path] = f"it could not be followed through {self.lost[path]}"
      elif not is_used:
        refused[path] = f"its shape is {shape}, and no product sums over it"
      elif len(found) > 1:
        refused[path] = f"it is summed over along {' and along '.join(map(str, found))}"
      elif not found[0]:
        refused[path] = "its product sums over no axis of it"
      else:
        known[path] = found[0]
    return known, refused


class _Track(NamedTuple):
  """A value that depends on one parameter: its axes, None with the reason where it is lost."""

  path: str
  dims: tuple[_Dim, ...] | None
  lost: str = ""


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

  closed = jax.make_jaxpr(flat)(*arrays)
  shapes = {path: tuple(x.shape) for path, x in flatten(params) if is_array(x)}
  walk = _Walk({path: math.prod(shape) for path, shape in shapes.items()})
  env: dict[Any, Any] = dict.fromkeys(closed.jaxpr.invars, _DATA)
  for var, (path, shape) in zip(closed.jaxpr.invars, shapes.items(), strict=False):
    dims = tuple(((frozenset([i]), n),) for i, n in enumerate(shape))
    env[var] = (_Track(path, dims),)
  walk.run(closed.jaxpr, env, 1)
  products = {path: tuple(found) for path, found in walk.products.items()}
  return Traced(products, walk.lost, shapes, dict(walk.macs), tuple(walk.others))


_DATA = "data"  # a value that depends on inputs; one that depends on nothing has no entry


class _Walk:
  """Goes through equations, and notes the products of parameters."""

  def __init__(self, sizes: Mapping[str, int]):
    self.sizes = sizes
    self.products: dict[str, list[Product]] = collections.defaultdict(list)
    self.lost: dict[str, str] = {}
    self.macs: dict[str, int] = collections.defaultdict(int)
    self.others: list[tuple[str, int]] = []

  def run(self, jaxpr: Any, env: dict[Any, Any], turns: int, scope: str = "") -> list[Any]:
    """Returns what is known of the outputs.

    Args:
      jaxpr: the equations.
      env: what is known of the inputs.
      turns: how often loops around it run it.
      scope: names of the scopes around it.
    """
    get = lambda v: None if isinstance(v, core.Literal) else env.get(v)
    made = _made(jaxpr)
    for eqn in jaxpr.eqns:
      known = [get(v) for v in eqn.invars]
      around = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
      if eqn.primitive.name in ("dot_general", "conv_general_dilated", "gather"):
        outs = [self._product(eqn, known, turns, around, any(_picks(v, made) for v in eqn.invars))]
      else:
        outs = self._equation(eqn, known, turns, around)
      for var, out in zip(eqn.outvars, outs, strict=True):
        if out:
          env[var] = out
    return [get(v) for v in jaxpr.outvars]

  def _equation(self, eqn: Any, known: list[Any], turns: int, scope: str) -> Sequence[Any]:
    """Returns what is known of the outputs of one equation, which is no product."""
    name = eqn.primitive.name
    loop = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
    if loop is not None:
      return loop(eqn, known, turns, scope)
    if (inner := _inner(eqn)) is not None:
      return self.run(inner, _bound(inner.invars, known), turns, scope)
    if name == "dynamic_slice" and known[0]:
      known = known[:1]  # whichever rows data picks, its axes are the same
    if _DATA in known:
      return [_DATA] * len(eqn.outvars)
    if not any(known) or _is_statistic(eqn):
      return [None] * len(eqn.outvars)
    return [_followed(eqn, known, i) for i in range(len(eqn.outvars))]

  def _product(self, eqn: Any, known: list[Any], turns: int, scope: str, picks: bool) -> Any:
    """Notes a product; what it returns is no weight, or one that nobody can follow."""
    kind, axes, macs = _contracted(eqn)
    if picks:
      kind, macs = "lookup", 0
    factors = []
    for of, contracted in zip(known, axes, strict=False):
      for track in () if of is None or of == _DATA else of:
        self._note(track, contracted, kind)
        factors += [track.path] if track.dims is not None else []
    self._count(dict.fromkeys(factors), macs * turns, scope)
    if _DATA in known or kind == "lookup":  # rows of a table are data, whoever picks them
      return _DATA
    tracks = [track for of in known for track in of or ()]
    return tuple(_Track(t.path, None, "a product of weights or constants") for t in tracks) or None

  def _count(self, paths: Collection[str], macs: int, scope: str) -> None:
    """Notes the multiply-adds of a product of these parameters, or of one without any."""
    if not paths and macs:
      self.others.append((scope, macs))
    whole = sum(self.sizes[path] for path in paths)
    for path in paths:
      self.macs[path] += macs * self.sizes[path] // max(whole, 1)

  def _note(self, track: _Track, contracted: Sequence[int], kind: str) -> None:
    """Notes what a product that sums over some axes of a value does with its parameter."""
    if track.dims is None:
      self.lost.setdefault(track.path, track.lost)
      return
    summed = frozenset[int]().union(*(_all_of(track.dims[d]) for d in contracted))
    left = [dim for d, dim in enumerate(track.dims) if d not in contracted]
    if kind == "dot" and any(summed & part for dim in left for part, n in dim if n > 1):
      self.lost.setdefault(track.path, "a product that sums over a part of an axis")
    else:
      self.products[track.path].append(Product(tuple(sorted(summed)), kind))

  def _scan(self, eqn: Any, known: list[Any], turns: int, scope: str) -> list[Any]:
    p = eqn.params
    consts, carries = p["num_consts"], p["num_carry"]
    body, length = p["jaxpr"].jaxpr, p["length"]
    first = [_carried(k) for k in known[consts : consts + carries]]
    layers = [_unstacked(k) for k in known[consts + carries :]]
    given = [*known[:consts], *first, *layers]
    outs = self.run(body, _bound(body.invars, given), turns * length, scope)
    # A carry that is the same weight after a turn is so after all of them.
    last = [k if k == out else _lost(k, out, "scan") for k, out in zip(first, outs, strict=False)]
    return [*last, *(_lost(None, out, "scan") for out in outs[carries:])]

  def _while(self, eqn: Any, known: list[Any], turns: int, scope: str) -> list[Any]:
    skip = eqn.params["cond_nconsts"]
    body, consts = eqn.params["body_jaxpr"].jaxpr, eqn.params["body_nconsts"]
    first = [_carried(k) for k in known[skip + consts :]]
    given = [*known[skip : skip + consts], *first]
    outs = self.run(body, _bound(body.invars, given), turns, scope)
    return [k if k == out else _lost(k, out, "while") for k, out in zip(first, outs, strict=True)]

  def _cond(self, eqn: Any, known: list[Any], turns: int, scope: str) -> list[Any]:
    found = [
      self.run(branch.jaxpr, _bound(branch.jaxpr.invars, known[1:]), turns, scope)
      for branch in eqn.params["branches"]
    ]
    return [_either(outs) for outs in zip(*found, strict=True)]


def _is_statistic(eqn: Any) -> bool:
  """Returns whether an equation makes a statistic or a mask of a weight, which is no weight."""
  name = eqn.primitive.name
  if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
    return True
  return all(var.aval.dtype == bool for var in eqn.outvars)


def _followed(eqn: Any, known: list[Any], i: int) -> tuple[_Track, ...]:
  """Returns the parameters that output i of an equation depends on, and where their axes are."""
  name, shape, tracks = eqn.primitive.name, eqn.outvars[i].aval.shape, []
  follow = _FOLLOW.get(name)
  for j, of in enumerate(known):
    for track in of or ():
      dims = None
      if track.dims is not None and follow is not None:
        dims = follow(eqn, j, i, track.dims)
      elif name in _SAME_SHAPE and eqn.invars[j].aval.shape == shape:
        dims = track.dims
      tracks.append(_Track(track.path, dims, "" if dims is not None else track.lost or name))
  return tuple(dict.fromkeys(tracks))


def _bound(variables: Sequence[Any], known: Sequence[Any]) -> dict[Any, Any]:
  return {v: k for v, k in zip(variables, known, strict=True) if k}


def _inner(eqn: Any) -> Any:
  """Returns the jaxpr that an equation calls with its own arguments; None without one."""
  for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
    if (found := eqn.params.get(key)) is not None:
      inner = getattr(found, "jaxpr", found)
      return inner if len(inner.invars) == len(eqn.invars) else None
  return None


def _made(jaxpr: Any) -> dict[Any, Any]:
  """Returns variable -> the equation that makes it."""
  return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


# What moves the entries of a one-hot, and leaves each as it is.
_MOVES = frozenset(
  "convert_element_type copy copy_p transpose reshape broadcast_in_dim squeeze".split()
)


def _picks(var: Any, made: Mapping[Any, Any]) -> bool:
  """Returns whether a value is a one-hot: the outcome of == as numbers."""
  while not isinstance(var, core.Literal) and (eqn := made.get(var)) is not None:
    if (inner := _inner(eqn)) is not None:
      var, made = inner.outvars[eqn.outvars.index(var)], _made(inner)
    elif eqn.primitive.name in _MOVES:
      var = eqn.invars[0]
    else:
      return eqn.primitive.name == "eq"
  return False


def _carried(known: Any) -> Any:
  """Returns what is known of a carry: what is no weight may become data in a turn."""
  return known if known else _DATA


def _unstacked(known: Any) -> Any:
  """Returns a stacked value without its first axis, as a turn of a scan sees it."""
  if not known or known == _DATA:
    return known
  return tuple(t if t.dims is None else t._replace(dims=t.dims[1:]) for t in known)


def _lost(*known: Any) -> Any:
  """Returns the values of a loop, which nobody can follow out of it."""
  *values, name = known
  if _DATA in values:
    return _DATA
  return tuple(_Track(t.path, None, name) for of in values for t in of or ()) or None


def _either(outs: Sequence[Any]) -> Any:
  if _DATA in outs:
    return _DATA
  return tuple(dict.fromkeys(t for of in outs for t in of or ())) or None


def _contracted(eqn: Any) -> tuple[str, tuple[Sequence[int], Sequence[int]], int]:
  """Returns the kind of a product, the axes of both operands that it sums over, and its size."""
  lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
  out, p = eqn.outvars[0].aval.shape, eqn.params
  if eqn.primitive.name == "dot_general":
    (left, right), _ = p["dimension_numbers"]
    return "dot", (left, right), math.prod(out) * math.prod(lhs[a] for a in left)
  if eqn.primitive.name == "gather":
    numbers = p["dimension_numbers"]
    return "lookup", ((*numbers.collapsed_slice_dims, *numbers.operand_batching_dims), ()), 0
  # Groups of a convolution lie along the input channels, at one offset of the window.
  spec = p["dimension_numbers"]
  macs = math.prod(out) * math.prod(rhs) // rhs[spec.rhs_spec[0]]
  return "conv", ((spec.lhs_spec[1],), (spec.rhs_spec[1],)), macs


# --- how equations move the axes of a weight ------------------------------------------------------


def _transpose(eqn, j, i, dims):
  del j, i
  return tuple(dims[a] for a in eqn.params["permutation"])


def _reshape(eqn, j, i, dims):
  """Cuts the pieces of all axes anew; None where an axis would be cut across its rows."""
  del j, i
  pieces = [piece for dim in dims for piece in dim if piece[1] != 1]
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
  out: list[_Dim] = [((frozenset(), n),) for n in shape]
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


def _all_of(dim: _Dim) -> frozenset[int]:
  return frozenset(itertools.chain.from_iterable(part for part, _ in dim))


_FOLLOW: Mapping[str, Callable[..., tuple[_Dim, ...] | None]] = {
  "transpose": _transpose,
  "reshape": _reshape,
  "broadcast_in_dim": _broadcast,
  "squeeze": _squeeze,
  **dict.fromkeys(("slice", "dynamic_slice", "split", "pad", "concatenate"), _resized),
}
# Elementwise, of one shape: a product with a mask, a cast, a scale.
_SAME_SHAPE = frozenset(
  "convert_element_type copy copy_p mul add sub div neg sign abs exp log tanh logistic sqrt rsqrt "
  "integer_pow pow square max min clamp select_n stop_gradient reduce_precision rev round floor "
  "optimization_barrier sharding_constraint layout_constraint device_put pvary psum mesh_cast "
  "reshard add_any nm_pinned erf cbrt expm1 log1p sin cos is_finite".split()
)
