"""One run of a recipe: drawn from a seed, trained, finalized, verified, scored.

    Row, pattern, steps -> rules -> one compiled train step -> (seed as data) -> a record

The library is used as any user would: rules around an unchanged network, `sr_ste` in the optimizer
chain, `update_state` after each update, `finalize` and `verify` at the end.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import nm_sparsity_jax as nms

BATCH, RATE, SAMPLES = 64, 1e-3, 20
VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "nm-sparsity-jax")
WATCHED = {
  "density": "nm/density",
  "D": "nm/D",
  "gradient_all": "nm/grad_abs_var/all",
  "gradient_kept": "nm/grad_abs_var/kept",
  "second_moment_all": "nm/second_moment_var/all",
  "second_moment_kept": "nm/second_moment_var/kept",
}


class Block(nn.Module):
  """Attention, then the feed-forward layers whose kernels are made sparse, unless `ff` is False."""

  heads: int
  mlp: int
  ff: bool

  @nn.compact
  def __call__(self, x, mask):
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
    return x + Mlp(self.mlp, name="mlp")(nn.LayerNorm()(x)) if self.ff else x


class Mlp(nn.Module):
  """Without biases, so that zeroed kernels and no feed-forward layers are the same function."""

  width: int

  @nn.compact
  def __call__(self, x):
    h = nn.gelu(nn.Dense(self.width, use_bias=False, name="wi")(x))
    return nn.Dense(x.shape[-1], use_bias=False, name="wo")(h)


class Network(nn.Module):
  """A pre-norm transformer: causal over symbols, or over all patches where `symbols` is 0."""

  shape: nms.flops.ViTShape
  symbols: int
  ff: bool

  @nn.compact
  def __call__(self, x):
    s = self.shape
    mask = nn.make_causal_mask(x) if self.symbols else None
    normal = nn.initializers.normal(0.3)
    if self.symbols:
      x = nn.Embed(self.symbols, s.embed, embedding_init=normal)(x)
    else:
      x = nn.Dense(s.embed)(x)
    x = x + self.param("position", normal, (s.tokens, s.embed))
    for i in range(s.layers):
      x = Block(s.heads, s.mlp, self.ff, name=f"block_{i}")(x, mask)
    x = nn.LayerNorm()(x)
    return nn.Dense(s.classes)(x if self.symbols else x.mean(1))


def _small(symbols: int) -> nms.flops.ViTShape:
  return nms.flops.ViTShape(
    layers=2, embed=128, mlp=512, heads=4, head_dim=32, tokens=12, patch=1, classes=symbols
  )


class Bigram(NamedTuple):
  """y[t] = table[x[t - 1], x[t]], the table random: nothing to learn but its entries."""

  symbols: int = 40
  tests: int = 2048
  shape: nms.flops.ViTShape = _small(40)

  def draw(self, key):
    """All that a seed decides of the data."""
    table, train, test = jax.random.split(key, 3)
    table = jax.random.randint(table, (self.symbols, self.symbols), 0, self.symbols)
    data = {"table": table, "train": train}
    return data | {"test": self._examples(data, test, self.tests)}

  def batch(self, data, step):
    return self._examples(data, jax.random.fold_in(data["train"], step), BATCH)

  def _examples(self, data, key, count):
    x = jax.random.randint(key, (count, self.shape.tokens), 0, self.symbols)
    return x, data["table"][x[:, :-1], x[:, 1:]]

  def predictions(self, logits):
    return logits[:, 1:]  # the first symbol has none before it


class Digits(NamedTuple):
  """sklearn's 8x8 digits in 16 patches, by the paper's ViT-tiny: a smoke test, no ranking."""

  symbols: int = 0
  tests: int = 360
  shape: nms.flops.ViTShape = nms.flops.ViTShape(
    layers=3, embed=192, mlp=768, heads=3, head_dim=64, tokens=16, patch=4, classes=10
  )

  def draw(self, key):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    order, train = jax.random.split(key)
    order = jax.random.permutation(order, len(labels))
    x, y = jnp.float32(patches)[order] / 16, jnp.int32(labels)[order]
    test, rest = (x[: self.tests], y[: self.tests]), (x[self.tests :], y[self.tests :])
    return {"images": rest, "train": train, "test": test}

  def batch(self, data, step):
    x, y = data["images"]
    chosen = jax.random.randint(jax.random.fold_in(data["train"], step), (BATCH,), 0, len(y))
    return x[chosen], y[chosen]

  def predictions(self, logits):
    return logits


TASKS = {
  "bigram": Bigram(),
  "bigram80": Bigram(symbols=80, shape=_small(80)),
  "digits": Digits(),
}


def rules_of(row, pattern: str, steps: int) -> nms.Rules:
  """The rules of a row: its recipe on the feed-forward kernels."""
  if not row.sparse:
    return nms.Rules({".*": nms.recipe("dense")})
  phases = nms.Phases(total=steps, dense=steps * row.dense // 100, finetune=steps // 5)
  fields = {"gradient": row.gradient, "decay_kind": row.decay_kind}
  return nms.Rules({"ff": nms.recipe(row.recipe, pattern=pattern, phases=phases, **fields)})


def training_flops(task, row, pattern: str, steps: int) -> float:
  """FLOPs of attention and feed-forward layers, all steps, as `nm_sparsity_jax.flops` counts."""
  recipes = dict(rules_of(row, pattern, steps).places) if row.sparse else {}
  cost = nms.flops.training(task.shape, recipes, BATCH, steps=steps)
  return cost.select("attention", *(("ff",) if row.ff else ())).flops


def equal_steps(task, row, pattern: str, dense_steps: int) -> int:
  """The most steps that a row can take for what `dense_steps` cost the dense network."""
  price = 3 * BATCH * nms.flops.Cost(task.shape.ops()).select("attention", "ff").flops * dense_steps
  low, high = dense_steps, 4 * dense_steps
  while low < high:
    middle = (low + high + 1) // 2
    fits = training_flops(task, row, pattern, middle) <= price
    low, high = (middle, high) if fits else (low, middle - 1)
  return low


class Experiment(NamedTuple):
  """Compiled once for every seed."""

  start: Any
  train_step: Any
  score: Any
  rules: nms.Rules


@functools.lru_cache(maxsize=64)
def experiment(task, row, pattern: str, steps: int) -> Experiment:
  """The functions of one row: the seed comes in as a key and as data."""
  rules = rules_of(row, pattern, steps)
  network = Network(task.shape, task.symbols, row.ff)
  rate = optax.warmup_cosine_decay_schedule(0.0, RATE, max(1, steps // 10), steps)
  tx = optax.chain(nms.sr_ste(rules), optax.adamw(rate))
  every = max(1, steps // SAMPLES)

  def loss_of(params, inputs, targets):
    logits = task.predictions(network.apply({"params": params}, inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), (logits.argmax(-1) == targets).mean()

  @jax.jit
  def start(key, data):
    inputs, _ = task.batch(data, 0)
    params = network.init(key, inputs)["params"]
    return params, tx.init(params), nms.init_state(params, rules)

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(carry, data):
    params, opt_state, state = carry
    step = nms.step_count(opt_state)
    inputs, targets = task.batch(data, step)

    def loss_fn(params):
      return loss_of(nms.sparsify(params, rules, step, state), inputs, targets)

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)

    def watch():
      seen = nms.metrics.summary(params, rules, step, state, grads, opt_state, per_place=False)
      return {name: seen[key] for name, key in WATCHED.items()}

    nothing = lambda: dict.fromkeys(WATCHED, jnp.float32(0))
    watched = jax.lax.cond(step % every == 0, watch, nothing) | {"loss": loss}

    updates, opt_state = tx.update(grads, opt_state, params, nm_state=state)
    new = optax.apply_updates(params, updates)
    count = nms.step_count(opt_state)
    state = nms.update_state(state, new, rules, count, grads=grads, grads_at=params)
    return (new, opt_state, state), watched

  @jax.jit
  def score(params, data):
    return loss_of(params, *data["test"])

  return Experiment(start, train_step, score, rules)


def train(task_name: str, row, pattern: str, steps: int, seed: int) -> dict[str, Any]:
  """Runs one seed of one row, and says all that is worth keeping of it."""
  began = time.process_time()
  task = TASKS[task_name]
  run = experiment(task, row, pattern, steps)
  init, draw = jax.random.split(jax.random.key(seed))
  data = task.draw(draw)
  carry = run.start(init, data)
  every, curve = max(1, steps // SAMPLES), []
  for step in range(steps):
    carry, watched = run.train_step(carry, data)
    if step % every == 0:
      curve.append({"step": step} | watched)
  params, opt_state, state = carry
  if int(nms.step_count(opt_state)) != steps:
    raise AssertionError(f"{steps} steps were wanted, {nms.step_count(opt_state)} were taken.")

  final = nms.finalize(params, run.rules, state)
  density = 1.0
  if row.sparse:
    proof = nms.verify(final, run.rules)
    if not proof.ok:
      raise AssertionError(f"{row} at {pattern} is not what it should be:\n{proof}")
    density = float(np.mean([p.density for p in proof.places]))
  loss, accuracy = run.score(final, data)
  names = ("step", "loss", *(WATCHED if row.sparse else ()))
  return {
    "steps": steps,
    "accuracy": float(accuracy),
    "cross_entropy": float(loss),
    "density": density,
    "flops": training_flops(task, row, pattern, steps),
    "curve": {name: [_short(point[name]) for point in curve] for name in names},
    "versions": {"python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in VERSIONS[:-1]}
    | {VERSIONS[-1]: nms.__version__},
    "seconds": round(time.process_time() - began, 1),
  }


def _short(x) -> float | int:
  return x if isinstance(x, int) else float(f"{float(x):.4g}")
