"""Checks that several rooms share, and silence while others import."""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SEED = (1 << 31) - 1  # jax keeps 32 bits, TensorFlow 64, and numpy takes nothing below 0


def check_seed(name: str, seed: Any) -> None:
  """Refuses a seed that another library would wrap, or refuse in words of its own.

  >>> check_seed("RANDOM_SEED", 3)

  Args:
    name: of the setting.
    seed: its value.
  """
  is_whole = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
  if not is_whole or not 0 <= int(seed) <= _MOST_SEED:
    raise ValueError(f"{name}={seed!r}: give a whole number from 0 to {_MOST_SEED:,}.")


def choose(known: Mapping[str, Any], setting: str, name: str) -> Any:
  """Returns what has a name; an error lists the names.

  >>> choose({"beam": 1}, "DECODER", "beam")
  1
  """
  if name not in known:
    raise ValueError(f"{setting}={name!r}: choose one of {', '.join(known)}.")
  return known[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences warnings of loggers, and what imports write, while it is entered.

  TensorFlow writes to the file descriptor of stderr, past Python, when it is imported. So this
  sends the descriptor itself to nowhere.
  """
  # For all loggers at once: to ask for absl's would make a plain one before absl makes its own.
  level = logging.root.manager.disable
  logging.disable(logging.WARNING)
  sys.stderr.flush()
  saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 2)
  try:
    yield
  finally:
    sys.stderr.flush()
    os.dup2(saved, 2)
    os.close(saved)
    os.close(nowhere)
    logging.disable(level)
