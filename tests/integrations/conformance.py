"""What every trainer must show, and how: one function a claim."""

import functools
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = pathlib.Path(os.environ.get("SCRIPTS_PATH", "~/.cache/nm-sparsity/scripts")).expanduser()
BLOCKS = ("ff", "qkv", "o")
RECIPES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise", "idp")


def recipe_of(name, pattern, steps):
  """A recipe for a short run."""
  phases = nms.Phases(total=steps, dense=steps // 6, finetune=steps // 3)
  return nms.recipe(name, pattern=pattern, phases=phases)


def rules_of(pattern, steps):
  """Recipe -> rules that give it to the blocks that families of models know."""
  return {
    name: nms.Rules(dict.fromkeys(BLOCKS, recipe_of(name, pattern, steps))) for name in RECIPES
  }


# --- n:m ------------------------------------------------------------------------------------------


def assert_nm(w, axes, pattern, path=""):
  """Of each m weights along the axes that a product sums over, n are left: by numpy alone."""
  n, m = map(int, pattern.split(":"))
  axes = np.atleast_1d(axes)
  groups = np.moveaxis(np.asarray(w, np.float32), axes, range(-len(axes), 0)).reshape(-1, m)
  assert set(np.count_nonzero(groups, axis=1)) == {n}, path


def assert_sparse(params, rules, pattern, places):
  """So many weights have a place in the rules, and each is n:m along its axes."""
  found, weights = rules.assign(params).sites, dict(flatten(params))
  assert len(found) == places
  for path, site in found.items():
    assert_nm(weights[path], site.groups.axes, pattern, path)


# --- the axes that a product sums over ------------------------------------------------------------


def assert_sums_over(site, kernel, x, call):
  """A layer sums over the axes of a site: a feature of 0 gives what a slice of 0 gives.

  Args:
    site: what rules say of the kernel.
    kernel: what the layer multiplies by.
    x: an input of the layer, whose last axes meet those of the site.
    call: call(kernel, x) is the layer.
  """
  axes = site.groups.axes
  kernel, x = np.array(kernel, np.float32), np.array(x, np.float32)
  last = range(-len(axes), 0)
  assert x.shape[-len(axes) :] == tuple(kernel.shape[axis] for axis in axes), site.path
  # The feature that says most, since an untrained bias or relu may leave others at 0.
  size = np.abs(x).reshape(-1, *x.shape[-len(axes) :]).sum(0)
  size *= np.abs(np.moveaxis(kernel, axes, last)).sum(tuple(range(kernel.ndim - len(axes))))
  feature = (..., *np.unravel_index(size.argmax(), size.shape))
  no_feature, no_slice = x.copy(), kernel.copy()
  no_feature[feature] = 0
  np.moveaxis(no_slice, axes, last)[feature] = 0
  want = np.asarray(call(kernel, no_feature))
  np.testing.assert_allclose(call(no_slice, x), want, 1e-4, 1e-5, err_msg=site.path)
  assert np.abs(call(kernel, x) - want).max() > 1e-3, site.path


def input_of(site, *batch):
  """A random input of a layer: its last axes are those that the kernel sums over."""
  summed = (site.shape[axis] for axis in site.groups.axes)
  return np.random.default_rng(0).normal(size=(*batch, *summed))


def layer_at(model, path):
  """The part of a model at a path: of 'layers/0/mlp', `model.layers[0].mlp`."""
  step = lambda at, word: at[int(word)] if word.isdigit() else getattr(at, word)
  return functools.reduce(step, path.split("/"), model)


def nnx_call(layer, name="kernel"):
  """call(kernel, x) of an NNX layer."""

  def call(kernel, x):
    getattr(layer, name)[...] = jnp.asarray(kernel)
    return layer(jnp.asarray(x))

  return call


# --- losses ---------------------------------------------------------------------------------------


def losses_by_hand(loss, params, rules, tx, batches, accumulate=1):
  """The losses of all batches: masks in the loss, SR-STE's term before the optimizer.

  Args:
    loss: loss(params, batch).
    params: at the first step.
    rules: what is sparse.
    tx: the optimizer for dense weights.
    batches: one a step, or as many as are accumulated.
    accumulate: batches of a step.
  """
  tx = optax.MultiSteps(optax.chain(nms.sr_ste(rules), tx), accumulate)
  opt, state = tx.init(params), nms.init_state(params, rules)

  @jax.jit
  def step(params, opt, state, batch):
    masked = lambda w: loss(nms.sparsify(w, rules, nms.step_count(opt), state), batch)
    value, grads = jax.value_and_grad(masked)(params)
    updates, opt = tx.update(grads, opt, params, nm_state=state)
    after = optax.apply_updates(params, updates)
    state = nms.update_state(state, after, rules, nms.step_count(opt), grads, params)
    return after, opt, state, value

  losses = []
  for batch in batches:
    params, opt, state, value = step(params, opt, state, batch)
    losses.append(float(value))
  return np.array(losses)


# --- killed and resumed ---------------------------------------------------------------------------


def assert_same(found, expected, atol=0):
  """Two trees have the same arrays: to the bit, or within `atol`."""

  def check(path, x, y):
    where = jax.tree_util.keystr(path)
    np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=where)

  jax.tree_util.tree_map_with_path(check, found, expected)


def steps_of(command, kill_at=None):
  """Runs a program that prints 'step 1' and so on; returns its exit code and its steps."""
  env, steps = os.environ | {"PYTHONPATH": str(ROOT)}, []
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
    for line in process.stdout:
      if line.startswith("step"):
        steps.append(int(line.split()[1]))
        if steps[-1] == kill_at:
          process.kill()
  return process.returncode, steps


def kill_and_resume(program, folder, steps, kill_at):
  """Trains into folder/whole, and into folder/killed in two parts; returns the second's first step.

  Args:
    program: a file; its argument is where a run saves, and whence it goes on.
    folder: of both runs.
    steps: of a whole run.
    kill_at: the step after which one run gets SIGKILL.
  """
  command = lambda name: [sys.executable, str(program), str(folder / name)]
  assert steps_of(command("whole")) == (0, [*range(1, steps + 1)])
  assert steps_of(command("killed"), kill_at)[0] == -signal.SIGKILL
  code, seen = steps_of(command("killed"))
  assert code == 0 and seen[-1] == steps
  return seen[0]


# --- programs of others, and examples -------------------------------------------------------------


def replaced(text, changes):
  """A program with other lines: {what stands there once: what takes its place}."""
  for old, new in changes.items():
    assert text.count(old) == 1, f"the program has changed: {old!r}"
    text = text.replace(old, new)
  return text


def run_example(name, changes):
  """Runs an example as a program, made shorter."""
  code = replaced((ROOT / "examples" / name).read_text("utf-8"), changes)
  exec(compile(code, name, "exec"), {"__name__": "__main__"})
