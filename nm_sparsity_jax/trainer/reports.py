"""What a run reports: TensorBoard, JSON lines, one line on the terminal.

step -> [Watch: finite? means] -> scalars -> MODEL_DIR/<room>/{events..., metrics.jsonl}
                -> step 120/400  loss 1.234  D 0.53  2:8  density 0.25  9,120 tokens/s  0:41 left
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.runs import files
from nm_sparsity_jax.trainer.run import Run
from nm_sparsity_jax.trainer.step import NORMS, patterns_at
from nm_sparsity_jax.trainer.workloads import Sums

_AHEAD = 2  # steps that are given to the devices before the result of one is looked at


def writer(folder: pathlib.Path, start: int, also: Sequence[Any] = ()) -> Any:
  """Returns a clu writer of event files and metrics.jsonl; drops lines of later steps.

  Args:
    folder: of the room.
    start: the step that the run goes on from.
    also: other writers that get the same.
  """
  with quiet():  # TensorFlow, which clu imports, writes past Python
    from nm_sparsity_jax.trainer import writers

  _cut(folder / "metrics.jsonl", start)
  return writers.joined(folder, also)


def _cut(path: pathlib.Path, start: int) -> None:
  """Drops the lines that a run without a good end wrote after the step that is resumed from."""
  if not path.is_file():
    return
  kept = []
  for line in path.read_text().splitlines(keepends=True):
    try:
      if json.loads(line)["step"] > start:
        break
    except ValueError:  # half a line
      break
    kept.append(line)
  files.write_atomically(path, "".join(kept))


class Curves:
  """Writes the scalars of a run, one room for each of its folders: train, training_eval/<task>.

  Args:
    folder: of the run.
    tracker: gets all of it too; see `tracking`. None = nobody.
  """

  def __init__(self, folder: pathlib.Path, tracker: Any = None):
    self._folder, self._tracker = folder, tracker
    self._writers: dict[str, Any] = {}

  def open(self, room: str, start: int) -> None:
    """Makes a room's files; drops lines of steps after `start` where the room is not open yet."""
    if room not in self._writers:
      also = [] if self._tracker is None else [self._tracker.writer(self._folder, room)]
      self._writers[room] = writer(self._folder / room, start, also)

  def write(self, room: str, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes the scalars of a step to a room that is open."""
    self._writers[room].write_scalars(step, scalars)

  def track(self, room: str, step: int, scalars: Mapping[str, Any]) -> None:
    """Hands the scalars of a step, which have files of their own, to the tracker alone."""
    if self._tracker is None:
      return
    if room not in self._writers:
      self._writers[room] = self._tracker.writer(self._folder, room)
    self.write(room, step, scalars)

  def flush(self, *rooms: str) -> None:
    """Writes out what is buffered for some rooms; for all, if none is named."""
    for room in rooms or self._writers:
      self._writers[room].flush()

  def close(self, how: str = "finished") -> None:
    """Closes all rooms, the others too where one fails.

    Args:
      how: the run ends, for a tracker that asks: 'finished', 'stopped' or 'failed'.
    """
    if hasattr(self._tracker, "ends"):
      self._tracker.ends(self._folder, how)
    with contextlib.ExitStack() as stack:
      for each in self._writers.values():
        stack.callback(each.close)


class NotFinite(Exception):
  """A number of a step is not finite.

  Attributes:
    what: the loss, or the gradient or update.
    step: the global step.
  """

  def __init__(self, what: str, step: int):
    super().__init__(what, step)
    self.what, self.step = what, step


class Watch:
  """Looks at the results of each step a few steps later, so that the devices never wait for it.

  Args:
    run: whose periods, workload and rules say what is written when.
    offset: the global step of the run's step 0.
    curves: gets the scalars, in the room 'train'.
    progress: gets a line at each report.
  """

  def __init__(self, run: Run, offset: int, curves: Curves, progress: Progress):
    self._run, self._offset = run, offset
    self.curves, self.progress = curves, progress
    self._pending: collections.deque[tuple[int, Sums, Any]] = collections.deque()
    self._sums: list[np.ndarray] = []  # since the last report

  def add(self, done: int, sums: Sums, sampled: Mapping[str, Any]) -> None:
    """Takes the results of a step, and looks at an older one.

    Args:
      done: the steps of this run, with this one.
      sums: of its batch, and norms.
      sampled: metrics; {} where the step is not sampled.
    """
    self._pending.append((done, sums, sampled))
    if len(self._pending) > _AHEAD:
      self._look()

  def catch_up(self) -> None:
    """Looks at all results that are left. Raises `NotFinite`, as `add` does."""
    while self._pending:
      self._look()

  def _look(self) -> None:
    done, sums, sampled = self._pending.popleft()
    values, at, run = np.asarray(sums.values), self._offset + done, self._run
    if not np.isfinite(values).all():
      raise NotFinite("loss" if not np.isfinite(values[0]) else "gradient or update", at)
    self._sums.append(values)
    self.progress.count(values[sums.names.index(run.unit)])
    written = {name: float(x) for name, x in jax.device_get(sampled).items()}
    if run.periods.reports(done, run.sparse_steps):
      written |= self._means(done, sums.names)
      kinds = patterns_at(run.model.rules, run.model.shapes, done)
      self.progress.show(at, written["loss"], kinds)
    if written:
      self.curves.write("train", at, written)

  def _means(self, done: int, names: Sequence[str]) -> dict[str, float]:
    """Returns the means over the steps since the last call."""
    sums: Any = np.sum(self._sums, 0, dtype=np.float64).tolist()
    found = dict(zip(names, sums, strict=True))
    norms = {name: found.pop(name) / len(self._sums) for name in NORMS}
    scalars = self._run.model.workload.scalars(found) | norms
    if self._run.learning_rate is not None:
      scalars["learning_rate"] = float(self._run.learning_rate(done - 1))
    self._sums = []
    return scalars


class Progress:
  """Shows one live line on a terminal, else a line now and then.

  Args:
    first: the step that this process starts at.
    last: the step that the run ends at.
    stream: where to; None = stderr.
    unit: what is counted.
  """

  def __init__(self, first: int, last: int, stream: Any = None, unit: str = "tokens"):
    self._stream = sys.stderr if stream is None else stream
    self._unit = unit
    self._first, self._last = first, last
    self._clock: float | None = None
    self._counted = 0.0
    self._live = None
    if self._stream.isatty():
      from rich.console import Console
      from rich.live import Live

      console = Console(file=self._stream)
      self._live = Live("", console=console, auto_refresh=False, redirect_stderr=False)
      self._live.start()

  def count(self, size: float) -> None:
    """Notes a step and its batch's size. The first step compiles; the clock starts after it."""
    if self._clock is None:
      self._clock = time.monotonic()
      self._first += 1
    else:
      self._counted += size

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves saving and evaluating out of the clock."""
    begin = time.monotonic()
    try:
      yield
    finally:
      if self._clock is not None:
        self._clock += time.monotonic() - begin

  def show(self, step: int, loss: float, kinds: Sequence[tuple[str, str, float, int]]) -> None:
    """Prints the line of a step; `kinds` are of `step.patterns_at`."""
    passed = time.monotonic() - (self._clock or 0.0) if self._clock else 0.0
    done = step - self._first
    words = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", *_sparsity(kinds)]
    if done > 0 and passed > 0:
      words.append(f"{self._counted / passed:,.0f} {self._unit}/s")
      words.append(f"{clock(passed / done * (self._last - step))} left")
    self._put("  ".join(words))

  def say(self, text: str) -> None:
    """Prints a line that stays."""
    if self._live is None:
      print(text, file=self._stream, flush=True)
    else:
      self._live.console.print(text, highlight=False, soft_wrap=True)

  def _put(self, text: str) -> None:
    if self._live is None:
      print(text, file=self._stream, flush=True)
    else:
      from rich.text import Text

      self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

  def close(self) -> None:
    """Leaves the last line where it is."""
    if self._live is not None:
      self._live.stop()


def _sparsity(kinds: Sequence[tuple[str, str, float, int]]) -> list[str]:
  """Returns D, pattern and density; by rule where rules differ."""
  kinds = [kind for kind in kinds if kind[1] != "dense"] or list(kinds)
  if not kinds:
    return []
  total = sum(size for *_, size in kinds)
  decay = sum(d * size for *_, d, size in kinds) / total
  patterns = dict.fromkeys((rule, pattern) for rule, pattern, *_ in kinds)
  one = len({pattern for _, pattern in patterns}) == 1
  names = [next(iter(patterns))[1]] if one else [f"{rule} {p}" for rule, p in patterns]
  density = sum(_density(p, d) * size for _, p, d, size in kinds) / total
  return [f"D {decay:.3g}", ", ".join(names), f"density {density:.3g}"]


def _density(pattern: str, decay: float) -> float:
  if pattern == "dense" or decay > 0:
    return 1.0
  n, m = map(int, pattern.split(":"))
  return n / m


def clock(seconds: float) -> str:
  """Returns a time such as 1:02:03, or 2:03."""
  seconds = round(seconds)
  hours, rest = divmod(seconds, 3600)
  return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
