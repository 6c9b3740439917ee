"""Shapes of ViT and T5: their sizes, and the operations that follow from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from nm_sparsity_jax.flops.ops import Op, is_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTShape:
  """A Vision Transformer (arXiv 2010.11929); the defaults are ViT-Base/16 at 224 x 224.

  The paper's totals (Tables 1, 17, 18) are `attention` + `ff` without a [CLS] token: patch
  embedding, head, norms and biases are not in them, and are apart here:

  >>> from nm_sparsity_jax.flops import Cost
  >>> paper = Cost(ViTShape().ops()).select("attention", "ff")
  >>> round(paper.flops / 1e9, 2)
  34.71

  Attributes:
    layers: Transformer blocks.
    embed: width d of the residual stream.
    mlp: width of the MLP.
    heads: attention heads.
    head_dim: width of a head.
    gated: two input kernels (wi_0 * wi_1) in the MLP instead of one.
    tokens: image patches n.
    class_token: whether a [CLS] token is prepended (n + 1 tokens in every block).
    patch: numbers in a patch, 16 * 16 * 3.
    classes: outputs of the head; 0 = no head.
    bias: whether kernels have one.
  """

  layers: int = 12
  embed: int = 768
  mlp: int = 3072
  heads: int = 12
  head_dim: int = 64
  gated: bool = False
  tokens: int = 196
  class_token: bool = False
  patch: int = 768
  classes: int = 1000
  bias: bool = True

  def __post_init__(self):
    _check_sizes(self, zero=("classes",))

  def ops(self) -> tuple[Op, ...]:
    """Returns the dense forward FLOPs for one image, and all parameters."""
    n, d, layers = self.tokens + self.class_token, self.embed, self.layers
    joined = self.heads * self.head_dim
    wi = 1 + self.gated
    ops = [
      Op(
        name="encoder/patch_embedding",
        role="embedding",
        place="encoder",
        flops=2 * self.tokens * self.patch * d,
        params=self.patch * d + d * self.class_token,
        axis=self.patch,
      ),
      Op(name="encoder/position", role="position", place="encoder", params=n * d),
      *_attention("encoder/self", layers, n, n, d, joined),
      *_mlp("encoder", layers, n, d, self.mlp, self.gated),
      Op(name="encoder/norm", role="norm", place="encoder", params=2 * d * (2 * layers + 1)),
    ]
    if self.bias:
      ops.append(
        Op(
          name="encoder/bias",
          role="bias",
          place="encoder",
          params=layers * (3 * joined + d + wi * self.mlp + d) + d + self.classes,
        )
      )
    if self.classes:
      ops.append(
        Op(
          name="encoder/logits",
          role="logits",
          place="encoder",
          flops=2 * d * self.classes,
          params=d * self.classes,
          axis=d,
        )
      )
    return tuple(ops)


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
    _check_sizes(self, zero=("buckets",))

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
      *_attention("encoder/self", enc, source, source, d, joined),
      *_mlp("encoder", enc, source, d, self.mlp, self.gated),
      Op(name="encoder/norm", role="norm", place="encoder", params=d * (2 * enc + 1)),
      Op(
        name="decoder/self/position",
        role="position",
        place="decoder/self",
        params=self.heads * self.buckets,
      ),
      *_attention("decoder/self", dec, target, target, d, joined),
      *_attention("decoder/cross", dec, target, source, d, joined),
      *_mlp("decoder", dec, target, d, self.mlp, self.gated),
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


def _attention(
  place: str, layers: int, queries: int, keys: int, embed: int, joined: int
) -> tuple[Op, ...]:
  """Returns multi-head attention of `queries` over `keys` tokens; joined = heads * head_dim."""

  def kernel(role: str, tokens: int, axis: int) -> Op:
    return Op(
      name=f"{place}/{role}",
      role=role,
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * joined * layers,
      params=embed * joined * layers,
    )

  square = 2 * queries * keys * joined * layers
  return (
    kernel("q", queries, embed),
    kernel("k", keys, embed),
    kernel("v", keys, embed),
    Op(name=f"{place}/scores", role="scores", place=place, flops=square),
    Op(name=f"{place}/values", role="scores", place=place, flops=square),
    kernel("o", queries, joined),
  )


def _mlp(place: str, layers: int, tokens: int, embed: int, mlp: int, gated: bool) -> tuple[Op, ...]:
  """Returns (wi_0, wi_1, wo) where gated, else (wi, wo)."""
  kernels = [(name, embed) for name in (("wi_0", "wi_1") if gated else ("wi",))] + [("wo", mlp)]
  return tuple(
    Op(
      name=f"{place}/{name}",
      role="ff",
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * mlp * layers,
      params=embed * mlp * layers,
    )
    for name, axis in kernels
  )


def _check_sizes(shape: Any, zero: tuple[str, ...]) -> None:
  """Refuses a size that is no positive int; those in `zero` may be 0."""
  for field in dataclasses.fields(shape):
    value = getattr(shape, field.name)
    if field.type == "bool":
      if not isinstance(value, bool):
        raise ValueError(f"{type(shape).__name__}({field.name}={value!r}): give True or False.")
    elif not (value is None and field.default is None):
      least = 0 if field.name in zero else 1
      if not (is_int(value) and value >= least):
        raise ValueError(
          f"{type(shape).__name__}({field.name}={value!r}): a size counts things, "
          f"so it must be an int >= {least}."
        )
