"""Keeps the former path of `nm_sparsity_jax.models.t5` for gin files and programs of users."""

from nm_sparsity_jax.models.t5 import T5Config, Transformer

__all__ = ["T5Config", "Transformer"]
