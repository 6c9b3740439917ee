"""One run of a recipe: drawn from a seed, trained, finalized, verified, scored.

    Row, pattern, steps -> rules -> one compiled train step -> (seed as data) -> a record

The library is used as any user would: an unchanged network, an optimizer in `nms.sparse`, and
`verify` at the end.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _recipes_cmudict import WORDS
from _recipes_tasks import TASKS as SMALL

import nm_sparsity_jax as nms

TASKS = SMALL | WORDS
SAMPLES = 20
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def rules_of(places, row, pattern: str, steps: int) -> nms.Rules:
  """Returns the rules of a row: its recipe on the kernels of these places."""
  if not row.sparse:
    return nms.Rules({".*": nms.recipe("dense")})
  phases = nms.Phases(
    total=steps, dense=steps * row.dense // 100, finetune=steps * row.finetune // 100
  )
  recipe = nms.recipe(
    row.recipe, pattern=pattern, phases=phases, gradient=row.gradient, lam=row.lam,
    decoupled=row.decoupled or None,
  )  # fmt: skip
  return nms.Rules(dict.fromkeys(places, recipe))


def training_flops(task, row, pattern: str, steps: int) -> float:
  """Returns the FLOPs of attention and feed-forward layers over all steps."""
  sparse = rules_of(task.places, row, pattern, steps).places if row.sparse else {}
  cost = nms.flops.training(task.cost, sparse, task.examples, steps=steps)
  return cost.select("attention", *(("ff",) if row.ff else ())).flops


def affordable(task, row, pattern: str, price: float, most: int) -> int:
  """Returns the most steps of a row, up to `most`, that cost no more than `price`."""
  low, high = 1, most
  while low < high:
    middle = (low + high + 1) // 2
    fits = training_flops(task, row, pattern, middle) <= price
    low, high = (middle, high) if fits else (low, middle - 1)
  return low


class Experiment(NamedTuple):
  """Compiled once for every seed."""

  init: Any
  train_step: Any
  score: Any
  rules: nms.Rules


def falling(steps: int, peak: float):
  """Returns the learning rate of a row: a warm-up of 10 % and a cosine to 0."""
  return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), steps)


def held(steps: int, peak: float, warmup: float = 0.1):
  """Returns a learning rate without decay: a warm-up of that share, then constant."""
  return optax.warmup_constant_schedule(0.0, peak, max(1, int(steps * warmup)))


@functools.lru_cache(maxsize=64)
def experiment(task, row, pattern: str, steps: int, rate=None) -> Experiment:
  """Returns the functions of one row: the seed comes in as a key and as data."""
  rules = rules_of(task.places, row, pattern, steps)
  network = task.network(row.ff)
  schedule = (rate or (held if row.constant else falling))(steps, row.rate or task.rate)
  tx = nms.sparse(task.optimizer(schedule), rules, learning_rate=schedule)

  def loss_of(params, inputs, targets):
    logits = task.predictions(network.apply({"params": params}, inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    counted = task.counted(targets)
    return losses.mean(where=counted), (logits.argmax(-1) == targets).mean(where=counted)

  @jax.jit
  def init(key, data, params):
    if params is None:
      inputs, _ = task.batch(data, 0)
      params = network.init(key, inputs)["params"]
    return params, tx.init(params)

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(carry, data):
    params, opt_state = carry
    batch = task.batch(data, nms.step_count(opt_state))
    (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  @jax.jit
  def score(params, data):
    return loss_of(params, *data["test"])

  return Experiment(init, train_step, score, rules)


@functools.cache
def start_of(task_name: str, row, seed: int):
  """Returns the weights of a dense start and its scores; (None, {}) for a task without one."""
  task = TASKS[task_name]
  if not task.start:
    return None, {}
  run = experiment(task, row, "-", task.start, functools.partial(held, warmup=0.5))
  key, draw = jax.random.split(jax.random.key(seed))
  data = task.draw(draw)
  carry = run.init(key, task.fed(data, 0), None)
  for step in range(task.start):
    carry, _ = run.train_step(carry, task.fed(data, step))
  loss, accuracy = run.score(carry[0], data)
  about = {"steps": task.start, "accuracy": float(accuracy), "cross_entropy": float(loss)}
  return carry[0], {"start": about}


def train(
  task_name: str, row, pattern: str, steps: int, seed: int, onlooker=None
) -> dict[str, Any]:
  """Runs one seed of one row, and returns its scores, its curve and its versions.

  Args:
    task_name: of TASKS.
    row: how it trains.
    pattern: the target, "-" without sparsity.
    steps: how long.
    seed: draws everything.
    onlooker: called with (task, row, rules); what it returns is called with (carry, step, data) at
      each sample, and its figures join the curve.
  """
  task = TASKS[task_name]
  dense = type(row)("dense", ff=row.ff)
  first, about_start = start_of(task_name, dense, seed)
  began = time.process_time()
  run = experiment(task, row, pattern, steps)
  key, draw = jax.random.split(jax.random.key(seed))
  # The start has seen the first batches of its key.
  data = task.draw(jax.random.fold_in(draw, 1) if task.start else draw)
  first = jax.tree.map(jnp.copy, first)  # the first step donates its own
  carry = run.init(key, task.fed(data, 0), first)
  every, curve = max(1, steps // SAMPLES), []
  look = onlooker(task, row, run.rules) if onlooker else lambda *_: {}
  for step in range(steps):
    seen = look(carry, step, data) if step % every == 0 else {}
    carry, loss = run.train_step(carry, task.fed(data, step))
    if step % every == 0:
      curve.append({"step": step, "loss": loss} | seen)
  final, _ = carry
  loss, accuracy = run.score(final, data)
  diverged = {} if jnp.isfinite(loss) else {"diverged": True}
  if diverged:  # nobody could deploy it: it scores as a network of zeros does, which guesses
    final = jax.tree.map(jnp.zeros_like, final)
    loss, accuracy = run.score(final, data)
  return diverged | {
    "steps": steps,
    "accuracy": float(accuracy),
    "cross_entropy": float(loss),
    **task.further(task.network(row.ff), final, data),
    "density": kept(nms.verify(final, run.rules)) if row.sparse else 1.0,
    "flops": training_flops(task, row, pattern, steps),
    "curve": {name: [_short(point[name]) for point in curve] for name in curve[0]},
    "versions": versions(task.packages),
    "seconds": round(time.process_time() - began, 1),
    **about_start,
  }


def versions(packages) -> dict[str, str]:
  """Returns the versions that a record has: the usual ones, and those of more packages."""
  found = {name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)}
  return {"python": platform.python_version()} | found | {"nm-sparsity-jax": nms.__version__}


def kept(report) -> float:
  """Returns the mean density of sparse weights; raises where one is not n:m."""
  if not report.ok:
    raise AssertionError(f"weights are not what they should be:\n{report}")
  return float(np.mean([place.density for place in report.sites]))


def _short(x) -> float | int | None:
  if not np.isfinite(x):
    return None
  return x if isinstance(x, int) else float(f"{float(x):.4g}")
