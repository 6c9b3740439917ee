"""Products of a packed weight by the C++ kernels of `native/`, on a CPU.

    x (batch, depth), NMPacked -> [dot] -> jax.ffi -> libnm_sparsity -> (batch, features), float32

setup.py builds the library where a compiler is. Without it everything else works, and `missing`
says why. It holds a kernel for each instruction set, and takes the best that this machine has.
"""

from __future__ import annotations

import ctypes
import functools

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.packed.array import NMPacked

ISAS = {"best": 0, "portable": 1, "avx2": 2, "avx512": 3}
VALUES = ("float32", "bfloat16", "int8")
_TARGET = "nm_sparsity_dot"


@functools.cache
def _registered() -> tuple[ctypes.CDLL | None, str]:
  # Once a process: jax keeps the handler, and a second one of the same name is an error.
  library, why = installed.kernels()
  if library is None:
    return None, why
  try:
    handler = jax.ffi.pycapsule(library.nm_sparsity_dot)
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
  except Exception as e:  # a jaxlib with another interface
    return None, f"{installed.LIBRARY} does not fit this jaxlib: {str(e).splitlines()[0]}"
  return library, ""


def missing(packed: NMPacked | None = None) -> str:
  """Says why the kernels cannot be used, or not for this weight; '' where they can."""
  _, why = _registered()
  if not why and packed is not None and packed.values.dtype.name not in VALUES:
    why = f"they take values of {', '.join(VALUES)}, not {packed.values.dtype}"
  return why


def isa(name: str = "best") -> str:
  """Returns the name of an instruction set; '' where this machine or the library lacks it."""
  library, _ = _registered()
  return library.nm_sparsity_isa(ISAS[name]).decode() if library else ""


def dot(x: jax.Array, packed: NMPacked, isa: str = "best", threads: int = 0) -> jax.Array:
  """Returns x . W: float32 [batch, features].

  Args:
    x: [batch, depth] of any float.
    packed: values of `VALUES`.
    isa: one of `ISAS`.
    threads: of XLA's pool that share the columns at most; 0 for all.
  """
  _registered()
  settings = {"n": packed.n, "m": packed.m, "bits": packed.bits, "isa": ISAS[isa],
              "threads": threads}  # fmt: skip
  scale = jnp.zeros((0,), jnp.float32) if packed.scale is None else packed.scale
  out = jax.ShapeDtypeStruct((x.shape[0], packed.features), jnp.float32)
  call = jax.ffi.ffi_call(_TARGET, out, vmap_method="sequential")
  static = {name: np.int64(value) for name, value in settings.items()}
  return call(x.astype(jnp.float32), packed.values, packed.indices, scale, **static)
