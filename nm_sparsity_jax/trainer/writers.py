"""What takes the scalars of a run, room by room: its files, and a tracker of your own.

A room is 'train', 'training_eval/<task>' or 'inference_eval/<task>'.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import abc
import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.runs import files


class Writer(abc.ABC):
  """Takes the scalars of a run. Subclass it for a service of your own, and define `write`.

      class Printer(Writer):
        def write(self, room, step, scalars):
          print(self.folder.name, room, step, dict(scalars))

  A gin file binds it: `train.Run.tracker = @my_module.Printer()`.

  Attributes:
    folder: of the run.
  """

  folder: pathlib.Path

  def open(self, folder: pathlib.Path) -> None:
    """Begins with the run of a folder, or goes on with it, before the first call of `write`."""
    self.folder = folder

  @abc.abstractmethod
  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Takes the scalars of a step.

    Args:
      room: such as 'train'.
      step: the global one.
      scalars: name -> value.
    """

  def flush(self) -> None:  # noqa: B027 (not every service has a buffer)
    """Writes out what is buffered: a checkpoint of this step follows."""

  def close(self, how: str) -> None:  # noqa: B027 (not every service has an end)
    """Ends.

    Args:
      how: the process of the run ends: 'finished'; 'stopped', to be resumed; 'failed'.
    """


class Curves:
  """Writes metrics.jsonl and TensorBoard's events, and passes all on to a tracker.

  Args:
    folder: of the run.
    tracker: gets all of it too; None = nobody.
  """

  def __init__(self, folder: pathlib.Path, tracker: Writer | None = None):
    self.folder, self._tracker = folder, tracker
    self._rooms: dict[str, tuple[Any, Any]] = {}
    if tracker is not None:
      tracker.open(folder)

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Adds a line, and an event; seqio writes the files of 'inference_eval/' itself."""
    values = {name: float(x) for name, x in scalars.items()}
    if not room.startswith("inference_eval/"):
      if room not in self._rooms:
        self._rooms[room] = _opened(self.folder / room, step)
      lines, events = self._rooms[room]
      lines.write(json.dumps({"step": step, **values}) + "\n")
      events.write_scalars(step, values)
    if self._tracker is not None:
      self._tracker.write(room, step, values)

  def flush(self) -> None:
    """Flushes all files, and the tracker: a checkpoint of this step follows."""
    files = (x for pair in self._rooms.values() for x in pair)
    for writer in (*files, *([] if self._tracker is None else [self._tracker])):
      writer.flush()

  def close(self, how: str = "finished") -> None:
    """Closes all files, the others too where one fails."""
    with contextlib.ExitStack() as stack:
      if self._tracker is not None:
        stack.callback(self._tracker.close, how)
      for writer in (x for pair in self._rooms.values() for x in pair):
        stack.callback(writer.close)


def _opened(folder: pathlib.Path, step: int) -> tuple[Any, Any]:
  """Opens metrics.jsonl, without lines that come again, and a writer of events."""
  with quiet():  # TensorFlow, which clu imports, writes past Python
    from clu import metric_writers
  folder.mkdir(parents=True, exist_ok=True)
  path, kept = folder / "metrics.jsonl", []
  for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
    # A run that was killed wrote half a line, or lines of steps that it does again.
    if not line.endswith("\n") or json.loads(line)["step"] >= step:
      break
    kept.append(line)
  files.write_atomically(path, "".join(kept))
  return path.open("a"), metric_writers.SummaryWriter(str(folder))
