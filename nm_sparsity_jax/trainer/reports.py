"""The line of a run on the terminal: step 120/400  loss 1.234  D 0.53  2:8  density 0.25 ..."""

from __future__ import annotations

import datetime
import functools
import math
import sys
import time
from typing import Any

from nm_sparsity_jax.training.rules import Rules


class Progress:
  """Prints a line now and then, with the throughput since the last one and the time that is left.

  Args:
    last: the step that the run ends at.
    unit: what is counted.
  """

  def __init__(self, last: int, unit: str = "tokens"):
    self._last, self._unit = last, unit
    self._since: float | None = None
    self._steps, self._counted = 0, 0.0

  def restart(self) -> None:
    """Starts the clock anew, as after an evaluation, whose time is none of the steps'."""
    self._since, self._steps, self._counted = time.monotonic(), 0, 0.0

  def count(self, size: float) -> None:
    """Notes a step and its batch's size. The first step compiles; the clock starts after it."""
    if self._since is None:
      self.restart()
    else:
      self._steps, self._counted = self._steps + 1, self._counted + float(size)

  def show(self, step: int, loss: float, sparsity: str) -> None:
    """Prints the line of a step; `sparsity` is what the function of that name returns."""
    words = [f"step {step:,}/{self._last:,}", f"loss {loss:.4f}", sparsity]
    if self._since is not None and self._steps:
      passed = time.monotonic() - self._since
      left = round(passed / self._steps * (self._last - step))
      words += [f"{self._counted / passed:,.0f} {self._unit}/s"]
      words += [f"{datetime.timedelta(seconds=left)} left"]
    self.restart()
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
