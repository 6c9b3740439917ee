"""The line of a run on the terminal: step 120/400  loss 1.234  D 0.53  2:8  density 0.25 ..."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from nm_sparsity_jax.training.rules import Rules


class Progress:
  """Prints a line now and then, with the throughput and the time that is left.

  Args:
    first: the step that this process starts at.
    last: the step that the run ends at.
    unit: what is counted.
  """

  def __init__(self, first: int, last: int, unit: str = "tokens"):
    self._first, self._last, self._unit = first, last, unit
    self._clock: float | None = None
    self._counted = 0.0

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
    yield
    if self._clock is not None:  # else the first step is still to come
      self._clock += time.monotonic() - begin

  def show(self, step: int, loss: float, sparsity: str) -> None:
    """Prints the line of a step; `sparsity` is what the function of that name returns."""
    words = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", sparsity]
    passed = time.monotonic() - self._clock if self._clock else 0.0
    done = step - self._first
    if done > 0 and passed > 0:
      words.append(f"{self._counted / passed:,.0f} {self._unit}/s")
      words.append(f"{clock(passed / done * (self._last - step))} left")
    say("  ".join(words))


def say(text: str) -> None:
  """Prints a line of progress, past a buffer that a kill would lose."""
  print(text, file=sys.stderr, flush=True)


def sparsity(rules: Rules, params: Any, step: int) -> str:
  """Returns D, patterns and density at a step, as the line of a run shows them.

      sparsity(rules, params, 100)  # 'D 0.25  ff 2:8, qkv 1:4  density 0.625'

  Args:
    rules: of the run.
    params: its parameters, or their shapes.
    step: updates of the sparse run.
  """
  # From the schedule, on the host: a look at the weights would hold the devices up.
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
