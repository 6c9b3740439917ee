"""What T5X restores: a dense or sparse checkpoint, by which rules, and the position in the data.

checkpoint -> [require_sparse, resume_sparse: its structure]
           -> [initializers.SparseTrainStateInitializer: its values] -> train state
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging
from clu.data import dataset_iterator
from etils import epath
from t5x import state_utils, utils

from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, folders, trained
from nm_sparsity_jax.training import layers


def require_sparse(checkpoint, model_state):
  """Refuses a dense checkpoint, and one without the masks that these rules need.

  Bind it in eval and infer:

      utils.RestoreCheckpointConfig.state_transformation_fns = [@t5x_adapter.require_sparse]

  Args:
    checkpoint: what was read, after T5X's assignment map.
    model_state: what the model needs.
  """
  if not _is_sparse(checkpoint):
    raise ValueError(
      "this checkpoint is dense, or of a local run, whose weights are masked already: it has no "
      "flax_mutables/nm_sparsity. Evaluate it with T5X's own model, or fine-tune it first "
      "(runs/t5x_finetune.gin)."
    )
  return _with_the_same_masks(checkpoint, model_state)


def resume_sparse(checkpoint, model_state, *, fresh: str = "", is_resuming: bool = False):
  """Lets a sparse run start from a dense checkpoint, but not resume one.

  A checkpoint that a run starts from must have every parameter: T5X's `fallback_to_scratch`,
  which a dense checkpoint needs for the rest of the train state, would draw a missing one at
  random.

  Args:
    checkpoint: what was read, after T5X's assignment map.
    model_state: what the run needs.
    fresh: a regex of parameters, such as 'decoder/logits_dense/.*', that may be drawn.
    is_resuming: whether the checkpoint is one of this run; T5X says so.
  """
  if not is_resuming:
    _refuse_missing(checkpoint, model_state, fresh)
    _quiet_fresh_starts()
    return checkpoint
  if not _is_sparse(checkpoint):
    raise ValueError(
      "MODEL_DIR holds checkpoints of a dense run, and T5X would resume that one. Take an empty "
      "MODEL_DIR and name the dense checkpoint as INITIAL_CHECKPOINT_PATH."
    )
  _refuse_other_optimizer(checkpoint, model_state)
  return _with_the_same_masks(checkpoint, model_state)


def stored_rules(
  checkpoint,
  pretrained_steps=None,
  places=None,
  recipe=None,
  pattern=None,
  sparse_steps=None,
  dense_steps=None,
  finetune_steps=None,
  beta=None,
  gradient=None,
  fields=None,
  indivisible=None,
):
  """Returns the rules that a checkpoint holds; refuses a setting that says something else.

  Args:
    checkpoint: the folder of one, or of a run; of several, the first.
    pretrained_steps: the step at which its run began; None = any.
    places: as of `configure.rules`, and None = not given, as for all that follow.
    recipe: as of `configure.rules`.
    pattern: as of `configure.rules`.
    sparse_steps: as of `configure.rules`.
    dense_steps: as of `configure.rules`.
    finetune_steps: as of `configure.rules`.
    beta: as of `configure.rules`.
    gradient: as of `configure.rules`.
    fields: as of `configure.rules`.
    indivisible: as of `configure.rules`.
  """
  return trained.stored_rules(
    _first(checkpoint),
    pretrained_steps,
    "T5X's own model",
    places=places,
    recipe=recipe,
    pattern=pattern,
    sparse_steps=sparse_steps,
    dense_steps=dense_steps,
    finetune_steps=finetune_steps,
    beta=beta,
    gradient=gradient,
    fields=fields,
    indivisible=indivisible,
  )


def first_step(run, initial=None):
  """Returns the global step at which a sparse run begins; None where nothing tells.

  Args:
    run: MODEL_DIR, whose checkpoints know it, or one of its checkpoints.
    initial: the checkpoint that a new run starts from, which is of that step.
  """
  return trained.start_of(_first(run), _first(initial))


def owes_evaluation(model_dir, first_step=None, last_step=None, eval_period=None):
  """Returns whether a run must evaluate its newest checkpoint before it goes on.

  T5X saves a step before it evaluates it. A process that ends in between leaves a hole in the
  curves, for the next one begins with the step after. T5X also counts the period from the step
  that a process started at, so where checkpoints come more often than evaluations a run can go on
  from a step at which none is due, a whole period after the last one. Bind it where T5X asks
  whether to evaluate first:

      train_script.train.run_eval_before_training = @t5x_adapter.owes_evaluation()

  Args:
    model_dir: of the run.
    first_step: the global step at which the run began; it is not evaluated.
    last_step: that at which it ends, which is evaluated whatever the period.
    eval_period: steps between evaluations, 0 = never; None = each saved step is evaluated.
  """
  newest = folders.latest(model_dir) if isinstance(model_dir, str) and model_dir else None
  step = None if newest is None else folders.named_step(newest)
  if step is None or step == first_step or eval_period == 0:
    return False
  folder, start = folders.path_of(model_dir), first_step or 0
  noted = [_steps_of_losses(f) for f in (folder / "training_eval").glob("*")]
  for lines in (folder / "inference_eval").glob("*-metrics.jsonl"):
    found = map(_step_of_line, lines.read_text().splitlines())
    noted.append({step for step in found if isinstance(step, int)})
  period = eval_period or 1
  is_due = step == last_step or (step - start) % period == 0

  def owes(steps):
    last = max((s for s in steps if s <= step), default=start)
    return last < step and (is_due or step - last >= period)

  return any(map(owes, noted or [set()]))


def _steps_of_losses(folder):
  """Returns the steps at which a task's losses were written."""
  steps = set()
  for file in folder.glob("events*"):
    with contextlib.suppress(tf.errors.DataLossError):  # cut off
      for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(record)
        if any(not value.tag.startswith("timing/") for value in event.summary.value):
          steps.add(event.step)
  return steps


