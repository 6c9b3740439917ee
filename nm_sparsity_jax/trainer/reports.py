"""The line of a run on the terminal: step 120/400  loss 1.234  D 0.53  2:8  density 0.25 ..."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from nm_sparsity_jax.training.rules import Rules


def say(text: str) -> None:
  """Prints a line of progress, past a buffer that a kill would lose."""
  print(text, file=sys.stderr, flush=True)


def sparsity(rules: Rules, params: Any, step: int) -> str:
  """Returns D, patterns and density at a step, as the line of a run shows them.

  sparsity(rules, params, 100)  # 'D 0.25  1:4, 2:8  density 0.625'
  """
  # From the schedule, on the host: a look at the weights would hold the devices up.
  decay_of = functools.cache(lambda recipe: float(recipe.decay(step)))
  found = []
  for site in rules.assign(params).sites.values():
    begun = [pattern for start, pattern in site.recipe.levels(site.axis_size) if start <= step]
    if begun:
      found.append((math.prod(site.shape), decay_of(site.recipe), begun[-1]))
  if not found:
    return "dense"
  total = sum(size for size, *_ in found)
  decay = sum(size * decay for size, decay, _ in found) / total
  kept = sum(size * (1 if decay > 0 else pattern.density) for size, decay, pattern in found)
  patterns = ", ".join(sorted({str(pattern) for *_, pattern in found}))
  return f"D {decay:.3g}  {patterns}  density {kept / total:.3g}"
