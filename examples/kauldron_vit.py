"""A konfig file of Kauldron: ViT-B/16 on ImageNet, with feed-forward kernels of 1:8.

    python -m kauldron.main --cfg=examples/kauldron_vit.py --cfg.workdir=/data/vit_b

`nms.sparse` around the optimizer is ours, and a metric. docs/kauldron.md has more commands.
"""

from kauldron import konfig

with konfig.imports():
  import optax
  from kauldron import kd

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.integrations import kauldron as nms_kauldron


def get_config():
  cfg = kd.train.Trainer(seed=0, num_train_steps=90_000)
  phases = nms.Phases(total=cfg.ref.num_train_steps, dense=9_000, finetune=18_000)
  rules = nms.Rules({"ff": nms.recipe("mdgf_exponential", pattern="1:8", phases=phases)})
  cfg.train_ds = images("train[:99%]", training=True)
  cfg.model = kd.nn.Vit(image="batch.image", encoder=kd.nn.VitEncoder.from_variant_str("ViT-B/16"))
  logits_and_labels = {"logits": "preds.logits", "labels": "batch.label"}
  cfg.train_losses = {"xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(**logits_and_labels)}
  cfg.train_metrics = {
    "accuracy": kd.metrics.Accuracy(**logits_and_labels),
    "sparsity": nms_kauldron.Sparsity(rules=rules),
  }
  rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10_000, cfg.ref.num_train_steps)
  cfg.schedules = {"learning_rate": rate}
  adamw = optax.adamw(cfg.ref.schedules["learning_rate"], weight_decay=1e-4)
  cfg.optimizer = nms.sparse(optax.chain(optax.clip_by_global_norm(1.0), adamw), rules)
  cfg.checkpointer = kd.ckpts.Checkpointer(save_interval_steps=1_000)
  cfg.evals = {
    "eval": kd.evals.Evaluator(
      run=kd.evals.EveryNSteps(2_500), ds=images("train[99%:]", training=False)
    )
  }
  return cfg


def images(split, training):
  cut = kd.data.py.RandomCrop if training else kd.data.CenterCrop
  flip = [kd.data.py.RandomFlipLeftRight(key="image")] if training else []
  return kd.data.py.Tfds(
    name="imagenet2012",
    split=split,
    shuffle=training,
    num_epochs=None if training else 1,
    batch_size=1024,
    transforms=[
      kd.data.Elements(keep=["image", "label"]),
      kd.data.Resize(key="image", min_size=256, method="bilinear"),
      cut(key="image", shape=(224, 224, 3)),
      *flip,
      kd.data.ValueRange(key="image", in_vrange=(0, 255), vrange=(-1, 1)),
      kd.data.Rearrange(key="label", pattern="... -> ... 1"),
    ],
  )
