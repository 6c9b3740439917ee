"""A run that is killed again and again ends with the bits of one that was not."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from checkpoint_files import assert_same, read

from nm_sparsity_jax.runs import folders

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# What it imports warns on its own account.
pytestmark = pytest.mark.filterwarnings("ignore")

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
  """A process that forks runs."""
  env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
  env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
  errors = (tmp_path_factory.mktemp("worker") / "stderr").open("w+")
  command = [sys.executable, str(HERE / "local_worker.py"), str(tmp_path_factory.mktemp("xla"))]
  pipe = subprocess.PIPE
  with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env) as p:
    try:
      yield p
    finally:
      p.stdin.close()
      p.wait(60)


def run(worker, folder, steps, kill_after=None, delay=0.0):
  """One process, killed `delay` seconds after so many steps: its status, its last step."""
  folder.mkdir(exist_ok=True)
  worker.stdin.write(f"{steps} {folder}\n")
  worker.stdin.flush()
  seen, last = 0, None
  for line in worker.stdout:
    word, number = line.split()
    if word == "ended":
      return int(number), last
    last, seen = int(number), seen + 1
    if seen == kill_after:
      time.sleep(delay)
      children = pathlib.Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
      for child in children:
        with contextlib.suppress(ProcessLookupError):
          os.kill(int(child), signal.SIGKILL)
  raise AssertionError("the worker has ended")


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(worker, tmp_path, kills=20, steps=120):
  """The loop is one for all workloads, and test_workloads.py kills a process of it."""
  whole, folder = tmp_path / "whole", tmp_path / "killed"
  assert run(worker, whole, steps) == (0, steps - 1)
  rng = random.Random(1)
  left_behind = 0
  for i in range(kills):
    after, delay = rng.randint(4, (steps - 20) // kills), rng.uniform(0, 0.05)
    status, last = run(worker, folder, steps, after, delay)
    assert status == signal.SIGKILL
    found = folders.steps(folder)
    assert not found or found[-1] <= last + 4, i
    if found:
      assert int(read(folder, found[-1])["state/step"]) == found[-1]
    left_behind += any("tmp" in p.name for p in folder.iterdir())
  assert run(worker, folder, steps) == (0, steps - 1)
  assert_same(read(folder, steps), read(whole, steps))
  assert folders.steps(folder) == [steps - 3, steps]
  assert not any("tmp" in p.name for p in folder.iterdir())
  assert left_behind  # some were hit while they wrote


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
  assert run(tmp_path / "killed", 7)[0] == -signal.SIGKILL
  code, told = run(tmp_path / "killed", 23)
  assert code == -signal.SIGKILL and told[0] > 1  # it goes on from what was saved
  code, told = run(tmp_path / "killed")
  assert code == 0 and told[0] > 8 and told[-1] == 40
  ends = [
    jax.tree.flatten(ocp.CheckpointManager(tmp_path / name).restore(40, args=restore))
    for name in ("whole", "killed")
  ]
  assert ends[0][1] == ends[1][1] and len(ends[0][0]) > 10
  jax.tree.map(np.testing.assert_array_equal, ends[0][0], ends[1][0])
