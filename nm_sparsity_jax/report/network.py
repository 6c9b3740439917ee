"""The shape of a run's network, from what it left in its folder.

    run.json   -> {"workload": {"shape": [...]}} \\
    config.gin -> the T5 that it binds           /  flops.Shape
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.runs import trained

if TYPE_CHECKING:
  from nm_sparsity_jax import flops


@dataclasses.dataclass(frozen=True)
class NotedShape:
  """A `flops.Shape` of operations that a run noted of its network."""

  noted: tuple[flops.Op, ...]

  def ops(self) -> tuple[flops.Op, ...]:
    """Returns the operations."""
    return self.noted


def shape_of(folder: pathlib.Path, gin: str) -> flops.Shape:
  """Returns the shape of a run's network.

  A run of any model family notes its operations in run.json, {"workload": {"shape": [...]}},
  each with the fields of a `flops.Op`. Without such a note it is the T5 that config.gin binds.

  Args:
    folder: the run's.
    gin: the text of its config.gin; '' where there is none.

  Raises:
    ValueError: neither tells the network.
  """
  from nm_sparsity_jax import flops

  noted = (trained.started(folder).get("workload") or {}).get("shape")
  if noted is None:
    return _configured_t5(gin)
  try:
    return NotedShape(tuple(flops.Op(**op) for op in noted))
  except TypeError as e:
    raise ValueError(f"run.json notes operations that cannot be read: {e}") from e


def _configured_t5(gin: str) -> flops.T5Shape:
  """Returns the shape of the T5 that the config binds."""
  from nm_sparsity_jax import flops
  from nm_sparsity_jax.models.t5 import T5Config

  settings = trained.parse_settings(gin)
  found = re.findall(r"^(?:\w+\.)*T5Config\.(preset|wmt)\.(\w+) = (.*)$", gin, re.MULTILINE)
  if len({how for how, *_ in found}) != 1:
    raise ValueError("config.gin binds no T5Config.preset or T5Config.wmt")
  values = {}
  for _, name, text in found:
    macro = text.removeprefix("%")
    values[name] = settings.get(macro) if macro != text else _literal(name, text)
  lengths = settings.get("TASK_FEATURE_LENGTHS") or {}
  if not {"inputs", "targets"} <= set(lengths):
    raise ValueError("config.gin has no TASK_FEATURE_LENGTHS of inputs and targets")
  try:
    config = getattr(T5Config, found[0][0])(**values)
  except TypeError as e:
    raise ValueError(f"config.gin binds a T5Config that cannot be made: {e}") from e
  return flops.T5Shape.of(config, lengths["inputs"], lengths["targets"])


def _literal(name: str, text: str) -> Any:
  try:
    return trained.plain(text)
  except ValueError:
    raise ValueError(f"{name} is not a plain value in config.gin: {text}") from None
