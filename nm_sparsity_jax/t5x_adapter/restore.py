"""What T5X restores: a dense or sparse checkpoint, by which rules, and the position in the data.

checkpoint -> [require_sparse, resume_sparse: its structure]
           -> [SparseTrainStateInitializer: its values] -> train state
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
import re

import tensorflow as tf
from absl import logging
from clu.data import dataset_iterator
from etils import epath
from t5x import state_utils, utils

from nm_sparsity_jax import layers


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
      "this checkpoint is dense: it has no flax_mutables/nm_sparsity, so no sparse step. Evaluate "
      "it with T5X's own model, or fine-tune it first (runs/t5x_finetune.gin)."
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
    return checkpoint
  if not _is_sparse(checkpoint):
    raise ValueError(
      "MODEL_DIR holds checkpoints of a dense run, and T5X would resume that one. Take an empty "
      "MODEL_DIR and name the dense checkpoint as INITIAL_CHECKPOINT_PATH."
    )
  _refuse_other_optimizer(checkpoint, model_state)
  return _with_the_same_masks(checkpoint, model_state)


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


def _is_sparse(checkpoint):
  return layers.COLLECTION in checkpoint.get("flax_mutables", {})


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


class SparseTrainStateInitializer(utils.TrainStateInitializer):
  """T5X's initializer, which also checks a restored train state against the model.

  Bind it in eval and infer; `SparseTrainer` checks what it is given by itself.

      infer_script.infer.train_state_initializer_cls = @t5x_adapter.SparseTrainStateInitializer

  Args:
    optimizer_def: as of T5X's.
    init_fn: `get_initial_variables` of a model of this package.
    input_shapes: as of T5X's.
    partitioner: as of T5X's.
    input_types: as of T5X's.
  """

  def __init__(self, optimizer_def, init_fn, input_shapes, partitioner, input_types=None):
    super().__init__(optimizer_def, init_fn, input_shapes, partitioner, input_types)
    self.global_train_state_shape = _CheckedState(
      self.global_train_state_shape, init_fn.__self__.check
    )


class _CheckedState:
  """A train state of shapes, whose `restore_state` checks what comes out."""

  def __init__(self, state, check):
    self._state, self._check = state, check

  def __getattr__(self, name):
    return getattr(self._state, name)

  def restore_state(self, state_dict):
    restored = self._state.restore_state(state_dict)
    self._check(restored)
    return restored
