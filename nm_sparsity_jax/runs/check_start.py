"""Whether a checkpoint to start from holds weights that its own network never saw.

    checkpoint -> its rules -> the smallest sparse kernel -> [told] -> a sentence, or ''

T5X stores dense weights, and so does a moving average; masks act on them on the fly. A run that
starts from them without `finalize` trains another network than the one that was scored.
"""

from __future__ import annotations

import math

import numpy as np

from nm_sparsity_jax.runs import checkpoint_rules
from nm_sparsity_jax.runs.checkpoint import Stored


def told(stored: Stored) -> str:
  """Returns what is wrong with a start from a sparse run that is not finalized; '' if nothing is.

      if said := unfinalized.told(stored):
        warnings.warn(f"INITIAL_CHECKPOINT_PATH: {said}")

  It reads one kernel. '' also where the rules or the array cannot be read: what reads
  the whole checkpoint says why.

  Args:
    stored: the checkpoint.
  """
  if not stored.rules or stored.in_place and not stored.average:
    return ""
  try:
    places = checkpoint_rules.assign(stored, checkpoint_rules.rules_for(stored, None)).places
    path, place = min(places.items(), key=lambda item: math.prod(item[1].shape))
    array = stored.array(stored.deployed(f"target/{path}"))
  except (ValueError, OSError):  # rules of another model, an unknown recipe, a damaged array
    return ""
  density = place.pattern.density
  if np.count_nonzero(array) <= (1 + density) / 2 * array.size:
    return ""
  return (
    f"{stored.path} is of a sparse run and not finalized, so it holds dense weights that its "
    f"network never saw ({path!r} is not {place.pattern}): start from what `nm-sparsity finalize` "
    "writes, or go on in its own MODEL_DIR."
  )
