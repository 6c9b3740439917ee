"""The networks of train_step.py: parameters, a batch, and the loss of one.

`t5` is an encoder-decoder of T5.1.1-small's widths, written out here. `vit` and `resnet` are the
library's, of ViT-B/16's and ResNet-50's widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.models import resnet, vit

EMBED, MLP, HEADS, HEAD, VOCAB = 512, 1024, 6, 64, 32128
BATCH, INPUTS, TARGETS = 8, 64, 32


def init(key, layers):
  """Returns parameters with T5X's names and shapes, without relative positions."""
  keys = iter(jax.random.split(key, 1000))
  kernel = lambda i, o: {"kernel": jax.random.normal(next(keys), (i, o)) / i**0.5}
  scale = lambda: {"scale": jnp.ones(EMBED)}
  attention = lambda: {
    **{name: kernel(EMBED, HEADS * HEAD) for name in ("query", "key", "value")},
    "out": kernel(HEADS * HEAD, EMBED),
  }
  mlp = lambda: {"wi_0": kernel(EMBED, MLP), "wi_1": kernel(EMBED, MLP), "wo": kernel(MLP, EMBED)}
  encoder = {
    f"layers_{i}": {"attention": attention(), "mlp": mlp(), "n0": scale(), "n1": scale()}
    for i in range(layers)
  }
  decoder = {
      f"layers_{i}": {
          "self_attention": attention(), "encoder_decoder_attention": attention(), "mlp": mlp(),
          "n0": scale(), "n1": scale(), "n2": scale(),
      }
      for i in range(layers)
  }  # fmt: skip
  return {
    "token_embedder": {"embedding": jax.random.normal(next(keys), (VOCAB, EMBED))},
    "encoder": encoder,
    "decoder": decoder,
    "logits_dense": kernel(EMBED, VOCAB),
  }


def attend(p, x, y, causal=False):
  heads = lambda t, name: (t @ p[name]["kernel"]).reshape(*t.shape[:-1], HEADS, HEAD)
  scores = jnp.einsum("bqhd,bkhd->bhqk", heads(x, "query"), heads(y, "key"))
  if causal:
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads(y, "value"))
  return mixed.reshape(*x.shape[:-1], HEADS * HEAD) @ p["out"]["kernel"]


def gated(p, x):
  return (jax.nn.gelu(x @ p["wi_0"]["kernel"]) * (x @ p["wi_1"]["kernel"])) @ p["wo"]["kernel"]


def norm(p, x):
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]


def loss_of(params, batch):
  x = params["token_embedder"]["embedding"][batch["inputs"]]
  for p in params["encoder"].values():
    h = norm(p["n0"], x)
    x = x + attend(p["attention"], h, h)
    x = x + gated(p["mlp"], norm(p["n1"], x))
  y = params["token_embedder"]["embedding"][batch["targets"]]
  for p in params["decoder"].values():
    h = norm(p["n0"], y)
    y = y + attend(p["self_attention"], h, h, causal=True)
    y = y + attend(p["encoder_decoder_attention"], norm(p["n1"], y), x)
    y = y + gated(p["mlp"], norm(p["n2"], y))
  logits = y @ params["logits_dense"]["kernel"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


class Network(NamedTuple):
  """What a train step is measured on.

  Attributes:
    params: as they are at first.
    batch: of training.
    loss: (params, batch) -> (loss, what else a step computes, such as batch statistics).
    place: what becomes sparse.
    pattern: the one of its rows; None = several.
  """

  params: Any
  batch: Any
  loss: Callable[[Any, Any], tuple[jax.Array, Any]]
  place: str
  pattern: str | None


def t5(layers: int) -> Network:
  """Returns the encoder-decoder."""
  key = jax.random.key(0)
  batch = {
    "inputs": jax.random.randint(key, (BATCH, INPUTS), 0, VOCAB),
    "targets": jax.random.randint(key, (BATCH, TARGETS), 0, VOCAB),
  }
  loss = lambda params, batch: (loss_of(params, batch), None)
  return Network(init(key, layers), batch, loss, "ff", None)


def images(network: Any, place: str, pattern: str, count: int) -> Network:
  """Returns a network of images that trains on so many of them."""
  c, key = network.config, jax.random.key(0)
  pixels = jax.random.normal(key, (count, c.image_size, c.image_size, c.channels))
  batch = {"image": pixels, "label": jax.random.randint(key, (count,), 0, c.classes)}
  variables = dict(jax.jit(network.init)(key, pixels[:1]))
  params = variables.pop("params")

  def loss(params, batch):
    logits, new = network.apply(
      {"params": params, **variables}, batch["image"], train=True, mutable=[*variables]
    )
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return each.mean(), new

  return Network(params, batch, loss, place, pattern)


NETWORKS: dict[str, Callable[[int], Network]] = {
  "t5": t5,
  "vit": lambda layers: images(vit.ViT(vit.config("vit_b16", layers=layers)), "ff", "1:8", 4),
  "resnet": lambda layers: images(
    resnet.ResNet(resnet.config("resnet50", depths=(layers,) * 4)), "conv", "2:8", 4
  ),
}
