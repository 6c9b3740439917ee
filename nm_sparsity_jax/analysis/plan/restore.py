"""What a run would take from a checkpoint: T5X's restore, followed on keys.

Stored -> [T5X's transformations] -> [restore] -> loaded, initialised, dropped, refused
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.trees import alike, flatten, nested
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import checkpoint


@dataclasses.dataclass(frozen=True)
class Restore:
  """What becomes of each key.

  Attributes:
    load: key of the model -> (leaf of the checkpoint, dtype after loading).
    initialise: keys of the model that start afresh.
    drop: keys of the checkpoint that the model does not take.
    errors: what T5X would refuse, or would load wrongly without an error.
  """

  load: Mapping[str, tuple[checkpoint.Leaf, str | None]]
  initialise: Sequence[str]
  drop: Sequence[str]
  errors: Sequence[str]


def restore(
  stored: checkpoint.Stored,
  model: Mapping[str, Any],
  dtype: str | None,
  transformations: Sequence[Callable] = (),
  fallback: bool = False,
) -> Restore:
  """Goes through the steps of T5X's restore with keys instead of arrays.

  Args:
    stored: the checkpoint.
    model: key -> something with shape and dtype: what the model takes.
    dtype: the dtype that floating arrays get; None keeps the stored one.
    transformations: `RestoreCheckpointConfig.state_transformation_fns`.
    fallback: `RestoreCheckpointConfig.fallback_to_scratch`.
  """
  errors: list[str] = []
  state: Any = nested(stored.leaves)
  for function in transformations:
    try:
      state = function(state, nested(model))
    except Exception as e:
      errors.append(f"restoring from {stored.path}: {gin_files.message(e)}")
      break
  found = dict(flatten(state))
  load: dict[str, tuple[checkpoint.Leaf, str | None]] = {}
  initialise: list[str] = []
  other: dict[str, tuple] = {}  # key -> (shape there, shape here)
  for key, wanted in model.items():
    leaf = found.get(key)
    if leaf is None:
      initialise.append(key)
      continue
    if leaf.shape is not None and leaf.shape != tuple(wanted.shape):
      other[key] = leaf.shape, tuple(wanted.shape)
    load[key] = leaf, dtype if dtype and _is_cast(key, leaf, stored.format) else leaf.dtype
  if other:
    errors.append(_of_another_size(stored.path, other, len(model)))
  taken = {leaf.key for leaf, _ in load.values()}
  drop = [key for key in stored.leaves if key not in taken]
  if initialise and not fallback and not errors:
    errors.append(
      f"{stored.path} lacks {len(initialise)} of {len(model)} arrays, such as {initialise[0]}, and "
      "RestoreCheckpointConfig.fallback_to_scratch is not set: T5X will fail"
    )
  return Restore(load, initialise, drop, errors)


_SHOWN = 3  # groups of arrays that an error names


def _of_another_size(path: str, other: Mapping[str, tuple], count: int) -> str:
  """Says which arrays have another shape; like layers count once, parameters come first."""
  if len(other) == 1:
    ((key, (there, here)),) = other.items()
    return f"{key} has shape {there} in {path} and {here} here"
  told = [
    f"{name} has shape {there} there and {here} here" for name, _, (there, here) in alike(other)
  ]
  told.sort(key=lambda text: not text.startswith("target/"))
  more = f"; and {len(told) - _SHOWN} kinds more" if told[_SHOWN:] else ""
  return (
    f"{path} is of a model of another size: {len(other)} of {count} arrays differ. "
    f"{'; '.join(told[:_SHOWN])}{more}. Take the model file that it was made with"
  )


def _is_cast(key: str, leaf: checkpoint.Leaf, kind: str) -> bool:
  """Returns whether T5X's restore dtype applies: to parameters, and to what is not sharded.

  So the step, an int32, becomes a float32 in a run that restored it.
  """
  alone = leaf.shape == () and not key.startswith("flax_mutables/")
  return kind == "T5X" or key.startswith("target/") or alone
