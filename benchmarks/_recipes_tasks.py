"""What the benchmark of recipes learns: tasks, their networks and their data.

    Task -> network, optimizer;  key -> data -> batch of a step

`bigram` is a random table, `mini_mnli` text from a dense start, and `rebus` the generated pictures
of the library. `_recipes_cmudict` has the words that are held out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.models import vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.runs import glue
from nm_sparsity_jax.trainer import optimizers
from nm_sparsity_jax.trainer.images import rebus


class Sizes(NamedTuple):
  """Of a `Network`."""

  layers: int
  embed: int
  mlp: int
  heads: int
  tokens: int
  classes: int


class Block(nn.Module):
  """Attention, then the feed-forward layers whose kernels are made sparse, unless `ff` is False."""

  heads: int
  mlp: int
  ff: bool

  @nn.compact
  def __call__(self, x, mask):
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
    return x + Mlp(self.mlp, name="mlp")(nn.LayerNorm()(x)) if self.ff else x


class Mlp(nn.Module):
  """Without biases, so that zeroed kernels and no feed-forward layers are the same function."""

  width: int

  @nn.compact
  def __call__(self, x):
    h = nn.gelu(nn.Dense(self.width, use_bias=False, name="wi")(x))
    return nn.Dense(x.shape[-1], use_bias=False, name="wo")(h)


class Network(nn.Module):
  """A pre-norm causal transformer over symbols."""

  sizes: Sizes
  symbols: int
  ff: bool

  @nn.compact
  def __call__(self, x):
    s = self.sizes
    mask = nn.make_causal_mask(x)
    normal = nn.initializers.normal(0.3)
    x = nn.Embed(self.symbols, s.embed, embedding_init=normal)(x)
    x = x + self.param("position", normal, (s.tokens, s.embed))[None]
    for i in range(s.layers):
      x = Block(s.heads, s.mlp, self.ff, name=f"block_{i}")(x, mask)
    return nn.Dense(s.classes)(nn.LayerNorm()(x))


class TextToText(nn.Module):
  """The library's T5 as a classifier: the logits of the first word that it answers."""

  config: T5Config

  @nn.compact
  def __call__(self, inputs):
    start = jnp.zeros((len(inputs), 1), jnp.int32)
    t5 = Transformer(self.config, name="t5")
    return t5(inputs, start, start + 1, enable_dropout=False)[:, 0]


