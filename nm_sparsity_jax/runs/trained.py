"""What a run trained, from what it left in its folder.

    config.gin        -> [read_settings] -> Settings: values of gin macros
    newest checkpoint -> [rules_of]      -> Rules, those of the macros where no checkpoint tells
    run.json          -> [started]       -> where it began, what it ran with

A checkpoint of a sparse run holds the text of its rules, so it is believed first: the macros may be
overridden by bindings that no macro shows.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.errors import UnknownRecipe
from nm_sparsity_jax.runs import files, folders

if TYPE_CHECKING:
  from nm_sparsity_jax.rules import Rules


def config_of(folder: str | os.PathLike) -> pathlib.Path | None:
  """Returns the file that holds a run's gin configuration; None where there is none."""
  found = (pathlib.Path(folder) / name for name in ("config.gin", "operative_config.gin"))
  return next((file for file in found if file.is_file()), None)


def macros(text: str) -> dict[str, str]:
  """Returns the macros of a gin configuration: name -> value as text, on one line.

  >>> macros("SPARSE_STEPS = 100\\nSPARSITY_RULES = \\\\\\n    {'ff': '1:8'}\\n")
  {'SPARSE_STEPS': '100', 'SPARSITY_RULES': "{'ff': '1:8'}"}
  """
  # gin breaks a long value into lines, all but the first indented.
  found = re.findall(r"^([A-Z][A-Z0-9_]*) = (.*(?:\n[ \t]+.*)*)", text, re.MULTILINE)
  return {name: " ".join(value.replace("\\\n", "\n").split()) for name, value in found}


@dataclasses.dataclass(frozen=True)
class Settings:
  """The macros of a run's gin configuration.

  Attributes:
    text: the configuration; '' where there is none.
    values: macro -> value.
    references: macro -> text of a value that is no plain one, such as '@sr_ste()'.
  """

  text: str
  values: Mapping[str, Any]
  references: Mapping[str, str]

  def get(self, name: str, default: Any = None) -> Any:
    """Returns the value of a macro, the default where it is not set.

    Raises:
      ValueError: its value is a reference.
    """
    if name in self.references:
      raise ValueError(f"{name} is no plain value in config.gin: {self.references[name]}")
    return self.values.get(name, default)


def read_settings(folder: str | os.PathLike) -> Settings:
  """Reads the macros that a run was configured with.

  Args:
    folder: the run's.
  """
  file = config_of(folder)
  return parse_settings(file.read_text() if file else "")


def parse_settings(text: str) -> Settings:
  """Parses the macros of a gin configuration.

  >>> settings = parse_settings("RECIPE = 'sr_ste'\\nRULES = @configure.rules()\\n")
  >>> settings.get("RECIPE"), settings.get("PATTERN"), dict(settings.references)
  ('sr_ste', None, {'RULES': '@configure.rules()'})

  Args:
    text: the configuration.
  """
  values, references = {}, {}
  for name, value in macros(text).items():
    try:
      values[name] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      references[name] = value
  return Settings(text, values, references)


def started(folder: str | os.PathLike) -> Mapping[str, Any]:
  """Returns what the local runner noted when it started: `start`, `processes`; else empty."""
  return files.read_json(pathlib.Path(folder) / "run.json", {})


def rules_of(folder: str | os.PathLike, gin: str | None = None) -> Rules:
  """Returns the rules of a run: those in its newest checkpoint, else those of its macros.

  Args:
    folder: the run's.
    gin: the text of its config.gin, '' for none; None reads it from the folder.

  Raises:
    ValueError: neither tells them, or the macros say what is refused.
  """
  settings = read_settings(folder) if gin is None else parse_settings(gin)
  return _stored(folder) or _configured(settings)


def _stored(folder: str | os.PathLike) -> Rules | None:
  """Returns the rules in the newest checkpoint; None where it has none or cannot be read."""
  newest = folders.latest(folder)
  if newest is None:
    return None
  from nm_sparsity_jax import rules_text
  from nm_sparsity_jax.runs import checkpoint

  try:
    text = checkpoint.read(newest).rules
    return None if text is None else rules_text.parse(text)
  except UnknownRecipe:  # the macros know no more of it
    raise
  except (ValueError, OSError, ImportError):  # copied in part, say, or Orbax is not installed
    return None


def _configured(settings: Settings) -> Rules:
  """Returns the rules that the macros of gin_configs/sparsity.gin say."""
  from nm_sparsity_jax import configure

  if not settings.text:
    raise ValueError("there is no config.gin")
  if "RECIPE" not in {*settings.values, *settings.references}:
    raise ValueError("config.gin has no macro RECIPE")
  return configure.rules(
    recipe=settings.get("RECIPE"),
    pattern=settings.get("PATTERN"),
    sparse_steps=settings.get("SPARSE_STEPS"),
    beta=settings.get("BETA"),
    gradient=settings.get("GRADIENT"),
    places=settings.get("SPARSITY_RULES"),
    fields=settings.get("RECIPE_FIELDS"),
    dense_steps=settings.get("DENSE_STEPS") or 0,
    finetune_steps=settings.get("FINETUNE_STEPS") or 0,
    indivisible=settings.get("INDIVISIBLE") or "error",
  )