def _step_of_line(line):
  try:
    return json.loads(line).get("step")
  except (ValueError, AttributeError):  # cut off
    return None


def _first(path: Any) -> Any:
  return path[0] if isinstance(path, list | tuple) and path else path


def absolute(path):
  """Returns a path that Orbax takes: T5X hands it a relative one, and dies at its first save.

  Bind it where T5X takes a path:

      train.model_dir = @t5x_adapter.absolute()
      t5x_adapter.absolute.path = %MODEL_DIR

  Args:
    path: a folder, relative to the current one or not; a bucket's and None stay as they are.
  """
  if not isinstance(path, str) or not path or "://" in path:
    return path
  return os.path.abspath(os.path.expanduser(path))


def start(path, run=None):
  """Returns INITIAL_CHECKPOINT_PATH as T5X takes it; refuses what T5X would die of.

  T5X's own checkpoints by Orbax have a folder for the position in the data, which may be empty, and
  with `SaveCheckpointConfig.save_dataset` T5X asks for it.

  Args:
    path: of the checkpoint; None = none.
    run: MODEL_DIR; one with checkpoints does not look at the path any more.
  """
  path = absolute(path)
  if not isinstance(path, str) or not path or isinstance(run, str) and folders.latest(run):
    return path
  try:
    stored = checkpoint.read(path)
  except FileNotFoundError:
    raise FileNotFoundError(
      f"INITIAL_CHECKPOINT_PATH={path!r}: there is no such checkpoint. Name a folder that is "
      "there, such as '.../checkpoint_1000000'."
    ) from None
  except Exception:  # T5X and `plan` say what is wrong
    return path
  data = folders.path_of(path) / "dataset"
  if stored.format == "Orbax" and not data.is_dir():
    raise ValueError(
      f"INITIAL_CHECKPOINT_PATH={path!r} has no folder 'dataset', and T5X asks for one. An empty "
      f"one will do: mkdir {data}"
    )
  if said := checkpoint_rules.check_start(stored):
    warnings.warn(f"INITIAL_CHECKPOINT_PATH: {said}", stacklevel=2)
  return path


def saves(config):
  """Returns T5X's SaveCheckpointConfig; refuses one that rounds the weights.

  Bind it around T5X's own:

      utils.CheckpointConfig.save = @t5x_adapter.saves()
      t5x_adapter.saves.config = @utils.SaveCheckpointConfig()

  Args:
    config: of T5X; None = nothing is saved.
  """
  if (dtype := getattr(config, "dtype", None)) not in (None, "float32"):
    raise ValueError(
      f"utils.SaveCheckpointConfig.dtype={dtype!r}: rounding changes which weights survive, so "
      "whatever reads the checkpoint would have other masks. Set 'float32'."
    )
  return config


def refuse_relative(name, path) -> None:
  """Refuses a relative path before the first step.

  Args:
    name: of the setting.
    path: its value.
  """
  if absolute(path) != path:
    raise ValueError(
      f"{name}={path!r} is relative, and Orbax fails at the first save into it. Give the absolute "
      f"path, {absolute(path)!r}; the run files of this package do so by t5x_adapter.absolute."
    )


