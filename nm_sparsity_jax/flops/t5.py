"""The shape of a T5: its sizes, and the operations that follow from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from nm_sparsity_jax.flops import parts
from nm_sparsity_jax.flops.ops import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Shape:
  """An encoder-decoder with T5's parameter tree (arXiv 1910.10683; T5.1.1 by default).

  No biases, RMS norms (a scale each), one table of relative-position biases for the encoder and
  one for the decoder, shared by their layers. T5.1.1: `gated=True, tied=False`; T5.1.0:
  `gated=False, tied=True`.

  >>> from nm_sparsity_jax.flops import Cost
  >>> base = T5Shape(layers=12, embed=768, mlp=2048, heads=12, input_length=512,
  ...                target_length=128)
  >>> Cost(base.ops()).params
  247577856

  Attributes:
    layers: encoder layers.
    decoder_layers: decoder layers; None = as many.
    embed: width d of the residual stream.
    mlp: width of the MLP.
    heads: attention heads.
    head_dim: width of a head; heads * head_dim need not be `embed`.
    gated: two input kernels (wi_0 * wi_1) in the MLP instead of one (wi).
    vocab: rows of the embedding table, padding included.
    tied: logits by the embedding table; False = a kernel of their own.
    buckets: relative-position buckets; 0 = no such biases.
    input_length: tokens of an example that the encoder reads, padding included.
    target_length: tokens of an example that the decoder reads, padding included.
  """

  layers: int
  decoder_layers: int | None = None
  embed: int
  mlp: int
  heads: int
  head_dim: int = 64
  gated: bool = True
  vocab: int = 32128
  tied: bool = False
  buckets: int = 32
  input_length: int
  target_length: int

  def __post_init__(self):
    parts.check_sizes(self, zero=("buckets",))

  @classmethod
  def of(cls, config: Any, input_length: int, target_length: int) -> T5Shape:
    """Returns the shape of a network: of a `models.t5.T5Config`, or one with its names."""
    return cls(
      layers=config.num_encoder_layers,
      decoder_layers=config.num_decoder_layers,
      embed=config.emb_dim,
      mlp=config.mlp_dim,
      heads=config.num_heads,
      head_dim=config.head_dim,
      gated=len(config.mlp_activations) > 1,
      vocab=config.vocab_size,
      tied=config.logits_via_embedding,
      input_length=input_length,
      target_length=target_length,
    )

  def ops(self) -> tuple[Op, ...]:
    """Returns the dense forward FLOPs for one (input, target) pair, and all parameters."""
    d, joined = self.embed, self.heads * self.head_dim
    source, target = self.input_length, self.target_length
    enc = self.layers
    dec = enc if self.decoder_layers is None else self.decoder_layers
    return (
      Op(name="shared/embedding", role="embedding", place="shared", params=self.vocab * d),
      Op(
        name="encoder/self/position",
        role="position",
        place="encoder/self",
        params=self.heads * self.buckets,
      ),
      *parts.attention("encoder/self", enc, source, source, d, joined),
      *parts.mlp("encoder", enc, source, d, self.mlp, self.gated),
      Op(name="encoder/norm", role="norm", place="encoder", params=d * (2 * enc + 1)),
      Op(
        name="decoder/self/position",
        role="position",
        place="decoder/self",
        params=self.heads * self.buckets,
      ),
      *parts.attention("decoder/self", dec, target, target, d, joined),
      *parts.attention("decoder/cross", dec, target, source, d, joined),
      *parts.mlp("decoder", dec, target, d, self.mlp, self.gated),
      Op(name="decoder/norm", role="norm", place="decoder", params=d * (3 * dec + 1)),
      Op(
        name="decoder/logits",
        role="logits",
        place="decoder",
        flops=2 * target * d * self.vocab,
        params=0 if self.tied else d * self.vocab,
        axis=d,
      ),
    )
