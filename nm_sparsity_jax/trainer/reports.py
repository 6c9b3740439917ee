"""The line of a run on the terminal: step 120/400  loss 1.234  2:8 D 0.53 ..."""

from __future__ import annotations

import functools
import sys
from typing import Any

from nm_sparsity_jax.training.rules import Rules


def say(text: str) -> None:
  """Prints a line of progress, past a buffer that a kill would lose."""
  print(text, file=sys.stderr, flush=True)


def sparsity(rules: Rules, params: Any, step: int) -> str:
  """Returns the patterns at a step, each with its D, as the line of a run shows them.

  >>> import numpy as np
  >>> from nm_sparsity_jax import Phases, recipe
  >>> r = recipe("mdgf_linear", pattern="1:4", phases=Phases(total=100, dense=10), beta=0.01)
  >>> rules, params = Rules({"x/kernel": r}), {"x": {"kernel": np.zeros((8, 4))}}
  >>> [sparsity(rules, params, step) for step in (0, 85)]
  ['dense', '1:4 D 0.25']
  """
  # From the schedule, on the host: a look at the weights would hold the devices up.
  decay_of = functools.cache(lambda recipe: float(recipe.decay(step)))
  found = set()
  for site in rules.assign(params).sites.values():
    begun = [pattern for start, pattern in site.recipe.levels(site.axis_size) if start <= step]
    if begun:
      found.add(f"{begun[-1]} D {decay_of(site.recipe):.3g}")
  return ", ".join(sorted(found)) or "dense"
