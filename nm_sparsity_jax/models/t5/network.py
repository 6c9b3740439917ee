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
from flax.linen import partitioning, spmd
from jax import checkpoint_policies as keep
from jax import lax

from nm_sparsity_jax.models.t5 import layers
from nm_sparsity_jax.models.t5.attention import DECODED, PREPARED
from nm_sparsity_jax.models.t5.config import T5Config
from nm_sparsity_jax.training.layers import COLLECTION, STATE_COLLECTION

# What the backward pass does not compute again; it has the input of each layer.
_REMAT: dict[str, Any] = {
  "minimal": keep.save_from_both_policies(
    keep.dots_with_no_batch_dims_saveable, keep.save_only_these_names("nm_mask")
  ),
  "nm_masks": keep.save_only_these_names("nm_mask"),
  "full": None,
}

# --- one layer ------------------------------------------------------------------------------------


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
  # Of the residual stream: one draw serves all positions, as in T5X.
  return nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))


def _relative_positions(cfg: T5Config) -> layers.RelativePositionBiases:
  # 32 and 128 are those of every published T5, and no field of T5X's config.
  return layers.RelativePositionBiases(
    num_buckets=32,
    max_distance=128,
    num_heads=cfg.num_heads,
    dtype=cfg.dtype,
    embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    name="relpos_bias",
  )


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
    position: jax.Array | None = None,
  ) -> jax.Array:
    """Maps [b, q, e] and encoded [b, k, e] to [b, q, e]; see `Transformer.decode` and `step`."""
    cfg = self.config
    own = "self_attention" if self.is_decoder else "attention"  # T5X's names
    positions: Any = self.relative_embedding or _relative_positions(cfg)
    if position is not None:
      bias = self._bias_at(position, positions, max_decode_length)
    else:
      length = max_decode_length if decode and max_decode_length else x.shape[-2]
      bias = positions(length, length, not self.is_decoder)

    def add(x, name, part):
      y = part(_layer_norm(cfg, f"pre_{name}_layer_norm")(x))
      return _on_stream(x + _dropout(cfg)(y, deterministic))

    def attend(y):
      cache: Any = dict(decode=decode, position=position, length=max_decode_length)
      return _attention(cfg, own)(y, y, mask, bias, deterministic=deterministic, **cache)

    def attend_to_encoded(y):
      attention = _attention(cfg, "encoder_decoder_attention")
      once = position is not None
      return attention(y, encoded, encoder_decoder_mask, deterministic=deterministic, once=once)

    x = add(_on_stream(x), own, attend)
    if self.is_decoder:
      x = add(x, "cross_attention", attend_to_encoded)
    return add(x, "mlp", lambda y: _mlp(cfg)(y, deterministic=deterministic))

  def _bias_at(self, position, positions, length):
    """Returns the bias [1, h, 1, length] of one query."""

    # It depends on key - query alone, so each row is a piece of the last one, which has all
    # distances of the past. What stands behind it is of keys in the future, which are masked.
    def every_distance():
      last = positions(length, length, False)[:, :, -1:]
      return jnp.pad(last, ((0, 0), (0, 0), (0, 0), (0, length - 1)), mode="edge")

    biases = self.variable(PREPARED, "biases", every_distance).value
    length = (biases.shape[-1] + 1) // 2
    return lax.dynamic_slice_in_dim(biases, length - 1 - position, length, axis=-1)


# --- stacks of layers -----------------------------------------------------------------------------


def _through_layers(
  cfg: T5Config, is_decoder: bool, x: jax.Array, *context: Any, **static: Any
) -> jax.Array:
  """Applies a stack of layers to `x`, one by one or scanned, each under remat if so configured.

  Args:
    cfg: the configuration.
    is_decoder: which of the two stacks.
    x: [b, q, e].
    *context: arrays or None that every layer gets after `x`.
    **static: what is no array, and what no scan needs to know.
  """
  depth = cfg.num_decoder_layers if is_decoder else cfg.num_encoder_layers

  def run(layer, x, *context):
    return layer(x, *context, **static)

  if cfg.remat_policy != "none":
    if cfg.remat_policy not in _REMAT:
      known = ", ".join(_REMAT)
      raise ValueError(f"remat_policy={cfg.remat_policy!r}: choose one of none, {known}.")
    # A scan keeps XLA from undoing the remat by itself; without one, prevent_cse does.
    run = nn.remat(run, prevent_cse=not cfg.scan_layers, policy=_REMAT[cfg.remat_policy])
  if not cfg.scan_layers:
    positions = _relative_positions(cfg)  # one table for the stack; a scan has one a layer
    for i in range(depth):
      x = run(Layer(cfg, is_decoder, positions, name=f"layers_{i}"), x, *context)
    return x
  scan: Any = partitioning.scan_with_axes(
    lambda layer, x, *context: (run(layer, x, *context), None),
    variable_axes={
      "params": cfg.param_scan_axis,  # masks lie as their kernels do
      STATE_COLLECTION: cfg.param_scan_axis,
      **dict.fromkeys(("cache", PREPARED, DECODED), 0),
    },
    variable_broadcast=COLLECTION,  # the step is one number for all layers
    split_rngs={"params": True, "dropout": True},
    in_axes=nn.broadcast,  # type: ignore
    length=depth,
    axis_name="layers",
  )
  layer = Layer(cfg, is_decoder, name="decoder" if is_decoder else "encoder")
  return scan(layer, x, *context)[0]


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
    x = _dropout(cfg)(x, deterministic).astype(cfg.dtype)
    x = _through_layers(cfg, False, x, encoder_mask, deterministic=deterministic)
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
    encoded: jax.Array | None,
    decoder_input_tokens: jax.Array,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    **decoding: Any,
  ) -> jax.Array:
    """Maps encoded [b, k, e], ids [b, q] to float32 logits [b, q, vocab]; see `Layer`."""
    cfg = self.config
    embedding: Any = self.shared_embedding
    y = embedding(decoder_input_tokens.astype(jnp.int32), gather="position" in decoding)
    y = _dropout(cfg)(y, deterministic).astype(cfg.dtype)
    decoding["deterministic"] = deterministic
    y = _through_layers(cfg, True, y, decoder_mask, encoded, encoder_decoder_mask, **decoding)
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


# --- the network ----------------------------------------------------------------------------------


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
    packed = decoder_mask = None
    if encoder_segment_ids is not None:
      if decode:
        raise ValueError("encoder_segment_ids: packed examples cannot be decoded, unpack them.")
      packed: Any = layers.make_attention_mask(
        decoder_segment_ids,  # type: ignore  # it comes where the encoder's do
        encoder_segment_ids,
        jnp.equal,
        dtype=dtype,
      )
    if decode:
      # What comes next is not known yet, so no target is padding; the cache knows the past.
      targets = jnp.ones_like(targets)
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
    # The token to come is real, whatever it is; only padding of the input is masked.
    cross = layers.make_attention_mask(jnp.ones_like(tokens[:, :1]), tokens, dtype=dtype)
    self.put_variable(PREPARED, "mask", cross)
    # A call without variables makes them: keys and values of the input, and room for the tokens.
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
