"""T5.1.1, T5.1.0 and the paper's translation model: an encoder and a decoder of our layers.

    params, step, stored masks -> rules -> every projection's W~ -> [Transformer] -> logits

The parameter tree, the logical axes and `encode`, `decode`, `__call__` are T5X's, so its
checkpoints load and its models take this module. Two trees exist, as there:

    scan_layers=False  T5X's examples/t5: encoder/layers_0/mlp/wi/kernel (embed, mlp), ...; the
                       layers of a stack share one relative position table
    scan_layers=True   T5X's examples/scalable_t5: encoder/encoder/mlp/wi/kernel (embed, layers,
                       mlp), ...; one compilation serves all layers, each layer has a relative
                       position table, attention kernels keep heads and kv apart

Reference: Raffel et al., JMLR 2020, arXiv:1910.10683; T5.1.1: Shazeer, GLU Variants Improve
Transformer, 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.linen import partitioning, spmd
from flax.typing import Dtype
from jax import checkpoint_policies as keep

from nm_sparsity_jax.layers import COLLECTION, STATE_COLLECTION
from nm_sparsity_jax.models.t5 import layers
from nm_sparsity_jax.rules import Rules

# emb_dim, num_heads, layers of encoder and of decoder, head_dim, mlp_dim
_T5_1_1 = {
  "tiny": (128, 4, 2, 32, 256),
  "small": (512, 6, 8, 64, 1024),
  "base": (768, 12, 12, 64, 2048),
  "large": (1024, 16, 24, 64, 2816),
  "xl": (2048, 32, 24, 64, 5120),
  "xxl": (4096, 64, 24, 64, 10240),
}
_T5_1_0 = {
  "tiny": (128, 4, 2, 32, 256),
  "small": (512, 8, 6, 64, 2048),
  "base": (768, 12, 12, 64, 3072),
  "large": (1024, 16, 24, 64, 4096),
  "3B": (1024, 32, 24, 128, 16384),
  "11B": (1024, 128, 24, 128, 65536),
}
_WMT = {"wmt": (1024, 16, 6, 64, 4096)}

_VOCABULARY = 32128  # T5's 32,000 pieces and 100 sentinels, rounded up to a multiple of 128

# What the backward pass does not compute again, beside the input of each layer.
_REMAT: dict[str, Callable | None] = {
  "minimal": keep.save_from_both_policies(
    keep.dots_with_no_batch_dims_saveable, keep.save_only_these_names("nm_mask")
  ),
  "nm_masks": keep.save_only_these_names("nm_mask"),
  "full": None,
}


@struct.dataclass
class T5Config:
  """Sizes and choices of a T5; the fields of T5X's `T5Config`, and those from `rules` on.

  >>> T5Config.t5_1_1("small", dropout_rate=0.0).mlp_activations
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
    mlp_activations: one for each of its input projections; see `layers.MlpBlock`.
    dropout_rate: of every dropout.
    logits_via_embedding: the logits come from the token embedding (T5.1.0), not from a projection
      of their own (T5.1.1).
    float32_attention_logits: compute attention logits in float32 whatever `dtype` is.
    rules: what is sparse, and how; None = dense.
    remat_policy: what the backward pass finds stored. 'none': everything; 'minimal': products
      with weights, and N:M masks; 'nm_masks': N:M masks only; 'full': nothing, all of a layer is
      computed again.
    scan_layers: scan over the layers of a stack, which stacks their parameters.
    param_scan_axis: along which axis.
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
  rules: Rules | None = None
  remat_policy: str = "none"
  scan_layers: bool = False
  param_scan_axis: int = 1

  @classmethod
  def t5_1_1(cls, size: str, **overrides: Any) -> T5Config:
    """T5.1.1: gated GELU, logits of their own; 'tiny', 'small', 'base', 'large', 'xl', 'xxl'."""
    fields = dict(mlp_activations=("gelu", "linear"), logits_via_embedding=False)
    return cls._of_size(_T5_1_1, size, fields | overrides)

  @classmethod
  def t5_1_0(cls, size: str, **overrides: Any) -> T5Config:
    """T5.1.0: ReLU, logits via the embedding; 'tiny', 'small', 'base', 'large', '3B', '11B'."""
    fields = dict(mlp_activations=("relu",), logits_via_embedding=True)
    return cls._of_size(_T5_1_0, size, fields | overrides)

  @classmethod
  def preset(cls, version: str, size: str, **overrides: Any) -> T5Config:
    """`t5_1_1` or `t5_1_0`, by the name of the version."""
    versions = {"t5_1_1": cls.t5_1_1, "t5_1_0": cls.t5_1_0}
    if version not in versions:
      raise ValueError(f"T5 of version {version!r}: choose one of {', '.join(versions)}.")
    return versions[version](size, **overrides)

  @classmethod
  def wmt(cls, **overrides: Any) -> T5Config:
    """The translation model of the N:M paper's Table 16, 6 + 6 layers.

    The table says nothing on activation and logits; these are those of the Transformer that it
    follows (Vaswani et al. 2017, arXiv:1706.03762): ReLU, logits via the embedding.
    """
    fields = dict(mlp_activations=("relu",), logits_via_embedding=True)
    return cls._of_size(_WMT, "wmt", fields | overrides)

  @classmethod
  def _of_size(cls, sizes, size, fields) -> T5Config:
    if size not in sizes:
      raise ValueError(f"T5 of size {size!r}: choose one of {', '.join(sizes)}.")
    emb_dim, num_heads, depth, head_dim, mlp_dim = sizes[size]
    own = dict(vocab_size=_VOCABULARY, emb_dim=emb_dim, num_heads=num_heads, head_dim=head_dim)
    own |= dict(mlp_dim=mlp_dim, num_encoder_layers=depth, num_decoder_layers=depth)
    return cls(**(own | fields))


