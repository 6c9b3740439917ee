"""T5X's initializer, which also shows what becomes sparse and checks what was restored.

shapes, mesh -> the table, the schedule, groups that devices cut
restored     -> a train state of this model, or an error
"""

# T5X is not on PyPI: where types are checked without it, it is unknown.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import traverse_util
from flax.core import unfreeze
from t5x import utils

from nm_sparsity_jax.core.trees import alike
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.training.sites import Site


class SparseTrainStateInitializer(utils.TrainStateInitializer):
  """T5X's initializer, which shows what becomes sparse and checks what was restored.

  T5X makes one as soon as it knows the shape of a batch, before anything compiles. It prints the
  places and the schedule, and warns of groups that devices cut, and of macros among the flags that
  nothing reads. It tells the model how devices share the weights, so that masks on several TPUs
  take one pass. Bind it in training, evaluation and inference:

      infer_script.infer.train_state_initializer_cls = @t5x_adapter.SparseTrainStateInitializer

  Args:
    optimizer_def: as of T5X's.
    init_fn: `get_initial_variables` of a model of this package.
    *args: as of T5X's.
    **kwargs: as of T5X's.
  """

  def __init__(self, optimizer_def, init_fn, *args, **kwargs):
    super().__init__(optimizer_def, init_fn, *args, **kwargs)
    model, axes = init_fn.__self__, self.train_state_axes.params
    mesh = self._partitioner.mesh
    model.know_shardings(mesh, axes)
    self.global_train_state_shape = _CheckedState(self.global_train_state_shape, model.check)
    if jax.process_index() == 0:
      assignment = model.stored_rules.assign(model.made)
      by_path = traverse_util.flatten_dict(unfreeze(axes), sep="/")
      doubts = [*cuts(assignment.places, by_path, mesh.shape), *gin_files.unread_flags(sys.argv)]
      warnings = "".join(f"warning: {doubt}\n" for doubt in doubts)
      # T5X logs to stderr, hundreds of lines; this is all that stands in stdout.
      print(f"\n{assignment}\n\n{warnings}", flush=True)


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


def cuts(
  places: Mapping[str, Site], axes: Mapping[str, Any], mesh: Mapping[str, int]
) -> Iterator[str]:
  """Yields a sentence for the places whose groups do not lie on one device each.

  Their masks are right, but devices exchange weights for them in each step.

  Args:
    places: path -> sparse parameter.
    axes: path -> its mesh axes, as of a `PartitionSpec`; None where it is not split.
    mesh: mesh axis -> devices along it.
  """
  facts = {}
  for path, place in places.items():
    names = tuple(axes.get(path) or ())
    for i, axis in enumerate(place.axes):
      split = names[axis] if axis < len(names) else None
      parts = math.prod(
        mesh[name] for name in ((split,) if isinstance(split, str) else split or ())
      )
      length = math.prod(place.shape[a] for a in place.axes[i:])
      if parts > 1 and length % (parts * place.whole):
        facts[path] = f"{parts} devices share {length} weights along axis {axis}"
  for name, _, fact in alike(facts):
    yield (
      f"{name}: {fact}, and cut its groups: they exchange weights in each step. Take fewer "
      "partitions, or another pattern there."
    )
