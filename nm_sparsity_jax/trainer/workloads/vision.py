"""Images with one label each: ViT, SwinV2, ResNet, and networks of their interface.

    image, label -> [mixup or cutmix, by the step's key] -> network -> logits -> loss, top-1, top-5

The network is the dense one:

    network.init(rng, images, train=False) -> {"params", other collections = state}
    network.apply(variables, images, train, rngs={"dropout": key}, mutable=[...]) -> logits
    network.config: image_size, channels, classes

A `Source` of `nm_sparsity_jax.trainer.images` brings the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.trainer.workloads.base import Batch, Workload

LOSSES = {"softmax": optax.softmax_cross_entropy, "sigmoid": optax.sigmoid_binary_cross_entropy}


class Images(Workload):
  """A network that names images, and the images.

      Images(vit.ViT(vit.config("vit_test")), rebus.Rebus(batch_size=128), mixup=0.5)

  Sums are 'accuracy', rows whose best logit is the label's, and 'accuracy_top5', rows where it is
  among the best five. In training that label is the one with the larger share of a mixed row. An
  evaluation neither mixes nor smooths.

  Args:
    network: dense, without rules of its own; see the module.
    data: an `images.Source`; None = nothing, for a plan.
    loss: 'softmax', the cross entropy of one label; or 'sigmoid', the binary cross entropy of each
      class, its mean over classes (timm's BCE) [LOSS].
    label_smoothing: share of the target that is spread over all classes [LABEL_SMOOTHING].
    mixup: alpha of Beta(alpha, alpha), of which the share of a row is drawn; its partner, the row
      next to it, has the rest. 0 = never. One share for a batch, as in timm [MIXUP].
    cutmix: alpha of the share of a row's area; a box of it shows the partner. 0 = never. With both,
      each batch takes one of them by a coin [CUTMIX].
  """

  def __init__(
    self,
    network: nn.Module,
    data: Any,
    loss: str = "softmax",
    label_smoothing: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
  ):
    self.network: Any = network
    self.network_config = config = self.network.config
    self._image = 1, config.image_size, config.image_size, config.channels
    self.data, self.kind, self._losses = data, loss, choose(LOSSES, "LOSS", loss)
    self.batch_size = data.batch_size if data else 1
    self.label_smoothing, self.mixup, self.cutmix = label_smoothing, mixup, cutmix

  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns parameters and state."""
    return self.network.init(rng, jnp.zeros(self._image, jnp.float32), train=False)

  def loss(self, params, state, batch, rng):
    """Returns the loss of the real rows; how many are right, right in five, and there."""
    images, real = batch["image"], batch["real"].astype(jnp.float32)
    targets = jax.nn.one_hot(batch["label"], self.network_config.classes)
    if rng is None:
      logits = self._logits(params, state, images)
    else:
      # Smoothed before they are mixed, as in timm.
      mix_key, dropout_key = jax.random.split(rng)
      targets = optax.smooth_labels(targets, self.label_smoothing)
      if self.mixup or self.cutmix:
        images, targets = mixed(images, targets, mix_key, self.mixup, self.cutmix)
      variables, rngs = {"params": params, **state}, {"dropout": dropout_key}
      logits, state = self.network.apply(variables, images, train=True, rngs=rngs, mutable=[*state])
      logits = logits.astype(jnp.float32)
    each = self._losses(logits, targets)
    # The mean over classes, as timm's BCE, so that its rates carry over.
    each = jnp.mean(each, -1) if self.kind == "sigmoid" else each
    best = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]  # the lower class wins a tie
    hits = best == jnp.argmax(targets, -1)[:, None]
    sums = {
      "accuracy": jnp.sum(jnp.where(hits[:, 0], real, 0.0)),
      "accuracy_top5": jnp.sum(jnp.where(hits.any(-1), real, 0.0)),
      "examples": jnp.sum(real),
    }
    return jnp.sum(each * real), sums, state

  def predict(self, params, state, batch):
    """Returns the label of the best logit of each image, and its probability."""
    logits = self._logits(params, state, batch["image"])
    found = jax.nn.softmax(logits) if self.kind == "softmax" else jax.nn.sigmoid(logits)
    return {"label": jnp.argmax(logits, -1), "probability": jnp.max(found, -1)}

  def _logits(self, params: Any, state: Mapping[str, Any], images: jax.Array) -> jax.Array:
    """Returns the float32 logits of an evaluation."""
    variables = {"params": params, **state}
    return self.network.apply(variables, images, train=False).astype(jnp.float32)

  def batches(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless training batches; batch i is a function of (seed, i)."""
    return map(self._checked, self.data.train(seed, start))

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns the splits of the data."""
    return {name: map(self._checked, split) for name, split in self.data.splits().items()}

  def _checked(self, batch: Batch) -> Batch:
    """Refuses labels that the network has no class for: one_hot makes rows of zeros of them."""
    labels, classes = np.asarray(batch["label"]), self.network_config.classes
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
      raise ValueError(
        f"CLASSES={classes}, but an image has the label {wrong[0]}: labels go from 0 to "
        f"{classes - 1}. Set CLASSES to the classes of the data."
      )
    return batch

  def example(self) -> Batch:
    """Returns the shapes of one image; no data are read."""
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    images = jax.ShapeDtypeStruct(self._image, jnp.float32)
    return {"image": images, "label": number, "real": number}


# --- mixing ---------------------------------------------------------------------------------------


def mixed(
  images: jax.Array, targets: jax.Array, rng: jax.Array, mixup: float, cutmix: float
) -> tuple[jax.Array, jax.Array]:
  """Returns rows that are mixed in pairs, and their targets: a function of the key.

  Rows 2j and 2j + 1 are partners, so that devices which share a batch need not exchange any.

      mixed(images, targets, key, mixup=0.8, cutmix=1.0)

  Args:
    images: float32 [rows, height, width, channels].
    targets: float32 [rows, classes].
    rng: a key.
    mixup: see `Images`.
    cutmix: see `Images`.
  """
  partner = lambda x: x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)
  keys = jax.random.split(rng, 4)
  alpha = jnp.float32(mixup or 1.0)
  share = jax.random.beta(keys[0], alpha, alpha, dtype=jnp.float32)
  inside, area = _box(images.shape[1:3], keys[1], keys[2], cutmix or 1.0)
  # Traced, so one program serves both; what is not shown costs a product.
  coin = jax.random.bernoulli(keys[3]) if mixup and cutmix else jnp.bool_(bool(cutmix))
  share = jnp.where(coin, 1 - area, share)
  boxed = jnp.where(inside[None, :, :, None], partner(images), images)
  blended = share * images + (1 - share) * partner(images)
  return jnp.where(coin, boxed, blended), share * targets + (1 - share) * partner(targets)


def _box(
  shape: tuple[int, ...], share_key: jax.Array, place_key: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
  """Returns a random box of an image, bool [height, width], and its share of the area."""
  a = jnp.float32(alpha)
  side = jnp.sqrt(1 - jax.random.beta(share_key, a, a, dtype=jnp.float32))
  sides = []
  for key, length in zip(jax.random.split(place_key), shape, strict=True):
    # As in timm: a box at the edge is cut, and its share is what is left.
    half = (side * length).astype(jnp.int32) // 2
    center = jax.random.randint(key, (), 0, length)
    at = jnp.arange(length)
    sides.append((at >= center - half) & (at < center + half))
  inside = sides[0][:, None] & sides[1][None, :]
  return inside, jnp.mean(inside.astype(jnp.float32))
