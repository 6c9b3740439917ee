"""Keras on JAX: a small network reads digits, dense and 2:4 and 1:8 sparse, by the same `fit`.

    KERAS_BACKEND=jax python examples/keras_vision.py

Runs in a minute on a laptop's CPU. The digits are those of scikit-learn; nothing is downloaded.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import keras
import optax
from sklearn.datasets import load_digits

import nm_sparsity_jax as nms
from nm_sparsity_jax.integrations.keras import Metrics, OptaxOptimizer, params

EPOCHS, BATCH = 20, 50
digits = load_digits()
x = digits.images[..., None].astype("float32") / 16  # (1797, 8, 8, 1)
y = digits.target.astype("int32")
TRAIN, TEST = (x[:1500], y[:1500]), (x[1500:], y[1500:])
STEPS = EPOCHS * 1500 // BATCH


def network():
  """Returns a convolution, attention over the 16 positions that it leaves, and a classifier."""
  keras.utils.set_random_seed(0)
  image = keras.Input((8, 8, 1))
  h = keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu", name="stem")(image)
  h = keras.layers.Conv2D(64, 3, padding="same", activation="relu", name="conv")(h)
  h = keras.layers.Reshape((16, 64))(h)
  h = h + keras.layers.MultiHeadAttention(4, 16, name="attention")(h, h)
  h = keras.layers.Dense(128, "relu", name="up")(keras.layers.GlobalAveragePooling1D()(h))
  return keras.Model(image, keras.layers.Dense(10, name="head")(h))


def sparse_rules(model, pattern):
  """Returns rules for all kernels but the first and the last; a trace tells their axes."""
  phases = nms.Phases(total=STEPS, dense=STEPS // 5, finetune=STEPS // 3)
  recipe = nms.recipe("mdgf_exponential", pattern=pattern, phases=phases)
  rules = nms.Rules({"(stem|head)/kernel": nms.recipe("dense"), ".*/kernel": recipe})
  forward = lambda p, x: model.stateless_call([*p.values()], model.non_trainable_variables, x)
  return rules.for_model(forward, params(model), x[:1])


def train(pattern=None):
  """Returns the model, its rules and its history; without a pattern it is dense."""
  model, rules, tx = network(), None, optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS))
  if pattern:
    rules = sparse_rules(model, pattern)
    tx = nms.sparse(tx, rules)  # the one line that a dense program does not have
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer=OptaxOptimizer(tx), loss=loss, metrics=["accuracy"])
  watch = [Metrics()] if pattern else []
  history = model.fit(
    *TRAIN, batch_size=BATCH, epochs=EPOCHS, validation_data=TEST, callbacks=watch, verbose=0
  )
  return model, rules, history.history


def main():
  """Trains three times and verifies."""
  for pattern in (None, "2:4", "1:8"):
    model, rules, history = train(pattern)
    print(f"{pattern or 'dense'}: accuracy on held-out digits {history['val_accuracy'][-1]:.3f}")
    if pattern:
      print(f"density {history['nm/density'][0]:.3f} -> {history['nm/density'][-1]:.3f}")
      print(nms.verify(params(model), rules))


if __name__ == "__main__":
  main()
