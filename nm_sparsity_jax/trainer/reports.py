"""What a run reports while it trains: are its numbers finite, means, one line on the terminal.

step -> [Watch: finite? means] -> scalars -> curves
                -> step 120/400  loss 1.234  D 0.53  2:8  density 0.25  9,120 tokens/s  0:41 left
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.trainer.run import Run
from nm_sparsity_jax.trainer.step import NORMS
from nm_sparsity_jax.trainer.writers import Curves
from nm_sparsity_jax.training.rules import Rules

_AHEAD = 2  # steps that are given to the devices before the result of one is looked at


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
    self._workload = run.model.workload
    self.curves, self.progress = curves, progress
    self._pending: collections.deque[tuple[int, Any, Any]] = collections.deque()
    self._steps = 0  # since the last report
    self._sums: dict[str, float] = {}  # of these steps

  def add(self, done: int, sums: Mapping[str, Any], sampled: Mapping[str, Any]) -> None:
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
    sums, written = jax.device_get((sums, dict(sampled)))
    at, run = self._offset + done, self._run
    if wrong := [name for name, x in sums.items() if not np.isfinite(x)]:
      raise NotFinite("gradient or update" if set(wrong) <= set(NORMS) else "loss", at)
    self._steps += 1
    self._sums = {name: self._sums.get(name, 0.0) + float(x) for name, x in sums.items()}
    self.progress.count(sums[self._workload.weight])
    if run.periods.reports(done, run.sparse_steps):
      written |= self._means(done)
      self.progress.show(at, written["loss"], sparsity(run.model.rules, run.model.shapes, done))
    if written:
      self.curves.write("train", at, written)

  def _means(self, done: int) -> dict[str, float]:
    """Returns the means over the steps since the last call."""
    norms = {name: self._sums.pop(name) / self._steps for name in NORMS}
    scalars = self._workload.scalars(self._sums) | norms
    if self._run.learning_rate is not None:
      scalars["learning_rate"] = float(self._run.learning_rate(done - 1))
    self._steps, self._sums = 0, {}
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
    self._first, self._last, self._unit = first, last, unit
    self._clock: float | None = None
    self._counted = 0.0
    self._is_live = self._stream.isatty()

  def count(self, size: float) -> None:
    """Notes a step and its batch's size. The first step compiles; the clock starts after it."""
    if self._clock is None:
      self._clock = time.monotonic()
      self._first += 1
    else:
      self._counted += float(size)

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves saving and evaluating out of the clock."""
    begin = time.monotonic()
    try:
      yield
    finally:
      if self._clock is not None:
        self._clock += time.monotonic() - begin

  def show(self, step: int, loss: float, sparsity: str) -> None:
    """Prints the line of a step; `sparsity` is what the function of that name returns."""
    words = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", sparsity]
    passed = time.monotonic() - self._clock if self._clock else 0.0
    done = step - self._first
    if done > 0 and passed > 0:
      words.append(f"{self._counted / passed:,.0f} {self._unit}/s")
      words.append(f"{clock(passed / done * (self._last - step))} left")
    text = "  ".join(words)
    if self._is_live:  # over the line before
      text = text[: shutil.get_terminal_size().columns - 1]
    print(text, end="" if self._is_live else "\n", file=self._begun(), flush=True)

  def say(self, text: str) -> None:
    """Prints a line that stays."""
    print(text, file=self._begun(), flush=True)

  def _begun(self) -> Any:
    """Returns the stream, at the beginning of an empty line."""
    if self._is_live:
      self._stream.write("\r\x1b[K")
    return self._stream

  def close(self) -> None:
    """Leaves the last line where it is."""
    if self._is_live:
      print(file=self._stream)


def sparsity(rules: Rules, params: Any, step: int) -> str:
  """Returns D, patterns and density at a step, as the line of a run shows them.

      sparsity(rules, params, 100)  # 'D 0.25  ff 2:8, qkv 1:4  density 0.625'

  Args:
    rules: of the run.
    params: its parameters, or their shapes.
    step: updates of the sparse run.
  """
  decay_of = functools.cache(lambda recipe: float(recipe.decay(step)))
  patterns, total, decays, kept = {}, 0, 0.0, 0.0
  for place in rules.assign(params).places.values():
    levels = [pattern for start, pattern in place.recipe.levels(place.axis_size) if start <= step]
    if levels:
      size, decay = math.prod(place.shape), decay_of(place.recipe)
      patterns[place.key] = str(levels[-1])
      total, decays = total + size, decays + decay * size
      kept += size * (1.0 if decay > 0 else levels[-1].density)
  if not total:
    return "dense"
  names = set(patterns.values())
  if len(names) > 1:
    names = {f"{rule} {pattern}" for rule, pattern in patterns.items()}
  return f"D {decays / total:.3g}  {', '.join(sorted(names))}  density {kept / total:.3g}"


def clock(seconds: float) -> str:
  """Returns a time such as 1:02:03, or 2:03."""
  seconds = round(seconds)
  hours, rest = divmod(seconds, 3600)
  return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
