"""Checkpoints by Orbax: what one holds, by T5X's names; and Orbax made quiet.

    state/ -> [read] -> key -> shape, dtype -> array, when it is asked for

Kauldron writes by Orbax too, and has names of its own.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.runs.contents import Contents


def read(name: str, state: Any) -> Contents:
  """Reads the metadata of a checkpoint; arrays are read when they are asked for.

  Args:
    name: of the checkpoint, for errors.
    state: a path of `folders.orbax_state`.
  """
  ocp = library(name)
  reader = ocp.PyTreeCheckpointer()
  with quiet():
    told: Any = reader.metadata(state)
  told = getattr(told, "item_metadata", told)
  leaves: dict[str, Any] = {}

  def walk(node, keys):
    if isinstance(node, Mapping):
      for key, child in node.items():
        walk(child, (*keys, str(key)))
    elif hasattr(node, "dtype"):
      leaves["/".join(keys)] = tuple(getattr(node, "shape", ())), str(np.dtype(node.dtype))

  walk(getattr(told, "tree", told), ())
  if not leaves:
    raise ValueError("it names no arrays")
  names = _named(leaves, _KAULDRON if state.name == "default" else _LOCAL)

  def array(key: str) -> np.ndarray:
    wanted: Any = nested({names[key]: ocp.RestoreArgs(restore_type=np.ndarray)})
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True)
    with quiet():
      (_, value), *_ = flatten(reader.restore(state, args=args))
    return np.asarray(value)

  return Contents("Orbax", {key: leaves[name] for key, name in names.items()}, array)


# Kauldron's names and T5X's; the first that fits. `nms.sparse` keeps the step twice. The states of
# an optax chain lie in a tuple there, and are left out: nobody reads moments here.
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


# The local runner trains in place, so its state is the optimizer's. T5X's keys stay as they are.
_LOCAL = (
  ("state/nm_sparsity/dense/", "state/dense/"),
  ("state/nm_sparsity/", "flax_mutables/nm_sparsity/"),
)


def _named(leaves: Collection[str], table: Sequence[tuple[str, str | None]]) -> dict[str, str]:
  """Returns T5X's key -> the checkpoint's own key."""
  names = {}
  for key in leaves:
    fits = lambda word, key=key: key.startswith(word) if word.endswith("/") else key == word
    theirs, ours = next((pair for pair in table if fits(pair[0])), ("", ""))
    if ours is not None:
      names[ours + key.removeprefix(theirs)] = key
  return names


def library(name: str) -> Any:
  """Imports Orbax, or says what to install."""
  try:
    import orbax.checkpoint as ocp
  except ImportError as e:
    raise ModuleNotFoundError(
      f"{name!r} is an Orbax checkpoint: pip install orbax-checkpoint"
    ) from e
  _ignore_late_callbacks()
  return ocp


@contextlib.contextmanager
def quiet():
  """Silences Orbax: its warnings of files that T5X does not write, and what its threads log.

  An error in a thread is raised again where its result is asked for.
  """
  logger = logging.getLogger("absl")
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    with quiet_threads():
      yield
  finally:
    logger.setLevel(level)


@contextlib.contextmanager
def quiet_threads():
  """Silences what Orbax' threads log of their errors.

  The caller that waits for a thread gets its error. Without this a full disk prints 60 lines.
  """
  logger = logging.getLogger("absl")

  def is_of_others(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname

  logger.addFilter(is_of_others)
  try:
    yield
  finally:
    logger.removeFilter(is_of_others)


@functools.cache
def _ignore_late_callbacks() -> None:
  """Prints no traceback where tensorstore calls back after Orbax has given up.

  It calls from threads of its own, once for each array of a damaged checkpoint, at any time after
  the error was raised. So the hook stays.
  """
  hook = sys.unraisablehook

  def print_error(raised: Any) -> None:
    if raised.exc_type is not RuntimeError or str(raised.exc_value) != "Event loop is closed":
      hook(raised)

  sys.unraisablehook = print_error
