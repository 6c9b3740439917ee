"""Arrays that XLA on a CPU computes once instead of once for every use.

Elementwise work is fused into each consumer and computed again there, m times where the consumer
broadcasts a group's value over the group. An integer remainder counts as too expensive for that,
and one by a value that no array holds changes nothing. (An optimization_barrier is dropped on CPU.)

It is a primitive of its own, for `lax.platform_dependent` leaves two conditionals in the program
wherever it stands, which take time to trace and to remove.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_once = Primitive("nm_computed_once")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
batching.defvectorized(_once)


def computed_once(x: jax.Array) -> jax.Array:
  """Returns x itself, computed once on a CPU.

  Args:
    x: unsigned integers below the largest of their type.
  """
  return _once.bind(x)


def _remainder(x):
  return lax.rem(x, x.dtype.type(np.iinfo(x.dtype).max))


mlir.register_lowering(_once, lambda _, x: [x])
mlir.register_lowering(_once, mlir.lower_fun(_remainder, multiple_results=False), platform="cpu")
