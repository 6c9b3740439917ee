"""One weight that is n:m, kept without its zeros.

    weight (exact zeros) -> [pack] -> NMPacked(values, indices, scale) -> [unpack] -> the same bits

The canonical layout is one for memory, files and backends. `array` knows it, `bits` knows how
indices share bytes.
"""

from nm_sparsity_jax.packed.array import (
  MOST,
  NMPacked,
  Sizes,
  check,
  lost_signs,
  pack,
  sizes,
  sparse_operand,
  unpack,
)

__all__ = [
  "MOST", "NMPacked", "Sizes", "check", "lost_signs", "pack", "sizes", "sparse_operand", "unpack",
]  # fmt: skip
