"""Which weights survive: scores in, boolean masks out. True means kept.

    params + step -> recipe -> [mask] -> effective weight -> layer -> loss

Pure functions of arrays; steps, schedules, Flax and T5X live downstream. Nothing is
sorted, gathered or transposed. Every pass is elementwise or reduces within a group, so
any axis of any rank works, and a sharded array needs no communication as long as each
shard holds whole groups.
"""

from nm_sparsity_jax.core.masks.making import Axis, check_axis, magnitude_mask, nm_mask
from nm_sparsity_jax.core.masks.once import computed_once

__all__ = ["Axis", "check_axis", "computed_once", "magnitude_mask", "nm_mask"]
