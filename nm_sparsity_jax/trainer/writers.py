"""What takes the scalars of a run, room by room: its files, and a tracker of your own.

A room is 'train', 'training_eval/<task>' or 'inference_eval/<task>'.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from nm_sparsity_jax.runs import events, files

# (room, global step, name -> value); a gin file binds it: `train.Run.tracker = @my_module.Mine()`.
Tracker = Callable[[str, int, Mapping[str, float]], Any]


class Curves:
  """Writes metrics.jsonl and TensorBoard's events, and passes all on to a tracker.

  Args:
    folder: of the run.
    tracker: gets all of it too; None = nobody.
  """

  def __init__(self, folder: pathlib.Path, tracker: Tracker | None = None):
    self.folder, self._tracker = folder, tracker
    self._rooms: dict[str, tuple[Any, Any]] = {}

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Adds a line, and an event; seqio writes the files of 'inference_eval/' itself."""
    values = {name: float(x) for name, x in scalars.items()}
    if not room.startswith("inference_eval/"):
      if room not in self._rooms:
        self._rooms[room] = _opened(self.folder / room, step)
      lines, records = self._rooms[room]
      lines.write(json.dumps({"step": step, **values}) + "\n")
      records.write(step, values)
    if self._tracker is not None:
      self._tracker(room, step, values)

  def flush(self) -> None:
    """Flushes all files: a checkpoint of this step follows."""
    for file in itertools.chain(*self._rooms.values()):
      file.flush()

  def close(self) -> None:
    """Closes all files. What was flushed is written: of the rest, an error is not raised."""
    for file in itertools.chain(*self._rooms.values()):
      with contextlib.suppress(Exception):  # a full disk, which has stopped the run already
        file.close()


def _opened(folder: pathlib.Path, step: int) -> tuple[Any, Any]:
  """Opens metrics.jsonl, without lines that come again, and a writer of events."""
  path, kept = folder / "metrics.jsonl", []
  for line in path.read_text().splitlines(keepends=True) if path.is_file() else ():
    # A run that was killed wrote half a line, or lines of steps that it does again.
    if not line.endswith("\n") or json.loads(line)["step"] >= step:
      break
    kept.append(line)
  files.write_atomically(path, "".join(kept))
  return path.open("a"), events.Writer(folder)
