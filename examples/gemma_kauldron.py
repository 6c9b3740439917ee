"""A tiny Gemma with random weights learns to count, with 1:4 feed-forward and attention kernels.

    uv pip install gemma==4.0.1 kauldron==1.4.4 "sentencepiece<0.2.3" nm-sparsity-jax
    python examples/gemma_kauldron.py /tmp/gemma      # again: it goes on where it was stopped

One argument of Kauldron's trainer is ours, `optimizer`. A metric shows what it does.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gemma import gm
from kauldron import kd

import nm_sparsity_jax as nms
from nm_sparsity_jax.integrations import kauldron as nms_kauldron

STEPS = 200


@dataclasses.dataclass(frozen=True)
class Counting:
  """Sequences that count in steps of 3 from any number, modulo 64."""

  size: int
  seed: int

  def __len__(self):
    return self.size

  def __getitem__(self, i):
    start = np.random.default_rng((self.seed, int(i))).integers(64)
    tokens = ((start + 3 * np.arange(17)) % 64).astype(np.int32)
    return {"tokens": tokens[:-1], "target": tokens[1:, None]}


def model(dtype=jnp.float32):
  config = gm.nn.config.TransformerConfig(
    num_embed=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    final_logit_softcap=None,
    use_post_attn_norm=False,
    use_post_ffw_norm=False,
    attention_types=(gm.nn.AttentionType.GLOBAL,) * 2,
  )
  return gm.nn.Transformer(config=config, tokens="batch.tokens", dtype=dtype)


def rules_for(gemma, recipe):
  """Rules for any model of gm.nn: the forward pass tells how its kernels lie."""
  tokens = jax.ShapeDtypeStruct((1, 16), "int32")
  params = jax.eval_shape(gemma.init, jax.random.key(0), tokens)["params"]
  rules = nms.Rules({"decoder/ff": recipe, "decoder/qkv": recipe})
  return rules.for_model(lambda p, x: gemma.apply({"params": p}, x).logits, params, tokens)


def trainer(workdir, gemma, rules, **changes):
  xent = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.target")
  batches = {"batch_size": 16, "num_workers": 0}
  train = kd.data.py.DataSource(data_source=Counting(512, seed=0), shuffle=True, **batches)
  test = kd.data.py.DataSource(
    data_source=Counting(64, seed=1), shuffle=False, num_epochs=1, **batches
  )
  settings = {
    "seed": 0,
    "num_train_steps": STEPS,
    "train_ds": train,
    "model": gemma,
    "optimizer": nms.sparse(optax.adamw(3e-3), rules),  # the one line
    "train_losses": {"xent": xent},
    "train_metrics": {"sparsity": nms_kauldron.Sparsity(rules=rules)},
    "log_metrics_every": 20,
    "evals": {
      "test": kd.evals.Evaluator(run=kd.evals.EveryNSteps(100), ds=test, losses={"xent": xent})
    },
    "checkpointer": kd.ckpts.Checkpointer(save_interval_steps=50),
  }
  return kd.train.Trainer(workdir=workdir, **(settings | changes))


if __name__ == "__main__":
  gemma = model()
  phases = nms.Phases(total=STEPS, dense=40, finetune=60)
  rules = rules_for(gemma, nms.recipe("mdgf_exponential", pattern="1:4", phases=phases))
  run = trainer(sys.argv[1], gemma, rules)
  state, _ = run.train()
  print(nms.verify(state.params, rules))