def _layer_norm(cfg: T5Config, name: str) -> layers.LayerNorm:
  return layers.LayerNorm(dtype=cfg.dtype, name=name)


def _attention(cfg: T5Config, name: str) -> layers.MultiHeadDotProductAttention:
  return layers.MultiHeadDotProductAttention(
    num_heads=cfg.num_heads,
    head_dim=cfg.head_dim,
    dtype=cfg.dtype,
    dropout_rate=cfg.dropout_rate,
    float32_logits=cfg.float32_attention_logits,
    split_kernels=cfg.scan_layers,
    rules=cfg.rules,
    name=name,
  )


def _mlp(cfg: T5Config) -> layers.MlpBlock:
  return layers.MlpBlock(
    intermediate_dim=cfg.mlp_dim,
    activations=cfg.mlp_activations,
    intermediate_dropout_rate=cfg.dropout_rate,
    dtype=cfg.dtype,
    rules=cfg.rules,
    name="mlp",
  )


def _dropout(cfg: T5Config) -> nn.Dropout:
  """For the residual stream: one draw serves all positions."""
  return nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))


def _relative_positions(cfg: T5Config) -> layers.RelativePositionBiases:
  return layers.RelativePositionBiases(
    num_buckets=32,
    max_distance=128,
    num_heads=cfg.num_heads,
    dtype=cfg.dtype,
    embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    name="relpos_bias",
  )


def _on_stream(x: jax.Array) -> jax.Array:
  """`x` with the logical axes of the residual stream [b, q, e]."""
  return spmd.with_logical_constraint(x, ("batch", "length", "embed"))


class EncoderLayer(nn.Module):
  """x + attention(norm x), then x + mlp(norm x).

  Attributes:
    config: sizes.
    relative_embedding: the table that the stack shares; None = the layer makes its own.
  """

  config: T5Config
  relative_embedding: nn.Module | None = None

  @nn.compact
  def __call__(
    self, inputs: jax.Array, encoder_mask: jax.Array | None = None, deterministic: bool = False
  ) -> jax.Array:
    """[b, q, e] -> [b, q, e]."""
    cfg = self.config
    length = inputs.shape[-2]
    positions: Any = self.relative_embedding or _relative_positions(cfg)
    bias = positions(length, length, True)
    inputs = _on_stream(inputs)
    x = _layer_norm(cfg, "pre_attention_layer_norm")(inputs)
    x = _attention(cfg, "attention")(x, x, encoder_mask, bias, deterministic=deterministic)
    x = _on_stream(inputs + _dropout(cfg)(x, deterministic))
    y = _layer_norm(cfg, "pre_mlp_layer_norm")(x)
    y = _mlp(cfg)(y, deterministic=deterministic)
    return _on_stream(x + _dropout(cfg)(y, deterministic))


class DecoderLayer(nn.Module):
  """x + self_attention(norm x), x + encoder_decoder_attention(norm x, encoded), x + mlp(norm x).

  Attributes:
    config: sizes.
    relative_embedding: the table that the stack shares; None = the layer makes its own.
  """

  config: T5Config
  relative_embedding: nn.Module | None = None

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    encoded: jax.Array,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """[b, q, e] and encoded [b, k, e] -> [b, q, e]; see `Transformer.decode`."""
    cfg = self.config
    length = max_decode_length if decode and max_decode_length else inputs.shape[-2]
    positions: Any = self.relative_embedding or _relative_positions(cfg)
    bias = positions(length, length, False)
    inputs = _on_stream(inputs)
    x = _layer_norm(cfg, "pre_self_attention_layer_norm")(inputs)
    x = _attention(cfg, "self_attention")(
      x, x, decoder_mask, bias, deterministic=deterministic, decode=decode
    )
    x = _on_stream(inputs + _dropout(cfg)(x, deterministic))
    y = _layer_norm(cfg, "pre_cross_attention_layer_norm")(x)
    y = _attention(cfg, "encoder_decoder_attention")(
      y, encoded, encoder_decoder_mask, deterministic=deterministic
    )
    y = _on_stream(x + _dropout(cfg)(y, deterministic))
    z = _layer_norm(cfg, "pre_mlp_layer_norm")(y)
    z = _mlp(cfg)(z, deterministic=deterministic)
    return _on_stream(y + _dropout(cfg)(z, deterministic))


