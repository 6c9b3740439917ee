"""Whether a checkpoint to start from holds weights that its own network never saw.

    checkpoint -> its rules -> the smallest sparse kernel, one piece -> [told] -> a sentence, or ''

T5X stores dense weights, and so does a moving average; masks act on them on the fly. A run that
starts from them without `finalize` trains another network than the one that was scored.
"""

from __future__ import annotations

import math

import numpy as np

from nm_sparsity_jax.runs import given
from nm_sparsity_jax.runs.checkpoint import Stored


def told(stored: Stored) -> str:
  """Returns what is wrong with a start from a sparse run that is not finalized; '' if nothing is.

      if said := unfinalized.told(stored):
        warn(f"INITIAL_CHECKPOINT_PATH: {said}")

  It reads one piece of one kernel. '' also where the rules or the array cannot be read: what reads
  the whole checkpoint says why.

  Args:
    stored: the checkpoint.
  """
  if not stored.rules or stored.in_place and not stored.average:
    return ""
  try:
    places = given.assign(stored, given.rules_for(stored, None)).places
    path, place = min(places.items(), key=lambda item: math.prod(item[1].shape))
    _, piece = next(stored.pieces(stored.deployed(f"target/{path}"), 0))
  except (ValueError, OSError):  # rules of another model, an unknown recipe, a damaged array
    return ""
  density = place.pattern.density
  used = np.count_nonzero(piece) / max(piece.size, 1)
  if used <= (1 + density) / 2:  # a piece may cut a group, so it is not held to the pattern itself
    return ""
  return (
    f"{stored.path} is of a sparse run and not finalized, so it holds dense weights that its "
    f"network never saw ({path!r} is not {place.pattern}): start from what `nm-sparsity finalize` "
    "writes, or go on in its own MODEL_DIR."
  )
