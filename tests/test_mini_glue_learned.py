"""A tiny T5 of our layers, from scratch, does better on mini-GLUE than the largest class."""

import warnings

import jax
import numpy as np
import optax
import pytest
import tasks_found

from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.runs import glue

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from t5x_tasks import metrics, mini
  from t5x_tasks.vocabulary import mini_words

STEPS, BATCH, LENGTH = 600, 64, 24
WORDS = mini_words()


def arrays(config, split):
  """Inputs [rows, LENGTH], and targets [rows, 2]: every label is one word."""
  task = glue.TASKS[config]
  inputs, targets = [], []
  for row in mini.make(config, split):
    text = [task.prefix, *(w for f in task.fields for w in (f"{f}:", row[f]))]
    inputs.append([*WORDS.encode(" ".join(text)), 1])
    label = task.labels[row["label"]] if task.labels else str(row["label"])
    targets.append([*WORDS.encode(label), 1])
  return np.array([x + [0] * (LENGTH - len(x)) for x in inputs]), np.array(targets)


def shifted(targets):
  return np.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def train(config):
  """Trains; a function from inputs to the first predicted ids."""
  sizes = dict(emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128, num_encoder_layers=2)
  network = Transformer(
    T5Config.t5_1_1("tiny", vocab_size=256, num_decoder_layers=1, dropout_rate=0.0, **sizes)
  )
  inputs, targets = arrays(config, "train")
  params = network.init(
    jax.random.key(0), inputs[:2], shifted(targets[:2]), targets[:2], enable_dropout=False
  )["params"]
  rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, STEPS // 20, STEPS)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.0))

  @jax.jit
  def step(params, state, inputs, given, targets):
    def loss(params):
      logits = network.apply({"params": params}, inputs, given, targets, enable_dropout=False)
      return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  state, rng = tx.init(params), np.random.default_rng(0)
  for _ in range(STEPS):
    rows = rng.integers(0, len(inputs), BATCH)
    params, state = step(params, state, inputs[rows], shifted(targets[rows]), targets[rows])

  @jax.jit
  def predict(inputs):
    start = np.zeros((len(inputs), 1), int)
    logits = network.apply({"params": params}, inputs, start, start + 1, enable_dropout=False)
    return logits[:, 0].argmax(-1)

  return predict


@pytest.mark.parametrize("config", [c for c, t in glue.TASKS.items() if "train" in t.splits])
def test_a_tiny_t5_beats_the_largest_class(config):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    predict = train(config)
    for split in glue.TASKS[config].splits:
      if split.startswith("validation"):
        inputs, targets = arrays(config, split)
        found, targets = np.asarray(predict(inputs)), targets[:, 0]
        if config == "stsb":
          numbers = lambda ids: [metrics.to_number(WORDS.decode([i])) for i in ids.tolist()]
          pearson = metrics.pearson_corrcoef(numbers(targets), numbers(found))
          print(config, pearson)
          assert pearson["pearson_corrcoef"] > 60
          continue
        accuracy, largest = np.mean(found == targets), np.bincount(targets).max() / len(targets)
        print(f"{config} {split}: accuracy {accuracy:.1%}, largest class {largest:.1%}")
        assert accuracy > largest + 0.06
