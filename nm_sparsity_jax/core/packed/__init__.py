"""One weight that is n:m, kept without its zeros.

    weight (exact zeros) -> [pack] -> NMPacked(values, indices, scale) -> [unpack] -> the same bits

The canonical layout is one for memory, files and backends; `array` knows it. `dot` multiplies:
`choice` says by which backend, `xla` or `cpu` with the C++ kernels of native/.
"""

from nm_sparsity_jax.core.packed.array import (  # fmt: skip
  MOST,
  NMPacked,
  check,
  like,
  pack,
  unpack,
)
from nm_sparsity_jax.core.packed.dot import BACKENDS, nm_dot, prepare

__all__ = [
  "BACKENDS", "MOST", "NMPacked", "check", "like", "nm_dot", "pack", "prepare", "unpack",
]  # fmt: skip
