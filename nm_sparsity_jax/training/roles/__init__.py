"""The one vocabulary of places: what 'ff', 'qkv' or 'decoder/cross/q' names in each family.

    'decoder/cross/qkv' -> [roles] -> a test of whole parameter paths -> rules
    parameter path      -> [roles] -> its role                        -> plan, flops, report, scores

A family of models says by regexes how it names its kernels. `register` adds a family from outside;
nothing else in the package knows the names that a family gives to its parameters. Those of this
package are T5's, flax's ViT and its attention, timm's names (of the vision models here),
big_vision's, Kauldron's and jimm's.

>>> role_of("layers_0/blocks_1/attn/q/kernel"), role_of("layer1_0/downsample_conv/kernel")
('q', 'shortcut')
"""

from nm_sparsity_jax.training.roles import families as _models  # noqa: F401, registers all of this package
from nm_sparsity_jax.training.roles.comparing import put_together, single, text_of
from nm_sparsity_jax.training.roles.matching import PathTest, Table, compiled, matches
from nm_sparsity_jax.training.roles.registry import (
  COMPOSITES,
  Family,
  check_word,
  families,
  narrowing,
  narrowing_text,
  path_test,
  regexes,
  register,
  role_of,
  roles_of,
)

__all__ = [
    "COMPOSITES", "Family", "PathTest", "check_word", "compiled",
    "Table", "families", "matches", "narrowing", "narrowing_text", "path_test",
    "put_together", "regexes", "register", "role_of", "roles_of", "single", "text_of",
]  # fmt: skip
