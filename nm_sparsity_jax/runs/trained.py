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
import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.core.errors import UnknownRecipe
from nm_sparsity_jax.runs import files, folders

if TYPE_CHECKING:
  from nm_sparsity_jax.runs.checkpoint import Stored
  from nm_sparsity_jax.training.rules import Rules


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
    references: macro -> text of a value that is not plain, such as '@sr_ste()'.
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
      raise ValueError(f"{name} is not a plain value in config.gin: {self.references[name]}")
    return self.values.get(name, default)


def read_settings(folder: str | os.PathLike) -> Settings:
  """Reads the macros that a run was configured with.

  Args:
    folder: the run's.
  """
  return parse_settings(gin_text(folder))


def gin_text(folder: str | os.PathLike) -> str:
  """Returns the gin configuration of a run; '' where there is none."""
  file = config_of(folder)
  return files.read_text(file) if file else ""


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
      values[name] = plain(value)
    except ValueError:
      references[name] = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
  if of_row := [name for name, value in references.items() if "paper.setting()" in value]:
    row = _settings_of_row(values.get("TABLE"), values.get("ROW"))
    values |= {name: row[name] for name in of_row if name in row}
    references = {name: value for name, value in references.items() if name not in row}
  return Settings(text, values, references)


def _settings_of_row(table: Any, row: Any) -> Mapping[str, Any]:
  """Returns the macros that a row of the paper sets; none where there is no such row."""
  from nm_sparsity_jax.runs import paper

  try:
    return paper.find(table, row).settings()
  except (ValueError, TypeError):
    return {}


_SHOWN = 200  # characters of a value that messages show


def plain(text: str) -> Any:
  """Returns the value of a literal whose whole numbers have at most 64 bits.

  >>> plain("{'ff': '1:8'}")
  {'ff': '1:8'}

  Raises:
    ValueError: it is no literal, or has a longer number.
  """
  try:
    tree = ast.parse(text.strip(), mode="eval")
    found = ast.literal_eval(tree)
  except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as e:
    raise ValueError(f"no plain value: {text[:_SHOWN]}") from e
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >> 63:
      raise ValueError(f"a whole number of more than 64 bits: {text[:_SHOWN]}")
  return found


def started(folder: str | os.PathLike) -> Mapping[str, Any]:
  """Returns what the local runner noted when it started: `start`, `processes`; else empty."""
  file = pathlib.Path(folder) / "run.json"
  found = files.read_json(file, {})
  with files.named(file):
    if not isinstance(found.get("start"), int | None):
      raise ValueError(f"its start is {found['start']!r}, no step")
    for process in found.get("processes") or []:
      if type(process["from"]) is not int or not isinstance(process["environment"], dict):
        raise ValueError(f"a process is {process!r}")
  return found


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


def stored_rules(
  path: str, pretrained_steps: int | None = None, why: str = "", **given: Any
) -> Rules:
  """Returns the rules that a checkpoint holds; refuses a setting that says something else.

  A checkpoint that cannot be read, or that is dense, is no error where the settings tell all: what
  opens it refuses it.

  Args:
    path: the checkpoint, or a run's folder, whose newest one counts.
    pretrained_steps: the step at which its run began, to be checked; None = any.
    why: how to evaluate a dense checkpoint.
    **given: arguments of `configure.rules`; None where a setting is not given.

  Raises:
    ValueError: a setting does not agree, or nothing tells the rules.
  """
  from nm_sparsity_jax.runs import checkpoint
  from nm_sparsity_jax.runs.contents import Unreadable
  from nm_sparsity_jax.training import configure, rules_text

  try:
    stored = checkpoint.read(checkpoint.find(path))
    reason = f"{path} is dense: it has no sparse step. Evaluate it with {why}"
  except Unreadable as e:  # whatever the settings say
    stored, reason = None, str(e).rstrip(".")
  except Exception as e:  # also what a bucket raises
    stored, reason = None, f"{str(e).rstrip('.')}, so its rules are unknown"
  if stored is None or stored.rules is None:
    try:
      return configure.rules(**{**_DEFAULTS, **{k: v for k, v in given.items() if v is not None}})
    except ValueError as e:
      is_given = any(value is not None for value in given.values())
      said = f" (The settings do not tell them: {e})" if is_given else ""
      raise ValueError(f"{reason}.{said}") from e
  rules = rules_text.parse(stored.rules)
  if pretrained_steps is not None and (start := _start(stored)) not in (None, pretrained_steps):
    raise ValueError(
      f"PRETRAINED_STEPS={pretrained_steps}, but the run of {stored.path} began at step {start}: "
      "leave PRETRAINED_STEPS out. Where a file sets it, None counts as left out."
    )
  configure.agree(rules, stored.path, **given)
  return rules


