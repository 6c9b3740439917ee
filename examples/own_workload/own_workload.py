"""A model family of your own for `nm-sparsity`: an MLP with batch statistics on generated vectors.

Nothing here is of the package's networks or data. `own_workload.gin` names the class.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.trainer.workloads import Workload
from nm_sparsity_jax.training import roles

# SPARSITY_RULES may say 'hidden'.
roles.register("own_mlp", {"hidden": r"hidden_\d+/kernel"})


class Mlp(nn.Module):
  """Two hidden layers with batch normalization.

  Attributes:
    width: of the hidden layers.
  """

  width: int

  @nn.compact
  def __call__(self, x, train):
    for i in range(2):
      x = nn.Dense(self.width, use_bias=False, name=f"hidden_{i}")(x)
      x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name=f"norm_{i}")(x))
    return nn.Dense(1, use_bias=False, name="out")(x)[:, 0]


class Regression(Workload):
  """Learns the outputs of a random network.

  Args:
    batch_size: of training and evaluation.
    width: of the hidden layers.
    inputs: length of a vector.
  """

  def __init__(self, batch_size=32, width=32, inputs=16):
    self.batch_size, self.inputs = batch_size, inputs
    self.network = Mlp(width)

  def init(self, rng):
    return self.network.init(rng, jnp.zeros((1, self.inputs)), train=False)

  def loss(self, params, state, batch, rng):
    variables = {"params": params, **state}
    if rng is None:
      out = self.predict(params, state, batch)["output"]
    else:
      x = batch["x"] + 0.01 * jax.random.normal(rng, batch["x"].shape)
      out, state = self.network.apply(variables, x, train=True, mutable=["batch_stats"])
    error = out - batch["y"]
    sums = {"absolute_error": jnp.sum(jnp.abs(error)), "examples": jnp.float32(len(error))}
    return jnp.sum(error**2), sums, state

  def predict(self, params, state, batch):
    return {"output": self.network.apply({"params": params, **state}, batch["x"], train=False)}

  def batches(self, seed, start):
    for position in itertools.count(start):
      yield self._batch((seed, position))

  def splits(self):
    return {"validation": [self._batch((2**31, i)) for i in range(2)]}

  def less_is_better(self, metric):
    return metric in ("loss", "absolute_error")

  def _batch(self, seed):
    truth = np.random.default_rng(0).normal(size=(self.inputs, 4)).astype(np.float32)
    x = np.random.default_rng(seed).normal(size=(self.batch_size, self.inputs)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ truth).sum(-1)}
