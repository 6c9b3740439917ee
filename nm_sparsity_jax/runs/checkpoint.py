"""Checkpoints as T5X lays them out: what one holds, one array of it, a new one.

    path -> [read] -> Stored: key -> Leaf(shape, dtype)
                              key -> array, one at a time
    tree -> [write] -> checkpoint_N/state

Keys are those of T5X's train state: target/..., state/step, state/param_states/...,
flax_mutables/... Formats: T5X's own (one msgpack file that refers to tensorstore arrays) and Orbax,
which Kauldron writes too, by names of its own. Orbax is what is written. A safetensors file of
timm's names reads like a dense checkpoint.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.runs import files, folders, foreign, limits
from nm_sparsity_jax.text import first_line


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
    format: 'Orbax', 'T5X' or 'timm'.
    leaves: key -> Leaf.
    step: T5X's global step, None if unknown.
    sparse_step: steps of the sparse run that wrote it, None for a dense one.
    rules: the text of that run's rules, None for a dense one.
    array: key -> its values, read now. ValueError where they cannot be.
  """

  path: str
  format: str
  leaves: Mapping[str, Leaf]
  step: int | None
  sparse_step: int | None
  rules: str | None
  array: Callable[[str], np.ndarray] = dataclasses.field(repr=False, compare=False)

  @functools.cached_property
  def average(self) -> str | None:
    """Returns the key above the moving average of all parameters; None where the run kept none."""
    params = {key.removeprefix("target/") for key in self.leaves if key.startswith("target/")}
    found: dict[str, set[str]] = {}
    for key in self.leaves:
      if hit := re.match(r"(state/param_states/(?:.*/)?average)/(.+)", key):
        found.setdefault(hit[1], set()).add(hit[2])
    return next((above for above, paths in found.items() if params and paths >= params), None)

  def deployed(self, key: str) -> str:
    """Returns where the values lie that are scored and deployed: in the average, if there is one.

        stored.array(stored.deployed("target/head/kernel"))

    Args:
      key: of a parameter, or any other, which is returned.
    """
    if self.average is None or not key.startswith("target/"):
      return key
    return self.average + key.removeprefix("target")


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


def read(name: str) -> Stored:
  """Reads the metadata of a checkpoint; arrays are read when you ask for them."""
  reader, path = _located(name)
  with _damage(name, "its metadata"):
    return reader(name, path)


def _located(name: str):
  """Returns what reads a checkpoint, and the file or folder to read."""
  folder = folders.path_of(name)
  if not folder.exists():
    raise FileNotFoundError(f"there is no checkpoint {name!r}")
  if folder.name.endswith(foreign.SUFFIXES) and folder.is_file():
    return _read_timm, folder
  if file := folders.legacy_file(folder):
    return _read_legacy, file
  if state := folders.orbax_state(folder):
    return _read_orbax, state
  if inside := folders.latest(name):
    raise ValueError(f"{name!r} is a folder of checkpoints: name one, such as {inside!r}")
  empty = folders.named_steps(name)
  beside = f"; nor does {folders.PREFIX}_{empty[-1]} in it" if empty else ""
  raise ValueError(
    f"{name!r} is not a checkpoint: it has neither a file 'checkpoint' (T5X) nor state/_METADATA "
    f"(Orbax){beside}"
  )


@contextlib.contextmanager
def _damage(name: str, what: str):
  """Names the checkpoint, and the part of it, where a reader fails with words of its own."""
  try:
    yield
  except (ModuleNotFoundError, _Unreadable):
    raise
  except Exception as e:
    raise _Unreadable(f"{name!r} is damaged: {what} cannot be read ({first_line(e)})") from e


class _Unreadable(ValueError):
  """An error that names its checkpoint already."""


_MOST_MSGPACK = 1 << 30  # bytes: arrays of any size lie beside the file


