"""Checkpoints as T5X lays them out: what one holds, arrays of it on the devices, a new one.

    path -> [read] -> Stored -> [load] -> tree of jax arrays
    key -> array -> [write] -> checkpoint_N/state

`t5x_format` reads T5X's own format, `orbax` Orbax, which is what is written, and `other_formats` a
safetensors file of timm's names or a folder of Hugging Face's T5, which are like dense checkpoints,
and a packed file, whose arrays have their zeros here.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.runs import (
  folders,
  network_settings,
  orbax,
  other_formats,
  t5x_format,
)
from nm_sparsity_jax.runs.stored import NOTES, Leaf, Stored, damage

__all__ = ["Leaf", "Stored", "check_new", "find", "load", "opened", "read", "restore", "write"]


def find(name: str) -> str:
  """Returns the checkpoint that a name means: itself, or the newest one in a run's folder."""
  path = folders.path_of(name)
  if folders.is_checkpoint(path) or other_formats.is_readable(path):
    return name
  return folders.latest(name) or folders.latest_of_kauldron(name) or name


def opened(path: str | os.PathLike | Stored) -> Stored:
  """Returns the checkpoint that a path means, or the one given."""
  return path if isinstance(path, Stored) else read(find(os.fspath(path)))


def read(name: str, like: Mapping[str, Any] | None = None, config: Any = None) -> Stored:
  """Reads the metadata of a checkpoint; arrays are read when you ask for them.

      checkpoint.read("model.safetensors", jax.eval_shape(network.init, key, images)).leaves

  Args:
    name: of its folder, of T5X's file in it, of a safetensors file of timm's names, or of a folder
      of Hugging Face's T5.
    like: the variables of the network that takes it, or their shapes: a file of timm's names is
      compared with them, and has the network's keys: a scan stacks blocks.
    config: of the network: settings that shapes do not reveal are compared, where a checkpoint or
      a file tells them.

  Raises:
    ValueError: it is damaged, or of another network.
  """
  path = folders.path_of(name)
  if not path.exists():
    raise FileNotFoundError(f"there is no checkpoint {name!r}")
  if other_formats.is_readable(path):
    return other_formats.read(name, like, config)
  if file := folders.t5x_file(path):
    format_, reader, path = "T5X", t5x_format.read, file
  elif state := folders.orbax_state(path):
    format_, reader, path = "Orbax", orbax.read, state
  else:
    inside = folders.latest(name)
    hint = f": name one in it, such as {inside!r}" if inside else ""
    raise ValueError(
      f"{name!r} is not a checkpoint: it has neither a file 'checkpoint' (T5X) nor state/_METADATA "
      f"(Orbax){hint}"
    )
  if config is not None:
    network_settings.check(name, config)
  with damage(name, "its metadata"):
    leaves, array = reader(path)
  return Stored.of(name, format_, leaves, array)


def load(stored: Stored, like: Any, shardings: Any) -> Any:
  """Loads the part of a checkpoint that a tree names.

  Args:
    stored: the checkpoint; more than is wanted may be in it.
    like: nested dict such as {'target': params} whose leaves have shape and dtype.
    shardings: the same tree of shardings.

  Returns:
    The tree of `like`, of jax arrays.

  Raises:
    ValueError: the checkpoint lacks an array, has another shape, or is damaged.
  """
  wanted = {key: tuple(leaf.shape) for key, leaf in flatten(like)}
  found = {key: stored.leaves[key].shape for key in wanted if key in stored.leaves}
  if said := difference(wanted, found):
    raise ValueError(
      f"{stored.path} is of another model: {said}: choose the model file of its run, and its sizes."
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
  where, dtypes = dict(flatten(shardings)), {key: leaf.dtype for key, leaf in flatten(like)}
  return nested(
    {key: jax.device_put(stored.array(key).astype(dtypes[key]), where[key]) for key in wanted}
  )


def restore(path: pathlib.Path, like: Any, shardings: Any) -> Any:
  """Restores a tree by Orbax, each shard onto its device.

  Args:
    path: the folder that Orbax reads, such as .../checkpoint_1000/state.
    like: a tree of shapes and dtypes; the checkpoint may hold more.
    shardings: the same tree of shardings.
  """
  import orbax.checkpoint as ocp

  def args(leaf, sharding):
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

  restore_args = jax.tree.map(args, like, shardings)
  with orbax.quiet(), ocp.PyTreeCheckpointer() as reader:
    wanted = ocp.args.PyTreeRestore(item=like, restore_args=restore_args, partial_restore=True)
    return reader.restore(path, args=wanted)


def check_new(folder: str) -> None:
  """Refuses what `write` would refuse, before anything is done for it."""
  if "://" in folder:
    raise ValueError(f"{folder!r}: name a folder on a local disk, and copy the checkpoint from it")
  safetensors_file.refuse_existing(folder)


def write(
  folder: str,
  arrays: Mapping[str, Any],
  settings: Mapping[str, int] | None = None,
  rules: str | None = None,
) -> None:
  """Writes a new Orbax checkpoint that T5X can open: all of it, or nothing.

      write("out/checkpoint_7", {"target/ff/kernel": np.zeros((8, 4), np.float32)})

  Args:
    folder: .../checkpoint_N on a local disk. It must not be there yet; its parents are made.
    arrays: key such as 'target/ff/kernel' -> numpy array.
    settings: of its network, which shapes do not reveal; see `runs.network_settings`.
    rules: the text of those that somebody gave for it; None where its arrays hold them, or nobody.
  """
  import orbax.checkpoint as ocp

  check_new(folder)
  with safetensors_file.whole(folder) as unfinished, orbax.quiet():
    unfinished.mkdir()
    with ocp.PyTreeCheckpointer() as writer:
      writer.save(unfinished / "state", nested(dict(arrays)))
    notes = {"network_settings": dict(settings or {}), "rules": rules}
    (unfinished / NOTES).write_text(json.dumps(notes, indent=1) + "\n")
    (unfinished / "dataset").mkdir()  # T5X asks for it where a run starts from this
