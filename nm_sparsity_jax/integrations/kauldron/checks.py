"""What a run of Kauldron would do wrong without a word, refused before it begins.

trainer, rules   -> [refuse_silent_mistakes] -> data, the length of the run
folder, rules    -> [refuse_other_rules] -> the rules of its newest checkpoint
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from kauldron import kd

from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.training import optim, rules_text, transform
from nm_sparsity_jax.training.rules import Rules


def refuse_silent_mistakes(trainer: Any, rules: Rules) -> None:
  """Refuses a trainer that could not resume to the same bits.

  Args:
    trainer: Kauldron's, while it is made.
    rules: of its train step.
  """
  if not isinstance(rules, Rules):
    raise ValueError(
      f"trainstep.rules={rules!r}: give nms.Rules, such as nms.Rules({{'ff': recipe}})."
    )
  if isinstance(trainer.checkpointer, kd.ckpts.Checkpointer):
    _refuse_unresumable(trainer.train_ds)
    _warn_without_end(trainer)


def _refuse_unresumable(train_ds: Any) -> None:
  """Raises where no checkpoint keeps the position in the data."""
  in_memory = isinstance(train_ds, kd.data.InMemoryPipeline)
  if in_memory or not getattr(train_ds, "_should_checkpoint", True):
    raise ValueError(
      f"train_ds={type(train_ds).__name__}: no checkpoint keeps its position, so a run that goes "
      "on would train on other batches; take a pipeline of kd.data.py, or checkpointer=None."
    )


def _warn_without_end(trainer: Any) -> None:
  """Warns where Kauldron would keep no checkpoint of the end of the run."""
  steps, saved = trainer.num_train_steps, trainer.checkpointer
  is_saved = steps in (saved.save_on_steps or ()) or not (steps or 0) % saved.save_interval_steps
  if not is_saved:
    warnings.warn(
      f"num_train_steps={steps} is not a multiple of save_interval_steps="
      f"{saved.save_interval_steps}: no checkpoint holds the end of the run.",
      stacklevel=2,
    )


def refuse_other_end(rules: Rules, start: int, num_train_steps: int | None) -> None:
  """Refuses a run that ends at another step than its schedule.

  Args:
    rules: of the train step.
    start: Kauldron's step before the first update of this sparse run.
    num_train_steps: Kauldron's step at the end.
  """
  ends = {r.phases.total for r in rules.places.values() if r.phases}
  if ends and num_train_steps is not None and num_train_steps - start not in ends:
    raise ValueError(
      f"num_train_steps={num_train_steps}, but the run begins at step {start} and its schedule has "
      f"{max(ends)} steps: set num_train_steps={start + max(ends)}, or Phases(total="
      f"{num_train_steps - start}). To stop earlier set stop_after_steps."
    )


def refuse_twice(opt_state: Any) -> None:
  """Refuses an optimizer that does what the train step adds.

  Args:
    opt_state: of the trainer's own optimizer.
  """
  if found := transform.states(opt_state, transform.SparseState, optim.SrSteState):
    raise ValueError(
      f"the optimizer holds a {type(found[0]).__name__}, but the train step wraps it by nms.sparse "
      "itself, which adds SR-STE's term: give a bare optimizer of optax."
    )


def refuse_other_rules(workdir: Any, rules: Rules) -> None:
  """Refuses to go on from a checkpoint of other rules, or of a dense run.

  Args:
    workdir: of the run; its newest checkpoint is read.
    rules: of the train step.
  """
  newest = folders.latest_of_kauldron(workdir)
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


def kept_text(rules: Rules) -> Mapping[str, Any]:
  """Returns the collection that a checkpoint keeps of the rules.

  Args:
    rules: of the train step.
  """
  return {"rules": rules_text.pack(rules_text.describe(rules))}
