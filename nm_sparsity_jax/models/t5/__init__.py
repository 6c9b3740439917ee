"""T5 from the layers of this package, with T5X's parameter tree and module interface."""

from nm_sparsity_jax.models.t5.network import T5Config, Transformer

__all__ = ["T5Config", "Transformer"]
