"""What a run tells while it goes on: TensorBoard, JSON lines, one line on the terminal.

step -> scalars -> MODEL_DIR/<room>/{events..., metrics.jsonl}
                -> step 120/400  loss 1.234  D 0.53  2:8  density 0.25  9,120 tokens/s  0:41 left
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def writer(folder: pathlib.Path, start: int) -> Any:
  """A clu writer of event files and metrics.jsonl; lines of later steps, of a killed run, go."""
  from clu import metric_writers

  class JsonLines(metric_writers.MetricWriter):
    """One line a call: {"step": ..., name: value, ...}."""

    def __init__(self, path: pathlib.Path):
      path.parent.mkdir(parents=True, exist_ok=True)
      _cut(path, start)
      self._file = path.open("a")

    def write_scalars(self, step: int, scalars: Mapping[str, Any]):
      values = {name: float(x) for name, x in scalars.items()}
      self._file.write(json.dumps({"step": step, **values}) + "\n")

    def write_summaries(self, *args, **kwargs): ...
    def write_images(self, *args, **kwargs): ...
    def write_videos(self, *args, **kwargs): ...
    def write_audios(self, *args, **kwargs): ...
    def write_texts(self, *args, **kwargs): ...
    def write_histograms(self, *args, **kwargs): ...
    def write_hparams(self, *args, **kwargs): ...

    def flush(self):
      self._file.flush()

    def close(self):
      self._file.close()

  lines = JsonLines(folder / "metrics.jsonl")
  return metric_writers.MultiWriter([lines, metric_writers.SummaryWriter(str(folder))])


def _cut(path: pathlib.Path, start: int) -> None:
  """Drops what a run that did not end well wrote beyond the step that is gone on from."""
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
  path.write_text("".join(kept))


class Progress:
  """One live line on a terminal, else a line now and then.

  Args:
    first: the step that this process starts at.
    last: the step that the run ends at.
    stream: where to.
  """

  def __init__(self, first: int, last: int, stream: Any = None):
    self._stream = sys.stderr if stream is None else stream
    self._first, self._last = first, last
    self._clock: float | None = None
    self._tokens = 0.0
    self._live = None
    if self._stream.isatty():
      from rich.console import Console
      from rich.live import Live

      console = Console(file=self._stream)
      self._live = Live("", console=console, auto_refresh=False, redirect_stderr=False)
      self._live.start()

  def count(self, tokens: float) -> None:
    """One more step is done. The first one, which compiles, starts the clock."""
    if self._clock is None:
      self._clock = time.monotonic()
      self._first += 1
    else:
      self._tokens += tokens

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Time that is no step's: to save and to evaluate."""
    begin = time.monotonic()
    try:
      yield
    finally:
      if self._clock is not None:
        self._clock += time.monotonic() - begin

  def show(self, step: int, loss: float, kinds: Sequence[tuple[str, str, float, int]]) -> None:
    """The line of a step; `kinds` are of `step.patterns_at`."""
    passed = time.monotonic() - (self._clock or 0.0) if self._clock else 0.0
    done = step - self._first
    words = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", *_sparsity(kinds)]
    if done > 0 and passed > 0:
      words.append(f"{self._tokens / passed:,.0f} tokens/s")
      words.append(f"{clock(passed / done * (self._last - step))} left")
    self._put("  ".join(words))

  def say(self, text: str) -> None:
    """A line that stays."""
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
  """D, pattern and density; by rule where rules differ."""
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
  """1:02:03, or 2:03."""
  seconds = round(seconds)
  hours, rest = divmod(seconds, 3600)
  return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
