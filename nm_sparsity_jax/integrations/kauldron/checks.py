"""What a run of Kauldron would do wrong without a word, refused before it begins."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from typing import Any

from kauldron import kd

from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules


def refuse_unresumable(trainer: Any) -> None:
  """Refuses a trainer whose checkpoints lack the position in the data, or the end of the run.

  Args:
    trainer: Kauldron's, while it is made.
  """
  data, saved = trainer.train_ds, trainer.checkpointer
  if not isinstance(saved, kd.ckpts.Checkpointer):
    return
  if isinstance(data, kd.data.InMemoryPipeline) or not getattr(data, "_should_checkpoint", True):
    raise ValueError(
      f"train_ds={type(data).__name__}: no checkpoint keeps its position, so a run that goes on "
      "would train on other batches; take a pipeline of kd.data.py, or checkpointer=None."
    )
  steps = trainer.num_train_steps or 0
  if steps % saved.save_interval_steps and steps not in (saved.save_on_steps or ()):
    raise ValueError(
      f"num_train_steps={steps} is not a multiple of save_interval_steps="
      f"{saved.save_interval_steps}: no checkpoint would hold the end of the run."
    )


def refuse_other_end(rules: Rules, start: int, num_train_steps: int | None) -> None:
  """Refuses a run that ends at another step than its schedule.

  Args:
    rules: of the train step.
    start: Kauldron's step before the first update of this sparse run.
    num_train_steps: Kauldron's step at the end.
  """
  ends = {start + r.phases.total for r in rules.places.values() if r.phases}
  if ends and num_train_steps is not None and num_train_steps not in ends:
    raise ValueError(
      f"num_train_steps={num_train_steps}, but the schedule ends at step {max(ends)}: set one to "
      "the other. To stop earlier set stop_after_steps."
    )


def refuse_other_rules(workdir: Any, rules: Rules) -> None:
  """Refuses to go on from a checkpoint of other rules, or of a dense run.

  Args:
    workdir: of the run; its newest checkpoint is read.
    rules: of the train step.
  """
  newest = folders.latest(workdir)
  if newest is None:
    return
  stored, own = checkpoint.read(newest).rules, rules_text.describe(rules)
  if stored is None:
    raise ValueError(
      f"{newest} is of a dense run: for a sparse run from it take another workdir, and load it by "
      "init_transform=kd.ckpts.PartialKauldronLoader(...)."
    )
  if stored != own:
    raise ValueError(
      f"{newest} was trained with the rules\n{stored}\nbut this run has\n{own}\nGo on with the "
      "checkpoint's rules, or take another workdir for a new run."
    )
