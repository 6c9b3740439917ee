"""How noisy a gradient is: batches of one size at one state of a run, by the weights in use.

weights, step, 16 batches of fresh examples -> 16 gradients -> noise, loss
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten

EXAMPLES = 16  # of a batch
APART = 2**31 - 1  # folded into the key of training: no step of a run is that one


@functools.lru_cache(maxsize=64)
def onlooker(task, row, rules: nms.Rules, batches: int):
  """Returns what measures a run at a step, (carry, step, data) -> its figures, and changes nothing.

  Args:
    task: of `_recipes_tasks`; it draws fresh examples for every step.
    row: how the run trains.
    rules: of the run.
    batches: whose gradients are compared.
  """
  network = task.network(row.ff)
  small = dataclasses.replace(task, examples=EXAMPLES)

  @jax.jit
  def measure(carry, step, data):
    params, opt_state = carry
    dense = nms.dense_params(params, opt_state)
    masks = nms.metrics.masks_of(dense, rules, step, opt_state.masks)
    fresh = data | {"train": jax.random.fold_in(data["train"], APART)}

    def loss_of(weights, number):
      x, y = small.batch(fresh, number)
      logits = small.predictions(network.apply({"params": weights}, x))
      return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def one(number):
      loss, grads = jax.value_and_grad(loss_of)(params, number)
      flat = dict(flatten(grads))
      return loss, {path: flat[path] * mask for path, mask in masks.items()}

    losses, grads = jax.lax.map(one, step * batches + jnp.arange(batches))
    return {"noise": noise(grads), "noise_loss": losses.mean()}

  return measure


def noise(grads: dict[str, jax.Array]) -> jax.Array:
  """Returns the sum of variances over the squared length of the true mean, estimated.

  The mean of n gradients is longer than the true one by 1 / n of the variance, which is taken off.

  Args:
    grads: path -> [n, ...], one gradient a batch.
  """
  n = len(next(iter(grads.values())))
  spread = sum(jnp.sum(jnp.var(g, axis=0, ddof=1)) for g in grads.values())
  length = sum(jnp.sum(jnp.square(jnp.mean(g, axis=0))) for g in grads.values())
  return spread / jnp.maximum(length - spread / n, 1e-30)