def _read_legacy(name: str, file) -> Stored:
  from flax import serialization

  if (size := file.stat().st_size if isinstance(file, pathlib.Path) else 0) > _MOST_MSGPACK:
    raise _Unreadable(f"{str(file)!r} has {size:,} bytes, and at most {_MOST_MSGPACK:,} are read")
  contents: Any = serialization.msgpack_restore(file.read_bytes())
  if contents.get("version", 0) < 2:
    version = contents.get("version", 0)
    raise _Unreadable(f"{name!r} has version {version}: T5X reads 2 and 3")
  leaves: dict[str, Leaf] = {}
  values: dict[str, Any] = {}
  there = limits.bytes_there(file.parent)

  def walk(node, keys):
    if isinstance(node, dict) and {"driver", "kvstore"} <= node.keys():
      leaves["/".join(keys)] = Leaf(
        "/".join(keys), *_spec("/".join(keys), node, file.parent, there)
      )
      values["/".join(keys)] = (node, file.parent)
    elif isinstance(node, dict):
      for key, child in node.items():
        walk(child, (*keys, str(key)))
    elif node is not None:
      array = np.asarray(node)
      leaves["/".join(keys)] = Leaf("/".join(keys), array.shape, str(array.dtype))
      values["/".join(keys)] = array

  walk(contents["optimizer"], ())
  return _stored(name, "T5X", leaves, lambda key: _stored_array(values[key]))


def _spec(
  key: str, spec: Mapping[str, Any], folder: Any, there: int | None
) -> tuple[tuple[int, ...] | None, str | None]:
  """Returns shape and dtype of an array that the msgpack file refers to, from its metadata."""
  if spec["driver"] != "zarr":
    raise ValueError(f"{key} is stored by {spec['driver']!r}: T5X stores by 'zarr'")
  zarray = folder / _name(spec) / ".zarray"
  if zarray.is_file():
    found = files.parse_json(zarray.read_text())
    dtype = _zarr_dtype(found["dtype"])
    limits.check_array(key, found["shape"], dtype, there, found["chunks"])
    return tuple(found["shape"]), dtype
  shape, dtype = (spec.get("metadata") or {}).get("shape"), spec.get("dtype")
  if shape is None:
    return None, dtype
  limits.check_array(key, shape, dtype, there)
  return tuple(map(int, shape)), dtype


def _name(spec: Mapping[str, Any]) -> str:
  """Returns the folder of an array: in the store's description, or beside it in old files."""
  name = str(spec["kvstore"].get("path") or spec.get("path", "")).strip("/").split("/")[-1]
  if name in ("", ".", ".."):
    raise ValueError(f"an array is said to lie in the folder {name!r}")
  return name


def _zarr_dtype(name: str) -> str:
  return name if name == "bfloat16" else str(np.dtype(name))


def _stored_array(value) -> np.ndarray:
  """Returns a value that the file holds, or an array that it refers to."""
  if not isinstance(value, tuple):
    return value
  import tensorstore

  spec, folder = value
  kvstore = f"{folder / _name(spec)}/"
  if "://" not in kvstore:
    kvstore = f"file://{pathlib.Path(kvstore).absolute()}/"
  zarray = files.parse_json((folder / _name(spec) / ".zarray").read_text())
  # Without a fill value every chunk is written, so one that is absent was lost.
  fill = zarray.get("fill_value") is not None
  spec = {"driver": spec["driver"], "kvstore": kvstore, "fill_missing_data_reads": fill}
  return np.asarray(tensorstore.open(spec).result().read().result())


def _read_timm(name: str, file) -> Stored:
  if not isinstance(file, pathlib.Path):
    raise _Unreadable(f"{name!r}: copy the file to a local disk")
  try:
    found, array = foreign.open_timm(name)
  except ValueError as e:  # it names the file
    raise _Unreadable(str(e)) from e
  return _stored(name, "timm", {key: Leaf(key, *of) for key, of in found.items()}, array)


def _read_orbax(name: str, state) -> Stored:
  ocp = orbax(name)
  reader = ocp.PyTreeCheckpointer()
  with quiet_orbax():
    found: Any = reader.metadata(state)
  found = getattr(found, "item_metadata", found)
  leaves: dict[str, Leaf] = {}
  there = limits.bytes_there(state)

  def walk(node, keys):
    if isinstance(node, Mapping):
      for key, child in node.items():
        walk(child, (*keys, str(key)))
    elif hasattr(node, "dtype"):
      key = "/".join(keys)
      leaf = Leaf(key, tuple(getattr(node, "shape", ())), str(np.dtype(node.dtype)))
      chunk = getattr(getattr(node, "storage", None), "chunk_shape", None)
      limits.check_array(key, leaf.shape or (), leaf.dtype, there, chunk)
      leaves[key] = leaf

  walk(getattr(found, "tree", found), ())
  if not leaves:
    raise ValueError("it names no arrays")
  names = _of_kauldron(leaves) if state.name == "default" else {key: key for key in leaves}
  leaves = {key: dataclasses.replace(leaves[name], key=key) for key, name in names.items()}

  def array(key: str) -> np.ndarray:
    wanted: Any = nested({names[key]: ocp.RestoreArgs(restore_type=np.ndarray)})
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=wanted, partial_restore=True)
    with quiet_orbax():
      (_, value), *_ = flat(reader.restore(state, args=args))
    return np.asarray(value)

  return _stored(name, "Orbax", leaves, array)


