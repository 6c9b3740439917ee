"""A checkpoint whose metadata were read: shapes and dtypes now, arrays when they are asked for.

Keys are those of T5X's train state: target/..., state/step, state/param_states/...,
flax_mutables/... Each reader of a format returns this.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.training import rules_text

NOTES = "notes.json"  # in a checkpoint of `checkpoint.write`: rules, and settings of the network
_SPARSE = "flax_mutables/nm_sparsity/"
_AVERAGE = "state/average/"  # before the key of what it is the average of; written by `trainer`


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array: its key in the checkpoint, shape and dtype."""

  key: str
  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(frozen=True)
class Stored:
  """One checkpoint.

  Attributes:
    path: its folder or file.
    format: 'Orbax', 'T5X', 'timm', 'Hugging Face' or 'packed'.
    leaves: key -> Leaf.
    step: T5X's global step, None if unknown.
    sparse_step: steps of the sparse run that wrote it, None for a dense one.
    rules: the text of that run's rules, None for a dense one.
    array: key -> its values, read now. ValueError where they cannot be.
    packed: of a packed file: reads the variables, with kernels as `NMPacked`; None of any other.
  """

  path: str
  format: str
  leaves: Mapping[str, Leaf]
  step: int | None
  sparse_step: int | None
  rules: str | None
  array: Callable[[str], np.ndarray] = dataclasses.field(repr=False, compare=False)
  packed: Callable[[], dict[str, Any]] | None = dataclasses.field(
    default=None, repr=False, compare=False
  )

  @classmethod
  def of(
    cls,
    path: str,
    format_: str,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    array: Callable[[str], np.ndarray],
    rules: str | None = None,
    packed: Callable[[], dict[str, Any]] | None = None,
  ) -> Stored:
    """Reads step and rules of a checkpoint; the other arguments are those of the class."""

    def named(key: str) -> np.ndarray:
      with damage(path, key):
        return array(key)

    number = lambda key: int(named(key)) if key in shapes else None
    if (key := f"{_SPARSE}rules") in shapes:
      rules = rules_text.unpack(named(key))
    leaves = {key: Leaf(key, *found) for key, found in shapes.items()}
    steps = number("state/step"), number(f"{_SPARSE}step")
    return cls(path, format_, leaves, *steps, rules, named, packed)

  @property
  def known_rules(self) -> str | None:
    """Returns the text of the run's rules, else of those that `finalize` was given, else None."""
    if self.rules is not None:
      return self.rules
    return files.read_json(folders.path_of(self.path) / NOTES, {}).get("rules")

  @property
  def in_place(self) -> bool:
    """Returns whether the run trained in place: its parameters are W~, and W is in its state."""
    return any(key.startswith("state/dense/") for key in self.leaves)

  def masks(self) -> dict[str, Any]:
    """Returns the stored masks, as `nms.init_state` makes them; `{}` where it keeps none."""
    kept = {key.removeprefix(_SPARSE): key for key in self.leaves if key.startswith(_SPARSE)}
    tree = {k: self.array(key) for k, key in kept.items() if k not in ("step", "start", "rules")}
    return nested({"step": np.int32(self.sparse_step or 0), **tree}) if tree else {}

  @property
  def average(self) -> bool:
    """Returns whether the run kept a moving average of what it trained."""
    return any(key.startswith(f"{_AVERAGE}target/") for key in self.leaves)

  def deployed(self, key: str) -> str:
    """Returns where the values lie that are scored and deployed: in the average, if there is one.

        stored.array(stored.deployed("target/head/kernel"))

    Args:
      key: of a parameter, of the workload's state, or any other, which is returned.
    """
    return _AVERAGE + key if _AVERAGE + key in self.leaves else key


@contextlib.contextmanager
def damage(path: str, what: str) -> Iterator[None]:
  """Names the checkpoint, and the part of it, where a library fails with words of its own."""
  try:
    yield
  except ModuleNotFoundError:
    raise
  except Exception as e:  # each library has errors of its own
    raise ValueError(f"{path!r} is damaged: {what} cannot be read ({first_line(e)})") from e
