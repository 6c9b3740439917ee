"""Errors that know which setting they are about, and warnings at the line of the reader's code.

    a wrong setting -> [SettingError: field, template, values] -> a text in the reader's own names

The core says `total`, a gin file says `SPARSE_STEPS`. An error that keeps its sentence and the
names in it apart can be told in either, so nobody edits English afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any


class SettingError(ValueError):
  """A setting is wrong; `str` says so with the names of the core.

  >>> e = SettingError("beta", "f({beta=}{given!r}): {beta} must be positive.", given=-1)
  >>> str(e)
  'f(beta=-1): beta must be positive.'
  >>> e.told({"beta": "BETA"})
  'f(BETA=-1): BETA must be positive.'

  Attributes:
    field: the setting that is wrong, by its name in the core.
    template: the sentence, for `str.format`. A name in braces is a value or, if there is none, a
      setting; with "=" behind it, as in `{beta=}`, it is a setting that gets a value.
    values: what stands in the sentence beside settings. One with a method `told`, such as `Phases`,
      mentions settings itself.
  """

  def __init__(self, field: str, template: str, **values: Any):
    super().__init__(field, template)
    self.field, self.template, self.values = field, template, values

  def told(self, names: Mapping[str, str]) -> str:
    """Returns the sentence with `names` for settings: name in the core -> the reader's name."""
    values = {
      key: value.told(names) if hasattr(value, "told") else value
      for key, value in self.values.items()
    }
    return self.template.format_map(_Names({**values, **names}))

  def __str__(self) -> str:
    return self.told({})


_MOST_SEED = (1 << 31) - 1  # jax keeps 32 bits, TensorFlow 64, and numpy takes nothing below 0


def check_seed(name: str, seed: Any) -> None:
  """Refuses a seed that another library would wrap, or refuse in words of its own.

  >>> check_seed("RANDOM_SEED", 3)

  Args:
    name: of the setting.
    seed: its value.
  """
  if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
    raise ValueError(f"{name}={seed!r}: give a whole number, such as 0.")
  if not 0 <= int(seed) <= _MOST_SEED:
    raise ValueError(f"{name}={seed!r}: give a whole number from 0 to {_MOST_SEED:,}.")


class UnknownRecipe(ValueError):
  """A checkpoint names a recipe that is not registered, since its module is not imported."""


def warn(text: str, everywhere: bool = True) -> None:
  """Gives a `UserWarning` once, at the line of the caller's code that led here.

  Frames of this package, jax, flax and optax are passed over: the line is one the caller wrote.

  Args:
    text: one sentence with the value, the rule and the fix.
    everywhere: warn once for each such line; False warns once in this process.
  """
  frame, level = sys._getframe(1), 2
  while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED:
    frame, level = frame.f_back, level + 1
  key = (text, frame.f_code.co_filename, frame.f_lineno) if everywhere else (text,)
  if key not in _told:
    warnings.warn(text, UserWarning, stacklevel=level)
    _told.add(key)  # not before: a filter may have made the warning an error


def forget_warnings() -> None:
  """Lets `warn` say everything once more, as in a new process."""
  _told.clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences warnings of this package and what imports write, while it is entered.

  TensorFlow writes to the file descriptor of stderr, past Python, when it is imported. So this
  sends the descriptor itself to nowhere.
  """
  loggers = [logging.getLogger(name) for name in ("nm_sparsity_jax", "absl")]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.ERROR)
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
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)


_PASSED = ("nm_sparsity_jax", "jax", "flax", "optax")
_told: set[tuple[Any, ...]] = set()


class _Names(dict):
  """Names of settings; one without another name keeps its own, before "=" too."""

  def __missing__(self, key: str) -> str:
    return f"{self[key[:-1]]}=" if key.endswith("=") else key
