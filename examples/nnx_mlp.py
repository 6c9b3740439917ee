"""An NNX model with N:M weights: of a program for dense ones, only the optimizer changes.

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


@nnx.jit
def train_step(model, optimizer, x, y):
  """Does one update; the optimizer's state holds the step of the schedule."""
  loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
  optimizer.update(model, grads)
  return loss


def main():
  """Trains and verifies."""
  key = jax.random.key(0)
  x = jax.random.normal(key, (256, 16))
  y = jnp.tanh(x @ jax.random.normal(jax.random.fold_in(key, 1), (16, 4)) / 4)
  model = Mlp(nnx.Rngs(0))
  print(rules.assign(nnx.state(model, nnx.Param)))
  optimizer = nnx.Optimizer(model, nms.sparse(optax.adam(3e-3), rules), wrt=nnx.Param)
  for step in range(STEPS):
    loss = train_step(model, optimizer, x, y)
    if step % 60 == 0 or step == STEPS - 1:
      print(f"step {step:3d}  D {float(recipe.decay(step)):.2f}  loss {float(loss):.4f}")

  model.eval()
  print(f"final loss {float(jnp.mean((model(x) - y) ** 2)):.4f}")
  print(nms.verify(nnx.state(model, nnx.Param), rules))


if __name__ == "__main__":
  main()
