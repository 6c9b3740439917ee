"""Products of a packed weight on a GPU, in two kernels of Pallas. They were never run on one.

    x (batch, depth), NMPacked -> [dot] -> gather, or unpack and multiply -> (batch, features)

`gather` reads for each kept entry the x that it meets: work for each kept entry and row of x.
`unpack` makes a tile of the weight in registers and gives it to the tensor cores: work for each
entry of the dense weight. So few rows and many zeros take the first, as a model of an H200 has it.

Both ask Pallas for Triton, since Mosaic cannot gather by an index. JAX calls that deprecated, so
Pallas is imported here alone, and when a product is asked for.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nm_sparsity_jax.packed import xla
from nm_sparsity_jax.packed.array import NMPacked

# Tests set it: then Pallas follows the kernels in plain JAX, on any machine.
INTERPRET = False

KERNELS = ("gather", "unpack")
_TRITON = "jax.experimental.pallas.triton"
_COLUMNS = 64  # of the weight in one program
_KEPT = 32  # kept rows that `gather` adds in one turn
_DEPTH = 32  # dense rows that `unpack` makes in one turn
_LEAST = 16  # rows of x in a product of tensor cores
_ROWS = {"gather": 8, "unpack": 64}  # of x in one program at most
_MANY, _MOST = (8, 8), (32, 64)  # m / n, and rows of x up to which `gather` is taken


def missing() -> str:
  """Says why the kernels cannot be used here; '' where they can."""
  try:
    importlib.import_module(_TRITON)
  except ImportError as e:
    return f"this JAX ({jax.__version__}) has no Triton for Pallas: {e}"
  if INTERPRET or jax.default_backend() in ("gpu", "cuda", "rocm"):
    return ""
  return f"JAX has no GPU here, it runs on {jax.default_backend()}"


def kernel(packed: NMPacked, batch: int) -> str:
  """Returns which of `KERNELS` multiplies: a model of the hardware says so, and no measurement.

  >>> from nm_sparsity_jax.packed import array
  >>> from nm_sparsity_jax.patterns import NM
  >>> w = array.pack(jnp.zeros((8, 4)), NM(1, 8))
  >>> kernel(w, batch=1), kernel(w, batch=9)
  ('gather', 'unpack')
  """
  sparsity = packed.m / packed.n
  few = any(sparsity >= least and batch <= most for least, most in (_MANY, _MOST))
  return "gather" if few else "unpack"


def dot(
  x: jax.Array, packed: NMPacked, way: str | None = None, interpret: bool | None = None
) -> jax.Array:
  """Returns x . W: float32 [batch, features].

  Args:
    x: [batch, depth] of any float.
    packed: the weight. An index beyond its group reads another x, and none beyond x.
    way: one of `KERNELS`; None for what `kernel` says.
    interpret: whether Pallas follows the kernel in plain JAX; None for INTERPRET.
  """
  way = kernel(packed, x.shape[0]) if way is None else way
  interpret = INTERPRET if interpret is None else interpret
  numbers = packed.n, packed.m, packed.depth, packed.bits

  @jax.custom_batching.custom_vmap
  def call(x, values, indices):
    return _call(way, interpret, x, NMPacked(values, indices, None, *numbers))

  @call.def_vmap
  def _(size, batched, x, values, indices):
    if batched[0] and not any(batched[1:]):
      y = call(x.reshape(-1, x.shape[-1]), values, indices)
      return y.reshape(size, -1, y.shape[-1]), True
    axes = tuple(0 if b else None for b in batched)
    one = lambda x, values, indices: xla.unpacked(x, NMPacked(values, indices, None, *numbers))
    return jax.vmap(one, in_axes=axes)(x, values, indices), True

  return xla.scaled(call(x, packed.values, packed.indices), packed)


def _call(way: str, interpret: bool, x: jax.Array, packed: NMPacked) -> jax.Array:
  """Runs one program for each tile of x . W."""
  import jax.experimental.pallas as pl

  triton: Any = importlib.import_module(_TRITON)
  batch, features = x.shape[0], packed.features
  rows = min(pl.next_power_of_2(batch), _ROWS[way])
  if way == "unpack":
    rows = max(rows, _LEAST)
  body = {"gather": _gather, "unpack": _unpack}[way]
  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), packed)
  return pl.pallas_call(
    functools.partial(body, shapes, batch, rows, pl, triton),
    out_shape=jax.ShapeDtypeStruct((batch, features), jnp.float32),
    grid=(pl.cdiv(features, _COLUMNS), pl.cdiv(batch, rows)),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name=f"nm_{way}",
  )(x, packed.values, packed.indices)


def _tile(pl: Any, rows: int) -> tuple[jax.Array, jax.Array]:
  """Returns the rows of x and the columns of W that this program has."""
  columns = pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
  return pl.program_id(1) * rows + jnp.arange(rows), columns


def _kept(
  w: NMPacked, triton: Any, refs: Any, row: jax.Array, column: jax.Array, there: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns (values, their places in the group) of kept rows; 0 where none is there."""
  values, indices = refs
  at = triton.load(values.at[row, column], mask=there, other=0)
  byte = triton.load(indices.at[row * w.bits // 8, column], mask=there, other=0).astype(jnp.int32)
  return at, (byte >> (row * w.bits % 8)) & ((1 << w.bits) - 1)


def _gather(w: NMPacked, batch: int, rows: int, pl: Any, triton: Any, x: Any, *refs: Any) -> None:
  """Adds up, for each kept entry, its value times the x at its place."""
  *weight, out = refs
  row, column = _tile(pl, rows)

  def add(turn: jax.Array, total: jax.Array) -> jax.Array:
    kept = (turn * _KEPT + jnp.arange(_KEPT))[:, None]
    there = (kept < w.rows) & (column[None] < w.features)
    values, places = _kept(w, triton, weight, kept, column[None], there)
    depth = kept // w.n * w.m + places
    inside = (there & (depth < w.depth))[None] & (row < batch)[:, None, None]
    met = triton.load(x.at[row[:, None, None], depth[None]], mask=inside, other=0)
    return total + jnp.sum(met.astype(jnp.float32) * values.astype(jnp.float32)[None], axis=1)

  total = lax.fori_loop(0, pl.cdiv(w.rows, _KEPT), add, jnp.zeros((rows, _COLUMNS), jnp.float32))
  _store(triton, out, total, row, column, batch, w.features)


def _unpack(w: NMPacked, batch: int, rows: int, pl: Any, triton: Any, x: Any, *refs: Any) -> None:
  """Makes tiles of the weight, and multiplies."""
  *weight, out = refs
  row, column = _tile(pl, rows)
  kind = _kind(x.dtype, w.values.dtype)
  # Triton rounds float32 to 10 bits unless it is asked not to.
  precision = lax.Precision.HIGHEST if kind == jnp.float32 else None

  def add(turn: jax.Array, total: jax.Array) -> jax.Array:
    depth = turn * _DEPTH + jnp.arange(_DEPTH)
    here = depth[:, None]
    there = (here < w.depth) & (column[None] < w.features)
    tile = jnp.zeros((_DEPTH, _COLUMNS), kind)
    for i in range(w.n):
      kept = here // w.m * w.n + i
      values, places = _kept(w, triton, weight, kept, column[None], there)
      tile = jnp.where(there & (places == here % w.m), values.astype(kind), tile)
    inside = (row < batch)[:, None] & (depth < w.depth)[None]
    met = triton.load(x.at[row[:, None], depth[None]], mask=inside, other=0)
    product = lax.dot(
      met.astype(kind), tile, precision=precision, preferred_element_type=jnp.float32
    )
    return total + product

  total = lax.fori_loop(0, pl.cdiv(w.depth, _DEPTH), add, jnp.zeros((rows, _COLUMNS), jnp.float32))
  _store(triton, out, total, row, column, batch, w.features)


def _kind(x: Any, w: Any) -> Any:
  """Returns the dtype of a product. int8 fits in a half as it is, so it takes that of x."""
  halves = jnp.bfloat16, jnp.float16
  same = x == w or (w == jnp.int8 and x in halves)
  return x if same else jnp.dtype(jnp.float32)


def _store(
  triton: Any, out: Any, total: jax.Array, row: jax.Array, column: jax.Array, *shape: int
) -> None:
  there = (row < shape[0])[:, None] & (column < shape[1])[None]
  triton.store(out.at[row[:, None], column[None]], total, mask=there)
