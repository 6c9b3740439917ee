"""Checkpoints of every format: what one holds, its arrays on the devices, and a new one.

    path -> [read] -> Stored -> [load] -> tree of jax arrays
    key -> array -> [write] -> checkpoint_N/state

Keys are those of T5X's train state: target/..., state/step, state/param_states/...,
flax_mutables/...
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.files import Lazy, whole
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import huggingface
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.runs import files, folders, orbax, other_formats, t5x_format
from nm_sparsity_jax.training import rules_text

_NOTES = "notes.json"  # in a checkpoint of `write`: rules, and settings of the network
_SPARSE = "flax_mutables/nm_sparsity/"


@dataclasses.dataclass(frozen=True)
class Stored:
  """One checkpoint whose metadata were read.

  Attributes:
    path: its folder or file.
    format: 'Orbax', 'T5X', 'timm', 'Hugging Face' or 'packed'.
    leaves: key -> array, not read yet.
    step: T5X's global step, None if unknown.
    sparse_step: steps of the sparse run that wrote it, None for a dense one.
    rules: the text of that run's rules, None for a dense one.
    packed: of a packed file: the variables, with kernels as `NMPacked`; None of any other.
  """

  path: str
  format: str
  leaves: Mapping[str, Lazy]
  step: int | None
  sparse_step: int | None
  rules: str | None
  packed: dict[str, Any] | None = None

  def array(self, key: str) -> np.ndarray:
    """Reads an array. ValueError where it is damaged."""
    return np.asarray(self.leaves[key])

  @property
  def known_rules(self) -> str | None:
    """Returns the text of the run's rules, else of those that `finalize` was given, else None."""
    if self.rules is not None:
      return self.rules
    return files.read_json(folders.path_of(self.path) / _NOTES, {}).get("rules")

  @property
  def in_place(self) -> bool:
    """Returns whether the run trained in place: its parameters are W~, and W is in its state."""
    # T5X's parameters are W, so it keeps no second one.
    return any(key.startswith(orbax.DENSE) for key in self.leaves)

  @property
  def start(self) -> int | None:
    """Returns the global step before the first sparse step; None where that is unknown."""
    if (key := f"{_SPARSE}start") in self.leaves:
      return int(self.array(key))
    if self.step is None or self.sparse_step is None:
      return None
    return self.step - self.sparse_step

  @property
  def average(self) -> bool:
    """Returns whether the run kept a moving average of what it trained: that is what is read."""
    return any(key.startswith(orbax.NOT_AVERAGED) for key in self.leaves)

  def masks(self) -> dict[str, Any]:
    """Returns the stored masks, as `nms.init_state` makes them; `{}` where it keeps none."""
    kept = {k.removeprefix(_SPARSE): x for k, x in self.leaves.items() if k.startswith(_SPARSE)}
    tree = {k: np.asarray(x) for k, x in kept.items() if k not in ("step", "start", "rules")}
    return nested({"step": np.int32(self.sparse_step or 0), **tree}) if tree else {}

  def variables(self) -> dict[str, Lazy]:
    """Returns what is deployed, not read yet: 'params/head/kernel', 'batch_stats/bn1/mean', ..."""
    found = {}
    for key, x in self.leaves.items():
      collection, _, path = key.removeprefix("flax_mutables/").partition("/")
      if key.startswith("target/"):
        found[f"params/{path}"] = x
      elif key.startswith("flax_mutables/") and collection != "nm_sparsity":
        found[f"{collection}/{path}"] = x
    return found


def find(name: str) -> str:
  """Returns the checkpoint that a name means: itself, or the newest one in a run's folder."""
  # First the run's: its folder may hold a packed file, as a folder of Hugging Face's does.
  return name if folders.contents(folders.path_of(name)) else folders.latest(name) or name


