"""An Equinox model with N:M weights: of a program for dense ones, only the optimizer changes.

    pip install equinox && python examples/equinox_mlp.py

Runs in a minute on a CPU. A residual MLP learns to sort 16 numbers: dense, and 1:8 in its blocks by
two recipes. Numbers it has not seen say how well.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import nm_sparsity_jax as nms

STEPS, BATCH, WIDTH = 1500, 128, 64


class Block(eqx.Module):
  norm: eqx.nn.LayerNorm
  mlp: eqx.nn.MLP

  def __init__(self, key):
    self.norm = eqx.nn.LayerNorm(WIDTH)
    self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=key)

  def __call__(self, x):
    return x + self.mlp(self.norm(x))


class Sorter(eqx.Module):
  embed: eqx.nn.Linear
  blocks: list[Block]
  head: eqx.nn.Linear

  def __init__(self, key):
    first, last, *keys = jax.random.split(key, 4)
    self.embed = eqx.nn.Linear(16, WIDTH, key=first)
    self.blocks = [Block(key) for key in keys]
    self.head = eqx.nn.Linear(WIDTH, 16, key=last)

  def __call__(self, x):
    x = self.embed(x)
    for block in self.blocks:
      x = block(x)
    return self.head(x)


def loss_of(model, x):
  return jnp.mean((jax.vmap(model)(x) - jnp.sort(x)) ** 2)


def train(tx):
  """A loop for dense weights; `tx` alone says whether they become sparse."""
  model = Sorter(jax.random.key(0))
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def train_step(model, opt_state, key):
    x = jax.random.normal(key, (BATCH, 16))
    grads = eqx.filter_grad(loss_of)(model, x)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state

  for step in range(STEPS):
    model, opt_state = train_step(model, opt_state, jax.random.key(step))
  return model


def main():
  phases = nms.Phases(total=STEPS, dense=STEPS // 10, finetune=STEPS // 4)
  # "ff": the weights of each eqx.nn.MLP that is called mlp. A regex for a whole path serves, too.
  rules = {
    name: nms.Rules({"ff": nms.recipe(name, pattern="1:8", phases=phases)})
    for name in ("sr_ste", "mdgf_exponential")
  }
  print(rules["sr_ste"].assign(Sorter(jax.random.key(0))))
  adam = optax.adam(optax.cosine_decay_schedule(2e-3, STEPS))
  unseen = jax.random.normal(jax.random.key(STEPS), (1024, 16))
  print(f"\n{'':17} error  zeros in the blocks")
  for name in ("dense", *rules):
    model = train(nms.sparse(adam, rules[name]) if name in rules else adam)
    weights = [layer.weight for block in model.blocks for layer in block.mlp.layers]
    zeros = np.mean([jnp.mean(w == 0) for w in weights])
    print(f"{name:17} {float(loss_of(model, unseen)):.4f} {zeros:6.1%}")
  print("\nthe first 16 inputs of one unit:", np.round(np.asarray(weights[0][0, :16]), 2))
  print(nms.verify(model, rules[name]))


if __name__ == "__main__":
  main()
