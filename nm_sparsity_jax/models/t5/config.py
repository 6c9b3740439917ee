"""Sizes and choices of a T5, and those of the published ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from nm_sparsity_jax.core.errors import choose

# emb_dim, num_heads, layers of encoder and of decoder, head_dim, mlp_dim
SIZES = {
  "t5_1_1": {
    "tiny": (128, 4, 2, 32, 256),
    "small": (512, 6, 8, 64, 1024),
    "base": (768, 12, 12, 64, 2048),
    "large": (1024, 16, 24, 64, 2816),
    "xl": (2048, 32, 24, 64, 5120),
    "xxl": (4096, 64, 24, 64, 10240),
  },
  "t5_1_0": {
    "tiny": (128, 4, 2, 32, 256),
    "small": (512, 8, 6, 64, 2048),
    "base": (768, 12, 12, 64, 3072),
    "large": (1024, 16, 24, 64, 4096),
    "3B": (1024, 32, 24, 128, 16384),
    "11B": (1024, 128, 24, 128, 65536),
  },
  "wmt": {"table_16": (1024, 16, 6, 64, 4096)},
}
_VOCABULARY = 32128  # T5's 32,000 pieces and 100 sentinels, rounded up to a multiple of 128


@struct.dataclass
class T5Config:
  """Sizes and choices of a T5; the fields of T5X's `T5Config`, and those from `remat_policy` on.

  >>> T5Config.preset("t5_1_1", "small", dropout_rate=0.0).mlp_activations
  ('gelu', 'linear')

  Attributes:
    vocab_size: rows of the token embedding.
    dtype: of the computation; parameters are float32.
    emb_dim: width of the residual stream.
    num_heads: attention heads.
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    head_dim: width of a head.
    mlp_dim: width of the feed-forward block.
    mlp_activations: one for each of its input projections: 'linear', the name of a function in
      flax.linen, or a function.
    dropout_rate: of every dropout.
    logits_via_embedding: the logits come from the token embedding (T5.1.0), not from a projection
      of their own (T5.1.1).
    float32_attention_logits: compute attention logits in float32 whatever `dtype` is.
    remat_policy: what the backward pass finds stored. 'none': everything; 'minimal': products
      with weights; 'full': nothing, all of a layer is computed again.
    scan_layers: scan over the layers of a stack, which stacks their parameters along axis 1.
  """

  vocab_size: int
  dtype: Dtype = jnp.float32
  emb_dim: int = 512
  num_heads: int = 8
  num_encoder_layers: int = 6
  num_decoder_layers: int = 6
  head_dim: int = 64
  mlp_dim: int = 2048
  mlp_activations: Sequence[str | Callable] = ("relu",)
  dropout_rate: float = 0.1
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  remat_policy: str = "none"
  scan_layers: bool = False

  def __post_init__(self):
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))  # a list in gin

  @classmethod
  def preset(cls, version: str, size: str, **overrides: Any) -> T5Config:
    """Returns one of `SIZES`, with some fields changed.

    T5.1.1 has a gated GELU and logits of its own. T5.1.0 has ReLU and logits via the embedding. So
    has 'wmt', the translation model of the N:M paper's Table 16. The table does not give them; they
    are those of the Transformer that it follows (Vaswani et al. 2017, arXiv:1706.03762).

    Args:
      version: 't5_1_1', 't5_1_0' or 'wmt'.
      size: such as 'small'; that of 'wmt' is 'table_16'.
      **overrides: fields of `T5Config`.
    """
    sizes = choose(SIZES, "T5_VERSION", version)
    emb_dim, num_heads, depth, head_dim, mlp_dim = choose(sizes, "T5_SIZE", size)
    # T5.1.1 gates its MLP and has logits of its own; all others are as the first T5.
    is_gated = version == "t5_1_1"
    fields: dict[str, Any] = dict(
      vocab_size=_VOCABULARY, emb_dim=emb_dim, num_heads=num_heads, head_dim=head_dim,
      mlp_dim=mlp_dim, num_encoder_layers=depth, num_decoder_layers=depth,
      mlp_activations=("gelu", "linear") if is_gated else ("relu",),
      logits_via_embedding=not is_gated,
    )  # fmt: skip
    return cls(**(fields | overrides))
