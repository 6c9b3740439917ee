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

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nm_sparsity_jax.models.t5 import layers
from nm_sparsity_jax.models.t5.attention import PREPARED
from nm_sparsity_jax.models.t5.config import T5Config
from nm_sparsity_jax.models.t5.stacks import (
  DecoderLayer,
  EncoderLayer,
  dropout,
  layer_norm,
  through_layers,
)


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
    gather: bool = False,
  ) -> jax.Array:
    """Maps ids [b, k] and mask [b, 1, k, k] to [b, k, e]; `gather` is that of `Embed`."""
    cfg = self.config
    embedding: Any = self.shared_embedding
    x = embedding(encoder_input_tokens.astype(jnp.int32), gather=gather)
    x = dropout(cfg)(x, deterministic).astype(cfg.dtype)
    x = through_layers(
      cfg,
      EncoderLayer,
      cfg.num_encoder_layers,
      "encoder",
      x,
      encoder_mask,
      deterministic=deterministic,
    )
    x = layer_norm(cfg, "encoder_norm")(x)
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
    encoded: jax.Array | None,
    decoder_input_tokens: jax.Array,
    decoder_positions: jax.Array | None = None,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    position: jax.Array | None = None,
  ) -> jax.Array:
    """Maps encoded [b, k, e], ids [b, q] to float32 logits [b, q, vocab]; `Transformer.decode`."""
    del decoder_positions  # relative positions need none
    cfg = self.config
    embedding: Any = self.shared_embedding
    y = embedding(decoder_input_tokens.astype(jnp.int32), gather=position is not None)
    y = dropout(cfg)(y, deterministic).astype(cfg.dtype)
    y = through_layers(
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
      position=position,
    )
    y = layer_norm(cfg, "decoder_norm")(y)
    y = dropout(cfg)(y, deterministic)
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
    """Returns whether layers are scanned. T5X's models read it: such caches have one more axis."""
    return self.config.scan_layers

  @nn.nowrap
  def dense_twin(self) -> Transformer:
    """Returns the same network without rules, for `sparsify`d, `finalize`d or dense parameters."""
    return self.clone(config=self.config.replace(rules=None))  # type: ignore

  def setup(self):
    """Makes the parts; encoder and decoder share the embedding."""
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
    """Returns what the decoder attends to.

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
    """Returns logits for every position, or for the next one.

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
          "encoder_segment_ids say that examples are packed: give decoder_segment_ids too, and "
          "decode unpacked examples."
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

  def start(self, encoder_input_tokens: jax.Array, length: int, beams: int = 1) -> None:
    """Reads the inputs of `step`: what it makes is in two collections, 'prepared' and 'decoded'.

        _, kept = network.apply(
          {"params": params}, inputs, 20, mutable=["prepared", "decoded"], method="start"
        )

    Encoder, and keys, values and position biases of the decoder, are computed here, once.

    Args:
      encoder_input_tokens: [b, k] ids, 0 = padding.
      length: tokens to decode at most.
      beams: hypotheses for each row.
    """
    tokens, dtype = encoder_input_tokens > 0, self.config.dtype
    mask = layers.make_attention_mask(tokens, tokens, dtype=dtype)
    encoded = self.encoder(encoder_input_tokens, mask, deterministic=True, gather=True)
    encoded, tokens = (jnp.repeat(x, beams, 0) for x in (encoded, tokens))
    cross = layers.make_attention_mask(jnp.ones_like(tokens[:, :1]), tokens, dtype=dtype)
    self.put_variable(PREPARED, "mask", cross)
    self._next(encoded, jnp.zeros((tokens.shape[0], 1), jnp.int32), jnp.int32(0), length)

  def step(self, decoder_input_tokens: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the logits of the next token, [b * beams, vocab], float32.

        logits, new = network.apply(
          {"params": params, **kept}, tokens, i, mutable=["decoded"], method="step"
        )
        kept |= new

    Numbers are those of `decode` with decode=True, which is T5X's, and reads and writes more: all
    rows of the token embedding, all of the cache, and where XLA does not see that they stay the
    same, keys and values of the input.

    Args:
      decoder_input_tokens: [b * beams], the last token of each hypothesis; 0 at position 0.
      position: int32 scalar, 0, 1, ...; below the length that `start` got.
    """
    return self._next(None, decoder_input_tokens[:, None], position)[:, 0]

  def _next(self, encoded, tokens, position, length=None):
    return self.decoder(
      encoded,
      tokens,
      encoder_decoder_mask=self.get_variable(PREPARED, "mask"),
      deterministic=True,
      max_decode_length=length,
      position=position,
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
    """Calls `encode`, then `decode`, with their arguments. Positions are not read.

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
