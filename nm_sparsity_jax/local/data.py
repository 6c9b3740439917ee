"""Names for gin files: T5's training data, which `workloads.text` reads."""

from nm_sparsity_jax.workloads.text import (
  Source,
  check_vocabulary,
  import_seqio,
  mixture,
  mixture_or_task,
)

__all__ = ["Source", "check_vocabulary", "import_seqio", "mixture", "mixture_or_task"]
