"""Keeps the former path of `nm_sparsity_jax.models.t5.layers`: the same objects."""

from nm_sparsity_jax.models.t5.layers import *  # noqa: F403
