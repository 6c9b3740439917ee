"""Keeps the former path of `nm_sparsity_jax.models.t5.network`: the same objects."""

from nm_sparsity_jax.models.t5.network import *  # noqa: F403
