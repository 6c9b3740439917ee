"""What T5X restores: a dense or sparse checkpoint, and the position in the data.

checkpoint -> [require_sparse, resume_sparse: its structure]
           -> [SparseTrainStateInitializer: its values] -> train state
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

import jax
import tensorflow as tf
from absl import logging
from clu.data import dataset_iterator
from etils import epath
from t5x import state_utils, utils

from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.integrations.t5x.models import SparseModel
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.training import layers


class SparseTrainStateInitializer(utils.TrainStateInitializer):
  """T5X's initializer, which shows what becomes sparse and checks what was restored.

  T5X makes one as soon as it knows the shape of a batch, before anything compiles. It prints the
  places, and warns of macros among the flags that nothing reads. It tells the model how devices
  share the weights, so that masks on several TPUs take one pass. Bind it in training, evaluation
  and inference:

      infer_script.infer.train_state_initializer_cls = @t5x_adapter.SparseTrainStateInitializer

  Args:
    optimizer_def: as of T5X's.
    init_fn: `get_initial_variables` of a model of this package.
    *args: as of T5X's.
    **kwargs: as of T5X's.
  """

  def __init__(self, optimizer_def, init_fn, *args, **kwargs):
    super().__init__(optimizer_def, init_fn, *args, **kwargs)
    model = init_fn.__self__
    if not isinstance(model, SparseModel):
      raise ValueError(
        f"the program's model is a {type(model).__name__}, which trains dense: name "
        "nm_sparsity_jax's run file after T5X's, which binds another model."
      )
    model.know_shardings(self._partitioner.mesh, self.train_state_axes.params)
    self.global_train_state_shape = _CheckedState(self.global_train_state_shape, model.check)
    if jax.process_index() == 0:
      assignment = model.stored_rules.assign(model.made)
      warned = "".join(f"warning: {said}\n" for said in gin_files.unread_flags(sys.argv))
      # T5X logs to stderr, hundreds of lines; this is all that stands in stdout.
      print(f"\n{assignment}\n\n{warned}", flush=True)


class _CheckedState:
  """A train state of shapes, whose `restore_state`, which T5X calls last, checks what comes out."""

  def __init__(self, state, check):
    self._state, self._check = state, check

  def __getattr__(self, name):
    return getattr(self._state, name)

  def restore_state(self, state_dict):
    restored = self._state.restore_state(state_dict)
    self._check(restored)
    return restored


def require_sparse(checkpoint, model_state, **unused):
  """Refuses a dense checkpoint.

  Bind it in eval and infer:

      utils.RestoreCheckpointConfig.state_transformation_fns = [@t5x_adapter.require_sparse]

  Args:
    checkpoint: what was read, after T5X's assignment map.
    model_state: what the model needs.
    **unused: what T5X says of a run that resumes.
  """
  mutables = checkpoint.get("flax_mutables", {})  # where it has none, Orbax has a marker there
  if not isinstance(mutables, Mapping) or layers.COLLECTION not in mutables:
    raise ValueError(
      "this checkpoint is dense, of a dense run or of a local one: it has no flax_mutables/"
      "nm_sparsity. Evaluate it with T5X's own model. To start from it, take an empty MODEL_DIR "
      "and name it as INITIAL_CHECKPOINT_PATH."
    )
  return checkpoint


def resume_sparse(checkpoint, model_state, *, fresh: str = "", is_resuming: bool = False):
  """Lets a sparse run start from a dense checkpoint, but resume only its own, with its optimizer.

  A checkpoint that a run starts from must have every parameter: T5X's `fallback_to_scratch`,
  which a dense checkpoint needs for the rest of the train state, would draw a missing one at
  random.

  Args:
    checkpoint: what was read, after T5X's assignment map.
    model_state: what the run needs.
    fresh: a regex of parameters, such as 'decoder/logits_dense/.*', that may be drawn.
    is_resuming: whether the checkpoint is one of this run; T5X says so.
  """
  paths = state_utils.flatten_state_dict
  if is_resuming:
    require_sparse(checkpoint, model_state)
    # T5X would drop moments that this optimizer lacks, and begin those that the checkpoint lacks.
    kept, needed = (paths(x["state"]) for x in (checkpoint, model_state))
    # Where an optax state is empty, Orbax has a marker.
    empty = paths(model_state["state"], keep_empty_nodes=True)
    if other := sorted((kept.keys() - empty.keys()) | (needed.keys() - kept.keys())):
      raise ValueError(
        f"the checkpoint was trained with another optimizer: {len(other)} of its arrays are not "
        f"those of this run, such as {other[0]}. Resume with the same optimizer, or take an empty "
        "MODEL_DIR and name the checkpoint as INITIAL_CHECKPOINT_PATH."
      )
    return checkpoint
  wanted, has = (paths(x["target"]) for x in (model_state, checkpoint))
  if lost := [name for name in wanted if name not in has and not re.fullmatch(fresh, name)]:
    raise ValueError(
      f"the checkpoint lacks {len(lost)} parameters, such as {lost[0]}, which would start from "
      "random values. "
      "Take the model file that it was trained with, map names by assignment_map, or allow it: "
      "t5x_adapter.resume_sparse.fresh = 'a regex of parameters'."
    )
  return checkpoint


def owes_evaluation(model_dir):
  """Returns whether a run evaluates its newest checkpoint before it goes on.

  T5X saves a step before it evaluates it, and counts the period of evaluations from the step that
  a process started at. A process that ended in between would leave a hole in the curves, so each
  one that goes on evaluates first. Bind it where T5X asks for it:

      train_script.train.run_eval_before_training = @t5x_adapter.owes_evaluation()

  Args:
    model_dir: of the run.
  """
  return bool(model_dir) and folders.latest(model_dir) is not None


def absolute(path):
  """Returns a path that Orbax takes: T5X hands it a relative one, and dies at its first save.

  Bind it where T5X takes a path:

      train.model_dir = @t5x_adapter.absolute()
      t5x_adapter.absolute.path = %MODEL_DIR

  Args:
    path: a folder, relative to the current one or not; a bucket's and None stay as they are.
  """
  if not path or "://" in path:
    return path
  return os.path.abspath(os.path.expanduser(path))


def get_dataset(*args, model_dir: str, **kwargs):
  """Returns T5X's training data, whose position only checkpoints in `model_dir` know.

  With `SaveCheckpointConfig.save_dataset` T5X asks every checkpoint for the position, also the
  dense one that a run starts from. There it is absent, or the position in other data.

  Args:
    *args: as of T5X's function.
    model_dir: the run's folder.
    **kwargs: as of T5X's function.
  """
  data = utils.get_dataset(*args, **kwargs)
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