def read(
  name: str | os.PathLike, like: Mapping[str, Any] | None = None, config: Any = None
) -> Stored:
  """Reads what a checkpoint holds, and none of its large arrays; a packed file it reads whole.

  Args:
    name: of the folder or file; a URL such as 'gs://bucket/run/checkpoint_1000' for Orbax and T5X.
      A run's folder means its newest one.
    like: of a file in timm's names, the variables of the network that takes it.
    config: of the network that takes it; None = any.

  Raises:
    FileNotFoundError: it is not there.
    ValueError: it is damaged, or of another network.
  """
  name = find(os.fspath(name))
  path = folders.path_of(name)
  if not path.exists():
    raise FileNotFoundError(f"there is no checkpoint {name!r}")
  rules = packed = None
  # Those of other libraries first: a folder of theirs may be called checkpoint_7 as well.
  if other_formats.is_readable(path):
    format_, arrays, rules, packed = other_formats.read(name, like, config)
  elif found := folders.contents(path):
    format_, inside = found
    with files.named(f"{name}, its metadata,"):
      arrays = (t5x_format if format_ == "T5X" else orbax).read(inside)
  else:
    raise ValueError(
      f"{name!r} is not a checkpoint: it has neither a file 'checkpoint' (T5X) nor state/_METADATA "
      "(Orbax)"
    )
  # Another window fits all shapes and gives other logits, so nothing later would notice it.
  noted = {} if config is None else network_settings(name)
  for setting, there in noted.items():
    here = getattr(config, setting, there)
    if here != there:
      raise ValueError(
        f"{name} was trained with {setting}={there}, and this network has {setting}={here}, which "
        f"shapes do not reveal: set {setting} of its config to {there}."
      )
  leaves = {key: _leaf(name, key, x) for key, x in arrays.items()}
  number = lambda key: int(np.asarray(leaves[key])) if key in leaves else None
  if (key := f"{_SPARSE}rules") in leaves:
    rules = rules_text.unpack(np.asarray(leaves[key]))
  return Stored(
    path=name,
    format=format_,
    leaves=leaves,
    step=number("state/step"),
    sparse_step=number(f"{_SPARSE}step"),
    rules=rules,
    packed=packed,
  )


def _leaf(name: str, key: str, x: Any) -> Lazy:
  # Damage shows when an array is read, far from here, so each knows its file and its name.
  def make() -> np.ndarray:
    with files.named(f"{name}, {key},"):
      return np.asarray(x)

  return Lazy(tuple(x.shape), x.dtype, make)


def network_settings(name: str) -> dict[str, Any]:
  """Returns settings of the network that shapes do not reveal: Swin's window, T5's activations.

  `write` notes them in the checkpoint, and the local runner in run.json beside it. Hugging Face's
  config.json has them too.

  Args:
    name: of the checkpoint.
  """
  folder = folders.path_of(name)
  if huggingface.is_folder(folder):
    return {"mlp_activations": huggingface.config_in(folder).mlp_activations}
  # Its own notes first: what `finalize` wrote may lie in the folder of another run.
  found = files.read_json(folder / _NOTES, None)
  if found is None:
    found = files.read_json(folder.parent / "run.json", {}).get("workload") or {}
  noted = found.get("network_settings", {}).items()
  return {name: tuple(x) if isinstance(x, list) else x for name, x in noted}  # JSON has no tuple


def load(stored: Stored, like: Any, shardings: Any) -> Any:
  """Loads what is deployed of a checkpoint, array by array, as far as a tree names it.

  Args:
    stored: the checkpoint; unless it is a packed file, it may have parameters that are not wanted.
    like: nested dict such as {'target': params} whose leaves have shape and dtype.
    shardings: the same tree of shardings.

  Returns:
    The tree of `like`, of jax arrays.

  Raises:
    ValueError: the checkpoint lacks an array, has another shape, or is damaged.
  """
  check_shapes(stored, like)
  # One array at a time is on the host: all of them may not fit.
  placed = [
    jax.device_put(stored.array(key).astype(x.dtype), sharding)
    for (key, x), sharding in zip(flatten(like), jax.tree.leaves(shardings), strict=True)
  ]
  return jax.tree.unflatten(jax.tree.structure(like), placed)


def check_shapes(stored: Stored, like: Any) -> None:
  """Refuses a checkpoint that lacks an array of a tree, or has it in another shape.

  A packed file must not have other parameters either.
  """
  wanted = {key: tuple(x.shape) for key, x in flatten(like)}
  is_due = lambda key: key in wanted or stored.packed and key.startswith("target/")
  found = {key: x.shape for key, x in stored.leaves.items() if is_due(key)}
  if said := difference(wanted, found):
    raise ValueError(
      f"{stored.path} is of another model: {said}: choose the model file of its run, and its sizes."
    )


def write(
  folder: str,
  arrays: Mapping[str, Any],
  settings: Mapping[str, Any] | None = None,
  rules: str | None = None,
) -> None:
  """Writes a new Orbax checkpoint that T5X can open: all of it, or nothing.

      write("out/checkpoint_7", {"target/ff/kernel": np.zeros((8, 4), np.float32)})

  Args:
    folder: .../checkpoint_N on a local disk. It must not be there yet; its parents are made.
    arrays: key such as 'target/ff/kernel' -> numpy array.
    settings: of its network, which shapes do not reveal; see `network_settings`.
    rules: the text of those that somebody gave for it; None where its arrays hold them, or nobody.
  """
  import orbax.checkpoint as ocp

  with whole(folder) as unfinished, orbax.quiet():
    unfinished.mkdir()
    with ocp.PyTreeCheckpointer() as writer:
      writer.save(unfinished / "state", nested(dict(arrays)))
    notes = {"network_settings": dict(settings or {}), "rules": rules}
    files.write_json(unfinished / _NOTES, notes)
    (unfinished / "dataset").mkdir()  # T5X asks for it where a run starts from this