_DEFAULTS: Mapping[str, Any] = {"places": {"ff": None}}  # those of gin_configs/sparsity.gin


def start_of(run: str | None, initial: str | None = None) -> int | None:
  """Returns the global step at which a sparse run begins, or began; None where nothing tells.

  Args:
    run: its folder, or one of its checkpoints.
    initial: the checkpoint that it starts from, for a run that has none of its own yet.

  Raises:
    ValueError: there is an initial checkpoint, and its step cannot be known.
  """
  if (newest := _newest(run)) is not None and (start := _read_start(newest)) is not None:
    return start
  return None if not initial else _step_of(initial)


def _newest(run: str | os.PathLike | None) -> str | None:
  """Returns the newest checkpoint of a run, or the one that it names; None where there is none."""
  from nm_sparsity_jax.runs import checkpoint

  try:
    return checkpoint.find(os.fspath(run)) if run else None
  except Exception:  # there is none, it is not a path, or the bucket cannot be looked at
    return None


# A checkpoint does not change, and gin asks again for each use of PRETRAINED_STEPS.
@functools.lru_cache(maxsize=16)
def _read_start(path: str) -> int | None:
  from nm_sparsity_jax.runs import checkpoint

  try:
    return _start(checkpoint.read(path))
  except Exception:  # also what a bucket raises; what opens the checkpoint says why
    return None


def _start(stored: Stored) -> int | None:
  """Returns the global step before the first sparse step; None of a dense checkpoint."""
  key = "flax_mutables/nm_sparsity/start"
  if key in stored.leaves:
    return int(stored.array(key))
  if stored.step is None or stored.sparse_step is None:
    return None
  return stored.step - stored.sparse_step


@functools.lru_cache(maxsize=16)
def _step_of(path: str) -> int:
  """Returns the step of a checkpoint, else that in its name."""
  from nm_sparsity_jax.runs import checkpoint

  try:
    step, why = checkpoint.read(path).step, "it holds no step"
  except Exception as e:  # also what a bucket raises
    step, why = None, str(e).rstrip(".")
  if step is None and isinstance(path, str):
    step = folders.named_step(path)
  if step is None:
    raise ValueError(
      f"INITIAL_CHECKPOINT_PATH={path!r} does not tell PRETRAINED_STEPS, its step ({why}). Set "
      "PRETRAINED_STEPS."
    )
  return step


def _stored(folder: str | os.PathLike) -> Rules | None:
  """Returns the rules in the newest checkpoint; None where it has none or cannot be read."""
  from nm_sparsity_jax.training import rules_text

  newest = _opened(folder)
  if newest is None or newest.rules is None:
    return None
  try:
    return rules_text.parse(newest.rules)
  except UnknownRecipe:  # the macros know no more of it
    raise
  except ValueError:
    return None


def _opened(folder: str | os.PathLike) -> Stored | None:
  """Returns the newest checkpoint of a run; None where there is none or it cannot be read."""
  from nm_sparsity_jax.runs import checkpoint

  newest = _newest(folder)
  try:
    return None if newest is None else checkpoint.read(newest)
  except (ValueError, OSError, ImportError):  # copied in part, say, or Orbax is not installed
    return None


def _configured(settings: Settings) -> Rules:
  """Returns the rules that the macros of gin_configs/sparsity.gin say."""
  from nm_sparsity_jax.training import configure

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
    dense_steps=settings.get("DENSE_STEPS", 0),
    finetune_steps=settings.get("FINETUNE_STEPS", 0),
    indivisible=settings.get("INDIVISIBLE") or "error",
  )
