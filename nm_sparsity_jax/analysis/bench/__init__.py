"""Packed weights against dense ones on this machine: time, bytes, and what is possible at most.

    from nm_sparsity_jax import bench

    print(bench.products([(1024, 4096, 1)], "1:8"))       # products alone, random weights

    found = bench.bench(network, params, rules, batch=1)   # finalized, or packed
    found.wholes[0].times, found.wholes[0].bound           # faster; at most

What stands where:

    timing      calls in turns -> seconds; which clock, how many threads
    layers      one product: dense, packed -> Product
    networks    what a network computes at once: a pass, the inputs of a T5, its next token -> Whole
    measuring   all of them -> Found
"""

from nm_sparsity_jax.analysis.bench.layers import Product
from nm_sparsity_jax.analysis.bench.measuring import Found, bench, products
from nm_sparsity_jax.analysis.bench.networks import Whole

__all__ = ["Found", "Product", "Whole", "bench", "products"]
