"""Checkpoints as T5X lays them out: what one holds, one array of it, a new one.

    path -> [read] -> Stored: key -> Leaf(shape, dtype)
                              key -> array, one at a time
    key -> array -> [write] -> checkpoint_N/state

Keys are those of T5X's train state: target/..., state/step, state/param_states/...,
flax_mutables/... `legacy` reads T5X's own format, `orbax` Orbax, which is what is written, and
`foreign` a safetensors file of timm's names or a folder of Hugging Face's T5, which are like dense
checkpoints, and a packed file, whose arrays have their zeros here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.runs import files, folders, legacy, network_settings, orbax, other_formats
from nm_sparsity_jax.runs.contents import Contents, damage


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array: its key in the checkpoint, shape and dtype; None where the format tells neither."""

  key: str
  shape: tuple[int, ...] | None
  dtype: str | None


@dataclasses.dataclass(frozen=True)
class Stored:
  """One checkpoint.

  Attributes:
    path: its folder.
    format: 'Orbax', 'T5X', 'timm', 'Hugging Face' or 'packed'.
    leaves: key -> Leaf.
    step: T5X's global step, None if unknown.
    sparse_step: steps of the sparse run that wrote it, None for a dense one.
    rules: the text of that run's rules, None for a dense one.
    array: key -> its values, read now. ValueError where they cannot be.
    packed: as in `Contents`.
  """

  path: str
  format: str
  leaves: Mapping[str, Leaf]
  step: int | None
  sparse_step: int | None
  rules: str | None
  array: Callable[[str], np.ndarray] = dataclasses.field(repr=False, compare=False)
  packed: Callable[[], dict[str, Any]] | None = dataclasses.field(
    default=None, repr=False, compare=False
  )

  @property
  def known_rules(self) -> str | None:
    """Returns the text of the run's rules, else of those that `finalize` was given, else None."""
    if self.rules is not None:
      return self.rules
    found = files.read_json(folders.path_of(self.path) / network_settings.NOTES, {})
    return None if found.get("rules") is None else str(found["rules"])

  @property
  def in_place(self) -> bool:
    """Returns whether the run trained in place: its parameters are W~, and W lies beside them."""
    return any(key.startswith("state/dense/") for key in self.leaves)

  def masks(self) -> dict[str, Any]:
    """Returns the stored masks, as `nms.init_state` makes them; `{}` where it keeps none."""
    kept = {key.removeprefix(_STATE): key for key in self.leaves if key.startswith(_STATE)}
    tree = {k: self.array(key) for k, key in kept.items() if k not in ("step", "start", "rules")}
    return nested({"step": np.int32(self.sparse_step or 0), **tree}) if tree else {}

  @property
  def average(self) -> bool:
    """Returns whether the run kept a moving average of what it trained."""
    return any(key.startswith(f"{_AVERAGE}target/") for key in self.leaves)

  def deployed(self, key: str) -> str:
    """Returns where the values lie that are scored and deployed: in the average, if there is one.

        stored.array(stored.deployed("target/head/kernel"))

    Args:
      key: of a parameter, of the workload's state, or any other, which is returned.
    """
    return _AVERAGE + key if _AVERAGE + key in self.leaves else key


_AVERAGE = "state/average/"  # before the key of what it is the average of; written by `local`


def find(name: str) -> str:
  """Returns the checkpoint that a name means: itself, or the newest one in a run's folder."""
  try:
    _located(name)
  except ValueError:
    if newest := folders.latest(name) or folders.latest_of_kauldron(name):
      return newest
    raise
  return name


def opened(path: str | os.PathLike | Stored) -> Stored:
  """Returns the checkpoint that a path means, or the one given."""
  return path if isinstance(path, Stored) else read(find(os.fspath(path)))