def _refuse_other_optimizer(checkpoint, model_state):
  """Refuses to resume with an optimizer whose state is built in another way."""
  was, now = (_optimizer_paths(x) for x in (checkpoint, model_state))
  if was != now:
    raise ValueError(
      f"MODEL_DIR holds checkpoints of another OPTIMIZER: its state is {_kinds(was)}, and that of "
      f"this run's OPTIMIZER is {_kinds(now)}. Continue with the OPTIMIZER in the config.gin "
      "beside them, or take an empty MODEL_DIR and name the checkpoint as INITIAL_CHECKPOINT_PATH."
    )


def _optimizer_paths(state):
  return set(state_utils.flatten_state_dict(state.get("state", {}).get("param_states", {})))


def _kinds(paths):
  """Names what an optimizer keeps: the word that does not belong to a parameter's path."""
  kinds = set()
  for path in paths:
    words = path.split("/")
    of_optax = [word for word in words if not word.isdigit()] if words[0].isdigit() else []
    kinds.add(of_optax[0] if of_optax else words[-1])
  return ", ".join(sorted(kinds)) or "empty"


# What a run never takes from the checkpoint that it starts from.
_STARTS_FRESH = ("state/param_states/", "flax_mutables/")


@functools.cache
def _quiet_fresh_starts():
  """Drops T5X's two warnings of each array that is meant to start afresh, and says it once."""
  logging.info("The optimizer's state and the masks start afresh, as they must in a new run.")
  logging.get_absl_logger().addFilter(_is_no_fresh_start)


def _is_no_fresh_start(record):
  text = str(record.msg)
  if not text.startswith(("Not restoring param=", "Initializing param=")) or not record.args:
    return True
  return not str(record.args[0]).startswith(_STARTS_FRESH)


def _is_sparse(checkpoint):
  mutables = checkpoint.get("flax_mutables", {})  # where it has none, Orbax has a marker there
  return isinstance(mutables, Mapping) and layers.COLLECTION in mutables


def _refuse_missing(checkpoint, model_state, fresh):
  """Refuses a checkpoint without a parameter that `fresh` does not match."""
  wanted, has = (state_utils.flatten_state_dict(x["target"]) for x in (model_state, checkpoint))
  if lost := [name for name in wanted if name not in has and not re.fullmatch(fresh, name)]:
    raise ValueError(
      f"the checkpoint has no {', '.join(lost[:3])}"
      f"{f', nor {len(lost) - 3} more' if lost[3:] else ''}, which would start from random values. "
      "Take the model file that it was trained with, map names by assignment_map, or allow it: "
      "t5x_adapter.resume_sparse.fresh = 'a regex of parameters'."
    )


def _with_the_same_masks(checkpoint, model_state):
  """Returns the checkpoint; refuses one without the masks of this model.

  Other rules are refused once their text is read. Without these masks it would never be read.
  """
  names = lambda tree: set(state_utils.flatten_state_dict(tree["flax_mutables"]))
  if missing := sorted(names(model_state) - names(checkpoint)):
    raise ValueError(
      f"the checkpoint was trained with other rules: this run keeps {', '.join(missing[:3])}"
      f"{' and more' if missing[3:] else ''}, and the checkpoint has none. Its rules are in the "
      "config.gin beside it; for a new run take another MODEL_DIR."
    )
  return checkpoint


def get_dataset(cfg, shard_id, num_shards, feature_converter_cls, *, model_dir: str, **kwargs):
  """Returns T5X's training data, whose position only checkpoints in `model_dir` know.

  With `SaveCheckpointConfig.save_dataset` T5X asks every checkpoint for the position, also the
  dense one that a run starts from. There it is absent, or the position in other data.

  Args:
    cfg: T5X's DatasetConfig.
    shard_id: of this host.
    num_shards: of all hosts.
    feature_converter_cls: of the model.
    model_dir: the run's folder.
    **kwargs: as of T5X's function.
  """
  data = utils.get_dataset(cfg, shard_id, num_shards, feature_converter_cls, **kwargs)
  return _OwnPosition(data, model_dir) if isinstance(data, tf.data.Dataset) else data


class _OwnPosition(dataset_iterator.TfDatasetIterator):
  """A data iterator that restores its position from the checkpoints of one directory only."""

  def __init__(self, dataset, model_dir):
    super().__init__(dataset, checkpoint=True)
    self._model_dir = epath.Path(model_dir)

  def restore(self, filename):
    if self._model_dir in epath.Path(filename).parents:
      super().restore(filename)
    else:
      logging.info("A new run: data from the beginning, not from the position in %s.", filename)
