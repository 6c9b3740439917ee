"""Arrays of a checkpoint, of either format, on the devices that want them.

Stored, shapes, shardings -> [load] -> tree of jax arrays
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.runs import checkpoint, folders, orbax


def load(
  stored: checkpoint.Stored,
  like: Any,
  shardings: Any,
  setting_of: Callable[[str], str | None] = lambda path: None,
) -> Any:
  """Loads the part of a checkpoint that a tree names.

  Args:
    stored: the checkpoint; more than is wanted may be in it.
    like: nested dict such as {'target': params} whose leaves have shape and dtype.
    shardings: the same tree of shardings.
    setting_of: path of a parameter -> the setting that its shape hangs on, or None.

  Returns:
    The tree of `like`, of jax arrays.

  Raises:
    ValueError: the checkpoint lacks an array, has another shape, or is damaged.
  """
  wanted = dict(flatten(like))
  if lost := sorted(set(wanted) - set(stored.leaves)):
    raise ValueError(
      f"{stored.path} lacks {len(lost)} of the {len(wanted)} arrays that this network takes, such "
      f"as {lost[0]}: it is of another model. Choose the model file that it was made with."
    )
  for key, leaf in wanted.items():
    shape = stored.leaves[key].shape
    if shape is not None and tuple(shape) != tuple(leaf.shape):
      setting = setting_of(key.rpartition("target/")[2])
      why = f"set {setting} as it was there" if setting else "it is of another model or vocabulary"
      raise ValueError(
        f"{key} has shape {tuple(shape)} in {stored.path}, and {tuple(leaf.shape)} in this "
        f"network: {why}."
      )
  if stored.format == "Orbax":
    path = folders.path_of(stored.path)
    try:
      return restore(folders.orbax_state(path) or path, like, shardings)
    except Exception as e:
      raise ValueError(
        f"{stored.path} cannot be read: it is damaged ({first_line(e)}). Take another checkpoint, "
        "or a copy of this one that `nm-sparsity verify` can read."
      ) from e
  where = dict(flatten(shardings))
  values = {
    key: jax.device_put(stored.array(key).astype(leaf.dtype), where[key])
    for key, leaf in wanted.items()
  }
  return nested(values)


def restore(path: pathlib.Path, like: Any, shardings: Any) -> Any:
  """Restores a tree by Orbax.

  Args:
    path: the folder that Orbax reads, such as .../checkpoint_1000/state.
    like: a tree of shapes and dtypes; the checkpoint may hold more.
    shardings: the same tree of shardings.
  """
  ocp = orbax.library(str(path))

  def args(leaf, sharding):
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

  restore_args = jax.tree.map(args, like, shardings)
  with orbax.quiet(), ocp.PyTreeCheckpointer() as reader:
    wanted = ocp.args.PyTreeRestore(item=like, restore_args=restore_args, partial_restore=True)
    return reader.restore(path, args=wanted)
