"""Checkpoints by Orbax: what one holds, by T5X's names; and Orbax made quiet.

Kauldron writes by Orbax too, and has names of its own.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nm_sparsity_jax.core.files import Lazy
from nm_sparsity_jax.core.trees import flatten, nested

AVERAGE = "state/average/"  # of a local run, before the name of what it is the average of
# Of keys that `read` returns: what was averaged, and W of a run that trains in place.
NOT_AVERAGED = "state/not_averaged/"
DENSE = "state/dense/"
# A name of Kauldron, or of the local runner, which trains in place, so its state is the optimizer's
# -> T5X's name; the first that fits. `nms.sparse` keeps the step twice.
_NAMES = (
  ("step", "state/step"),
  ("params/", "target/"),
  ("opt_state/count", "flax_mutables/nm_sparsity/step"),
  ("opt_state/masks/step", None),
  ("opt_state/masks/", "flax_mutables/nm_sparsity/"),
  ("opt_state/rules", "flax_mutables/nm_sparsity/rules"),
  ("opt_state/dense/", DENSE),
  ("opt_state/", "state/param_states/"),
  ("collections/", "flax_mutables/"),
  ("state/nm_sparsity/dense/", DENSE),
  ("state/nm_sparsity/", "flax_mutables/nm_sparsity/"),
)


def read(state: Any) -> dict[str, Lazy]:
  """Returns key -> array, which is read when it is asked for.

  Args:
    state: a path of `folders.contents`.
  """
  import orbax.checkpoint as ocp

  # It stays open as long as an array may be asked for.
  reader = ocp.PyTreeCheckpointer()
  with quiet():
    metadata: Any = reader.metadata(state)

  def restore(*names: str) -> dict[str, np.ndarray]:
    wanted: Any = nested({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})
    # Without transforms Orbax wants whole tuples, as of `optax.chain`; with them, a dict of one.
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, transforms={})
    with quiet():
      return dict(flatten(reader.restore(state, args=args)))

  @functools.cache
  def small_ones() -> dict[str, np.ndarray]:
    try:
      return restore(*small)
    except Exception:  # one is damaged: it is named when it is read by itself
      return {}

  def array(name: str) -> np.ndarray:
    if name in small and name in small_ones():
      return small_ones()[name]
    return np.asarray(restore(name)[name])

  found = dict(flatten(metadata.item_metadata.tree))
  # Each call of Orbax reads the metadata of all arrays, so small arrays share one.
  small = {name for name, x in found.items() if math.prod(x.shape) <= 2**16}
  # `nms.sparse` may stand inside others: its state is the one that has rules beside a count.
  sparse = [name.removesuffix("rules") for name in found if name.endswith("/rules")]
  prefix = next((prefix for prefix in sparse if f"{prefix}count" in found), "opt_state/")
  # What a run scored is read in place of what it averaged.
  averaged = {name.removeprefix(AVERAGE) for name in found if name.startswith(AVERAGE)}

  def key_of(name: str) -> str | None:
    """Returns T5X's name."""
    if name in averaged:
      return NOT_AVERAGED + name
    name = name.removeprefix(AVERAGE)
    if name.startswith(prefix):
      name = "opt_state/" + name.removeprefix(prefix)
    for theirs, ours in _NAMES:
      if name == theirs or theirs.endswith("/") and name.startswith(theirs):
        return None if ours is None else ours + name.removeprefix(theirs)
    return name

  lazy = lambda name, x: Lazy(tuple(x.shape), np.dtype(x.dtype), functools.partial(array, name))
  return {key: lazy(name, x) for name, x in found.items() if (key := key_of(name)) is not None}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences what Orbax logs, of files that T5X does not write, and in its threads.

  The caller that waits for a thread gets its error. Without this a full disk prints 60 lines.
  """
  logger = logging.getLogger("absl")
  is_of_others = lambda record: "orbax" not in record.pathname
  logger.addFilter(is_of_others)
  try:
    yield
  finally:
    logger.removeFilter(is_of_others)
