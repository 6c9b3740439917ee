"""How much arithmetic a pattern and a schedule cost: FLOPs and parameters of a network.

    shape -> ops (dense, forward, one example) -> x density  = inference
                                               -> x timeline = training

Plain Python numbers: nothing here touches an array, so a 100,000-step run of an 11B model is
priced in milliseconds. What is counted:

- One multiply-add is two FLOPs, as in Tables 1, 17 and 18 of "Progressive Gradient Flow for
  Robust N:M Sparsity Training in Transformers" (arXiv 2402.04744). Only matrix products count;
  and convolutions, which are matrix products too; softmax, norms, activations, pooling, table
  look-ups, optimizer and mask selection do not.
- One example is one sequence pair (T5, teacher-forced) or one image. Attention is counted
  over the full square, also where it is causal: that is what the matrix product computes.
- FLOPs of an n:m matrix are n/m of the dense ones: an ideal machine. `flops` prices the
  arithmetic; what hardware makes of it is measured elsewhere.
"""

from nm_sparsity_jax.flops.costs import Kernel, Priced, inference, kernels, price, training
from nm_sparsity_jax.flops.ops import Cost, Op, Shape
from nm_sparsity_jax.flops.t5 import T5Shape
from nm_sparsity_jax.flops.vision import ResNetShape, SwinShape, ViTShape

__all__ = [
    "Cost", "Kernel", "Op", "Priced", "ResNetShape", "Shape", "SwinShape", "T5Shape", "ViTShape",
    "inference", "kernels", "price", "training",
]  # fmt: skip
