"""A small decoder in flax NNX, dense and 1:4 sparse: only the optimizer differs.

    python examples/nnx_llm.py

Runs in about a minute on a laptop, in a checkout. Both networks learn the pages of docs/ by
characters, and then write on. examples/nnx_llm.ipynb is this program with a plot.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nm_sparsity_jax as nms

STEPS, LENGTH, WIDTH = 400, 64, 64

pages = sorted((pathlib.Path(nms.__file__).parents[1] / "docs").glob("*.md"))
text = "\n".join(page.read_text("utf-8") for page in pages)
symbols = sorted(set(text))
data = np.array([symbols.index(symbol) for symbol in text], "int32")
data, held_out = np.split(data, [len(data) * 9 // 10])


def batch_of(data, seed, size=24):
  """Returns stretches of the text, from places that chance chooses."""
  starts = np.random.default_rng(seed).integers(0, len(data) - LENGTH - 1, (size, 1))
  return data[starts + np.arange(LENGTH + 1)]


class Block(nnx.Module):
  def __init__(self, rngs):
    self.before, self.between = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
    self.attn = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    x = x + self.attn(self.before(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.down(nnx.gelu(self.up(self.between(x))))


class Decoder(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(len(symbols), WIDTH, rngs=rngs)
    self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.head = nnx.Linear(WIDTH, len(symbols), rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
    for block in self.blocks:
      x = block(x)
    return self.head(self.norm(x))


def loss_of(model, tokens):
  """Returns the mean cross entropy of the next characters, in nats."""
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
  loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
  optimizer.update(model, grads)
  return loss


def write(model, start, length=200):
  """Returns `start` and what the network writes on, each character drawn by its probability."""
  tokens, rng = [symbols.index(symbol) for symbol in start], np.random.default_rng(0)
  forward = nnx.jit(lambda model, tokens: nnx.softmax(model(tokens)[0, -1] / 0.6))
  for _ in range(length):
    chances = np.array(forward(model, jnp.array([tokens[-LENGTH:]])), "float64")
    tokens.append(rng.choice(len(symbols), p=chances / chances.sum()))
  return "".join(symbols[token] for token in tokens)


phases = nms.Phases(total=STEPS, dense=STEPS // 5, finetune=STEPS // 3)
recipe = nms.recipe("mdgf_exponential", pattern="1:4", phases=phases)
# Roles name the attention; a regex names the rest of each block.
rules = nms.Rules({"qkv": recipe, "o": recipe, r"blocks/\d+/(up|down)/kernel": recipe})
optimizers = {"dense": optax.adamw(3e-3), "1:4": nms.sparse(optax.adamw(3e-3), rules)}

losses = {}
for name, tx in optimizers.items():
  model = Decoder(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  losses[name] = [float(train_step(model, optimizer, batch_of(data, i))) for i in range(STEPS)]
  held_out_loss = float(loss_of(model, batch_of(held_out, 0, 256)))
  print(f"\n{name}: loss {losses[name][-1]:.2f}, of pages that it never saw {held_out_loss:.2f}")
  print(write(model, start=text[:LENGTH]))

print(nms.verify(nnx.state(model, nnx.Param), rules))