# Kauldron's names and T5X's; the first that fits. `nms.sparse` keeps the step twice. The states of
# an optax chain lie in a tuple there, and are left out: nobody reads moments here.
_KAULDRON = (
  ("step", "state/step"),
  ("params/", "target/"),
  ("opt_state/count", "flax_mutables/nm_sparsity/step"),
  ("opt_state/masks/step", None),
  ("opt_state/masks/", "flax_mutables/nm_sparsity/"),
  ("opt_state/fingerprint", None),
  ("opt_state/", "state/param_states/"),
  ("collections/", "flax_mutables/"),
)


def _of_kauldron(leaves: Mapping[str, Leaf]) -> dict[str, str]:
  """Returns T5X's key -> Kauldron's key of a checkpoint of Kauldron."""
  names = {}
  for key in leaves:
    fits = lambda word, key=key: key.startswith(word) if word.endswith("/") else key == word
    theirs, ours = next((pair for pair in _KAULDRON if fits(pair[0])), ("", ""))
    if ours is not None:
      names[ours + key.removeprefix(theirs)] = key
  return names


def orbax(name: str) -> Any:
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
def quiet_orbax():
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


_SMALL = ("state/step", "flax_mutables/nm_sparsity/step", "flax_mutables/nm_sparsity/rules")


def _stored(name, kind, leaves, array) -> Stored:
  from nm_sparsity_jax import rules_text

  def known_to_be_whole(key: str) -> np.ndarray:
    with _damage(name, key):
      return array(key)

  for key in _SMALL:
    if key in leaves and math.prod(leaves[key].shape or ()) > rules_text.TEXT_BYTES:
      raise ValueError(f"{key} has shape {leaves[key].shape}")
  step, sparse_step, rules = (known_to_be_whole(k) if k in leaves else None for k in _SMALL)
  if rules is not None:
    rules = rules_text.unpack(rules)

  def number(x: np.ndarray | None) -> int | None:
    if x is not None and not 0 <= int(x) < 1 << 63:
      raise ValueError(f"a step is {int(x)}")
    return None if x is None else int(x)

  return Stored(name, kind, leaves, number(step), number(sparse_step), rules, known_to_be_whole)


def check_new(folder: str) -> None:
  """Refuses what `write` would refuse, before anything is done for it."""
  if "://" in folder:
    raise ValueError(f"{folder!r}: name a folder on a local disk, and copy the checkpoint from it")
  if os.path.lexists(folder):
    raise ValueError(f"{folder!r} is there already: it is never overwritten")


def write(folder: str, tree: Mapping[str, Any]) -> None:
  """Writes a new Orbax checkpoint that T5X can open: all of it, or nothing.

  `writing.write` does the same with one array in memory at a time.

  Args:
    folder: .../checkpoint_N on a local disk. It must not be there yet; what is above it is made.
    tree: target, state and so on, of numpy arrays.
  """
  from nm_sparsity_jax.runs import writing

  writing.write(folder, {key: functools.partial(np.asarray, x) for key, x in flat(tree)})


# --- trees by key ---------------------------------------------------------------------------------


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a tree of the values at 'a/b/c'."""
  tree: dict[str, Any] = {}
  for key, value in flat.items():
    *folders, last = key.split("/")
    node = tree
    for word in folders:
      node = node.setdefault(word, {})
    node[last] = value
  return tree


def flat(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
  """Yields ('a/b/c', value) for each value of a tree of dicts."""
  if isinstance(tree, Mapping):
    for key, child in tree.items():
      yield from flat(child, (*keys, str(key)))
  else:
    yield "/".join(keys), tree
