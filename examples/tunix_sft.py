"""Tunix' trainer with N:M weights: of a program for dense ones, only the optimizer changes.

    pip install google-tunix==0.1.7
    python examples/tunix_sft.py [FOLDER]

Runs in a minute on a CPU: a small Qwen 3 with random weights learns to go on with sequences such as
5 8 11 14, dense and 1:4. With a FOLDER it saves checkpoints there, and goes on where it was killed.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

import nm_sparsity_jax as nms
from nm_sparsity_jax.integrations.tunix import Metrics

STEPS, SYMBOLS, LENGTH = 200, 32, 12
CONFIG = qwen3.ModelConfig(
  num_layers=2, vocab_size=SYMBOLS, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
  num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6,
)  # fmt: skip

phases = nms.Phases(total=STEPS, dense=40, finetune=80)
recipe = nms.recipe("mdgf_exponential", pattern="1:4", phases=phases)
rules = nms.Rules({"ff": recipe, "qkv": recipe, "o": recipe})


def batches(seed, how_many):
  """Yields numbers in equal steps, from a place and with a step that chance chooses."""
  rng = np.random.default_rng(seed)
  for _ in range(how_many):
    start, step = rng.integers(0, SYMBOLS, (2, 32, 1))
    tokens = ((start + step * np.arange(LENGTH)) % SYMBOLS).astype("int32")
    yield peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))


def inputs_of(batch):
  """Returns what the model takes."""
  seen = batch.input_mask.astype(bool)
  return {
    "input_tokens": batch.input_tokens, "input_mask": batch.input_mask,
    "positions": utils.build_positions_from_mask(seen),
    "attention_mask": utils.make_causal_attn_mask(seen),
  }  # fmt: skip


def train(optimizer, folder=None):
  """Returns a trained model: a usual program of Tunix, for whatever optimizer."""
  model = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))
  for i, layer in enumerate(model.layers):  # Tunix' have zeros here, as they expect a checkpoint
    for j, part in enumerate((layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)):
      part.kernel[...] = jax.random.normal(jax.random.key(3 * i + j), part.kernel.shape) / 8
  config = peft_trainer.TrainingConfig(
    max_steps=STEPS, eval_every_n_steps=80, checkpoint_root_directory=folder,
    checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2),
  )  # fmt: skip
  trainer = peft_trainer.PeftTrainer(model, optimizer, config).with_gen_model_input_fn(inputs_of)
  trainer.with_training_hooks(Metrics(every=40))  # density, D, patterns and flips
  trainer.train(batches(0, STEPS), [*batches(1, 4)])
  return model


def right(model):
  """Returns the share of next numbers that the model names, of sequences that it never saw."""
  inputs = inputs_of(next(batches(2, 1)))
  logits, _ = model(inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"])
  return float(jnp.mean(jnp.argmax(logits, -1)[:, 2:-1] == inputs["input_tokens"][:, 3:]))


optimizers = {"dense": optax.adamw(3e-3), "sparse": nms.sparse(optax.adamw(3e-3), rules)}
for name, optimizer in optimizers.items():
  model = train(optimizer, os.path.abspath(f"{sys.argv[1]}/{name}") if sys.argv[1:] else None)
  print(f"{name}: {right(model):.1%} of the next numbers are right")
print(nms.verify(nnx.state(model, nnx.Param), rules))