def read(name: str, like: Mapping[str, Any] | None = None, config: Any = None) -> Stored:
  """Reads the metadata of a checkpoint; arrays are read when you ask for them.

      checkpoint.read("model.safetensors", jax.eval_shape(network.init, key, images)).leaves

  Args:
    name: of its folder, of T5X's file in it, of a safetensors file of timm's names, or of a folder
      of Hugging Face's T5.
    like: the variables of the network that takes it, or their shapes. A file of timm's names is
      held against them, and has the network's keys: a scan stacks blocks. Of any checkpoint that a
      program of T5X's layout wrote, nothing is asked here.
    config: of the network: of a Swin V2 some files tell the window, which shapes do not, and so
      does the folder of a run; a folder of Hugging Face's T5 is held against it.

  Raises:
    ValueError: it is damaged, of another window, or a file of timm's names that the network does
      not take.
  """
  reader, path = _located(name)
  if config is not None and reader is not other_formats.read:
    network_settings.check(name, config)
  with damage(name, "its metadata"):
    if reader is other_formats.read:
      return _stored(name, other_formats.read(name, path, like, config))
    return _stored(name, reader(name, path))


def _located(name: str):
  """Returns what reads a checkpoint, and the file or folder to read."""
  folder = folders.path_of(name)
  if not folder.exists():
    raise FileNotFoundError(f"there is no checkpoint {name!r}")
  if folder.name.endswith(other_formats.SUFFIXES) and folder.is_file():
    return other_formats.read, folder
  if file := folders.legacy_file(folder):
    return legacy.read, file
  if state := folders.orbax_state(folder):
    return orbax.read, state
  if other_formats.is_folder(folder):
    return other_formats.read, folder
  if inside := folders.latest(name):
    raise ValueError(f"{name!r} is a folder of checkpoints: name one, such as {inside!r}")
  empty = folders.named_steps(name)
  beside = f"; nor does {folders.PREFIX}_{empty[-1]} in it" if empty else ""
  raise ValueError(
    f"{name!r} is not a checkpoint: it has neither a file 'checkpoint' (T5X) nor state/_METADATA "
    f"(Orbax){beside}"
  )


_STATE = "flax_mutables/nm_sparsity/"
_SMALL = ("state/step", "flax_mutables/nm_sparsity/step", "flax_mutables/nm_sparsity/rules")


def _stored(name: str, found: Contents) -> Stored:
  from nm_sparsity_jax.training import rules_text

  def array(key: str) -> np.ndarray:
    with damage(name, key):
      return found.array(key)

  leaves = {key: Leaf(key, shape, dtype) for key, (shape, dtype) in found.leaves.items()}
  for key in _SMALL:
    if key in leaves and math.prod(leaves[key].shape or ()) > rules_text.TEXT_BYTES:
      raise ValueError(f"{key} has shape {leaves[key].shape}")
  step, sparse_step, rules = (array(key) if key in leaves else None for key in _SMALL)
  text = found.rules if rules is None else rules_text.unpack(rules)
  numbers = _number(step), _number(sparse_step)
  return Stored(name, found.format, leaves, *numbers, text, array, found.packed)


def _number(x: np.ndarray | None) -> int | None:
  if x is not None and not 0 <= int(x) < 1 << 63:
    raise ValueError(f"a step is {int(x)}")
  return None if x is None else int(x)


def check_new(folder: str) -> None:
  """Refuses what `write` would refuse, before anything is done for it."""
  if "://" in folder:
    raise ValueError(f"{folder!r}: name a folder on a local disk, and copy the checkpoint from it")
  if os.path.lexists(folder):
    raise ValueError(f"{folder!r} is there already: it is never overwritten")


def write(
  folder: str,
  arrays: Mapping[str, Any],
  settings: Mapping[str, int] | None = None,
  rules: str | None = None,
) -> None:
  """Writes a new Orbax checkpoint that T5X can open: all of it, or nothing.

      write("out/checkpoint_7", {"target/ff/kernel": np.zeros((8, 4), np.float32)})

  Args:
    folder: .../checkpoint_N on a local disk. It must not be there yet; what is above it is made.
    arrays: key such as 'target/ff/kernel' -> numpy array.
    settings: of its network, which shapes do not reveal; see `runs.network_settings`.
    rules: the text of those that somebody gave for it; None where its arrays hold them, or nobody.
  """
  check_new(folder)
  ocp = orbax.library(folder)
  with files.whole_folder(folder) as unfinished, orbax.quiet():
    with ocp.PyTreeCheckpointer() as writer:
      writer.save(unfinished / "state", nested(dict(arrays)))
    notes = {"network_settings": dict(settings or {}), "rules": rules}
    (unfinished / network_settings.NOTES).write_text(json.dumps(notes, indent=1) + "\n")
    (unfinished / "dataset").mkdir()  # T5X asks for it where a run starts from this
