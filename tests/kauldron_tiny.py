"""A konfig file of a tiny run: two classes of noise, a ViT of one layer, twelve updates."""

from kauldron import konfig

with konfig.imports():
  import kauldron_runs
  import optax
  from kauldron import kd

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.integrations import kauldron as kauldron_adapter


def get_config():
  """The run that tests change and resume."""
  phases = nms.Phases(total=12, dense=2, finetune=4)
  rules = nms.Rules({"ff": nms.recipe("idp", pattern="1:4", phases=phases)})
  cfg = kd.train.Trainer()
  cfg.seed = 0
  cfg.num_train_steps = 12
  cfg.train_ds = _data(seed=0, training=True)
  cfg.model = kd.nn.Vit(
    image="batch.image", encoder=kd.nn.VitEncoder.from_variant_str("ViT-mu/4"), num_classes=2
  )
  cfg.train_losses = {
    "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.label")
  }
  cfg.train_metrics = {"accuracy": kd.metrics.Accuracy(logits="preds.logits", labels="batch.label")}
  cfg.optimizer = optax.sgd(
    0.1, momentum=0.9
  )  # Adam would make much of differences that are rounding
  cfg.trainstep = kauldron_adapter.SparseTrainStep(rules=rules)
  cfg.checkpointer = kd.ckpts.Checkpointer(save_interval_steps=4, max_to_keep=None)
  cfg.evals = {
    "eval": kd.evals.Evaluator(
      run=kd.evals.EveryNSteps(12),
      num_batches=None,
      ds=_data(seed=1, training=False),
    )
  }
  # One process makes several runs, and jax has one profiler.
  cfg.profiler = kd.inspect.Profiler(first_profile=1000)
  cfg.log_metrics_every = cfg.log_summaries_every = 1000  # each is a program of its own
  return cfg


def _data(seed, training):
  return kd.data.py.DataSource(
    data_source=kauldron_runs.Halves(size=64, seed=seed),
    shuffle=training,
    num_epochs=None if training else 1,
    batch_size=16,
    num_workers=0,
  )
