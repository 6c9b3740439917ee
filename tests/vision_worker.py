"""Forks runs of a tiny ResNet on images, as local_worker.py does of a T5: for tests that kill."""

import gc
import sys
import warnings

import local_worker


def main(cache):
  gc.disable()
  warnings.simplefilter("ignore")  # what is imported warns on its own account
  from nm_sparsity_jax.models import resnet
  from nm_sparsity_jax.trainer import checkpoints, optimizers, step, train
  from nm_sparsity_jax.trainer.images import rebus
  from nm_sparsity_jax.trainer.workloads import vision
  from nm_sparsity_jax.training import configure

  del checkpoints  # imported now, and not by every run

  def run(steps, folder):
    """Trains a third of the steps dense, a third towards the pattern, a third with it."""
    config = resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,), drop_path=0.2)
    workload = vision.Images(resnet.ResNet(config), rebus.Rebus(8), mixup=0.5)
    phases = dict(sparse_steps=steps, dense_steps=steps // 3, finetune_steps=steps // 3)
    rules = configure.rules({"conv": "1:8"}, "idp", **phases)
    return train.train(
      train.Run(
        model=step.Model(workload=workload, rules=rules, ema_decay=0.9),
        optimizer=optimizers.adamw(0.01, clip_norm=1.0),
        model_dir=folder,
        sparse_steps=steps,
        periods=train.Periods(evaluate=1000, checkpoint=3, report=1, metrics=None),
        keep_checkpoints=2,
        learning_rate=local_worker.tell,
      )
    )

  local_worker.serve(cache, run)


if __name__ == "__main__":
  main(sys.argv[1])
