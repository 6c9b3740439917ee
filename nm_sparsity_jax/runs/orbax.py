"""Checkpoints by Orbax: what one holds, by T5X's names; and Orbax made quiet.

Kauldron writes by Orbax too, and has names of its own.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested

# The names of Kauldron, and of the local runner, which trains in place, so its state is the
# optimizer's -> T5X's names; the first that fits. `nms.sparse` keeps the step twice.
_KAULDRON = (
  ("step", "state/step"),
  ("params/", "target/"),
  ("opt_state/count", "flax_mutables/nm_sparsity/step"),
  ("opt_state/masks/step", None),
  ("opt_state/masks/", "flax_mutables/nm_sparsity/"),
  ("opt_state/fingerprint", None),
  ("opt_state/dense/", "state/dense/"),
  ("opt_state/", "state/param_states/"),
  ("collections/", "flax_mutables/"),
)
_LOCAL = (
  ("state/nm_sparsity/dense/", "state/dense/"),
  ("state/nm_sparsity/", "flax_mutables/nm_sparsity/"),
)


def read(state: Any) -> tuple[dict[str, tuple[tuple[int, ...], str]], Callable[[str], np.ndarray]]:
  """Returns key -> shape and dtype, and what reads the array of a key.

  Args:
    state: a path of `folders.orbax_state`.
  """
  import orbax.checkpoint as ocp

  reader = ocp.PyTreeCheckpointer()
  with quiet():
    metadata: Any = reader.metadata(state)
  tree = dict(flatten(metadata.item_metadata.tree))
  table = _KAULDRON if state.name == "default" else _LOCAL
  names = {ours: key for key in tree if (ours := _t5x_name(key, table)) is not None}

  def array(key: str) -> np.ndarray:
    wanted: Any = nested({names[key]: ocp.RestoreArgs(restore_type=np.ndarray)})
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True)
    with quiet():
      (_, value), *_ = flatten(reader.restore(state, args=args))
    return np.asarray(value)

  def shape(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(tree[name].shape), np.dtype(tree[name].dtype).name

  return {key: shape(name) for key, name in names.items()}, array


def _t5x_name(key: str, table: Sequence[tuple[str, str | None]]) -> str | None:
  for theirs, ours in table:
    if key == theirs or theirs.endswith("/") and key.startswith(theirs):
      return None if ours is None else ours + key.removeprefix(theirs)
  return key


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences what Orbax logs, of files that T5X does not write, and in its threads.

  The caller that waits for a thread gets its error. Without this a full disk prints 60 lines.
  """
  import absl.logging  # noqa: F401  (makes the logger, whose records name the file that logs)

  logger = logging.getLogger("absl")
  is_of_others = lambda record: "orbax" not in record.pathname
  logger.addFilter(is_of_others)
  try:
    yield
  finally:
    logger.removeFilter(is_of_others)
