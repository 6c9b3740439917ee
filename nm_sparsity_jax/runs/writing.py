"""A new checkpoint by Orbax, one array in memory at a time, and the hashes of its arrays.

    key -> function that makes the array -> [write] -> checkpoint_N/state, checkpoint_N/sha256.json
    key -> `Layers` of a stack           ->
    checkpoint_N -> [hashes] -> key -> SHA-256, where somebody wrote them

Orbax takes a whole tree and copies it. Here a leaf is a promise: it is made, written and dropped
before the next one is made. A stack of layers is made, written and dropped layer by layer, and lies
so in the files: what reads it needs room for one layer.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.runs import files, folders, orbax, signals
from nm_sparsity_jax.runs.checkpoint import check_new
from nm_sparsity_jax.trees import nested

_FILE = "sha256.json"
Makes = Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layers:
  """An array that is made layer by layer.

  Attributes:
    shape: of the whole.
    dtype: numpy's name.
    axis: of the layers.
    make: yields one layer after the other. Each has all axes of the whole, and length 1 there.
  """

  shape: tuple[int, ...]
  dtype: str
  axis: int
  make: Callable[[], Iterable[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Hashes:
  """The SHA-256 of the arrays of a checkpoint.

  Attributes:
    whole: key -> that of an array.
    layers: key -> axis, and those of the layers along it.
  """

  whole: Mapping[str, str]
  layers: Mapping[str, tuple[int, tuple[str, ...]]]


def write(
  folder: str,
  arrays: Mapping[str, Makes | Layers],
  untold: Mapping[str, int] | None = None,
  rules: str | None = None,
) -> None:
  """Writes a new Orbax checkpoint that T5X can open: all of it, or nothing.

  A signal that asks the process to end waits for the array that is being written, and ends it when
  everything is cleaned up.

      write("out/checkpoint_7", {"target/ff/kernel": lambda: np.zeros((8, 4), np.float32)})

  Args:
    folder: .../checkpoint_N on a local disk. It must not be there yet; what is above it is made.
    arrays: key such as 'target/ff/kernel' -> what makes the array, or its layers. Each is called
      once.
    untold: what no shape tells of its network; see `runs.untold`.
    rules: the text of those that somebody gave for it; None where its arrays hold them, or nobody.
  """
  check_new(folder)
  ocp = orbax.library(folder)
  found: dict[str, Any] = {}
  failed: list[Exception] = []
  try:
    notes = ({"untold": dict(untold)} if untold else {}) | ({"rules": rules} if rules else {})
    _write(folder, arrays, ocp, found, failed, notes)
  except ValueError:
    if failed:  # what reads said so already
      raise failed[0] from None
    raise


def _write(
  folder: str,
  arrays: Mapping[str, Makes | Layers],
  ocp: Any,
  found: dict[str, Any],
  failed: list[Exception],
  told: Mapping[str, Any],
) -> None:
  with signals.Deferred() as stop, files.whole_folder(folder) as unfinished, orbax.quiet():
    leaves = {key: _Promise(key, make, found, failed, stop) for key, make in arrays.items()}
    registry = ocp.type_handlers.create_type_handler_registry((_Promise, _handler(ocp)))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as writer:
      writer.save(unfinished / "state", nested(leaves))
    stop.check()
    whole = {key: x for key, x in found.items() if isinstance(x, str)}
    layers = {key: x for key, x in found.items() if not isinstance(x, str)}
    notes = {"sha256": whole, **({"layers": layers} if layers else {}), **told}
    sums = json.dumps(notes, indent=1, sort_keys=True)
    (unfinished / _FILE).write_text(sums + "\n")
    (unfinished / "dataset").mkdir()  # T5X asks for it where a run starts from this


def hashes(path: str) -> Hashes:
  """Returns the SHA-256 of what was written; empty where nobody wrote hashes.

  Args:
    path: of the checkpoint.

  Raises:
    ValueError: the file that holds them is damaged.
  """
  file = folders.path_of(path) / _FILE
  found = files.read_json(file, {"sha256": {}})
  sums, layers = found.get("sha256"), found.get("layers", {})
  is_hash = lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x)
  if not isinstance(sums, dict) or not all(map(is_hash, sums.values())):
    raise ValueError(f"{file} is damaged: it holds no SHA-256 for each array")
  is_stack = lambda x: (
    isinstance(x, dict) and type(x.get("axis")) is int and isinstance(x.get("sha256"), list)
  )
  stacks: list[Any] = list(layers.values()) if isinstance(layers, dict) else [None]
  if not all(is_stack(x) and all(map(is_hash, x["sha256"])) for x in stacks):
    raise ValueError(f"{file} is damaged: it holds no SHA-256 for each layer")
  return Hashes(sums, {key: (x["axis"], tuple(x["sha256"])) for key, x in layers.items()})


def sha256(array: np.ndarray) -> str:
  """Returns the SHA-256 of an array: its dtype, its shape, its bytes in C order.

  >>> sha256(np.zeros(2, np.float32)) == sha256(-np.zeros(2, np.float32))
  False
  """
  found = hashlib.sha256(f"{array.dtype.name} {list(array.shape)}\n".encode())
  little = array.astype(array.dtype.newbyteorder("<"), copy=False)
  found.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
  return found.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class _Promise:
  """A leaf that is made when it is written; `size` and `nbytes` are what Orbax asks first."""

  key: str
  make: Makes | Layers
  found: dict[str, Any]
  failed: list[Exception]
  stop: signals.Deferred
  size: int = 1
  nbytes: int = 1

  def kept(self) -> np.ndarray | _Stack:
    """Makes the array, and notes its hash, or why it cannot be made; of a stack nothing yet."""
    self.stop.check()
    if isinstance(self.make, Layers):
      return _Stack(self, self.make, tuple(self.make.shape), np.dtype(self.make.dtype))
    try:
      array = np.asarray(self.make())
    except Exception as e:
      self.failed.append(e)
      raise
    self.found[self.key] = sha256(array)
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class _Stack:
  """What Orbax asks of an array before it writes it, of one that is not made yet."""

  promise: _Promise
  layers: Layers
  shape: tuple[int, ...]
  dtype: np.dtype
  size: int = 1

  def kept(self) -> Iterator[np.ndarray]:
    """Makes one layer after the other, and notes their hashes, or why one cannot be made."""
    promise, sums = self.promise, []
    promise.found[promise.key] = {"axis": self.layers.axis, "sha256": sums}
    try:
      for layer in self.layers.make():
        promise.stop.check()
        sums.append(sha256(layer))
        yield layer
        del layer  # or it would stay while the next one is made
    except Exception as e:
      promise.failed.append(e)
      raise


def _handler(ocp: Any) -> Any:
  """Returns what writes promises for Orbax, one after the other."""

  class OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's own handler of numpy arrays, given one at a time."""

    async def serialize(
      self, values: Sequence[_Promise], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
      args = args or [ocp.SaveArgs()] * len(values)
      for value, info, arg in zip(values, infos, args, strict=True):
        if isinstance(value.make, Layers):
          arg = dataclasses.replace(arg, shard_axes=(value.make.axis,))
        for future in await super().serialize([value.kept()], [info], [arg]):
          future.result()
      return []

    async def _open_and_write(self, value: Any, tspec: Any, ts_context: Any) -> None:
      if not isinstance(value, _Stack):
        return await super()._open_and_write(value, tspec, ts_context)
      import tensorstore

      opened: Any = await tensorstore.open(
        tensorstore.Spec(tspec), create=True, open=True, context=ts_context
      )
      before = (slice(None),) * value.layers.axis
      for i, layer in enumerate(value.kept()):
        await opened[(*before, slice(i, i + 1))].write(layer)
        del layer

  return OneByOne(deepcopy_host_arrays=False)
