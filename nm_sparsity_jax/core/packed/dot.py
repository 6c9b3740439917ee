"""x . W of a packed weight W: one call for every backend, with the gradient with respect to x.

    x (..., depth), NMPacked -> choice -> xla or cpu -> (..., features)
    NMPacked, rows of x -> [prepare] -> what the chosen backend reads, or a plain array

The weight is deployed and does not learn: its indices are integers, of which jax has no gradient.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.packed import choice, cpu, xla
from nm_sparsity_jax.core.packed.array import NMPacked, unpack

BACKENDS = ("auto", "cpu_ffi", "xla_scan", "unpack")


def nm_dot(x: jax.Array, packed: NMPacked | jax.Array, backend: str = "auto") -> jax.Array:
  """Returns x . W over the last axis of x, in the dtype of x. Sums are float32.

  It can be differentiated with respect to x, and mapped by `vmap`. Where x is inf or NaN at a
  pruned weight, a dense product is NaN and this is not.

  >>> w = pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))
  >>> nm_dot(jnp.array([[1.0, 2.0]]), w).tolist()
  [[10.0, 3.0]]

  Args:
    x: floats [..., depth].
    packed: the weight; or a plain array (depth, features), which `prepare` returns where a dense
      product is faster.
    backend: 'cpu_ffi', 'xla_scan' or 'unpack'; 'auto' takes the fastest by a measured table.

  Raises:
    ValueError: the depths differ, or the backend is unknown or cannot be used here.
  """
  if x.shape[-1:] != packed.shape[:1]:
    raise ValueError(
      f"x of shape {x.shape} and a weight of shape {packed.shape} do not fit: the last axis of x "
      "must be as long as the weight is deep."
    )
  if not isinstance(packed, NMPacked):
    return xla.product(x, packed).astype(x.dtype)
  lead = x.shape[:-1]
  batch = math.prod(lead)
  backend = _chosen(packed, batch, backend, dense=False)
  if not batch * packed.features * packed.rows:  # a scan over no rows is an error
    return jnp.zeros((*lead, packed.features), x.dtype)
  y: jax.Array = _dot(backend, x.reshape(batch, x.shape[-1]), packed)
  return y.reshape(*lead, packed.features)


def prepare(
  packed: NMPacked, batch: int, backend: str = "auto", memory: bool = False
) -> NMPacked | jax.Array:
  """Returns a weight as the fastest product with `batch` rows of x reads it. Call it outside jit.

  Where nothing beats a dense product this is the dense weight, in a plain array: making it inside
  jit, at each call, costs ten times as much as the product. On a CPU the array is float32, since
  XLA multiplies shorter floats several times more slowly there.

  >>> w = pack(np.array([[0, 3], [5, 0]], np.float32), NM(1, 2))
  >>> type(prepare(w, batch=1, memory=True)).__name__
  'NMPacked'

  Args:
    packed: the weight.
    batch: rows of x in one call: batch x beams in a decoder, batch x tokens in an encoder.
    backend: as in `nm_dot`.
    memory: keep it packed also where a dense product is faster.
  """
  backend = _chosen(packed, batch, backend, dense=not memory)
  if backend == "dense":
    w = jnp.asarray(unpack(packed))
    return w.astype(jnp.float32) if jax.default_backend() == "cpu" else w
  ready = xla.prepare(packed) if backend == "xla_scan" else packed
  return jax.tree.map(jnp.asarray, ready)


def _chosen(packed: NMPacked, batch: int, backend: str, dense: bool) -> str:
  if backend == "auto":
    return choice.best(packed, batch, dense)
  missing = cpu.missing(packed) if backend == "cpu_ffi" else ""
  if missing or backend not in BACKENDS:
    unknown = f"is unknown: take one of {', '.join(BACKENDS)}"
    raise ValueError(f"backend {backend!r} {missing and f'cannot be used: {missing}' or unknown}.")
  return backend


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(backend: str, x: jax.Array, packed: NMPacked) -> jax.Array:
  products = {"cpu_ffi": cpu.dot, "xla_scan": xla.scan, "unpack": xla.unpacked}
  return products[backend](x, packed).astype(x.dtype)


def _backward(backend: str, packed: NMPacked, dy: jax.Array) -> tuple[jax.Array, None]:
  del backend
  # dx = (dy * scale) . W^T, and the weight is made for it.
  dx = xla.product(xla.scaled(dy, packed), xla.dense(packed).T)
  return dx.astype(dy.dtype), None


_dot.defvjp(lambda backend, x, packed: (_dot(backend, x, packed), packed), _backward)