def _small(symbols: int) -> Sizes:
  return Sizes(layers=2, embed=128, mlp=512, heads=4, tokens=12, classes=symbols)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is learned, and by which network.

  Attributes:
    tests: examples that it is scored on.
    places: what becomes sparse.
    start: dense steps that come first, once a seed, after which the optimizer begins anew.
    examples: of a batch.
    rate: the largest learning rate.
    packages: whose versions a record has beside the usual ones.
  """

  tests: int
  places: tuple[str, ...] = ("ff",)
  start: int = 0
  examples: int = 64
  rate: float = 1e-3
  packages: tuple[str, ...] = ()

  def network(self, ff: bool) -> nn.Module:
    raise NotImplementedError

  def example(self) -> jax.ShapeDtypeStruct:
    """Returns one example as the network reads it, as a shape."""
    raise NotImplementedError

  @functools.cached_property
  def cost(self) -> nms.flops.Cost:
    """Returns the forward FLOPs of an example, with feed-forward layers."""
    network, x = self.network(ff=True), self.example()
    variables = jax.eval_shape(network.init, jax.random.key(0), x)
    return nms.flops.forward(network.apply, variables, x)

  def optimizer(self, rate):
    return optax.adamw(rate)

  def draw(self, key) -> dict[str, Any]:
    """Returns all data that a seed decides; "test" is what the network is scored on."""
    raise NotImplementedError

  def fed(self, data, step: int) -> dict[str, Any]:
    """Returns what a step is given of the data: all, or what a host has made for this step."""
    del step
    return data

  def batch(self, data, step):
    """Returns examples and answers of a step: some of "rows"."""
    x, y = data["rows"]
    key = jax.random.fold_in(data["train"], step)
    chosen = jax.random.randint(key, (self.examples,), 0, len(y))
    return x[chosen], y[chosen]

  def predictions(self, logits):
    """Returns the logits that have an answer."""
    return logits

  def counted(self, answers):
    """Returns which answers count in a mean; None where all of them do."""
    del answers

  def further(self, network, params, data) -> dict[str, float]:
    """Returns what else a record says of trained weights."""
    del network, params, data
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigram(Task):
  """y[t] = table[x[t - 1], x[t]], the table random: nothing to learn but its entries."""

  symbols: int
  sizes: Sizes
  tests: int = 2048

  def network(self, ff):
    return Network(self.sizes, self.symbols, ff)

  def example(self):
    return jax.ShapeDtypeStruct((1, self.sizes.tokens), jnp.int32)

  def draw(self, key):
    table, train, test = jax.random.split(key, 3)
    table = jax.random.randint(table, (self.symbols, self.symbols), 0, self.symbols)
    data = {"table": table, "train": train}
    return data | {"test": self._examples(data, test, self.tests)}

  def batch(self, data, step):
    return self._examples(data, jax.random.fold_in(data["train"], step), self.examples)

  def _examples(self, data, key, count):
    x = jax.random.randint(key, (count, self.sizes.tokens), 0, self.symbols)
    return x, data["table"][x[:, :-1], x[:, 1:]]

  def predictions(self, logits):
    return logits[:, 1:]  # the first symbol has none before it


_REBUS = vit.config(
  "vit_test", image_size=rebus.SIZE, classes=rebus.CLASSES, patch=8, layers=2, embed=128, heads=4,
  mlp=512, std=0.088,
)  # fmt: skip
_T5 = T5Config.preset(
  "t5_1_1", "tiny", vocab_size=256, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128,
  num_encoder_layers=2, num_decoder_layers=1, dropout_rate=0.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMnli(Task):
  """mini-GLUE's MNLI by the library's T5, fine-tuned from a dense start.

  The kernels of attention become sparse too: without feed-forward layers the network does as well.
  The rows are the same for all seeds; a seed draws their order and the initial weights.
  """

  rows: int = 20_000
  length: int = 24
  tests: int = 2048
  places: tuple[str, ...] = ("ff", "qkv", "o")
  start: int = 2000

  def network(self, ff: bool) -> nn.Module:
    """Returns the network; without `ff`, its feed-forward layers add 0."""
    off = {} if ff else {"mlp_activations": (jnp.zeros_like, jnp.zeros_like)}
    return TextToText(dataclasses.replace(_T5, **off))

  def example(self):
    return jax.ShapeDtypeStruct((1, self.length), jnp.int32)

  def optimizer(self, rate):
    return optax.adamw(rate, b2=0.98)

  def draw(self, key):
    rows = _mini_mnli("train", self.rows, self.length)
    test = _mini_mnli("validation_matched", self.tests, self.length)
    return {"rows": rows, "train": key, "test": test}


@functools.cache
def _mini_mnli(split: str, rows: int, length: int):
  """Returns ids of rows [rows, length], and the first id of each answer [rows]."""
  from t5x_tasks import mini
  from t5x_tasks.vocabulary import mini_words

  words, task = mini_words(), glue.TASKS["mnli"]
  x, y = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
  for i, row in enumerate(mini.make("mnli", split, {split.partition("_")[0]: rows})):
    text = [task.prefix, *(word for f in task.fields for word in (f"{f}:", row[f]))]
    ids = [*words.encode(" ".join(text)), 1]
    x[i, : len(ids)] = ids
    y[i] = words.encode(task.labels[row["label"]])[0]
  return jnp.asarray(x), jnp.asarray(y)


@functools.lru_cache(maxsize=540)  # the rows of a seed follow each other, and see the same
def _pictures(examples: int, seed: int, step: int) -> dict[str, Any]:
  """Returns a batch of the library's source."""
  batch = next(rebus.Rebus(examples).train(seed, step))
  return {"image": batch["image"], "label": batch["label"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebus(Task):
  """The pictures of 'rebus' by the ViT of `quickstart --task rebus`, with its optimizer and rate.

  Glyphs, table and the 2,048 pictures that are scored are the same for all seeds. A seed draws the
  initial weights and the pictures of training.
  """

  tests: int = rebus.VALIDATION
  examples: int = 128
  rate: float = 2e-3

  def network(self, ff: bool) -> nn.Module:
    return vit.ViT(_REBUS if ff else dataclasses.replace(_REBUS, mlp=0))

  def example(self):
    return jax.ShapeDtypeStruct((1, rebus.SIZE, rebus.SIZE, rebus.CHANNELS), jnp.float32)

  def optimizer(self, rate):
    return optimizers.adamw(rate)

  def draw(self, key):
    source = rebus.Rebus(self.tests)
    (test,) = source.splits()["validation"]
    return {
      "seed": np.uint32(jax.random.bits(key, dtype=jnp.uint32)),
      "test": (jnp.asarray(test["image"]), jnp.asarray(test["label"])),
    }

  def fed(self, data, step):
    """Returns the batch that the library's source has for a seed and a step."""
    return _pictures(self.examples, int(data["seed"]), step)

  def batch(self, data, step):
    del step
    return data["image"], data["label"]


TASKS = {
  "bigram80": Bigram(symbols=80, sizes=_small(80)),
  "bigram160": Bigram(symbols=160, sizes=_small(160), rate=4e-3),
  "mini_mnli": MiniMnli(),
  "rebus": Rebus(),
}
