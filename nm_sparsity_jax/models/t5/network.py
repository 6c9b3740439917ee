"""T5.1.1, T5.1.0 and the paper's translation model: an encoder and a decoder of our layers.

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
import numpy as np
from flax import linen as nn
from flax.linen import partitioning, spmd
from jax import checkpoint_policies as keep

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.models.t5 import layers
from nm_sparsity_jax.models.t5.attention import PREPARED, Attention, decoder_mask, pairs
from nm_sparsity_jax.models.t5.config import T5Config
from nm_sparsity_jax.training.layers import DenseGeneral

# What the backward pass does not compute again; it has the input of each layer.
_REMAT: dict[str, Any] = {"minimal": keep.dots_with_no_batch_dims_saveable, "full": None}

# --- one layer ------------------------------------------------------------------------------------


def _dropout(cfg: T5Config) -> nn.Dropout:
  # Of the residual stream: one draw serves all positions, as in T5X.
  return nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))


def _on_stream(x: jax.Array) -> jax.Array:
  return spmd.with_logical_constraint(x, ("batch", "length", "embed"))


class Layer(nn.Module):
  """x + attention(norm x), in a decoder x + attention(norm x, encoded), and x + mlp(norm x).

  Attributes:
    config: sizes.
    is_decoder: whether it attends to the past alone, and to what the encoder read.
    relative_embedding: the table that the stack shares; None = the layer makes its own.
  """

  config: T5Config
  is_decoder: bool
  relative_embedding: nn.Module | None = None

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array | None = None,
    encoded: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    once: bool = False,
  ) -> jax.Array:
    """Maps [b, q, e] and encoded [b, k, e] to [b, q, e]; see `Transformer.decode` and `step`."""
    cfg = self.config
    own = "self_attention" if self.is_decoder else "attention"  # T5X's names
    positions: Any = self.relative_embedding or layers.RelativePositionBiases(
      cfg, name="relpos_bias"
    )
    length = max_decode_length or x.shape[-2]
    place = np.arange(length, dtype=np.int32)
    # The query is known when a token comes: all distances there are, of which it takes a piece.
    distance = np.arange(1 - length, length)[None] if decode else place[None] - place[:, None]
    bias = positions(distance, not self.is_decoder)

    def add(x, name, part):
      y = part(layers.LayerNorm(cfg.dtype, name=f"pre_{name}_layer_norm")(x))
      return _on_stream(x + _dropout(cfg)(y, deterministic))

    def attend(y):
      attention = Attention(cfg, name=own)
      return attention(y, y, mask, bias, deterministic=deterministic, decode=decode)

    def attend_to_encoded(y):
      attention = Attention(cfg, name="encoder_decoder_attention")
      return attention(y, encoded, encoder_decoder_mask, deterministic=deterministic, once=once)

    x = add(_on_stream(x), own, attend)
    if self.is_decoder:
      x = add(x, "cross_attention", attend_to_encoded)
    return add(x, "mlp", lambda y: layers.MlpBlock(cfg, name="mlp")(y, deterministic))


# --- a stack of layers ----------------------------------------------------------------------------


class Stack(nn.Module):
  """Embedding, layers, norm; in a decoder also logits.

  Attributes:
    config: sizes.
    shared_embedding: the token embedding of both stacks.
    is_decoder: which of the two.
  """

  config: T5Config
  shared_embedding: nn.Module
  is_decoder: bool

  @nn.compact
  def __call__(
    self, tokens: jax.Array, *context: Any, deterministic: bool, gather: bool = False, **static: Any
  ) -> jax.Array:
    """Maps ids [b, q] to [b, q, e], or in a decoder to float32 logits [b, q, vocab].

    Args:
      tokens: the ids.
      *context: arrays or None that every `Layer` gets after `x`.
      deterministic: no dropout.
      gather: as in `Embed`.
      **static: more arguments of `Layer`, no arrays: no scan needs to know them.
    """
    cfg, kind = self.config, "decoder" if self.is_decoder else "encoder"
    embedding: Any = self.shared_embedding
    x = embedding(tokens.astype(jnp.int32), gather)
    x = _dropout(cfg)(x, deterministic).astype(cfg.dtype)
    x = self._through_layers(kind, x, context, static | {"deterministic": deterministic})
    x = layers.LayerNorm(cfg.dtype, name=f"{kind}_norm")(x)
    if not self.is_decoder:
      # T5X draws this one dropout anew for every position.
      return nn.Dropout(cfg.dropout_rate)(x, deterministic)
    x = _dropout(cfg)(x, deterministic)
    if cfg.logits_via_embedding:
      # Rows of the embedding have variance 1; this gives the logits the variance of a projection's.
      return embedding.attend(x) / jnp.sqrt(jnp.float32(cfg.emb_dim))
    logits = DenseGeneral(cfg.vocab_size, kernel_axes=("embed", "vocab"), name="logits_dense")
    return logits(x)  # float32, for a stable loss

  def _through_layers(self, kind, x, context, static):
    """Applies the layers, one by one or scanned, each under remat if so configured."""
    cfg = self.config
    depth = cfg.num_decoder_layers if self.is_decoder else cfg.num_encoder_layers

    def run(layer, x, *context):
      return layer(x, *context, **static)

    if cfg.remat_policy != "none":
      policy = choose(_REMAT, "REMAT_POLICY", cfg.remat_policy)
      # A scan keeps XLA from undoing the remat by itself; without one, prevent_cse does.
      run = nn.remat(run, prevent_cse=not cfg.scan_layers, policy=policy)
    if not cfg.scan_layers:
      # One table for the stack; a scan has one a layer.
      positions = layers.RelativePositionBiases(cfg, name="relpos_bias")
      for i in range(depth):
        x = run(Layer(cfg, self.is_decoder, positions, name=f"layers_{i}"), x, *context)
      return x
    scan: Any = partitioning.scan_with_axes(
      lambda layer, x, *context: (run(layer, x, *context), None),
      variable_axes={"params": 1, "cache": 0, PREPARED: 0},  # T5X's axes, so its checkpoints load
      split_rngs={"params": True, "dropout": True},
      in_axes=nn.broadcast,  # type: ignore
      length=depth,
      axis_name="layers",
    )
    return scan(Layer(cfg, self.is_decoder, name=kind), x, *context)[0]


# --- the network ----------------------------------------------------------------------------------


class Transformer(nn.Module):
  """An encoder-decoder; token id 0 is padding.

  variables = Transformer(config).init(key, inputs, shifted_targets, targets)
  logits = Transformer(config).apply(variables, inputs, shifted_targets, targets,
                                     enable_dropout=False)
  """

  config: T5Config

  @property
  def scan_layers(self) -> bool:
    """Returns whether layers are scanned. T5X's models read it: such caches have one more axis."""
    return self.config.scan_layers

  def setup(self):
    """Makes the parts; encoder and decoder share the embedding."""
    self.shared_embedding = layers.Embed(self.config, name="token_embedder")
    self.encoder = Stack(self.config, self.shared_embedding, False)
    self.decoder = Stack(self.config, self.shared_embedding, True)

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
    tokens, ids = encoder_input_tokens > 0, encoder_segment_ids
    mask = pairs(tokens, tokens)
    if ids is not None:
      mask &= pairs(ids, ids, jnp.equal)
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
    sources, targets, mask = encoder_input_tokens > 0, decoder_target_tokens > 0, None
    if decode:
      # What comes next is not known yet, so no target is padding; the cache knows the past.
      targets = jnp.ones_like(targets)
    else:
      mask = decoder_mask(decoder_target_tokens, decoder_segment_ids)
    # A query that is padding sees nothing: its output is not read.
    cross = pairs(targets, sources)
    if encoder_segment_ids is not None:
      if decode:  # the cache would let a token see the examples before its own
        raise ValueError("encoder_segment_ids: packed examples cannot be decoded; unpack them.")
      cross &= pairs(decoder_segment_ids, encoder_segment_ids, jnp.equal)  # type: ignore
    return self.decoder(
      decoder_input_tokens,
      mask,
      encoded,
      cross,
      deterministic=not enable_dropout,
      decode=decode,
      max_decode_length=max_decode_length,
    )

  def start(self, encoder_input_tokens: jax.Array, length: int, beams: int = 1) -> None:
    """Reads the inputs of `step`: what it makes is in two collections, 'prepared' and 'cache'.

        _, kept = network.apply(
          {"params": params}, inputs, 20, mutable=["prepared", "cache"], method="start"
        )

    Encoder, and keys and values of what it read, are computed here, once. Call it under jit: else
    the decoder runs once for nothing.

    Args:
      encoder_input_tokens: [b, k] ids, 0 = padding.
      length: tokens to decode at most.
      beams: hypotheses for each row.
    """
    tokens = encoder_input_tokens > 0
    mask = pairs(tokens, tokens)
    encoded = self.encoder(encoder_input_tokens, mask, deterministic=True, gather=True)
    encoded, tokens = (jnp.repeat(x, beams, 0) for x in (encoded, tokens))
    # The token to come is real, whatever it is; only padding of the input is masked.
    self.put_variable(PREPARED, "mask", pairs(jnp.ones_like(tokens[:, :1]), tokens))
    # Without variables this call makes them: keys and values, and a cache of `length` places.
    self._next(encoded, jnp.zeros((tokens.shape[0], length), jnp.int32), length)

  def step(self, decoder_input_tokens: jax.Array, length: int) -> jax.Array:
    """Returns the logits of the next token, [b * beams, vocab], float32.

        logits, new = network.apply(
          {"params": params, **kept}, tokens, 20, mutable=["cache"], method="step"
        )
        kept |= new

    Numbers are those of `decode` with decode=True, which is T5X's, and reads more: all rows of the
    token embedding, and where XLA does not see that they stay the same, keys and values of the
    input.

    Args:
      decoder_input_tokens: [b * beams], the last token of each hypothesis; 0 at first.
      length: that of `start`.
    """
    return self._next(None, decoder_input_tokens[:, None], length)[:, 0]

  def _next(self, encoded, tokens, length):
    mask = self.get_variable(PREPARED, "mask")
    static: Any = dict(decode=True, max_decode_length=length, once=True)
    return self.decoder(tokens, None, encoded, mask, deterministic=True, gather=True, **static)

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
