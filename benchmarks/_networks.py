"""What a train step is measured on: the library's networks with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.models import resnet, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer

KEY = jax.random.key(0)


class Network(NamedTuple):
  """Parameters, a batch, and (params, batch) -> (loss, what else a step computes)."""

  params: Any
  batch: Any
  loss: Callable[[Any, Any], tuple[jax.Array, Any]]


def mean_loss(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
  return losses.mean()


def t5(layers: int) -> Network:
  """Returns T5.1.1-small with so many layers in each stack, on 8 x (64 + 32) tokens."""
  sizes = dict(num_encoder_layers=layers, num_decoder_layers=layers, dropout_rate=0.0)
  network = Transformer(T5Config.preset("t5_1_1", "small", **sizes))
  source = jax.random.randint(KEY, (8, 64), 1, 32000)
  target = jax.random.randint(KEY, (8, 32), 1, 32000)
  batch = source, jnp.pad(target, ((0, 0), (1, 0)))[:, :-1], target
  loss = lambda params, batch: (
    mean_loss(network.apply({"params": params}, *batch, enable_dropout=False), batch[2]),
    None,
  )
  init = jax.jit(lambda key: network.init(key, *batch, enable_dropout=False))
  return Network(init(KEY)["params"], batch, loss)


def images(network: Any, count: int) -> Network:
  """Returns a network of images that trains on so many of them."""
  c = network.config
  pixels = jax.random.normal(KEY, (count, c.image_size, c.image_size, c.channels))
  batch = {"image": pixels, "label": jax.random.randint(KEY, (count,), 0, c.classes)}
  variables = dict(jax.jit(network.init)(KEY, pixels[:1]))
  params = variables.pop("params")

  def loss(params, batch):
    logits, new = network.apply(
      {"params": params, **variables}, batch["image"], train=True, mutable=[*variables]
    )
    return mean_loss(logits, batch["label"]), new

  return Network(params, batch, loss)


def vit_b16(layers: int) -> Network:
  return images(vit.ViT(vit.config("vit_b16", layers=layers)), 4)


def vit_tiny() -> Network:
  return images(vit.ViT(vit.ViTConfig(layers=12, embed=192, heads=3, mlp=768)), 16)


def resnet50(layers: int) -> Network:
  return images(resnet.ResNet(resnet.config("resnet50", depths=(layers,) * 4)), 4)


def mlp() -> Network:
  """Returns four residual layers of 512 x 2048, 8.4 million weights, all of them sparse."""
  shapes = {"wi": (512, 2048), "wo": (2048, 512)}
  draw = lambda shape: jax.random.normal(KEY, shape) * shape[0] ** -0.5
  params = {
    f"layer_{i}": {name: {"kernel": draw(shape)} for name, shape in shapes.items()}
    for i in range(4)
  }

  def loss(params, x):
    h = x.astype(params["layer_0"]["wi"]["kernel"].dtype)
    for layer in params.values():
      h = h + jax.nn.relu(h @ layer["wi"]["kernel"]) @ layer["wo"]["kernel"]
    return jnp.mean((h - jnp.sin(x)).astype(jnp.float32) ** 2), None

  return Network(params, jax.random.normal(KEY, (256, 512)), loss)
