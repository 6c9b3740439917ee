"""What a run trained: its rules and the shape of its network, from what it left in its folder.

    newest checkpoint -> the rules that it holds      \\
    config.gin        -> rules by its macros          /  Rules
    run.json          -> {"workload": {"ops": [...]}} \\
    config.gin        -> the T5 that it binds         /  flops.Shape
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.runs import folders, results

if TYPE_CHECKING:
  from nm_sparsity_jax import flops
  from nm_sparsity_jax.rules import Rules


def setting(macros: Mapping[str, str], name: str) -> Any:
  """Returns the value of a macro, or None if there is no such macro.

  Args:
    macros: of `results.macros`: name -> value as text.
    name: which of them.

  Raises:
    ValueError: it is a reference, and no plain value.
  """
  return _literal(name, macros.get(name, "None"))


def _literal(name: str, text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    raise ValueError(f"{name} is no plain value in config.gin: {text}") from None


# --- rules --------------------------------------------------------------------------------------


def rules_of(folder: pathlib.Path, gin: str) -> Rules:
  """Returns the rules of a run: those in its newest checkpoint, else those of its config.gin.

  Args:
    folder: the run's.
    gin: the text of its config.gin; '' where there is none.

  Raises:
    ValueError: neither tells the rules, or config.gin says what is refused.
  """
  return _stored_rules(folder) or _configured_rules(gin)


def _stored_rules(folder: pathlib.Path) -> Rules | None:
  """Returns the rules in the newest checkpoint; None where there is none that can be read."""
  from nm_sparsity_jax import configure

  newest = folders.latest(folder)
  if newest is None:
    return None
  try:
    from nm_sparsity_jax.runs import checkpoint

    text = checkpoint.read(newest).rules
    return None if text is None else configure.parse(text)
  except (ValueError, OSError, ImportError):  # such as a folder that was copied in part
    return None


def _configured_rules(gin: str) -> Rules:
  """Returns the rules that the macros of gin_configs/sparsity.gin say."""
  from nm_sparsity_jax import configure

  macros = results.macros(gin)
  if not gin:
    raise ValueError("there is no config.gin")
  if "RECIPE" not in macros:
    raise ValueError("config.gin has no macro RECIPE")
  names = {"places": "SPARSITY_RULES", "fields": "RECIPE_FIELDS"}
  given = ("recipe", "pattern", "sparse_steps", "beta", "gradient", *names)
  settings = {name: setting(macros, names.get(name, name.upper())) for name in given}
  for name in ("dense_steps", "finetune_steps"):
    settings[name] = setting(macros, name.upper()) or 0
  if indivisible := setting(macros, "INDIVISIBLE"):
    settings["indivisible"] = indivisible
  return configure.rules(**settings)


# --- shape --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NotedShape:
  """A `flops.Shape` of operations that a run noted of its network."""

  noted: tuple[flops.Op, ...]

  def ops(self) -> tuple[flops.Op, ...]:
    """Returns the operations."""
    return self.noted


def shape_of(folder: pathlib.Path, gin: str) -> flops.Shape:
  """Returns the shape of a run's network.

  A run of any model family notes its operations in run.json, {"workload": {"ops": [...]}}, each
  with the fields of a `flops.Op`. Without such a note it is the T5 that config.gin binds.

  Args:
    folder: the run's.
    gin: the text of its config.gin; '' where there is none.

  Raises:
    ValueError: neither tells the network.
  """
  from nm_sparsity_jax import flops

  noted = (results.started(folder).get("workload") or {}).get("ops")
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

  macros = results.macros(gin)
  found = re.findall(r"^(?:\w+\.)*T5Config\.(preset|wmt)\.(\w+) = (.*)$", gin, re.MULTILINE)
  if len({how for how, *_ in found}) != 1:
    raise ValueError("config.gin binds no T5Config.preset or T5Config.wmt")
  values = {}
  for _, name, text in found:
    macro = text.removeprefix("%")
    values[name] = setting(macros, macro) if macro != text else _literal(name, text)
  lengths = setting(macros, "TASK_FEATURE_LENGTHS") or {}
  if not {"inputs", "targets"} <= set(lengths):
    raise ValueError("config.gin has no TASK_FEATURE_LENGTHS of inputs and targets")
  try:
    config = getattr(T5Config, found[0][0])(**values)
  except TypeError as e:
    raise ValueError(f"config.gin binds a T5Config that cannot be made: {e}") from e
  return flops.T5Shape.of(config, lengths["inputs"], lengths["targets"])