def _through_layers(
  cfg: T5Config, layer_class: Any, depth: int, name: str, x: jax.Array, *context: Any, **static: Any
) -> jax.Array:
  """`x` through a stack of layers, one by one or scanned, each under remat if so configured.

  Args:
    cfg: the configuration.
    layer_class: `EncoderLayer` or `DecoderLayer`.
    depth: how many.
    name: of the scanned stack.
    x: [b, q, e].
    *context: arrays or None that every layer gets after `x`.
    **static: what is no array.
  """

  def run(layer, x, *context):
    return layer(x, *context, **static)

  if cfg.remat_policy not in (None, "none"):
    if cfg.remat_policy not in _REMAT:
      raise ValueError(
        f"remat_policy={cfg.remat_policy!r}: choose one of none, {', '.join(_REMAT)}."
      )
    # A scan keeps XLA from undoing the remat by itself; without one, it must be told.
    run = nn.remat(run, prevent_cse=not cfg.scan_layers, policy=_REMAT[cfg.remat_policy])
  if not cfg.scan_layers:
    positions = _relative_positions(cfg)
    for i in range(depth):
      x = run(layer_class(cfg, positions, name=f"layers_{i}"), x, *context)
    return x
  scan: Any = partitioning.scan_with_axes(
    lambda layer, x, *context: (run(layer, x, *context), None),
    variable_axes={
      "params": cfg.param_scan_axis,
      STATE_COLLECTION: cfg.param_scan_axis,
      "cache": 0,
    },
    variable_broadcast=COLLECTION,
    split_rngs={"params": True, "dropout": True},
    in_axes=nn.broadcast,  # type: ignore
    length=depth,
    axis_name="layers",
  )
  return scan(layer_class(cfg, name=name), x, *context)[0]


class Encoder(nn.Module):
  """Embedding, layers, norm.

  Attributes:
    config: sizes.
    shared_embedding: the token embedding, which the decoder uses too.
  """

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    encoder_mask: jax.Array | None = None,
    deterministic: bool = False,
  ) -> jax.Array:
    """Ids [b, k], mask [b, 1, k, k] -> [b, k, e]."""
    cfg = self.config
    embedding: Any = self.shared_embedding
    x = embedding(encoder_input_tokens.astype(jnp.int32))
    x = _dropout(cfg)(x, deterministic).astype(cfg.dtype)
    x = _through_layers(
      cfg,
      EncoderLayer,
      cfg.num_encoder_layers,
      "encoder",
      x,
      encoder_mask,
      deterministic=deterministic,
    )
    x = _layer_norm(cfg, "encoder_norm")(x)
    # T5X draws this one dropout anew for every position.
    return nn.Dropout(cfg.dropout_rate)(x, deterministic)


