"""Packed weights against dense ones on this machine: time and bytes.

from nm_sparsity_jax import bench

print(bench.products([(1024, 4096, 1)], "1:8"))       # products alone, random weights

found = bench.bench(network, tree, batch=1)            # of inference_tree.pack_tree
found.timings[0].times                                 # faster
"""

from nm_sparsity_jax.analysis.bench.layers import products
from nm_sparsity_jax.analysis.bench.networks import bench
from nm_sparsity_jax.analysis.bench.timing import Found, Timing

__all__ = ["Found", "Timing", "bench", "products"]
