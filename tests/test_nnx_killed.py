"""A program of a user that is killed again and again ends with the bits of one that was not."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


NNX = """
import sys

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import nm_sparsity_jax as nms

folder, steps = sys.argv[1], 40
phases = nms.Phases(total=steps, dense=5, finetune=10)
rules = nms.Rules({
  "hidden/kernel": nms.recipe("idp", pattern="2:8", phases=phases),
  "out/kernel": nms.recipe("mdgf_linear", pattern="1:4", phases=phases),
})


class Model(nnx.Module):
  def __init__(self, rngs):
    self.hidden, self.out = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x)))


@nnx.jit
def train_step(model, optimizer, x):
  grads = nnx.grad(lambda model: jnp.mean((model(x) - jnp.sin(x[:, :4])) ** 2))(model)
  optimizer.update(model, grads)


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, nms.sparse(optax.adamw(1e-2), rules), wrt=nnx.Param)
graph, state = nnx.split((model, optimizer))
manager = ocp.CheckpointManager(folder)
done = manager.latest_step() or 0
if done:
  state = manager.restore(done, args=ocp.args.StandardRestore(state))
  model, optimizer = nnx.merge(graph, state)
for step in range(done, steps):
  train_step(model, optimizer, jax.random.normal(jax.random.key(step), (8, 16)))
  manager.save(step + 1, args=ocp.args.StandardSave(nnx.state((model, optimizer))))
  print(step + 1, flush=True)
manager.wait_until_finished()
assert nms.verify(nnx.state(model, nnx.Param), rules).ok
"""


def test_nnx_with_orbax_killed_and_resumed_is_uninterrupted(tmp_path):
  """`nms.sparse` in a program of a user: its state is a tree that any checkpointer saves."""
  import orbax.checkpoint as ocp

  restore = ocp.args.StandardRestore()
  (tmp_path / "train.py").write_text(NNX)
  path = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])

  def run(folder, kill_at=None):
    command = [sys.executable, str(tmp_path / "train.py"), str(folder)]
    told = []
    with subprocess.Popen(
      command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
      for line in process.stdout:
        told.append(int(line))
        if told[-1] == kill_at:
          process.kill()
    return process.returncode, told

  assert run(tmp_path / "whole") == (0, list(range(1, 41)))
  for at in (7, 23):
    assert run(tmp_path / "killed", at)[0] == -signal.SIGKILL
  code, told = run(tmp_path / "killed")
  assert code == 0 and told[0] > 8 and told[-1] == 40  # it goes on from what was saved
  ends = [
    jax.tree.flatten(ocp.CheckpointManager(tmp_path / name).restore(40, args=restore))
    for name in ("whole", "killed")
  ]
  assert ends[0][1] == ends[1][1] and len(ends[0][0]) > 10
  jax.tree.map(np.testing.assert_array_equal, ends[0][0], ends[1][0])
