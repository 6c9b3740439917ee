"""S-STE: a soft threshold in place of a hard mask.

W -> [t: the largest |W| that is pruned of each group] -> S(W), shrunk by t -> * a kept scale -> W~
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from nm_sparsity_jax.core import gradients, masks
from nm_sparsity_jax.core.masks.selection import in_groups
from nm_sparsity_jax.recipes.levels import when
from nm_sparsity_jax.recipes.stateful import TakenOnce


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSte(TakenOnce):
  """Soft thresholds: W~ is continuous in W, since a weight is 0 where it begins to be pruned.

      S(W) = sign(W) * max(|W| - t, 0),   t = the (n+1)-th largest |W| of the group, 0 where n = m,
      W~ = scale * S(W),   dL/dW = g.

  The scale is the one of least squares, which minimizes ||W - scale * S(W)||:

      scale = <W, S(W)> / <S(W), S(W)>   of W at the end of the dense phase; 1 where S(W) is 0.

  It is one number for each parameter, so a stack of a scan has one, and it never changes again.
  What is deployed is scaled, too.

  Weights that tie with t become 0, so a group may keep fewer than n. The mask marks the weights
  whose S(W) is not 0. A group with inf or NaN, as in a run that diverged, gives inf or NaN.

  Reference: Hu, Zhu and Chen, "S-STE: continuous pruning function for efficient 2:4 sparse
  pre-training", NeurIPS 2024, arXiv:2409.09099. Other n:m than 2:4 are ours; pruned gradients and
  FP8 are not here.

  Attributes:
    pattern: what to keep.
    phases: dense until step `phases.dense`, where the scale is taken (from the initial weights
      when 0). `phases.finetune` changes nothing, since D is 0 already.
  """

  name: ClassVar[str] = "s_ste"
  keeps: ClassVar[str] = "scale"
  default_gradient: ClassVar[str] = "straight_through"

  def _soft(self, w, *, axis):
    """Returns S(W), float32 at least."""
    wide, m = w.astype(gradients.wider(w.dtype)), self.pattern.m
    kept = masks.magnitude_mask(w, self.pattern, axis)
    axes = masks.check_axis(w.shape, axis)
    grouped = in_groups(w.shape, axes, m)
    pruned = jnp.where(kept, jnp.zeros_like(wide), jnp.abs(wide)).reshape(grouped)
    t = jnp.max(pruned, axes[0] + 1, keepdims=True)
    # What is pruned is its own clip, so it becomes 0 and never -0.
    return wide - jnp.clip(wide.reshape(grouped), -t, t).reshape(w.shape)

  def _fit(self, groups, w):
    """Returns the scale of least squares, a float32 scalar."""
    soft = groups.apply(self._soft, w)
    norm = jnp.sum(soft * soft)
    scale = jnp.sum(w.astype(soft.dtype) * soft) / jnp.where(norm == 0, 1, norm)
    return jnp.where(norm == 0, 1, scale).astype(jnp.float32)

  def chosen(self, w, step, axis, stored):
    return self._soft(w, axis=axis) != 0

  def effective(self, w, step, axis=0, mask=None):
    still = lax.stop_gradient(w)
    dense = super().effective(still, step, axis, mask)  # NaN where no step was given
    now = _product(mask, self._soft(still, axis=axis), w.dtype)
    return gradients.straight_through(w, jnp.where(self.decay(step) == 0, now, dense))

  def final(self, w, groups, state=None):
    assert state is not None  # `finalize` has looked
    fit = lambda: self._fit(groups, w)
    scale = when(state["renewed"] > 0, lambda: state["scale"], fit)  # early: that of now
    soft = groups.apply(self._soft, w)
    # Weights that are n:m already are W~, of a run that trained in place: they are scaled.
    is_done = jnp.all(soft == w.astype(soft.dtype))
    return _product(jnp.where(is_done, 1, scale), soft, w.dtype)

  def first_state(self, groups, w):
    return {"scale": self._fit(groups, w)}

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    return self._renewed(state, step, last, lambda: self._fit(groups, w))


def _product(scale, soft, dtype):
  return gradients.rounded(scale.astype(soft.dtype) * soft, dtype)
