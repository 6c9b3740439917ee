"""One run of a recipe: drawn from a seed, trained, finalized, verified, scored.

    Row, pattern, steps -> rules -> one compiled train step -> (seed as data) -> a record

The library is used as any user would: rules around an unchanged network, `sr_ste` in the optimizer
chain, `update_state` after each update, `finalize` and `verify` at the end.
"""

from __future__ import annotations

import dataclasses
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
from nm_sparsity_jax.models.t5 import T5Config, Transformer

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


class TextToText(nn.Module):
  """The library's T5 as a classifier: the logits of the first word that it answers."""

  config: T5Config

  @nn.compact
  def __call__(self, inputs):
    start = jnp.zeros((len(inputs), 1), jnp.int32)
    t5 = Transformer(self.config, name="t5")
    return t5(inputs, start, start + 1, enable_dropout=False)[:, 0]


def _small(symbols: int) -> nms.flops.ViTShape:
  return nms.flops.ViTShape(
    layers=2, embed=128, mlp=512, heads=4, head_dim=32, tokens=12, patch=1, classes=symbols
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is learned, and by which network.

  Attributes:
    shape: of the network, for its FLOPs.
    symbols: that the network reads; 0 where it reads patches.
    tests: examples that it is scored on.
    places: what becomes sparse.
    start: dense steps that come first, once a seed, after which the optimizer begins anew.
  """

  shape: Any
  symbols: int
  tests: int
  places: tuple[str, ...] = ("ff",)
  start: int = 0

  def network(self, ff: bool) -> nn.Module:
    return Network(self.shape, self.symbols, ff)

  def optimizer(self, rate):
    return optax.adamw(rate)

  def draw(self, key) -> dict[str, Any]:
    """Returns all data that a seed decides; "test" is what the network is scored on."""
    raise NotImplementedError

  def batch(self, data, step):
    """Returns examples and answers of a step: some of "rows"."""
    x, y = data["rows"]
    key = jax.random.fold_in(data["train"], step)
    chosen = jax.random.randint(key, (BATCH,), 0, len(y))
    return x[chosen], y[chosen]

  def predictions(self, logits):
    """Returns the logits that have an answer."""
    return logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigram(Task):
  """y[t] = table[x[t - 1], x[t]], the table random: nothing to learn but its entries."""

  shape: nms.flops.ViTShape = _small(40)
  symbols: int = 40
  tests: int = 2048

  def draw(self, key):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits(Task):
  """sklearn's 8x8 digits in 16 patches, by the paper's ViT-tiny: a smoke test, no ranking."""

  shape: nms.flops.ViTShape = nms.flops.ViTShape(
    layers=3, embed=192, mlp=768, heads=3, head_dim=64, tokens=16, patch=4, classes=10
  )
  symbols: int = 0
  tests: int = 360

  def draw(self, key):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
    order, train = jax.random.split(key)
    order = jax.random.permutation(order, len(labels))
    x, y = jnp.float32(patches)[order] / 16, jnp.int32(labels)[order]
    test, rest = (x[: self.tests], y[: self.tests]), (x[self.tests :], y[self.tests :])
    return {"rows": rest, "train": train, "test": test}


_T5 = T5Config.t5_1_1(
  "tiny", vocab_size=256, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128,
  num_encoder_layers=2, num_decoder_layers=1, dropout_rate=0.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniGlue(Task):
  """A config of mini-GLUE by the library's T5, fine-tuned from a dense start.

  The kernels of attention become sparse too: without feed-forward layers the network does as well.
  The rows are the same for all seeds; a seed draws their order and the initial weights.
  """

  config: str
  rows: int = 20_000
  length: int = 24
  shape: nms.flops.T5Shape = nms.flops.T5Shape.of(_T5, 24, 1)
  symbols: int = _T5.vocab_size
  tests: int = 2048
  places: tuple[str, ...] = ("ff", "qkv", "o")
  start: int = 2000

  def network(self, ff: bool) -> nn.Module:
    """Returns the network; without `ff`, its feed-forward layers add 0."""
    off = {} if ff else {"mlp_activations": (jnp.zeros_like, jnp.zeros_like)}
    return TextToText(dataclasses.replace(_T5, **off))

  def optimizer(self, rate):
    return optax.adamw(rate, b2=0.98)

  def draw(self, key):
    split = "validation_matched" if self.config == "mnli" else "validation"
    rows = _mini_glue(self.config, "train", self.rows, self.length)
    test = _mini_glue(self.config, split, self.tests, self.length)
    return {"rows": rows, "train": key, "test": test}


@functools.cache
def _mini_glue(config: str, split: str, rows: int, length: int):
  """Returns ids of rows of mini-GLUE [rows, length], and the first id of each answer [rows]."""
  from t5x_tasks import mini
  from t5x_tasks.vocabulary import mini_words

  words, task = mini_words(), nms.glue.TASKS[config]
  x, y = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
  for i, row in enumerate(mini.make(config, split, {split.partition("_")[0]: rows})):
    text = [task.prefix, *(word for f in task.fields for word in (f"{f}:", row[f]))]
    ids = [*words.encode(" ".join(text)), 1]
    x[i, : len(ids)] = ids
    y[i] = words.encode(task.labels[row["label"]])[0]
  return jnp.asarray(x), jnp.asarray(y)


TASKS = {
  "bigram": Bigram(),
  "bigram80": Bigram(symbols=80, shape=_small(80)),
  "digits": Digits(),
  "mini_mnli": MiniGlue(config="mnli"),
}


def rules_of(places, row, pattern: str, steps: int) -> nms.Rules:
  """Returns the rules of a row: its recipe on the kernels of these places."""
  if not row.sparse:
    return nms.Rules({".*": nms.recipe("dense")})
  phases = nms.Phases(
    total=steps, dense=steps * row.dense // 100, finetune=steps * row.finetune // 100
  )
  fields = {"gradient": row.gradient, "decay_kind": row.decay_kind}
  recipe = nms.recipe(row.recipe, pattern=pattern, phases=phases, **fields)
  return nms.Rules(dict.fromkeys(places, recipe))


def training_flops(task, row, pattern: str, steps: int) -> float:
  """Returns the FLOPs of attention and feed-forward layers over all steps."""
  recipes = dict(rules_of(task.places, row, pattern, steps).places) if row.sparse else {}
  cost = nms.flops.training(task.shape, recipes, BATCH, steps=steps)
  return cost.select("attention", *(("ff",) if row.ff else ())).flops


def equal_steps(task, row, pattern: str, dense_steps: int) -> int:
  """Returns the most steps of a row that cost no more than `dense_steps` of the dense network."""
  dense = nms.flops.Cost(task.shape.ops()).select("attention", "ff").flops
  price = 3 * BATCH * dense * dense_steps
  low, high = dense_steps, 4 * dense_steps
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


def falling(steps: int):
  """Returns the learning rate of a row: a warm-up of 10 % and a cosine to 0."""
  return optax.warmup_cosine_decay_schedule(0.0, RATE, max(1, steps // 10), steps)


def level(steps: int):
  """Returns the learning rate of a dense start: a warm-up of half its steps, then constant."""
  return optax.warmup_constant_schedule(0.0, RATE, steps // 2)


@functools.lru_cache(maxsize=64)
def experiment(task, row, pattern: str, steps: int, rate=falling) -> Experiment:
  """Returns the functions of one row: the seed comes in as a key and as data."""
  rules = rules_of(task.places, row, pattern, steps)
  network = task.network(row.ff)
  tx = optax.chain(nms.sr_ste(rules), task.optimizer(rate(steps)))
  every = max(1, steps // SAMPLES)

  def loss_of(params, inputs, targets):
    logits = task.predictions(network.apply({"params": params}, inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), (logits.argmax(-1) == targets).mean()

  @jax.jit
  def init(key, data, params):
    if params is None:
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

  return Experiment(init, train_step, score, rules)


@functools.cache
def start_of(task_name: str, row, seed: int):
  """Returns the weights of a dense start and its scores; (None, {}) for a task without one."""
  task = TASKS[task_name]
  if not task.start:
    return None, {}
  run = experiment(task, row, "-", task.start, level)
  key, draw = jax.random.split(jax.random.key(seed))
  data = task.draw(draw)
  carry = run.init(key, data, None)
  for _ in range(task.start):
    carry, _ = run.train_step(carry, data)
  loss, accuracy = run.score(carry[0], data)
  about = {"steps": task.start, "accuracy": float(accuracy), "cross_entropy": float(loss)}
  return carry[0], {"start": about}


def train(task_name: str, row, pattern: str, steps: int, seed: int) -> dict[str, Any]:
  """Runs one seed of one row, and says all that is worth keeping of it."""
  task = TASKS[task_name]
  dense = type(row)("dense", ff=row.ff)
  first, about_start = start_of(task_name, dense, seed)
  began = time.process_time()
  run = experiment(task, row, pattern, steps)
  key, draw = jax.random.split(jax.random.key(seed))
  # The start has seen the first batches of its key.
  data = task.draw(jax.random.fold_in(draw, 1) if task.start else draw)
  carry = run.init(key, data, jax.tree.map(jnp.copy, first))  # the first step gives up its own
  every, curve = max(1, steps // SAMPLES), []
  for step in range(steps):
    carry, watched = run.train_step(carry, data)
    if step % every == 0:
      curve.append({"step": step} | watched)
  params, opt_state, state = carry
  if int(nms.step_count(opt_state)) != steps:
    raise AssertionError(f"{steps} steps were wanted, {nms.step_count(opt_state)} were taken.")

  final = nms.finalize(params, run.rules, state or steps)
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
    "largest": _largest(data["test"][1]),
    "flops": training_flops(task, row, pattern, steps),
    "curve": {name: [_short(point[name]) for point in curve] for name in names},
    "versions": {"python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in VERSIONS[:-1]}
    | {VERSIONS[-1]: nms.__version__},
    "seconds": round(time.process_time() - began, 1),
    **about_start,
  }


def _largest(answers) -> float:
  """Returns the share of the commonest answer."""
  return float(np.bincount(np.ravel(answers)).max() / np.size(answers))


def _short(x) -> float | int:
  return x if isinstance(x, int) else float(f"{float(x):.4g}")
