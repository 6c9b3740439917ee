"""What takes the scalars of a run, room by room: its files, and a tracker of your own.

    scalars of a step -> Files   -> MODEL_DIR/<room>/metrics.jsonl, event files of TensorBoard
                      -> tracker -> a service, such as `tracking.Mlflow`

A room is 'train', 'training_eval/<task>' or 'inference_eval/<task>'.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.runs import files


class Writer:
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
    """Begins with a run, or goes on with it, before the first call of `write`.

    Args:
      folder: of the run.
    """
    self.folder = folder

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Takes the scalars of a step.

    Args:
      room: such as 'train'.
      step: the global one.
      scalars: name -> value.
    """
    raise NotImplementedError

  def flush(self) -> None:
    """Writes out what is buffered: a checkpoint of this step follows."""

  def close(self, how: str) -> None:
    """Ends.

    Args:
      how: the process of the run ends: 'finished'; 'stopped', to be resumed; 'failed'.
    """


class Files(Writer):
  """Writes metrics.jsonl and TensorBoard's event files, but for what seqio writes itself."""

  def __init__(self):
    self._rooms: dict[str, tuple[Any, Any]] = {}

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Adds a line, and an event."""
    if room.startswith("inference_eval/"):
      return
    if room not in self._rooms:
      self._rooms[room] = self._opened(self.folder / room, step)
    lines, events = self._rooms[room]
    lines.write(json.dumps({"step": step, **scalars}) + "\n")
    events.write_scalars(step, scalars)

  def _opened(self, folder: pathlib.Path, step: int) -> tuple[Any, Any]:
    with quiet():  # TensorFlow, which clu imports, writes past Python
      from clu import metric_writers
    folder.mkdir(parents=True, exist_ok=True)
    _cut(folder / "metrics.jsonl", step)
    return (folder / "metrics.jsonl").open("a"), metric_writers.SummaryWriter(str(folder))

  def flush(self) -> None:
    """Flushes all files."""
    for lines, events in self._rooms.values():
      lines.flush()
      events.flush()

  def close(self, how: str) -> None:
    """Closes all files, the others too where one fails."""
    del how
    with contextlib.ExitStack() as stack:
      for lines, events in self._rooms.values():
        stack.callback(lines.close)
        stack.callback(events.close)


def _cut(path: pathlib.Path, step: int) -> None:
  """Drops the lines from a step on: a run that was killed wrote them, and they come again."""
  kept = []
  for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
    try:
      if json.loads(line)["step"] >= step:
        break
    except ValueError:  # half a line
      break
    kept.append(line)
  files.write_atomically(path, "".join(kept))


class Curves(Writer):
  """Writes to the files of a run, and to its tracker.

  Args:
    folder: of the run.
    tracker: gets all of it too; None = nobody.
  """

  def __init__(self, folder: pathlib.Path, tracker: Writer | None = None):
    self._writers = [Files(), *([] if tracker is None else [tracker])]
    for writer in self._writers:
      writer.open(folder)

  def write(self, room: str, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes the scalars of a step."""
    values = {name: float(x) for name, x in scalars.items()}
    for writer in self._writers:
      writer.write(room, step, values)

  def flush(self) -> None:
    """Flushes all writers."""
    for writer in self._writers:
      writer.flush()

  def close(self, how: str = "finished") -> None:
    """Closes all writers, the others too where one fails."""
    with contextlib.ExitStack() as stack:
      for writer in self._writers:
        stack.callback(writer.close, how)
