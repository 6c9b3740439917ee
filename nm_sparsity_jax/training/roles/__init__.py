"""Roles of kernels: what 'ff', 'qkv' or 'decoder/cross/q' names in each family of models.

    'decoder/cross/qkv' -> [matcher] -> a test of whole parameter paths -> rules
    parameter path      -> [role_of] -> its role                        -> plan, flops, scores

`families` is the table: T5's names, flax's ViT and its attention, timm's (of the vision models
here), big_vision's, Kauldron's and jimm's. `register` adds a family from outside.

>>> role_of("layers_0/blocks_1/attn/q/kernel"), role_of("layer1_0/downsample_conv/kernel")
('q', 'shortcut')
"""

from nm_sparsity_jax.training.roles import families as _table  # noqa: F401, registers its families
from nm_sparsity_jax.training.roles.registry import (
  COMPOSITES,
  Family,
  matcher,
  regexes,
  register,
  role_of,
  roles_of,
)

__all__ = [
    "COMPOSITES", "Family", "matcher", "regexes", "register", "role_of",
    "roles_of",
]  # fmt: skip
