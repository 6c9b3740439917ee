"""An NNX model with N:M weights: nothing of the model changes, the loss sees sparsified parameters.

    python examples/nnx_mlp.py

Runs in seconds on a CPU: a 1:4 MLP learns to copy a small random one, and is proved to be 1:4.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nm_sparsity_jax as nms

STEPS = 300


class Mlp(nnx.Module):
  """16 -> 64 -> 4, with statistics that change as it runs."""

  def __init__(self, rngs: nnx.Rngs):
    self.hidden = nnx.Linear(16, 64, rngs=rngs)
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.out = nnx.Linear(64, 4, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.gelu(self.norm(self.hidden(x))))


recipe = nms.recipe(
  "mdgf_linear", pattern="1:4", phases=nms.Phases(total=STEPS, dense=30, finetune=60)
)
rules = nms.Rules({"(hidden|out)/kernel": recipe})  # a place is a role or a regex for a whole path

# What the optimizer trains, and the rest: here BatchNorm's statistics.
graph, params, rest = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param, ...)
print(rules.assign(params))
tx = optax.chain(nms.count_steps(), optax.adam(3e-3))


@jax.jit
def train_step(params, rest, opt_state, x, y):
  """One update; the step of the schedule is the optimizer's own count."""
  step = nms.step_count(opt_state)

  def loss_fn(params):
    model = nnx.merge(graph, nms.sparsify(params, rules, step), rest, copy=True)
    loss = jnp.mean((model(x) - y) ** 2)
    return loss, nnx.state(model, nnx.Not(nnx.Param))

  (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), rest, opt_state, loss


def main():
  """Trains, finalizes, verifies."""
  key = jax.random.key(0)
  x = jax.random.normal(key, (256, 16))
  y = jnp.tanh(x @ jax.random.normal(jax.random.fold_in(key, 1), (16, 4)) / 4)
  trained, seen, opt_state = params, rest, tx.init(params)
  for step in range(STEPS):
    trained, seen, opt_state, loss = train_step(trained, seen, opt_state, x, y)
    if step % 60 == 0 or step == STEPS - 1:
      print(f"step {step:3d}  D {float(recipe.decay(step)):.2f}  loss {float(loss):.4f}")

  final = nms.finalize(trained, rules)
  model = nnx.merge(graph, final, seen)  # a plain nnx model with exact zeros
  model.eval()
  print(f"final loss {float(jnp.mean((model(x) - y) ** 2)):.4f}")
  print(nms.verify(final, rules))


if __name__ == "__main__":
  main()
