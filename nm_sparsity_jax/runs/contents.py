"""What a reader of one format returns: shapes and dtypes now, arrays when they are asked for.

`legacy`, `orbax` and `foreign` read; `checkpoint` makes one kind of checkpoint of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.text import first_line


@dataclasses.dataclass(frozen=True)
class Contents:
  """What one checkpoint holds, by T5X's keys.

  Attributes:
    format: 'Orbax', 'T5X', 'timm', 'Hugging Face' or 'packed'.
    leaves: key -> shape and dtype; None where the format does not tell one.
    array: key -> its values, read now.
    packed: of a packed file: reads the variables, with kernels as `NMPacked`; None of any other.
    rules: the text of the rules, where it is no array.
  """

  format: str
  leaves: Mapping[str, tuple[tuple[int, ...] | None, str | None]]
  array: Callable[[str], np.ndarray]
  packed: Callable[[], dict[str, Any]] | None = None
  rules: str | None = None


class Unreadable(ValueError):
  """An error that names its checkpoint already."""


@contextlib.contextmanager
def damage(name: str, what: str):
  """Names the checkpoint, and the part of it, where a reader fails with words of its own."""
  try:
    yield
  except (ModuleNotFoundError, Unreadable):
    raise
  except Exception as e:
    if isinstance(e, ValueError) and str(e).startswith(repr(name)[:-1]):  # or a file inside
      raise Unreadable(str(e)) from e
    raise Unreadable(f"{name!r} is damaged: {what} cannot be read ({first_line(e)})") from e
