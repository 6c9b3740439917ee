"""The layers of encoder and decoder, and a stack of them: one by one or scanned, with remat."""

from __future__ import annotations

from collections.abc import Callable
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

# What the backward pass does not compute again, beside the input of each layer.
_REMAT: dict[str, Callable | None] = {
  "minimal": keep.save_from_both_policies(
    keep.dots_with_no_batch_dims_saveable, keep.save_only_these_names("nm_mask")
  ),
  "nm_masks": keep.save_only_these_names("nm_mask"),
  "full": None,
}


def layer_norm(cfg: T5Config, name: str) -> layers.LayerNorm:
  """Returns the norm of a name."""
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


def dropout(cfg: T5Config) -> nn.Dropout:
  """Returns the dropout of the residual stream: one draw serves all positions."""
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
  """Returns `x` with the logical axes of the residual stream [b, q, e]."""
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
    """Maps [b, q, e] to [b, q, e]."""
    cfg = self.config
    length = inputs.shape[-2]
    positions: Any = self.relative_embedding or _relative_positions(cfg)
    bias = positions(length, length, True)
    inputs = _on_stream(inputs)
    x = layer_norm(cfg, "pre_attention_layer_norm")(inputs)
    x = _attention(cfg, "attention")(x, x, encoder_mask, bias, deterministic=deterministic)
    x = _on_stream(inputs + dropout(cfg)(x, deterministic))
    y = layer_norm(cfg, "pre_mlp_layer_norm")(x)
    y = _mlp(cfg)(y, deterministic=deterministic)
    return _on_stream(x + dropout(cfg)(y, deterministic))


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
    encoded: jax.Array | None,
    decoder_mask: jax.Array | None = None,
    encoder_decoder_mask: jax.Array | None = None,
    deterministic: bool = False,
    decode: bool = False,
    max_decode_length: int | None = None,
    position: jax.Array | None = None,
  ) -> jax.Array:
    """Maps [b, q, e] and encoded [b, k, e] to [b, q, e]; see `Transformer.decode` and `step`."""
    cfg = self.config
    positions: Any = self.relative_embedding or _relative_positions(cfg)
    if position is not None:
      bias = self._bias_at(position, positions, max_decode_length)
    else:
      length = max_decode_length if decode and max_decode_length else inputs.shape[-2]
      bias = positions(length, length, False)
    inputs = _on_stream(inputs)
    x = layer_norm(cfg, "pre_self_attention_layer_norm")(inputs)
    x = _attention(cfg, "self_attention")(
      x,
      x,
      decoder_mask,
      bias,
      deterministic=deterministic,
      decode=decode,
      position=position,
      length=max_decode_length,
    )
    x = _on_stream(inputs + dropout(cfg)(x, deterministic))
    y = layer_norm(cfg, "pre_cross_attention_layer_norm")(x)
    y = _attention(cfg, "encoder_decoder_attention")(
      y, encoded, encoder_decoder_mask, deterministic=deterministic, once=position is not None
    )
    y = _on_stream(x + dropout(cfg)(y, deterministic))
    z = layer_norm(cfg, "pre_mlp_layer_norm")(y)
    z = _mlp(cfg)(z, deterministic=deterministic)
    return _on_stream(y + dropout(cfg)(z, deterministic))

  def _bias_at(self, position, positions, length):
    """Returns the bias [1, h, 1, length] of one query.

    The bias depends on key - query alone, so each row is a piece of the last one, which has all
    distances of the past. What stands behind it is of keys in the future, which are masked.
    """

    def every_distance():
      last = positions(length, length, False)[:, :, -1:]
      return jnp.pad(last, ((0, 0), (0, 0), (0, 0), (0, length - 1)), mode="edge")

    biases = self.variable(PREPARED, "biases", every_distance).value
    length = (biases.shape[-1] + 1) // 2
    return lax.dynamic_slice_in_dim(biases, length - 1 - position, length, axis=-1)


def through_layers(
  cfg: T5Config, layer_class: Any, depth: int, name: str, x: jax.Array, *context: Any, **static: Any
) -> jax.Array:
  """Applies a stack of layers to `x`, one by one or scanned, each under remat if so configured.

  Args:
    cfg: the configuration.
    layer_class: `EncoderLayer` or `DecoderLayer`.
    depth: how many.
    name: of the scanned stack.
    x: [b, q, e].
    *context: arrays or None that every layer gets after `x`.
    **static: what is no array, and what no scan needs to know.
  """

  def run(layer, x, *context):
    return layer(x, *context, **static)

  if cfg.remat_policy not in (None, "none"):
    if cfg.remat_policy not in _REMAT:
      raise ValueError(
        f"remat_policy={cfg.remat_policy!r}: choose one of none, {', '.join(_REMAT)}."
      )
    # A scan keeps XLA from undoing the remat by itself; without one, prevent_cse does.
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
      **dict.fromkeys(("cache", PREPARED, DECODED), 0),
    },
    variable_broadcast=COLLECTION,
    split_rngs={"params": True, "dropout": True},
    in_axes=nn.broadcast,  # type: ignore
    length=depth,
    axis_name="layers",
  )
  return scan(layer_class(cfg, name=name), x, *context)[0]
