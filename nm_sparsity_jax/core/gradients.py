"""What flows back through an effective weight.

mask, D -> [blend: forward and backward of W~] -> layer
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from nm_sparsity_jax.core import masks


def blend(w: jax.Array, mask: jax.Array, decay: jax.Array, mode: str) -> jax.Array:
  """Returns the effective weight W~ = W * (mask + D * (1 - mask)).

  Gradient, with g = dL/dW~:

      masked            dL/dW = g * (mask + D * (1 - mask))     the paper's equation
      straight_through  dL/dW = g                               the authors' PyTorch code

  Where D = 1 every weight keeps its bits; where D = 0 a pruned one is exactly 0, even when it was
  inf or NaN. The product is computed in float32 (float64 for such weights) and rounded once to W's
  dtype.

  The mask is named "nm_mask": under remat, the policy `save_only_these_names("nm_mask")` of
  `jax.checkpoint_policies` keeps it instead of computing it again in the backward pass.

  Args:
    w: float array, the stored parameter.
    mask: bool, shape of `w`, True = kept.
    decay: D, float32 scalar.
    mode: 'masked' or 'straight_through'.

  Returns:
    Shape and dtype of `w`.
  """
  decay = computed_once(lax.stop_gradient(decay))
  return _blend(w, checkpoint_name(mask, "nm_mask"), decay, mode)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _blend(w, mask, decay, mode):
  del mode  # of the gradient
  wide = wider(w.dtype)
  faded = rounded(w.astype(wide) * decay.astype(wide), w.dtype)
  # D = 1 is a choice too, no product: XLA on a CPU makes 1.0 * 1e-40 zero.
  return jnp.where(mask | (decay == 1), w, jnp.where(decay == 0, jnp.zeros_like(w), faded))


@_blend.defjvp
def _blend_jvp(mode, primals, tangents):
  w, mask, decay = primals
  out, change = _blend(w, mask, decay, mode), tangents[0]
  if mode == "masked":
    # One product, so that its transpose, the backward pass, is one product too.
    wide = wider(w.dtype)
    scale = jnp.where(mask, jnp.ones((), wide), decay.astype(wide))
    change = (change.astype(wide) * scale).astype(w.dtype)
  return out, change


def computed_once(decay: jax.Array) -> jax.Array:
  """Returns D, computed once: XLA on a CPU would repeat its arithmetic in every kernel."""
  bits = masks.computed_once(lax.bitcast_convert_type(decay, jnp.uint32))
  return lax.bitcast_convert_type(bits, jnp.float32)


def wider(dtype: jnp.dtype) -> jnp.dtype:
  """Returns the dtype that a product with D is computed in: float32 at least."""
  return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


@jax.custom_jvp
def straight_through(w: jax.Array, now: jax.Array) -> jax.Array:
  """Returns `now`, of the shape and dtype of `w`; its whole gradient is that of `w`."""
  return now


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
  return primals[1], tangents[0]


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns a float32 (or float64) array in a dtype that may be narrower, rounded once."""
  # XLA may skip a cast to 16 bits that a cast back follows; it does not skip reduce_precision.
  if x.dtype == dtype:
    return x
  kind = jnp.finfo(dtype)
  rounded = lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)
  if kind.tiny <= jnp.finfo(x.dtype).tiny:
    return rounded
  # float16: reduce_precision makes its subnormals, up to 6e-5, zero; a cast does not.
  return jnp.where(jnp.abs(x) < x.dtype.type(kind.tiny), x.astype(dtype), rounded)
