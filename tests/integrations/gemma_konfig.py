"""A konfig file of a tiny run: the example's Gemma, twelve updates, stored masks."""

from kauldron import konfig

with konfig.imports():
  import gemma_kauldron
  import optax
  from kauldron import kd

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.integrations import kauldron as nms_kauldron


def get_config():
  """The run that tests change and resume."""
  cfg = kd.train.Trainer(seed=0, num_train_steps=12)
  phases = nms.Phases(total=cfg.ref.num_train_steps, dense=2, finetune=4)
  idp = nms.recipe("idp", pattern="1:4", phases=phases)
  rules = nms.Rules({"ff": idp, "qkv": idp}, axes={".*/gating_einsum": 1})
  # Adam would make much of differences that are rounding.
  cfg.optimizer = nms.sparse(optax.sgd(0.5, momentum=0.9), rules)
  cfg.model = gemma_kauldron.model()
  cfg.train_ds = _data(seed=0, shuffle=True, num_epochs=None)
  cfg.train_losses = {
    "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds.logits", labels="batch.target")
  }
  cfg.train_metrics = {"sparsity": nms_kauldron.Sparsity(rules=rules)}
  cfg.checkpointer = kd.ckpts.Checkpointer(save_interval_steps=4, max_to_keep=None)
  cfg.evals = {
    "test": kd.evals.Evaluator(
      run=kd.evals.EveryNSteps(12), ds=_data(seed=1, shuffle=False, num_epochs=1)
    )
  }
  # One process makes several runs, and jax has one profiler.
  cfg.profiler = kd.inspect.Profiler(first_profile=1000)
  cfg.log_metrics_every = 12  # a program of its own
  return cfg


def _data(seed, **settings):
  source = gemma_kauldron.Counting(size=64, seed=seed)
  return kd.data.py.DataSource(data_source=source, batch_size=16, num_workers=0, **settings)
