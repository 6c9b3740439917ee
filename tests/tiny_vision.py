"""A network with the interface of the vision models, for tests of what is around it."""

import dataclasses

import jax.numpy as jnp
from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class Config:
  image_size: int = 16
  channels: int = 3
  classes: int = 10
  width: int = 32
  drop: float = 0.0
  norm: bool = True
  scan: bool = False


class Mlp(nn.Module):
  width: int

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(self.width, name="fc1")(x)
    return nn.Dense(self.width, name="fc2")(nn.relu(x))


class Net(nn.Module):
  """Means of patches, batch statistics, and a feed-forward layer."""

  config: Config
  rules: object = None

  @nn.compact
  def __call__(self, images, train):
    c = self.config
    x = images.reshape(len(images), 4, c.image_size // 4, -1).mean(2).reshape(len(images), -1)
    x = nn.Dense(c.width, name="embed")(x.astype(jnp.float32))
    if c.norm:
      x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
    x = nn.Dropout(c.drop, deterministic=not train)(x)
    return nn.Dense(c.classes, name="head")(x + Mlp(c.width, name="mlp")(x))


def make(config=None, **fields):
  """Returns a network; a gin file says Net(config=make_config(...))."""
  return Net(config or Config(**fields))