class Decoder(nn.Module):
  """Embedding, layers, norm, logits.

  Attributes:
    config: sizes.
    shared_embedding: the token embedding, which the encoder uses too.
  """

  config: T5Config
  shared_embedding: nn.Module

  @nn.compact
  def __call__(
    self,
    encoded: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_positions: jax.Array | None = None,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """encoded [b, k, e], ids [b, q] -> float32 logits [b, q, vocab]; see `Transformer.decode`."""
    del decoder_positions  # relative positions need none
    cfg = self.config
    embedding: Any = self.shared_embedding
    y = embedding(decoder_input_tokens.astype(jnp.int32))
    y = _dropout(cfg)(y, deterministic).astype(cfg.dtype)
    y = _through_layers(
      cfg,
      DecoderLayer,
      cfg.num_decoder_layers,
      "decoder",
      y,
      encoded,
      decoder_mask,
      encoder_decoder_mask,
      deterministic=deterministic,
      decode=decode,
      max_decode_length=max_decode_length,
    )
    y = _layer_norm(cfg, "decoder_norm")(y)
    y = _dropout(cfg)(y, deterministic)
    if cfg.logits_via_embedding:
      # Rows of the embedding have variance 1; this gives the logits the variance of a projection's.
      return embedding.attend(y) / jnp.sqrt(jnp.float32(cfg.emb_dim))
    return layers.DenseGeneral(
      cfg.vocab_size,
      dtype=jnp.float32,  # for a stable loss
      kernel_axes=("embed", "vocab"),
      rules=cfg.rules,
      name="logits_dense",
    )(y)


class Transformer(nn.Module):
  """An encoder-decoder; token id 0 is padding.

      variables = Transformer(config).init(key, inputs, shifted_targets, targets)
      logits = Transformer(config).apply(variables, inputs, shifted_targets, targets,
                                         enable_dropout=False)

  Where `config.rules` names a weight, `variables` must hold the step: `nms.layers.with_step`.
  """

  config: T5Config

  @property
  def scan_layers(self) -> bool:
    """T5X's models read this: the caches of scanned layers carry one axis more."""
    return self.config.scan_layers

  @nn.nowrap
  def dense_twin(self) -> Transformer:
    """The same network without rules, for `sparsify`d, `finalize`d or dense parameters."""
    return self.clone(config=self.config.replace(rules=None))  # type: ignore

  def setup(self):
    """The parts; encoder and decoder share the embedding."""
    cfg = self.config
    self.shared_embedding = layers.Embed(
      num_embeddings=cfg.vocab_size,
      features=cfg.emb_dim,
      dtype=cfg.dtype,
      attend_dtype=jnp.float32,  # for a stable loss
      embedding_init=nn.initializers.normal(stddev=1.0),
      one_hot=True,
      name="token_embedder",
    )
    self.encoder = Encoder(cfg, self.shared_embedding)
    self.decoder = Decoder(cfg, self.shared_embedding)

  def encode(
    self,
    encoder_input_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    enable_dropout: bool = True,
  ) -> jax.Array:
    """What the decoder attends to.

    Args:
      encoder_input_tokens: [b, k] ids, 0 = padding.
      encoder_segment_ids: [b, k], the number of the packed example; None = not packed.
      enable_dropout: as in training.

    Returns:
      [b, k, e].
    """
    tokens, ids, dtype = encoder_input_tokens > 0, encoder_segment_ids, self.config.dtype
    filled = layers.make_attention_mask(tokens, tokens, dtype=dtype)
    packed = None if ids is None else layers.make_attention_mask(ids, ids, jnp.equal, dtype=dtype)
    mask = layers.combine_masks(filled, packed, dtype=dtype)
    return self.encoder(encoder_input_tokens, mask, deterministic=not enable_dropout)

  def decode(
    self,
    encoded: jax.Array,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    enable_dropout: bool = True,
    decode: bool = False,
    max_decode_length: int | None = None,
  ) -> jax.Array:
    """Logits for every position, or for the next one.

    Args:
      encoded: [b, k, e], of `encode`.
      encoder_input_tokens: [b, k], for the masks.
      decoder_input_tokens: [b, q], the targets shifted right by one; [b, 1] when decoding.
      decoder_target_tokens: [b, q], for the masks; not read when decoding.
      encoder_segment_ids: [b, k], the number of the packed example; None = not packed.
      decoder_segment_ids: [b, q], likewise.
      decoder_positions: not read; relative positions need none.
      enable_dropout: as in training.
      decode: one position a call, through the collection 'cache', which must be mutable. `init`
        with decode=True and inputs of the full length makes it.
      max_decode_length: the length of the cache; needed when decoding.

    Returns:
      [b, q, vocab], float32.
    """
    dtype = self.config.dtype
    sources, targets = encoder_input_tokens > 0, decoder_target_tokens > 0
    packed = None
    if encoder_segment_ids is not None:
      if decode or decoder_segment_ids is None:
        raise ValueError(
          "encoder_segment_ids say that examples are packed: then decoder_segment_ids must say so "
          "too, and decode=True is not possible. Decode unpacked examples, without segment ids."
        )
      packed = layers.make_attention_mask(
        decoder_segment_ids, encoder_segment_ids, jnp.equal, dtype=dtype
      )
    if decode:
      # What comes next is not known yet, so no target is padding; the cache knows the past.
      decoder_mask, targets = None, jnp.ones_like(targets)
    else:
      decoder_mask = layers.make_decoder_mask(
        decoder_target_tokens, dtype, decoder_segment_ids=decoder_segment_ids
      )
    cross = layers.make_attention_mask(targets, sources, dtype=dtype)
    return self.decoder(
      encoded,
      decoder_input_tokens,
      decoder_mask=decoder_mask,
      encoder_decoder_mask=layers.combine_masks(cross, packed, dtype=dtype),
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
    )

  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    encoder_positions: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    *,
    enable_dropout: bool = True,
    decode: bool = False,
  ) -> jax.Array:
    """`decode` after `encode`; their arguments. Positions are not read.

    Returns:
      [b, q, vocab], float32.
    """
    del encoder_positions
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids, enable_dropout)
    return self.decode(
      encoded,
      encoder_input_tokens,
      decoder_input_tokens,
      decoder_target_tokens,
      encoder_segment_ids,
      decoder_segment_ids,
      decoder_positions,
      enable_dropout,
      decode,
    )
